"""Replay of models whose sliding windows are cached apart, one request at a time or on a server.

A request resumes where a whole window is cached and computes the rest, KV that is cached beyond that point
included. It leaves a window at its end, and at the end of what was cached if that lies before it (prompts
branch there).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from costcache.sim.serving import Running, Server

if TYPE_CHECKING:
    from costcache.radix.node import Node
    from costcache.radix.windows import WindowTree
    from costcache.records import RequestRecord

__all__ = ["WindowServer"]


class WindowServer(Server):
    """A server with a queue, whose requests reserve room for full KV and for window KV.

    A running request needs window KV of its window and of what is computed at once: of its prompt until that
    is cached, then of its output.
    """

    tree: WindowTree

    def run_prompt(self, index: int, now: float, node: Node, request: RequestRecord, *, alone: bool) -> bool:
        """Admit a request that matched up to ``node``; False if it has to wait."""
        tree = self.tree
        usable = tree.usable(node)
        found = request.matched = usable.depth + usable.tokens
        tree.pin(usable)
        need = self.steps.most(self.inputs[index], self.outputs[index]) - found
        prompt = self.whole[index] - found
        after = min(need - max(0, prompt), tree.kept)
        windows = tree.in_flight(max(0, prompt)) + after
        if not tree.has_room(need, windows) and not alone:
            tree.unpin(usable)
            return False
        before = time.perf_counter()
        reserved, room = tree.make_room(usable, need, windows, watermark=self.watermark)
        self.deciding += time.perf_counter() - before
        self.pool.counters.oversized += reserved < need
        self.reserve_both(reserved, room)
        key = bytes(self.keys[index])
        self.prefilled(index, now, found)
        # The prompt's window KV is handed over; what is left is for the output.
        self.reserve_both(0, min(after, room) - room)
        leaf, left = self.extend(index, key, self.whole[index], reserved, request)
        tree.pin(leaf)
        tree.unpin(usable)
        self.admitted(index, now, leaf, left, request)
        self.windows[index] = min(after, room)
        return True

    def reserve_both(self, tokens: int, windows: int) -> None:
        """Change what running requests own outside the tree."""
        self.owned += tokens
        self.owned_windows += windows
        self.tree.reserve(self.owned, self.owned_windows)

    def begin(self) -> None:
        """Prepare the counts."""
        self.find = self.tree.find
        self.owned = self.owned_windows = 0
        self.windows: dict[int, int] = {}
        self.computed: dict[int, int] = {}

    def extend(
        self, index: int, key: bytes, tokens: int, reserved: int, request: RequestRecord
    ) -> tuple[Node, int]:
        """Move the uncached part of ``tokens`` tokens, and windows, from a request to the tree."""
        tree, page = self.tree, self.tree.page_size
        leaf = tree.match(tree.root(()), key, request)
        cached = leaf.depth + leaf.tokens
        first = self.computed.get(index, request.matched)
        duplicates = min(max(0, cached - first), reserved // page * page)
        added = max(0, min(tokens - cached, (reserved - duplicates) // page * page))
        self.reserve_both(-added - duplicates, 0)
        if added:
            leaf = tree.append(leaf, tree.part(key, cached, added), None, request)
        self.computed[index] = leaf.depth + leaf.tokens
        before = time.perf_counter()
        tree.keep_both(leaf, cached, request.matched, request, watermark=self.watermark)
        self.deciding += time.perf_counter() - before
        self.prioritize(leaf, index)
        return leaf, reserved - added - duplicates

    def release(self, ended: Running) -> None:
        """Free what a request owns and unlock its prefix, once its output is cached."""
        number = ended.number
        self.reserve_both(0, -self.windows.pop(number))
        reserved = ended.reserved if self.keys_after is None else self.cache_output(self.keys_after, ended)
        self.computed.pop(number)
        self.reserve_both(-reserved, 0)
        self.tree.unpin(ended.node)
        self.tree.finish(ended.request, self.infos.of(number, self.matched[number]))

    def restore(self) -> None:
        """Restore the free target of each pool, as far as locks allow."""
        if self.reserve:
            before = time.perf_counter()
            self.tree.restore()
            self.deciding += time.perf_counter() - before
