"""A pytest plugin that runs vLLM's own tests with a policy in each KV cache manager that they make.

    PYTHONPATH=tools COSTCACHE_OWN_TESTS=hazard VLLM_TARGET_DEVICE=cpu HF_HUB_OFFLINE=1 \
        pytest -p vllm_own_tests --confcutdir=tests/v1 tests/v1/core

in a folder that has vLLM's ``tests`` (they are in its sdist alone) and no ``vllm``. ``COSTCACHE_OWN_TESTS``
is the policy; without it the tests run on stock. A manager that no policy serves is left to vLLM, as in a
server. At the end it says how many managers had a policy, and the tests in which costcache's own code failed.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import pytest

POLICY = os.environ.get("COSTCACHE_OWN_TESTS")
_counts = {"with a policy": 0, "without": 0}
_failed: list[str] = []


class _Failures(logging.Handler):
    """Notes in which test costcache gave up, or dropped a policy."""

    def emit(self, record: logging.LogRecord) -> None:
        _failed.append(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {record.getMessage()}")


def pytest_configure() -> None:
    """Let each manager have the policy once it has been made."""
    if not POLICY:
        return
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from costcache.binding import Binding
    from costcache.deployment import Deployment
    from costcache.model import ModelSpec
    from costcache.settings import Settings
    from costcache.vllm.mixed import attach
    from costcache.vllm.registration import why_not

    original = KVCacheManager.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if why_not(self) is not None:
            _counts["without"] += 1
            return
        size = self.coordinator.single_type_managers[0].block_size
        model = ModelSpec.preset("llama-3-8b")
        attach(self, Binding.of(model, Deployment(page_size=size), Settings(policy=POLICY)))
        _counts["with a policy"] += 1

    KVCacheManager.__init__ = init
    logging.getLogger("costcache").addHandler(_Failures(logging.ERROR))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what had a policy."""
    if POLICY:
        managers = ", ".join(f"{count} managers {what}" for what, count in _counts.items())
        terminalreporter.write_line(f"costcache: policy {POLICY!r}, {managers}; {len(_failed)} failures")
        for line in _failed:
            terminalreporter.write_line(line)
