"""The facts of moves between tiers, by which the policy of writing decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.sim.tiers.extents import ROOT
from costcache.tiers import Move

if TYPE_CHECKING:
    from costcache.sim.tiers.lower import LowerTiers
    from costcache.sim.tiers.tier import ExtentRecord
    from costcache.sim.ttft import PrefillModel

__all__ = ["Moves"]


class Moves:
    """Says what a move costs, and what it saves."""

    def __init__(self, lower: LowerTiers, prefill: PrefillModel) -> None:
        """Take the facts from these tiers, and from the seconds of a prefill."""
        self._links, self._prefill = lower.links, prefill
        self._device, self._tiers = lower.device, lower.tiers

    def up(self, start: int, stop: int, sizes: list[int]) -> Move:
        """A load of the tokens of a prompt from ``start`` up to ``stop``, of so many bytes by tier."""
        recompute = self._prefill.more(stop - start, start)
        return Move(stop - start, sum(sizes), 1, recompute, self._links.load_seconds(sizes, queued=True))

    def down(
        self, copy: ExtentRecord, level: int, has_state: bool, *, waits: bool, alone: bool = False
    ) -> Move:
        """A write of an extent to a tier, which may hold it already; or of its state ``alone``.

        A state is worth all that it saves computing, back to the state before it, and is of no use without
        the KV in between, which is written after it.

        Args:
            copy: The extent, on that tier.
            level: The tier.
            has_state: Whether a state is written.
            waits: Whether somebody waits for the write.
            alone: Whether the state is written without KV.
        """
        tier, extent, has_states = self._tiers[level], copy.extent, self._device.has_states
        size = tier.state_bytes if alone else tier.size(extent, has_state)
        start, lacks = copy.depth, 0
        if has_states:
            start, lacks = self._resumes_before(copy, level)
        recompute = self._prefill.more(copy.end - start, start)
        if has_states and not has_state:
            lacks = 0
            if not copy.live_children:
                recompute = 0.0  # no request can resume from it
        sizes = [0] * len(self._tiers)
        sizes[level] = (copy.end - start) * tier.token_bytes + tier.state_bytes if has_state else size
        reload = self._links.load_seconds(sizes, queued=False)
        for lower in range(level + 1, len(self._tiers)):
            if self._tiers[lower].held(extent):
                sizes[level], sizes[lower] = 0, sizes[level]
                recompute = min(recompute, self._links.load_seconds(sizes, queued=True))
                break
        missing = tier.used + tier.reserved + size + lacks - tier.capacity
        return Move(
            copy.tokens,
            size,
            copy.uses,
            recompute,
            reload,
            chance=tier.pool.reuse_chance(copy, tier.stays),
            write=self._links.write_seconds(level, size + lacks) if waits else 0.0,
            displaced=tier.price.displaced(min(missing, size + lacks), tier.pool.order),
            followed=copy.live_children > 0 and not alone,
        )

    def _resumes_before(self, copy: ExtentRecord, level: int) -> tuple[int, int]:
        """Tokens up to the last state before an extent on its tier or on the device, and bytes after it.

        The bytes are those of the KV up to the extent that the tier does not hold.
        """
        tier, of = self._tiers[level], self._device.of
        above, lacks = of.parents[copy.extent], 0
        while above != ROOT:
            there = tier.records.get(above)
            for record in (there, self._device.records.get(above)):
                if record is not None and record.has_state:
                    return record.end, lacks
            if there is None or not there.held:
                lacks += tier.size(above, False)
            above = of.parents[above]
        return 0, lacks
