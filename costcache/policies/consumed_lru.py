"""States that no request went on from for longest go first: LRU that refreshes only what was consumed."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.policies.spec import PolicySpec
from costcache.policies.states import StateOrder, needs_states
from costcache.records import NodeRecord

__all__ = ["ConsumedLRU"]


class ConsumedLRU(StateOrder):
    """LRU on states, where a request refreshes the one that it goes on from and not those in front of it.

    Plain LRU refreshes every state on the path, so that those which longer ones have superseded stay
    as long as they do.
    """

    def score(self, record: NodeRecord) -> int:
        state = record.state
        return 0 if state is None else state.recency


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "consumed-lru": PolicySpec(
            lambda cost, pools, settings: ConsumedLRU(),
            "States that were gone on from least recently first (hybrid models).",
            supports=needs_states,
        )
    }
