"""Retention by tenant and session: each tenant's prefixes stay for as long as its weight says."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from costcache import KeyedOrder, NodeRecord, RequestInfo, RequestRecord

__all__ = ["Retention", "RetentionSettings"]

Weight = Annotated[float, Field(ge=0, le=1000)]


class RetentionSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of ``retention``, on the command line as ``--set retention.period=500``."""

    weights: dict[str, Weight] = Field(
        default_factory=dict, description="Weight of each tenant by its name, 0 to 1000; of others 1."
    )
    period: int = Field(
        1000,
        ge=0,
        description="Walks of the tree by which a weight of 1 lets a prefix outlive an unweighted one.",
    )
    live: float = Field(
        2.0, ge=1, le=1000, description="Factor on the weight of a session that has not said that it ended."
    )


class Retention(KeyedOrder):
    """Evicts the leaf whose time is up first: its last walk, plus the period times its weight.

    A prefix has the weight of the tenant that used it last, and more while that one's session is live. What a
    session leaves behind when it says that it ends has no weight, unless somebody else uses it again.
    """

    rises = False  # an end of a session lowers keys, and so does a use by a tenant of less weight

    def __init__(self, settings: RetentionSettings) -> None:
        super().__init__()
        self.settings = settings

    def key(self, record: NodeRecord) -> float:
        """Walk at which the record's time is up."""
        asker, settings = record.used_by, self.settings
        if asker is None:
            weight = 1.0
        else:
            weight = settings.weights.get(asker.tenant or "", 1.0)
            if asker.session is not None:
                weight *= 0.0 if record.data == asker else settings.live
        return record.recency + settings.period * weight

    def finish(self, request: RequestRecord, info: RequestInfo) -> None:
        """Take the weight off what a session that ended was the last to use."""
        record = request.end
        while info.session_ends and record is not None and record.used_by == request.asker:
            record.data = request.asker  # its session is over
            self.requeue(record)
            record = record.parent

    def split(self, prefix: NodeRecord, tail: NodeRecord) -> None:
        """Both parts are over, or neither."""
        prefix.data = tail.data
        super().split(prefix, tail)
