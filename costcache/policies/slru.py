"""Segmented LRU: what was used once goes before what came back."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["SLRU", "SLRUSettings"]


class SLRUSettings(BaseModel):
    """Settings of ``slru``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protected_threshold: int = Field(
        2, ge=1, description="Uses, the first one included, from which a node is protected."
    )


class SLRU(KeyedOrder):
    """Nodes on probation go before protected ones; least recently used first within each.

    As in SGLang, a node is protected for good once ``protected_threshold`` requests used it: there
    is no size limit on the protected segment and no demotion, unlike in the SLRU of the caching
    literature.
    """

    def __init__(self, protected_threshold: int = 2) -> None:
        super().__init__()
        self._threshold = protected_threshold

    def key(self, record: NodeRecord) -> tuple[bool, int]:
        return (record.uses >= self._threshold, record.recency)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "slru": PolicySpec(
            lambda cost, pools, settings: SLRU(settings.protected_threshold),
            "Used once first, then what came back; least recent first within each.",
            SLRUSettings,
        )
    }
