"""Settings of the hazard policy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from costcache.policies.hazard.tables import read_tables

__all__ = ["HazardSettings"]


class HazardSettings(BaseModel):
    """Settings of ``hazard``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Literal["tokens", "flops"] = Field(
        "tokens",
        description="Unit of the hits to maximise: tokens, or the FLOPs to recompute them, which grow with "
        "depth, and with models with states what a state saves per byte counts in full. Above a slower "
        "tier it is tokens in any case, since a miss is loaded from there.",
    )
    refresh: int = Field(
        50,
        ge=1,
        description="Requests after which survival is estimated anew, early in the cache's life; right after "
        "the pool first fills they are fewer.",
    )
    ghosts: float = Field(
        6.0,
        ge=0.0,
        description="Evicted tokens whose history is remembered, as a multiple of the pool, and of "
        "each slower tier that shares the forecast. A remembered node takes about 300 bytes.",
    )
    strength: float = Field(
        15.0, gt=0.0, description="Observed intervals that outweigh what is expected of similar classes."
    )
    memory: float = Field(
        1.0, gt=0.0, le=1.0, description="Share of what was learned that an estimate leaves to the next one."
    )
    doubt: float = Field(
        0.01,
        gt=0.0,
        le=1.0,
        description="Chance, at most, that LRU steps in within 10,000 requests although it is not ahead.",
    )
    prior: bool = Field(
        True,
        description="Whether to start from what many workloads have in common, which a few dozen intervals "
        "of the cache's own outweigh; else it starts as LRU. Not for models with states.",
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
