"""Hits per token: large nodes that few requests used go first."""

from __future__ import annotations

from costcache.hookspecs import hookimpl
from costcache.orders import KeyedOrder
from costcache.policies.spec import PolicySpec
from costcache.records import NodeRecord

__all__ = ["HitsPerToken"]


class HitsPerToken(KeyedOrder):
    """The leaf with the fewest uses per token goes first; among equals, the least recently used.

    Source: SGLang pull request 30300 of July 2026, "hits-per-token (HPT) size-aware radix-cache eviction
    policy", proposed as ``hpt``. Its title, summary and instructions for reproduction were at hand;
    its code and its formula were not. The ratio is the one that its name gives, and the tie is broken
    as SGLang breaks every tie. No parameters.

    Departures: uses are counted once per request, where SGLang counts inserts; a node that was trimmed or
    split has fewer tokens from then on, and so a higher rank, with the uses that it had.
    """

    def key(self, record: NodeRecord) -> tuple[float, int]:
        return (record.uses / record.tokens, record.recency)


@hookimpl
def policies() -> dict[str, PolicySpec]:
    return {
        "hits-per-token": PolicySpec(
            lambda cost, pools, settings: HitsPerToken(),
            "Fewest uses per token first; ties least recent first.",
        )
    }
