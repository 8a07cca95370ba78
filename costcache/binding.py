"""Binds a model to its pools: the plugin that serves it, its costs, its policy and its hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costcache import generic
from costcache.guard import HookGuard
from costcache.plugins import Architecture, PluginManager, get_plugins
from costcache.policies.windows import make_window_order
from costcache.pool import Pool
from costcache.settings import read_settings

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.deployment import Deployment
    from costcache.eviction import Refused
    from costcache.model import ModelSpec
    from costcache.orders import VictimOrder
    from costcache.policies.spec import PolicySpec
    from costcache.records import Clock, PoolState, Victim
    from costcache.settings import PoolSettings, Settings

__all__ = ["Binding"]


@dataclass(frozen=True)
class Binding:
    """A model as it is deployed, with the policy and the plugin that serve it.

    Attributes:
        settings: The framework's settings.
        policy: The chosen policy's own name.
        spec: The chosen policy.
        architecture: The plugin that serves the model.
        cost: The cost model.
        pool_settings: The settings that the plugin's hooks see.
        plugins: Where policies are looked up.
        drops_slow: Whether a plugin's policy is dropped that often takes longer than ``time_budget``. Never
            where ranks evict side by side and must choose alike: time differs between them.
    """

    settings: Settings
    policy: str
    spec: PolicySpec
    architecture: Architecture
    cost: CostModel
    pool_settings: PoolSettings
    plugins: PluginManager
    drops_slow: bool = True

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        deployment: Deployment,
        settings: Settings,
        *,
        plugins: PluginManager | None = None,
        drops_slow: bool = True,
    ) -> Binding:
        """Match the model and check every setting.

        Args:
            model: The model's architecture facts.
            deployment: Page size, parallelism and KV dtype.
            settings: Policy, headroom, trimming and the settings of plugins.
            plugins: Where to look for plugins; the process's own by default.
            drops_slow: False to count slow decisions only, so that a replay has the same result again.

        Raises:
            PluginError: No plugin, or no policy, can serve the model.
            SettingsError: A setting is wrong.
        """
        plugins = get_plugins() if plugins is None else plugins
        architecture = plugins.match(model)
        cost = architecture.cost(deployment)
        policy, spec = plugins.policy_spec(settings, architecture)
        read_settings(spec.settings, settings.policy_settings, "policy_settings.")
        pool_settings = architecture.pool_settings(settings)
        served = cost.deployment
        alone = served.attention_tp == 1 and served.pp == 1
        return cls(settings, policy, spec, architecture, cost, pool_settings, plugins, drops_slow and alone)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.cost.deployment.page_size

    def trim_step(self, auto: str = "exact") -> int:
        """Tokens that a trim is a multiple of; 0 if victims are evicted whole.

        Args:
            auto: Resolves the setting ``trim="auto"`` for this cache: ``"exact"`` or ``"chunk"``.
        """
        page, trim = self.page_size, self.settings.trim
        if trim == "auto":
            trim = auto  # type: ignore[assignment]  # one of the other choices
        if trim == "off":
            return 0
        return -(-self.settings.trim_chunk // page) * page if trim == "chunk" else page

    @property
    def ranks_states(self) -> bool:
        """Whether the chosen policy ranks KV and states together, on a model with states."""
        return self.architecture.model.has_states and "states" in self.spec.sees

    def make_order(self, pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
        """Make a new order of the chosen policy; returns the policy's own name and the order.

        Raises:
            PluginError: The order cannot be made.
            SettingsError: A setting under ``policy_settings`` is wrong.
        """
        settings = self.settings.model_copy(update={"policy": self.policy})
        return self.plugins.make_order(settings, self.architecture, self.cost, pools)

    def make_window_order(
        self, pools: tuple[PoolState, ...], *, shared: bool = False
    ) -> tuple[str, VictimOrder]:
        """Make a new order for sliding-window KV, of the policy that the chosen one names for it.

        Args:
            pools: The pool of windows; or, if ``shared``, the one that full KV is in too.
            shared: Full KV is in the same pool, so that the chosen policy ranks both.

        Raises:
            PluginError: The order cannot be made.
            SettingsError: A setting under ``policy_settings`` is wrong.
        """
        other = None if shared else self.spec.windows
        if other is None:
            name, order = self.make_order(pools)
            return name, make_window_order(order, leaves_only=self.spec.leaves_only)
        settings = self.settings.model_copy(update={"policy": other, "policy_settings": {}})
        _, spec = self.plugins.policy_spec(settings, self.architecture)
        name, order = self.plugins.make_order(settings, self.architecture, self.cost, pools)
        return name, make_window_order(order, leaves_only=spec.leaves_only)

    def pool(
        self,
        name: str,
        take: Callable[[Victim, int], int | Refused],
        *,
        unit: str = "tokens",
        capacity: int = 0,
        token_units: int = 1,
        state_units: int = 0,
        measure: Callable[[], PoolState] | None = None,
        make_order: Callable[[tuple[PoolState, ...]], tuple[str, VictimOrder]] | None = None,
        ranked: bool = True,
        clock: Clock | None = None,
        flat: bool = False,
        lower_tier: bool = False,
        also: Sequence[Pool] = (),
    ) -> Pool:
        """Make a pool whose evictions follow the chosen policy and the plugin's hooks.

        The arguments are those of :class:`costcache.pool.Pool`. ``make_order`` makes the order from the
        states of its pools, :meth:`make_order` by default; ``ranked`` is False for a pool that another one
        names in its ``also``, whose order ranks it. A lower tier keeps no headroom: every allocation from it
        asks for room first.
        """
        return Pool(
            name,
            take,
            (make_order or self.make_order) if ranked else None,
            HookGuard(self.architecture.name) if lower_tier else self._hooks(),
            unit=unit,
            page_size=self.page_size,
            capacity=capacity,
            token_units=token_units,
            state_units=state_units,
            measure=measure,
            clock=clock,
            flat=flat,
            lower_tier=lower_tier,
            also=also,
            time_budget=self.settings.time_budget,
            drops_slow=self.drops_slow,
        )

    def _hooks(self) -> HookGuard:
        """The plugin's eviction hooks under guard; those that are the defaults are left out."""
        architecture, settings = self.architecture, self.pool_settings
        model = architecture.model
        # The guard checks every answer of a plugin.
        free_target: Callable[..., Any] = architecture.free_target
        adjust: Callable[..., Any] = architecture.adjust_eviction_count
        no_headroom = free_target is generic.free_target and not settings.headroom
        return HookGuard(
            architecture.name,
            None if no_headroom else lambda pool: free_target(model, pool, settings),
            None
            if adjust is generic.adjust_eviction_count
            else lambda pool, requested: adjust(model, pool, requested, settings),
        )
