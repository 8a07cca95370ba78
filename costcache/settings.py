"""The framework's own settings, and validation of any settings model with errors that name the field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costcache.errors import SettingsError

__all__ = ["DEFAULT_POLICY", "PoolSettings", "Settings", "read_settings"]

DEFAULT_POLICY = "hazard"
"""The policy that ``costcache`` stands for unless the model's plugin prefers another."""

M = TypeVar("M", bound=BaseModel)


class Settings(BaseModel):
    """Settings of one cache, as keyword arguments, command-line options or one JSON object."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = Field(
        "costcache",
        description="Eviction policy by name; 'costcache' is the one that the model's plugin prefers.",
    )
    headroom: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the pool that an eviction leaves free beyond its shortfall, 0 to below 1; "
        "the model's plugin may scale it.",
    )
    trim: Literal["auto", "exact", "chunk", "off"] = Field(
        "auto",
        description="Trimming of an eviction's last victim: 'exact' frees only the pages needed, 'chunk' "
        "cuts at multiples of trim_chunk, 'off' frees whole nodes; 'auto' is exact where the tree allows it.",
    )
    trim_chunk: int = Field(2048, ge=1, description="Tokens per chunk when trim is 'chunk'.")
    core: Literal["auto", "python", "rust"] = Field(
        "auto",
        description="In SGLang: the tree core of the cache; 'auto' takes the fastest that can serve the "
        "policy. Ignored elsewhere.",
    )
    time_budget: float = Field(
        1.0,
        gt=0.0,
        description="Seconds that the policy of a plugin may take for one eviction. The third time that it "
        "takes longer, it is dropped for LRU; ranks that evict side by side, and replays, only count it.",
    )
    architecture: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the plugin that claims the model."
    )
    policy_settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the chosen policy."
    )


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings as the hooks ``free_target`` and ``adjust_eviction_count`` are given them.

    Attributes:
        headroom: The framework's ``headroom``, a share of the pool.
        architecture: The plugin's own settings, an instance of its ``settings_model``; None for a plugin
            without settings.
    """

    headroom: float
    architecture: BaseModel | None = None


def read_settings(model: type[M], values: dict[str, Any], where: str = "") -> M:
    """Validate ``values`` against ``model``.

    Args:
        model: The settings model.
        values: The user's values.
        where: Prefix of the field names in errors, for settings nested in a larger object
            (``"policy_settings."``).

    Raises:
        SettingsError: If a value is not valid; names each such field, its value and what is allowed.
    """
    try:
        return model.model_validate(values)
    except UnicodeEncodeError as error:  # half a character, from a name that is no text
        raise SettingsError(
            f"setting {where}*: {error.object[:60]!r} has characters that are no text: give another name"
        ) from None
    except ValidationError as error:
        raise SettingsError("; ".join(_problem(model, item, where) for item in error.errors())) from None


def _problem(model: type[BaseModel], item: Any, where: str) -> str:
    field = where + ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = ", ".join(sorted(where + name for name in model.model_fields)) or "none"
        return f"unknown setting {field!r}: known settings are {known}"
    if item["type"] == "missing":
        return f"setting {field!r} is missing: {item['msg']}"
    message = item["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"setting {field!r} is {item['input']!r}: {message}"
