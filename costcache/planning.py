"""Capacity analysis: how many tokens a memory budget can cache, with the arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from costcache.cost import TokenCost
from costcache.deployment import Deployment
from costcache.errors import PluginError, SettingsError
from costcache.model import ModelSpec
from costcache.plugins import Architecture
from costcache.records import PoolState
from costcache.settings import Settings

__all__ = ["FreeTarget", "Plan", "plan"]


@dataclass(frozen=True, slots=True)
class FreeTarget:
    """What a headroom setting leaves free in a pool.

    Attributes:
        label: What the setting is.
        headroom: The framework's headroom, a share of the pool.
        floor: The plugin's floor, a share of the pool; None for a plugin without one.
        share: The plugin's free target, a share of the pool.
        tokens: Tokens of the pool that it leaves free.
    """

    label: str
    headroom: float
    floor: float | None
    share: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rank's memory can cache.

    Attributes:
        model: Name of the model.
        plugin: The architecture plugin that serves it.
        deployment: How it is served.
        memory: Bytes of accelerator memory on one rank.
        weights: Bytes of it that are not for the cache: weights, activations, graphs.
        budget: Bytes for the cache.
        cost: What a token and a state hold on one rank.
        token_bytes: Bytes per cached token: KV and sliding-window pool together.
        tokens: Tokens that fit the budget, whole pages; None for a model without KV.
        decompressed_token_bytes: Bytes per token if latent layers kept keys and values of every head.
        decompressed_tokens: Tokens that would fit then; None for a model without latent layers.
        states: State checkpoints that fit if the budget held nothing else; None without states.
        state_tokens: Tokens that one state costs as much memory as; None without states or KV.
        free_targets: What headroom settings leave free; none for a model without KV.
    """

    model: str
    plugin: str
    deployment: Deployment
    memory: int
    weights: int
    budget: int
    cost: TokenCost
    token_bytes: int
    tokens: int | None
    decompressed_token_bytes: int
    decompressed_tokens: int | None
    states: int | None
    state_tokens: int | None
    free_targets: tuple[FreeTarget, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the free targets' class and with the arithmetic."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["deployment"] = self.deployment.model_dump(mode="json")
        values["cost"] = self.cost.model_dump(mode="json")
        values["free_targets"] = [asdict(target) for target in self.free_targets]
        return values


def plan(
    architecture: Architecture,
    deployment: Deployment,
    settings: Settings,
    *,
    memory: int,
    weights: int,
) -> Plan:
    """Analyse one rank.

    Args:
        architecture: The plugin that serves the model, from ``plugins.match``.
        deployment: How it is served.
        settings: Headroom, and the plugin's settings.
        memory: Bytes of accelerator memory on one rank.
        weights: Bytes of it that are not for the cache.

    Raises:
        SettingsError: The budget is empty, or a setting is wrong.
        PluginError: A hook of the plugin raised.
    """
    budget = memory - weights
    if budget <= 0:
        raise SettingsError(
            f"memory is {memory:,} bytes and weights {weights:,}: nothing is left to cache in; "
            "give what one rank has, and what one rank's weights take"
        )
    cost = architecture.cost(deployment).token
    page = deployment.page_size
    token_bytes = cost.kv_bytes + cost.swa_bytes
    decompressed = cost.decompressed_kv_bytes + cost.swa_bytes
    tokens = budget // token_bytes // page * page if token_bytes else None
    latent = architecture.model.has_latent
    return Plan(
        model=architecture.model.name,
        plugin=architecture.name,
        deployment=deployment,
        memory=memory,
        weights=weights,
        budget=budget,
        cost=cost,
        token_bytes=token_bytes,
        tokens=tokens,
        decompressed_token_bytes=decompressed,
        decompressed_tokens=budget // decompressed // page * page if latent else None,
        states=budget // cost.state_bytes if cost.state_bytes else None,
        state_tokens=cost.state_bytes // token_bytes if cost.state_bytes and token_bytes else None,
        free_targets=() if tokens is None else tuple(_free_targets(architecture, settings, tokens, page)),
    )


def _free_targets(
    architecture: Architecture, settings: Settings, tokens: int, page_size: int
) -> list[FreeTarget]:
    model: ModelSpec = architecture.model
    pool = PoolState("kv", "tokens", tokens, tokens, 0, 0, page_size)
    own = architecture.settings_model()
    has_floor = own is not None and "floor" in own.model_fields
    cases = [("as set", settings.headroom, settings.architecture)]
    if has_floor:
        cases += [
            ("headroom 20 % with a floor of 5 %", 0.20, {**settings.architecture, "floor": 0.05}),
            ("headroom 20 % without a floor", 0.20, {**settings.architecture, "floor": 0.0}),
        ]
    else:
        cases.append(("headroom 20 %", 0.20, settings.architecture))
    targets = []
    for label, headroom, values in cases:
        case = settings.model_copy(update={"headroom": headroom, "architecture": values})
        pool_settings = architecture.pool_settings(case)
        try:
            share = architecture.free_target(model, pool, pool_settings)
        except Exception as error:
            raise PluginError(f"plugin {architecture.name!r}: free_target raised {error!r}") from error
        floor = getattr(pool_settings.architecture, "floor", None)
        targets.append(FreeTarget(label, headroom, floor, share, int(share * tokens)))
    return targets
