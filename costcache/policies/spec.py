"""What a policy plugin offers under one name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from costcache.orders import VictimOrder
from costcache.records import PoolState

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.model import ModelSpec

__all__ = ["MakeOrder", "NoSettings", "PolicySpec", "supports_every_model"]

MakeOrder = Callable[["CostModel", tuple[PoolState, ...], Any], VictimOrder]
"""``make_order(cost, pools, settings)``: a new order for one cache."""


class NoSettings(BaseModel):
    """Settings of a policy that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def supports_every_model(model: ModelSpec) -> str | None:
    """The usual ``supports``: no model is refused."""
    return None


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy: how to make its order, and for which models.

    Attributes:
        make_order: ``make_order(cost, pools, settings)`` returns a new order for one cache, where
            cost is the :class:`~costcache.cost.CostModel`, pools the state of each pool at the start
            and settings an instance of ``settings``.
        summary: One line for people who choose: what goes first.
        settings: Pydantic model of the policy's settings; it can be made without arguments.
        supports: ``supports(model)`` returns None, or one clear line on why it does not serve the model.
    """

    make_order: MakeOrder
    summary: str
    settings: type[BaseModel] = NoSettings
    supports: Callable[[ModelSpec], str | None] = supports_every_model
