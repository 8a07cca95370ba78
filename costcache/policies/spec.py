"""The offer of a policy plugin: how to make an order, and for which models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from costcache.orders import VictimOrder
from costcache.records import PoolState

if TYPE_CHECKING:
    from costcache.cost import CostModel
    from costcache.model import ModelSpec

__all__ = ["MakeOrder", "NoSettings", "PolicySpec", "Sight", "supports_every_model"]

MakeOrder = Callable[["CostModel", tuple[PoolState, ...], Any], VictimOrder]
"""``make_order(cost, pools, settings)``: a new order for one cache."""

Sight = Literal["leaves", "nodes", "states"]
"""A value of :attr:`PolicySpec.sees`."""


class NoSettings(BaseModel):
    """Settings of a policy that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def supports_every_model(model: ModelSpec) -> str | None:
    """Refuse no model: the default of :attr:`PolicySpec.supports`."""
    return None


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy: how to make its order, what the order looks at, and which models it serves.

    ``sees`` decides where a policy can serve:

    - ``"leaves"``: it ranks unlocked leaves by a key made of uses, times and priority alone, not of position,
      size or who asks. Its order is a :class:`~costcache.orders.KeyedOrder`. Every host can serve it, the
      Rust core of SGLang included; on a model with states, a state has the key of its node.
    - ``"nodes"``: it looks at positions, sizes, who asks, or events of any node. SGLang's Rust core cannot
      serve it, and models with states only if it sees states too.
    - ``"states"``: on a model with states it ranks the state checkpoints, by a
      :class:`~costcache.policies.states.StateOrder`. A policy that sees nothing else serves such models only.

    Attributes:
        make_order: ``make_order(cost, pools, settings)`` returns a new order for one cache, where
            cost is the :class:`~costcache.cost.CostModel`, pools the state of each pool at the start
            and settings an instance of ``settings``.
        summary: One line for users who choose a policy: what is evicted first.
        settings: Pydantic model of the policy's settings; it can be made without arguments.
        supports: ``supports(model)`` returns None, or one clear line on why the policy does not serve a model
            that ``sees`` allows.
        sees: What the order looks at, one or more of the words above.
        windows: Name of the policy that ranks sliding-window KV in a pool of its own, where every record is a
            leaf, and those that a longer prompt has superseded look like the others; None for this one. Where
            windows share a pool with the rest, as in vLLM, this policy ranks both, whatever is named.
        explains: Whether the order's ``explained()`` tells classes of nodes apart, for ``costcache explain``.
    """

    make_order: MakeOrder
    summary: str
    settings: type[BaseModel] = NoSettings
    supports: Callable[[ModelSpec], str | None] = supports_every_model
    sees: frozenset[Sight] = frozenset({"nodes"})
    explains: bool = False
    windows: str | None = None

    @property
    def leaves_only(self) -> bool:
        """Whether its order is a key of unlocked leaves, which every host can serve."""
        return "leaves" in self.sees and "nodes" not in self.sees
