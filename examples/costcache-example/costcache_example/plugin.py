"""The hooks: costcache loads this module, since an entry point in ``pyproject.toml`` names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costcache import hookimpl
from costcache.cost import TokenCost
from costcache.cost import token_cost as compose_token_cost
from costcache.deployment import Deployment
from costcache.model import FullAttention, ModelSpec
from costcache.policies import PolicySpec
from costcache_example.worth import Worth, WorthSettings

__all__: list[str] = []


# A policy plugin is found by name. This policy looks at the depth and size of nodes, so it sees "nodes", the
# default, and serves models without states.
@hookimpl
def policies() -> dict[str, PolicySpec]:
    """Offer ``worth``."""
    return {
        "worth": PolicySpec(
            lambda cost, _, settings: Worth(cost, settings),
            "Cheapest to recompute: FLOPs per token, times the requests that used it.",
            WorthSettings,
            sees=frozenset({"nodes"}),
        )
    }


# A plugin may read a config that the core cannot: here a model that caches one key and value per
# ``acme_pool`` tokens. What only this plugin understands goes into ``extra``.
@hookimpl
def read_config(config: Mapping[str, Any]) -> ModelSpec | None:
    """Read the configs of model type ``acme_pooled``; all others are the core's."""
    if config.get("model_type") != "acme_pooled":
        return None
    layer = FullAttention(heads=config["heads"], kv_heads=config["kv_heads"], head_dim=config["head_dim"])
    return ModelSpec(
        name="acme-pooled",
        architecture="AcmePooled",
        layers=(layer,) * config["layers"],
        hidden_size=config["heads"] * config["head_dim"],
        vocab_size=config["vocab_size"],
        active_params=config["active_params"],
        extra={"acme_pool": config["acme_pool"]},
    )


@hookimpl
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Divide the core's bytes by the tokens that share a key and value."""
    cost = compose_token_cost(model, deployment)
    return cost.model_copy(update={"kv_bytes": -(-cost.kv_bytes // model.extra.get("acme_pool", 1))})


# An architecture plugin is found by matching. This one answers for the models of one vendor;
# every hook that it leaves out keeps the core's default.
@hookimpl
def match_model(model: ModelSpec) -> int | None:
    """Claim the models named ``acme-...`` (the folder of their config), ahead of mla's and mha's 10."""
    return 20 if model.name.startswith("acme-") else None


@hookimpl
def default_policy(model: ModelSpec) -> str | None:
    """Make the policy name ``costcache`` mean ``worth``, for models that it serves."""
    return None if model.has_states else "worth"
