"""The Engine's shims: stock SGLang serves on CPU, and reuse does not change what it answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engine import run_engine
from tests.sglang.tiny_models import write_model

OPTIONS: dict[str, dict[str, Any]] = {
    "mha": {},
    "mla": {},
    # States at chunk ends, not only at sequence ends: without them nothing shared is ever reused.
    "hybrid": {"mamba_radix_cache_strategy": "extra_buffer", "page_size": 64, "max_mamba_cache_size": 40},
}


@pytest.mark.engine
@pytest.mark.parametrize("name", OPTIONS)
def test_reuse_does_not_change_the_answers(name: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    shared = [[rng.randrange(3, 500) for _ in range(200)] for _ in range(4)]
    prompts = [shared[i % 4] + [rng.randrange(3, 500) for _ in range(20)] for i in range(12)]
    model = write_model(name, tmp_path)
    cached = run_engine(model, prompts, tmp_path, max_total_tokens=2048, **OPTIONS[name])
    cold = run_engine(
        model, prompts, tmp_path, max_total_tokens=2048, disable_radix_cache=True, **OPTIONS[name]
    )
    assert [a.output for a in cached.answers] == [a.output for a in cold.answers]
    assert len({a.output for a in cold.answers}) > 1, "equality means nothing if all answers are alike"
    assert sum(a.cached for a in cold.answers) == 0
    assert sum(a.cached for a in cached.answers) > 0
