"""Capacity analysis: the tokens that a memory budget can cache, with the arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel

from costcache.cost import TokenCost, pool_sizes, sequence_bytes, split_tokens, window_share
from costcache.deployment import SWA_RATIO, Deployment, WindowLayout
from costcache.errors import SettingsError
from costcache.plugins import Architecture, ask
from costcache.records import PoolState
from costcache.settings import Settings

__all__ = ["LENGTHS", "SEQUENCE", "FreeTarget", "Plan", "SequenceLength", "plan"]

SEQUENCE = 65_536
"""Tokens of a sequence that `plan` assumes for a model with sliding windows."""

LENGTHS = (8_192, 32_768, 131_072)
"""Tokens of the sequences for which the layouts of sliding windows are compared."""


@dataclass(frozen=True, slots=True)
class FreeTarget:
    """The free target of a pool under some settings.

    Attributes:
        label: The settings in a few words.
        headroom: The framework's headroom, a share of the pool.
        architecture: The plugin's own settings, as plain data; empty for a plugin without any.
        share: The plugin's free target, a share of the pool.
        tokens: Tokens of the pool that it leaves free.
    """

    label: str
    headroom: float
    architecture: dict[str, Any]
    share: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SequenceLength:
    """The effect of the length of sequences on a model with sliding windows.

    Attributes:
        sequence: Tokens of each sequence.
        tokens: Tokens that fit if full and window KV each get the memory that the sequences need: in shared
            pages, or with a pool of windows of the right size.
        one_pool_tokens: Tokens that fit in one pool of all layers.
        ratio: Tokens of the pool of windows per token of the full pool that would be the right size.
        split_tokens: Tokens that fit into two pools at the ratio that is set, or SGLang's own.
    """

    sequence: int
    tokens: int
    one_pool_tokens: int
    ratio: float
    split_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The tokens and states that one rank's memory can cache.

    Attributes:
        model: Name of the model.
        plugin: The architecture plugin that serves it.
        deployment: How it is served.
        memory: Bytes of accelerator memory on one rank.
        weights: Bytes of it that the cache cannot use: weights, activations, graphs.
        budget: Bytes for the cache.
        cost: Bytes of a token and of a state on one rank.
        layout: Where sliding windows are assumed to be cached.
        ratio: Tokens of the pool of windows per token of the full pool, if it is set.
        sequence: Tokens of a sequence, assumed where windows have their own pool.
        token_bytes: Bytes per cached token, windows included; rounded up.
        tokens: Tokens that fit the budget, whole pages; None for a model without KV.
        lengths: Tokens that fit with sequences of 8k, 32k and 128k; none without sliding windows.
        decompressed_token_bytes: Bytes per token if latent layers kept keys and values of every head.
        decompressed_tokens: Tokens that would fit then; None for a model without latent layers.
        states: State checkpoints that fit if the budget held nothing else; None without states.
        state_tokens: Tokens that take as much memory as one state; None without states or KV.
        free_targets: Free targets as set and under a few other settings; none for a model without KV.
    """

    model: str
    plugin: str
    deployment: Deployment
    memory: int
    weights: int
    budget: int
    cost: TokenCost
    layout: WindowLayout
    ratio: float | None
    sequence: int
    token_bytes: int
    tokens: int | None
    decompressed_token_bytes: int
    decompressed_tokens: int | None
    states: int | None
    state_tokens: int | None
    free_targets: tuple[FreeTarget, ...]
    lengths: tuple[SequenceLength, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, arithmetic included."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["deployment"] = self.deployment.model_dump(mode="json")
        values["cost"] = self.cost.model_dump(mode="json")
        values["lengths"] = [asdict(length) for length in self.lengths]
        values["free_targets"] = [asdict(target) for target in self.free_targets]
        return values


def plan(
    architecture: Architecture,
    deployment: Deployment,
    settings: Settings,
    *,
    memory: int,
    weights: int,
    sequence: int = SEQUENCE,
    layout: WindowLayout | None = None,
) -> Plan:
    """Analyse one rank.

    Args:
        architecture: The plugin that serves the model, from ``plugins.match``.
        deployment: How it is served.
        settings: Headroom, and the plugin's settings.
        memory: Bytes of accelerator memory on one rank.
        weights: Bytes of it that the cache cannot use.
        sequence: Tokens of each sequence; matters for sliding windows in a pool of their own.
        layout: Where the server keeps sliding windows; as the deployment says by default.

    Raises:
        SettingsError: The budget is empty, or a setting is wrong.
        PluginError: A hook of the plugin raised.
    """
    budget = memory - weights
    if budget <= 0:
        raise SettingsError(
            f"memory is {memory:,} bytes and weights {weights:,}: nothing is left for the cache; "
            "give the memory of one rank, and the weights of one rank"
        )
    if sequence < 1:
        raise SettingsError(f"sequence is {sequence}; give the tokens of a sequence, 1 or more")
    model = architecture.model
    deployment = deployment.serving(model)
    cost = architecture.cost(deployment).token
    page = deployment.page_size
    where = layout or deployment.window_layout
    ratio = deployment.swa_full_tokens_ratio if where == "own-pool" and cost.swa_bytes else None

    def fitting(token: TokenCost, length: int, where: WindowLayout) -> tuple[int, int | None]:
        """Bytes per token, rounded up, and the tokens that fit, in whole pages."""
        size = sequence_bytes(model, deployment, token, length, where)
        if ratio is not None and where == "own-pool":
            tokens = split_tokens(model, deployment, *pool_sizes(budget, token, ratio, page), length)
            return -(-budget // tokens) if tokens else -(-size // length), tokens
        return -(-size // length), budget * length // size // page * page if size else None

    token_bytes, tokens = fitting(cost, sequence, where)
    unpacked = cost.model_copy(update={"kv_bytes": cost.decompressed_kv_bytes})
    decompressed, decompressed_tokens = fitting(unpacked, sequence, where)
    lengths = [
        SequenceLength(
            length,
            fitting(cost, length, "shared-pages")[1] or 0,
            fitting(cost, length, "one-pool")[1] or 0,
            round(float(window_share(model, deployment, length)) / length, 6),
            split_tokens(model, deployment, *pool_sizes(budget, cost, ratio or SWA_RATIO, page), length),
        )
        for length in LENGTHS
        if cost.swa_bytes
    ]
    latent = architecture.model.has_latent
    return Plan(
        model=architecture.model.name,
        plugin=architecture.name,
        deployment=deployment,
        memory=memory,
        weights=weights,
        budget=budget,
        cost=cost,
        layout=where,
        ratio=ratio,
        sequence=sequence,
        token_bytes=token_bytes,
        tokens=tokens,
        decompressed_token_bytes=decompressed,
        decompressed_tokens=decompressed_tokens if latent else None,
        states=budget // cost.state_bytes if cost.state_bytes else None,
        state_tokens=cost.state_bytes // token_bytes if cost.state_bytes and token_bytes else None,
        lengths=tuple(lengths),
        free_targets=() if tokens is None else tuple(_free_targets(architecture, settings, tokens, page)),
    )


def _free_targets(
    architecture: Architecture, settings: Settings, tokens: int, page_size: int
) -> list[FreeTarget]:
    pool = PoolState("kv", "tokens", tokens, tokens, 0, 0, page_size)
    cases = [("as set", settings)]
    for values in _examples(architecture.settings_model()):
        label = ", ".join(["headroom 20 %", *(f"{name} {value}" for name, value in values.items())])
        own = settings.architecture | values
        cases.append((label, settings.model_copy(update={"headroom": 0.20, "architecture": own})))
    targets = []
    for label, case in cases:
        given = architecture.pool_settings(case)
        what = f"plugin {architecture.name!r}: free_target raised"
        share = ask(what, architecture.free_target, architecture.model, pool, given)
        used = {} if given.architecture is None else given.architecture.model_dump(mode="json")
        targets.append(FreeTarget(label, case.headroom, used, share, int(share * tokens)))
    return targets


def _examples(own: type[BaseModel] | None) -> list[dict[str, Any]]:
    """Return a plugin's defaults with one example of one field each, then the defaults alone."""
    fields = (
        {} if own is None else {name: field for name, field in own.model_fields.items() if field.examples}
    )
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    examples = [{name: value} for name, field in fields.items() for value in field.examples or ()]
    return [*(defaults | example for example in examples), defaults]
