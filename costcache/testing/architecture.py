"""The contract of architecture plugins, as a class of tests to subclass."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.records import PoolState
from costcache.settings import Settings
from costcache.testing import strategies
from costcache.testing.server import SmallServer, made_cache
from costcache.testing.steps import Step

__all__ = ["ArchitectureContract"]

_kit = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.differing_executors])


class ArchitectureContract:
    """Tests that every architecture plugin must pass.

    Subclass it, and give the plugin and its models::

        class TestAcme(ArchitectureContract):
            plugin = costcache_acme
            serves = (ModelSpec.from_config(ACME),)

    Attributes:
        plugin: The module or object with the hooks.
        serves: Models that it claims.
        leaves: Presets that it must leave to others.
    """

    plugin: ClassVar[Any]
    serves: ClassVar[tuple[ModelSpec, ...]]
    leaves: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @functools.cache
    def plugins(cls) -> PluginManager:
        """The built-in plugins and this one."""
        manager = PluginManager()
        manager.register(cls.plugin, "tested", getattr(cls.plugin, "__name__", "tested"))
        return manager

    def test_it_claims_its_models_and_leaves_the_others(self) -> None:
        plugins = self.plugins()
        assert self.serves, "give at least one model in serves"
        for model in self.serves:
            assert plugins.match(model).name == "tested", f"{model.name!r} is not claimed"
        for name in self.leaves:
            assert plugins.match(ModelSpec.preset(name)).name != "tested", f"{name!r} is claimed"
        assert not plugins.failures, plugins.failures

    def test_tokens_and_states_cost_bytes(self) -> None:
        for model in self.serves:
            for deployment in (Deployment(), Deployment(page_size=64)):
                token = self.plugins().match(model).cost(deployment).token
                assert token.kv_bytes > 0 or model.has_states, f"a token of {model.name!r} takes no bytes"
                assert (token.state_bytes > 0) == model.has_states

    @_kit
    @given(
        requested=st.integers(1, 512),
        free=st.integers(0, 512),
        evictable=st.integers(0, 512),
        page_size=st.sampled_from([1, 16, 64]),
    )
    def test_eviction_hooks_answer_within_their_bounds(
        self, requested: int, free: int, evictable: int, page_size: int
    ) -> None:
        state = PoolState("kv", "tokens", 1024, free, evictable, 1024 - free - evictable, page_size)
        for model in self.serves:
            architecture = self.plugins().match(model)
            pool_settings = architecture.pool_settings(Settings())
            target: Any = architecture.free_target(model, state, pool_settings)
            assert 0.0 <= float(target) < 1.0, f"free_target is {target!r}, not a share below 1"
            wanted = state.in_pages(requested)
            count: Any = architecture.adjust_eviction_count(model, state, wanted, pool_settings)
            assert wanted <= int(count) <= state.capacity, (
                f"adjust_eviction_count answered {count!r} for {wanted}: it may not free less, "
                "nor more than there is"
            )

    @_kit
    @given(steps=strategies.streams())
    def test_a_cache_of_its_models_frees_enough_and_nothing_pinned(self, steps: list[Step]) -> None:
        for model in self.serves:
            server = SmallServer(made_cache(model, 60, 1, "costcache", self.plugins()))
            server.run(steps)
            assert server.cache.counters.clamped == 0, "an answer of a hook had to be replaced: see the log"
