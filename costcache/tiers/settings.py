"""Settings of the tiers below the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator

from costcache.errors import SettingsError
from costcache.sizes import parse_bytes
from costcache.tiers.writing import WRITINGS

__all__ = ["TierSettings"]


class TierSettings(BaseModel):
    """Settings of a tiered cache; sizes are those of one rank, as ``200GB`` or in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: NonNegativeInt = Field(description="Host memory, in bytes.")
    disk: NonNegativeInt = Field(0, description="Storage, in bytes; 0 for no disk tier.")
    path: Path | None = Field(
        None,
        description="Folder of the disk tier. Each rank has a folder of its own in it, if there are several.",
    )
    storage: str = Field("file", description="Name of the storage backend.")
    storage_settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the storage backend."
    )
    write: str = Field(
        "write_through",
        description=f"Policy of writing: {', '.join(sorted(WRITINGS))}.",
    )
    state_share: float = Field(
        0.5,
        gt=0.0,
        lt=1.0,
        description="Models with states: share of the host memory that is for states.",
    )
    in_flight: PositiveInt = Field(
        1 << 30,
        description="Bytes of copies to slower tiers that may be under way on one link; what would exceed "
        "it is not copied. What is copied because it is evicted takes memory of its own meanwhile.",
    )

    @field_validator("host", "disk", "in_flight", mode="before")
    @classmethod
    def _in_bytes(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_bytes(value, info.field_name)
        except SettingsError as error:
            raise ValueError(str(error)) from error

    @field_validator("write")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in WRITINGS:
            raise ValueError(f"choose {', '.join(sorted(WRITINGS))}")
        return value
