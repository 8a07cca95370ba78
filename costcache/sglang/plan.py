"""What was decided for one cache before it is built: settings, plugin, cost model and tree core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from costcache.plugins import Architecture, PluginManager, get_plugins
from costcache.policies.states import StateOrder
from costcache.records import PoolState

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.deployment import Deployment
    from costcache.model import ModelSpec
    from costcache.orders import VictimOrder
    from costcache.settings import PoolSettings, Settings

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """The parts of one cache, matched once.

    Attributes:
        settings: The framework's settings.
        architecture: The plugin that serves the model.
        cost: The cost model.
        pool_settings: What the plugin's hooks are told.
        plugins: Where policies are looked up.
        core: Tree core that holds the cache.
        reason: Why that core, in a few words.
    """

    settings: Settings
    architecture: Architecture
    cost: CostModel
    pool_settings: PoolSettings
    plugins: PluginManager
    core: Literal["python", "rust"] = "python"
    reason: str = "asked for"

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        deployment: Deployment,
        settings: Settings,
        *,
        plugins: PluginManager | None = None,
        core: Literal["python", "rust"] = "python",
        reason: str = "asked for",
    ) -> Plan:
        """Match the model and check every setting.

        Raises:
            PluginError: No plugin, or no policy, can serve the model.
            SettingsError: A setting is wrong.
        """
        plugins = get_plugins() if plugins is None else plugins
        architecture = plugins.match(model)
        plan = cls(
            settings,
            architecture,
            architecture.cost(deployment),
            architecture.pool_settings(settings),
            plugins,
            core,
            reason,
        )
        plan.sample_order()  # a policy that cannot serve must say so now, not at the first reset
        return plan

    @property
    def knows_states(self) -> bool:
        """Whether one order of the chosen policy serves KV and states together."""
        return isinstance(self.sample_order(), StateOrder)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.cost.deployment.page_size

    @property
    def trim_step(self) -> int:
        """Tokens that a trim is a multiple of; 0 for no trimming."""
        page = self.page_size
        if self.settings.trim == "off":
            return 0
        if self.settings.trim == "chunk" or (self.settings.trim == "auto" and self.core == "rust"):
            return -(-self.settings.trim_chunk // page) * page
        return page

    def sample_order(self) -> VictimOrder:
        """An order of the chosen policy before there are pools, to see what it is.

        Raises:
            PluginError: It cannot be made, or does not serve the model.
        """
        units = {"kv": "tokens", "state": "states"} if self.cost.token.state_bytes else {"kv": "tokens"}
        pools = [
            PoolState(pool, unit, 1 << 20, 1 << 20, 0, 0, self.page_size) for pool, unit in units.items()
        ]
        return self.make_order(tuple(pools))[1]

    def make_order(self, pools: tuple[PoolState, ...]) -> tuple[str, VictimOrder]:
        """A new order of the chosen policy, and the policy's name."""
        return self.plugins.make_order(self.settings, self.architecture, self.cost, pools)

    def free_target(self, pool: PoolState) -> float:
        """The plugin's free target: a share of the pool."""
        architecture = self.architecture
        return architecture.free_target(architecture.model, pool, self.pool_settings)

    def adjust(self, pool: PoolState, requested: int) -> int:
        """The plugin's adjusted count, in units of the pool."""
        architecture = self.architecture
        return architecture.adjust_eviction_count(architecture.model, pool, requested, self.pool_settings)

    def bytes_of(self, pool: str) -> int:
        """Bytes that one unit of a pool holds, on one rank."""
        token = self.cost.token
        return {"swa": token.swa_bytes, "state": token.state_bytes}.get(pool, token.kv_bytes)
