"""Hazard: what is least likely to be used again soon, for its class and age, goes first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from costcache.errors import SettingsError
from costcache.hookspecs import hookimpl
from costcache.policies.hazard_order import Hazard
from costcache.policies.hazard_states import HazardStates
from costcache.policies.spec import PolicySpec
from costcache.policies.tables import read_tables

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.orders import VictimOrder
    from costcache.records import PoolState

__all__ = ["HazardSettings"]


class HazardSettings(BaseModel):
    """Settings of ``hazard``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Literal["tokens", "flops"] = Field(
        "tokens",
        description="What hits count in: tokens, or the FLOPs to recompute them, which grow with depth.",
    )
    refresh: int = Field(
        50, ge=1, description="Requests after which survival is estimated anew, early in the cache's life."
    )
    ghosts: float = Field(
        6.0, ge=0.0, description="Evicted tokens whose history is remembered, as a multiple of the pool."
    )
    strength: float = Field(
        5.0, gt=0.0, description="Observed intervals that outweigh what is expected of similar classes."
    )
    memory: float = Field(
        1.0, gt=0.0, le=1.0, description="Share of what was learned that an estimate leaves to the next one."
    )
    tables: Path | None = Field(
        None,
        description="File of what another run learned, to start from: see 'costcache explain "
        "--save-tables'. Every rank reads it, so it must be the same on each machine.",
    )

    @field_validator("tables")
    @classmethod
    def _readable(cls, tables: Path | None) -> Path | None:
        if tables is not None:
            read_tables(tables)  # its own error says more than that of a policy that cannot be made
        return tables


def _make(cost: CostModel, pools: tuple[PoolState, ...], settings: HazardSettings) -> VictimOrder:
    if len(pools) > 1 or (pools and pools[0].unit == "bytes"):
        if settings.tables is not None:
            raise SettingsError(
                f"setting 'policy_settings.tables' is {str(settings.tables)!r}: tables are of tokens, and "
                "this model has states: leave it out"
            )
        return HazardStates(cost.token.kv_bytes, cost.token.state_bytes)
    # A host that only asks whether it could be made names no pool.
    return Hazard(pools[0].capacity if pools else 0, settings, cost)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "hazard": PolicySpec(
            _make,
            "Fewest expected uses per token and time first, by class and age.",
            HazardSettings,
            sees=frozenset({"nodes", "states"}),
            explains=True,
        )
    }
