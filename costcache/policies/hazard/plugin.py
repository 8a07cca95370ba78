"""The policy plugin ``hazard``: evicts what is least likely to be used again soon, for its class and age."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.errors import SettingsError
from costcache.hookspecs import hookimpl
from costcache.policies.hazard.order import Hazard
from costcache.policies.hazard.settings import HazardSettings
from costcache.policies.hazard.states import TOKENS_POWER, HazardStates
from costcache.policies.spec import PolicySpec

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.orders import VictimOrder
    from costcache.records import PoolState

__all__ = ["policies"]


def _make(cost: CostModel, pools: tuple[PoolState, ...], settings: HazardSettings) -> VictimOrder:
    if len(pools) > 1 or (pools and pools[0].unit == "bytes"):
        if settings.tables is not None:
            raise SettingsError(
                f"setting 'policy_settings.tables' is {str(settings.tables)!r}: tables are of tokens, and "
                "this model has states: leave it out"
            )
        power = 1.0 if settings.objective == "flops" else TOKENS_POWER
        return HazardStates(cost.token.kv_bytes, cost.token.state_bytes, power=power, doubt=settings.doubt)
    # A host that only asks whether it could be made names no pool.
    return Hazard(pools[0].capacity if pools else 0, settings, cost)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    """Offer the policy ``hazard``."""
    return {
        "hazard": PolicySpec(
            _make,
            "Fewest expected uses per token and time first, by class and age.",
            HazardSettings,
            sees=frozenset({"nodes", "states"}),
            explains=True,
            windows="s3fifo",  # hazard's classes are those of nodes in a tree
        )
    }
