"""Copies down: from one tier to the next slower one, when a prefix is made, used or evicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from costcache.tiers.tier import NO_SLOTS, Place, Source, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costcache.radix.node import Node
    from costcache.tiers.counters import TierCounters
    from costcache.tiers.device import DeviceTier
    from costcache.tiers.facts import Facts
    from costcache.tiers.host import HostTier
    from costcache.tiers.line import Line
    from costcache.tiers.lower import LowerTier
    from costcache.tiers.writing import Writing

__all__ = ["Down"]


class Down:
    """The copies from a tier to the next slower one.

    What stays where it is is pinned meanwhile. What is about to be evicted is read at once.

    Attributes:
        demotes: Whether the policy of writing copies what is about to be evicted.
    """

    def __init__(
        self,
        source: DeviceTier | HostTier,
        target: LowerTier,
        lines: Sequence[Line],
        counters: TierCounters,
        facts: Facts,
        writing: Writing,
        in_flight: int,
        arrived: Callable[[Node], object] | None = None,
    ) -> None:
        """Connect two tiers.

        Args:
            source: The faster tier.
            target: The slower one.
            lines: The links back to the device, that between the two first.
            counters: Counts of the slower one.
            facts: What the policy of writing is told.
            writing: The policy of writing.
            in_flight: Bytes that may be under way.
            arrived: Called with a node of the slower tier when a copy has ended there.
        """
        self._source = source
        self._target = target
        self._lines = lines
        self._line = lines[0]
        self._counters = counters
        self._facts = facts
        self._writing = writing
        self._in_flight = in_flight
        self._arrived = arrived
        self._renewed = (0, 0)  # the node that was renewed last, and its uses
        # A policy that writes ahead of need leaves all to evictions, which the device then makes in time.
        self._copies = writing.name != "write_back" and not writing.ahead
        self.demotes = writing.name in {"write_back", "by_cost"}

    def copy(self, node: Node) -> None:
        """Copy the prefix of a node that was made or used, as far as the policy of writing wants it."""
        if not self._copies or node.parent is None:
            return
        place = place_of(node)
        at, start = self._reach(place)
        last = self._wanted(node, start, at)
        if last is not None:
            self._copy(last, place_of(last), min(start, last.end), pinned=True)

    def demote(self, node: Node) -> None:
        """A node, its last tokens or its ending are about to be evicted: copy them if that is worth it."""
        source = self._source
        if node.parent is None or not source.ends(node):
            return  # nothing could resume from it
        if not self.demotes:
            self._renew(node)
            return
        place = place_of(node)
        at, start = self._reach(place)
        if start >= node.end and not self._lacks_ending(node, at):
            self._target.renew(at, node)
            return
        move = self._facts.of(source, node, min(max(node.depth, start), node.end), self._target, self._lines)
        if not self._writing.demotes(move):
            self._counters.refused += move.tokens
            self._facts.lost(self._target, move)
            return
        self._copy(node, place, min(start, node.end), pinned=False)

    def _renew(self, node: Node) -> None:
        """Tell the slower tier what is known of a node that is evicted, if it has any of it.

        Once for a leaf that is trimmed page by page, since it takes a walk.
        """
        target, now = self._target, (node.serial, node.uses)
        if target.shares and now != self._renewed:
            self._renewed = now
            target.renew(target.find(place_of(node)), node)

    def left_to_copy(self, node: Node) -> int | None:
        """Tokens that the eviction of a node would have to copy, with its ending; None if it is all below.

        What is on its way to the slower tier counts as being there.
        """
        at, start = self._reach(place_of(node))
        return None if start >= node.end and not self._lacks_ending(node, at) else max(0, node.end - start)

    def may_copy(self, node: Node, tokens: int) -> bool:
        """Whether so many tokens of a node's prefix, and its ending, may be copied now."""
        source = self._source
        return self._may(tokens, source.ending(node).size if source.needs_ending else 0)

    def _reach(self, place: Place) -> tuple[Node, int]:
        """The node at the end of a prefix in the slower tier, and the tokens there or on their way."""
        target = self._target
        at = target.find(place)
        return at, max(at.end, self._line.covered(place, target.tree.page_bytes, target.page_size))

    def _lacks_ending(self, node: Node, at: Node) -> bool:
        """Whether a node has an ending that the same node of the slower tier has not."""
        source = self._source
        return source.needs_ending and at.end == node.end and source.ends(node) and not self._target.ends(at)

    def _wanted(self, node: Node, start: int, at: Node) -> Node | None:
        """The deepest node of a path that the slower tier lacks, and that the policy wants copied now."""
        source, last = self._source, None
        for part in node.path():
            if part.end <= start and not (part is node and start == at.end and self._lacks_ending(part, at)):
                continue
            if not source.ends(part):
                continue  # what is before the next ending goes with it
            first = max(part.depth, min(start, part.end))
            if not self._writing.copies(self._facts.of(source, part, first, self._target, self._lines)):
                break
            last = part
        return last

    def _copy(self, node: Node, place: Place, start: int, *, pinned: bool) -> None:
        """Copy a prefix from ``start`` on; without a pin its bytes are read at once."""
        source, target, line, counters = self._source, self._target, self._line, self._counters
        tokens = node.end - start
        ending = source.ending(node) if source.needs_ending else NO_SLOTS
        if source.needs_ending and not ending.size:
            return  # it is being settled whose it is
        if not tokens and place in line.writes:
            return  # its ending is on its way
        if not tokens and (not ending.size or target.ends(target.find(place))):
            return
        rows = ending.size
        landing = target.land(place, start, rows) if self._may(tokens, rows) else None
        if landing is None:
            counters.skipped += tokens
            return
        what = Source(source.buffers, source.slots_of(node)[start : node.end], ending, at_once=not pinned)
        history = node if pinned else target.remember(node)
        if pinned:
            source.tree.pin(node)
        line.writes.append(place)
        size = landing.size

        def collected(done: int) -> None:
            line.writes.remove(place)
            if pinned:
                source.tree.unpin(node)
            added, kept = landing.settle(done, history)
            if done * target.page_size < tokens:
                counters.lost += tokens - kept
            if added is None:
                counters.skipped += kept  # the prefix before it was evicted meanwhile
                return
            counters.written += kept
            counters.bytes_in += size if kept == tokens else size * kept // tokens
            counters.demoted += 0 if pinned else kept
            if self._arrived is not None:
                self._arrived(added)

        line.submit(lambda: landing.write(what), collected, size)

    def _may(self, tokens: int, rows: int) -> bool:
        """Whether so much more may be under way."""
        return self._line.copies.in_flight + self._source.buffers.bytes_of(tokens, rows) <= self._in_flight
