"""Pytest fixtures for tests of plugins; pytest loads them by the entry point ``pytest11``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from costcache.plugins import PluginManager
    from costcache.radix.cache import PrefixCache
    from costcache.sim.trace import Trace

__all__: list[str] = []

# Their asserts show the values, as those of a test file do.
pytest.register_assert_rewrite("costcache.testing.policy", "costcache.testing.architecture")


@pytest.fixture
def costcache_plugins() -> PluginManager:
    """The built-in plugins; register your own with ``costcache_plugins.register(module, name)``."""
    from costcache.plugins import PluginManager

    return PluginManager()


@pytest.fixture
def costcache_cache(costcache_plugins: PluginManager) -> Callable[..., PrefixCache]:
    """Make small caches: ``costcache_cache("lru", tokens=600, model="llama-3-8b", page_size=1)``."""
    from costcache.model import ModelSpec
    from costcache.testing.server import made_cache

    def make(
        policy: str, *, tokens: int = 600, model: str = "llama-3-8b", page_size: int = 1, **settings: Any
    ) -> PrefixCache:
        spec = ModelSpec.preset(model)
        return made_cache(spec, tokens, page_size, policy, costcache_plugins, **settings)

    return make


@pytest.fixture
def costcache_trace() -> Callable[..., Trace]:
    """Generate small traces: ``costcache_trace("chat", requests=300, seed=1)``."""
    from costcache.sim.workloads import generate, workload_settings

    def make(workload: str = "chat", *, requests: int = 300, seed: int = 0, **settings: Any) -> Trace:
        return generate(
            workload, workload_settings(workload, {"requests": requests, "seed": seed, **settings})
        )

    return make
