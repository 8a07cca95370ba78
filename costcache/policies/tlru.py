"""Tail-optimised LRU: first evicts tails without which the next turn's prefill is still short enough."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["TLRU", "TLRUSettings"]


class TLRUSettings(BaseModel):
    """Settings of ``tlru``. With both at 0 the order is LRU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: int = Field(
        0, ge=0, description="Uncached tokens of a next turn that still meet the latency goal."
    )
    next_prompt_estimate: int = Field(0, ge=0, description="Tokens that a next turn is expected to add.")

    @model_validator(mode="after")
    def _threshold_above_estimate(self) -> TLRUSettings:
        if (self.threshold or self.next_prompt_estimate) and self.threshold <= self.next_prompt_estimate:
            raise ValueError(
                f"threshold ({self.threshold}) must be above next_prompt_estimate "
                f"({self.next_prompt_estimate}): otherwise no tail is safe to evict"
            )
        return self


class TLRU(KeyedOrder):
    """Evicts tails beyond ``longest + next_prompt_estimate - threshold`` first, then by LRU.

    ``longest`` is the longest prefix, in tokens, that was ever cached through the node. Without the tail
    beyond that bound, a next turn still prefills at most ``threshold`` tokens. The rule is that of SGLang's
    order of this name, in tokens.
    """

    def __init__(self, threshold: int = 0, next_prompt_estimate: int = 0) -> None:
        super().__init__()
        self._slack = threshold - next_prompt_estimate
        self._longest: dict[int, int] = {}

    def key(self, record: NodeRecord) -> tuple[int, int]:
        safe = record.depth >= max(0, self._longest[record.serial] - self._slack)
        return (-1 if safe else 0, record.recency)

    def insert(self, record: NodeRecord) -> None:
        longest, end = self._longest, record.depth + record.tokens
        node = record
        # An ancestor's longest is at least its descendants': stop at the first that is long enough.
        while node.parent is not None and longest.get(node.serial, -1) < end:
            longest[node.serial] = end
            node = node.parent
        super().insert(record)

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        self._longest[prefix.serial] = self._longest[tail.serial]
        super().split(prefix, tail)

    def remove(self, record: NodeRecord) -> None:
        super().remove(record)
        self._longest.pop(record.serial, None)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "tlru": PolicySpec(
            lambda cost, pools, settings: TLRU(settings.threshold, settings.next_prompt_estimate),
            "Tails that no latency goal needs, then least recently used.",
            TLRUSettings,
        )
    }
