"""A real engine on the CPU: the answers are stock's, token for token, and more of the prompts is cached."""

from __future__ import annotations

import pytest
import vllm

from tests.vllm.engine import run_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("cpu" not in str(vllm.__file__) and not vllm.platforms.current_platform.is_cpu(), reason="no CPU build"),
]
