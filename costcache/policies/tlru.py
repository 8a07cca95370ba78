"""Tail-optimised LRU: first evicts tails without which the next turn's prefill is still short enough."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord, Victim

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

    A node is such a tail if all of it is beyond the bound. A node that was merged of many counts token by
    token, as those did that it was merged of: its tokens beyond the bound are evicted first.
    """

    def __init__(self, threshold: int = 0, next_prompt_estimate: int = 0) -> None:
        super().__init__()
        self._slack = threshold - next_prompt_estimate
        self._longest: dict[int, int] = {}
        self._merged: set[int] = set()  # serials of nodes that were merged of several

    def key(self, record: NodeRecord) -> tuple[int, int]:
        bound = self._bound(record)
        safe = record.end > bound if record.serial in self._merged else record.depth >= bound
        return (-1 if safe else 0, record.recency)

    def _bound(self, record: NodeRecord) -> int:
        return max(0, self._longest[record.serial] - self._slack)

    def next_victim(self, pool: str) -> Victim | None:
        victim = super().next_victim(pool)
        if victim is None or victim.record.serial not in self._merged:
            return victim
        record = victim.record
        bound = self._bound(record)
        if record.depth < bound < record.end:
            return victim._replace(tokens=record.end - bound)
        return victim

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
        if tail.serial in self._merged:
            self._merged.add(prefix.serial)
        super().split(prefix, tail)

    def merge(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        longest = self._longest
        longest[tail.serial] = max(longest[tail.serial], longest.pop(prefix.serial))
        self._merged.discard(prefix.serial)
        self._merged.add(tail.serial)
        self.merged(prefix, tail)

    def remove(self, record: NodeRecord) -> None:
        super().remove(record)
        self._longest.pop(record.serial, None)
        self._merged.discard(record.serial)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "tlru": PolicySpec(
            lambda cost, pools, settings: TLRU(settings.threshold, settings.next_prompt_estimate),
            "Tails that no latency goal needs, then least recently used.",
            TLRUSettings,
        )
    }
