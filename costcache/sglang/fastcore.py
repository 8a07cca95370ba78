"""The Python tree core with events and fast walks."""

from __future__ import annotations

from typing import Any

from costcache.sglang.pycore import CostTreeCore
from costcache.sglang.walks import FastWalks

__all__ = ["FastTreeCore"]


class FastTreeCore(FastWalks, CostTreeCore):
    """Tells the pools of fast walks; all else is told where SGLang's own walks tell it."""

    def path_walked(self, path: list[Any], inserting: bool) -> None:
        """A walk used these nodes."""
        records = [node.kv for node in path]
        if inserting:
            for node, record in zip(path, records, strict=True):
                record.priority = node.priority
        self.kv.use(records, inserting=inserting)

    def nodes_locked(self, nodes: list[Any]) -> None:
        """These nodes are protected now."""
        lock = self.kv.lock
        for node in nodes:
            lock(node.kv)

    def nodes_unlocked(self, nodes: list[Any]) -> None:
        """These nodes are protected no more."""
        unlock = self.kv.unlock
        for node in nodes:
            unlock(node.kv)
