"""The chunks of vLLM's CPU tier as records of a pool: runs of chunks of one prefix that share their history.

A chunk's key is the hash of its whole prefix and the number of its KV cache group. vLLM says at which token
of its prompt a chunk ends, so the one before it is known: the chunks of one group that follow each other in a
request are a path, and those of one history a run. A chunk whose predecessor is not in the tier begins a tree
of its own.

The accesses of a request are ranked as vLLM's LRU ranks them: while it runs, all have the recency of its
first one, and when it ends, its whole path is recent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from costcache.eviction import Refused
from costcache.records import Action, NodeRecord, RequestRecord, Victim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from costcache.binding import Binding
    from costcache.pool import Pool
    from costcache.records import Asker, RequestInfo

__all__ = ["Chunks", "Run"]

_DELETE = Action.DELETE
_HASHED = 7
"""Bytes of a key's hash that stand for its prefix; with one of the group they are a small integer."""
_GROUP = 4
"""Bytes at the end of a key that are the number of its group, most significant first."""


class Run(NodeRecord):
    """Consecutive chunks of one prefix that the same requests used.

    Attributes:
        keys: Their keys, in order.
        size: Tokens per chunk.
        busy: How many of them are in transfer. The run is pinned as long as any is.
    """

    __slots__ = ("busy", "keys", "size")

    def __init__(self, parent: NodeRecord | None, depth: int, keys: list[bytes], size: int) -> None:
        NodeRecord.__init__(self, 0, parent, len(keys) * size, depth)  # the pool numbers it
        self.keys = keys
        self.size = size
        self.busy = 0

    def prefix_hash(self, offset: int = 0) -> int | None:
        """See :class:`costcache.records.NodeRecord`; vLLM's hash of a chunk is that of its whole prefix."""
        key = self.keys[offset // self.size]
        return int.from_bytes(key[-1:] + key[:_HASHED], "big")

    def content(self, start: int, end: int) -> bytes:  # noqa: ARG002 # the keys are still those of before
        """See :class:`costcache.records.NodeRecord`."""
        return b"".join([key[:_HASHED] for key in self.keys[start // self.size :]])

    def prefix_hash_with(self, offset: int, content: bytes | bytearray) -> int:  # noqa: ARG002 # the hash has it
        """See :class:`costcache.records.NodeRecord`."""
        return int.from_bytes(self.keys[0][-1:] + content[:_HASHED], "big")

    def shared(self, offset: int, content: bytes | bytearray) -> int:
        """See :class:`costcache.records.NodeRecord`."""
        at = 0
        for key in self.keys[offset // self.size :]:
            if not content.startswith(key[:_HASHED], at):
                break
            at += _HASHED
        return at // _HASHED * self.size


class _Path:
    """The chunks of one group that a request has named.

    Attributes:
        at: Their keys, by the token at which they end.
        end: Where the last one named ends.
        made: How many the request has stored.
        request: The record of the request for this group.
    """

    __slots__ = ("at", "end", "made", "request")

    def __init__(self, request: RequestRecord) -> None:
        self.at: dict[int, bytes] = {}
        self.end = 0
        self.made = 0
        self.request = request

    def in_order(self) -> list[bytes]:
        """The keys from the first token on, whatever the order in which they were named."""
        at = self.at
        ends = list(at)
        return list(at.values()) if ends == sorted(ends) else [at[end] for end in sorted(ends)]


class _Visit:
    """A request that uses the tier; vLLM keeps it in its own context of the request.

    Attributes:
        owner: The tier.
        cleared: How often the tier had been cleared when the request began.
        rank: ``Clock.accesses`` at its first access.
        request: The record of the request.
        told: What its client said.
        paths: Its paths, by group.
    """

    __slots__ = ("cleared", "owner", "paths", "rank", "request", "told")

    def __init__(
        self, owner: Chunks, cleared: int, rank: int, request: RequestRecord, told: RequestInfo
    ) -> None:
        self.owner = owner
        self.cleared = cleared
        self.rank = rank
        self.request = request
        self.told = told
        self.paths: dict[bytes, _Path] = {}

    def path(self, group: bytes) -> _Path:
        """The path of a group. Each has a record of its own, since a use counts once in each."""
        path = self.paths.get(group)
        if path is None:
            request = self.request
            path = self.paths[group] = _Path(RequestRecord(request.number, request.in_seconds, request.asker))
        return path


class Chunks:
    """The host of a pool over the chunks of the tier.

    Attributes:
        held: vLLM's status objects of the cached chunks, by key.
        pool: The pool.
        size: Tokens per chunk.
    """

    def __init__(
        self, binding: Binding, capacity: int, sender: Callable[[Any], tuple[Asker | None, RequestInfo]]
    ) -> None:
        """Start with an empty tier.

        Args:
            binding: The model, its policy and its plugin; its page is a chunk.
            capacity: Chunks that the tier has room for.
            sender: Says who sent the request of vLLM's context, and what the client said.
        """
        self._sender = sender
        self.held: dict[bytes, Any] = {}
        self.size = size = binding.page_size
        # No more is evicted from a lower tier than is asked for: vLLM wants exactly so many chunks.
        self.pool: Pool = binding.pool("host", self.take, capacity=capacity * size, lower_tier=True)
        self._where: dict[bytes, Run] = {}
        self._steps: dict[bytes, int] = {}  # tokens per chunk of each group, as far as they have been seen
        self._new: list[bytes] = []  # chunks that are in no run yet, all of one request
        self._context: Any = None  # that of this request
        self._cleared = 0
        self._busy: set[bytes] = set()  # chunks in transfer
        self._taken: list[bytes] = []

    # -- requests ----------------------------------------------------------------------------

    def name(self, keys: Iterable[bytes], context: Any) -> None:
        """A request names chunks for the first time: those in the tier are used."""
        if self._new:
            self._flush()
        visit, where, position = self._visit(context), self._where, context.get_offload_key_position
        group, step = b"", 0
        path: _Path | None = None
        found: list[bytes] = []
        for key in keys:
            if path is None or not key.endswith(group):
                if found and path is not None:
                    self._use(self._walk(found, path, step), path.request, visit.rank)
                    found = []
                group = key[-_GROUP:]
                path = visit.path(group)
                step = self._steps.get(group, 0)
            end = position(key)
            if end is None:  # taken for the next one
                end = path.end + (step or self.size)
            if not step or end % step:
                self._steps[group] = step = math.gcd(step, end)
            path.at[end] = key
            path.end = end
            if key in where:
                found.append(key)
        if found and path is not None:
            self._use(self._walk(found, path, step), path.request, visit.rank)

    def store(self, key: bytes, chunk: Any, context: Any) -> None:
        """A request stores a chunk, which joins a run with those after it before anything else happens."""
        if context is not self._context:
            if self._new:
                self._flush()
            self._context = context
        self.held[key] = chunk
        self._new.append(key)

    def end(self, context: Any) -> None:
        """A request ends."""
        if self._new:
            self._flush()
        visit: _Visit | None = context.get_state(_Visit)
        if visit is None or visit.owner is not self or visit.cleared != self._cleared:
            return  # it named nothing
        pool, where, size = self.pool, self._where, self.size
        late = pool.clock.accesses != visit.rank  # others came since
        if late:
            pool.clock.accesses += 1
        for group, path in visit.paths.items():
            request, keys = path.request, path.in_order()
            if late:
                pool.use(self._walk(keys, path, self._steps[group]), request)
            request.end = next((where[key] for key in reversed(keys) if key in where), None)
            request.matched = (len(keys) - path.made) * size
            pool.finish(request, visit.told._replace(new_tokens=path.made * size))

    def begin_transfer(self, key: bytes) -> None:
        """A chunk is going to be read."""
        if self._new:
            self._flush()
        run = self._where[key]
        self._busy.add(key)
        run.busy += 1
        if run.busy == 1:
            self.pool.pin(run)

    def end_transfer(self, key: bytes) -> None:
        """A chunk was written, or has no reader any more."""
        if self._new:
            self._flush()
        run = self._where[key]
        self._busy.remove(key)
        run.busy -= 1
        if not run.busy:
            self.pool.unpin(run)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Chunks are wanted: they are recent, but not used."""
        if self._new:
            self._flush()
        self.pool.clock.accesses += 1
        self.pool.use(self._walk(list(keys)), None)

    def _visit(self, context: Any) -> _Visit:
        visit: _Visit | None = context.get_state(_Visit)
        if visit is None or visit.owner is not self or visit.cleared != self._cleared:
            clock = self.pool.clock
            clock.accesses += 1
            asker, told = self._sender(context)
            visit = _Visit(self, self._cleared, clock.accesses, self.pool.begin(asker), told)
            context.set_state(visit)
        return visit

    def _use(self, runs: list[NodeRecord], request: RequestRecord, rank: int) -> None:
        """Count a use of runs, at the time of the request's first access unless they were used since."""
        pool = self.pool
        if pool.clock.accesses == rank:
            pool.use(runs, request)
            return
        before = [run.recency for run in runs]
        pool.use(runs, request)
        for run, recency in zip(runs, before, strict=True):
            run.recency = max(rank, recency)

    def _flush(self) -> None:
        """Make runs of the chunks that were stored."""
        keys, context = self._new, self._context
        self._new, self._context = [], None
        visit, position = self._visit(context), context.get_offload_key_position
        group, step, start, end = b"", 0, 0, 0
        path: _Path | None = None
        run: list[bytes] = []
        for key in keys:
            at = position(key)
            if path is not None and (at is None or at == end + step) and key.endswith(group):
                run.append(key)
                end += step
                continue
            if path is not None:
                self._make(run, start, path, step, visit.rank)
            group = key[-_GROUP:]
            path = visit.path(group)
            step = self._steps.get(group, self.size)
            if at is None:
                at = next((each for each, named in path.at.items() if named == key), step)
            run, start, end = [key], at, at
        if path is not None:
            self._make(run, start, path, step, visit.rank)

    def _make(self, keys: list[bytes], end: int, path: _Path, step: int, rank: int) -> None:
        """Make a run of stored chunks, the first of which ends at token ``end``."""
        pool, where, size = self.pool, self._where, self.size
        run = Run(self._before(path, end, step), (end // step - 1) * size, keys, size)
        where.update(dict.fromkeys(keys, run))
        path.made += len(keys)
        self._busy.update(keys)
        run.busy = len(keys)
        # It is locked from the start, so no order ranks it before its recency is right.
        pool.insert(run, path.request, locks=1)
        run.recency, run.locks = rank, 0
        pool.pin(run)
        end += len(keys) * step
        while (after := path.at.get(end)) is not None:
            if after in where:  # it was cached before
                self._follow(where[after], run)
                break
            end += step

    # -- structure ---------------------------------------------------------------------------

    def _walk(self, keys: list[bytes], path: _Path | None = None, step: int = 0) -> list[NodeRecord]:
        """The runs of these chunks, in the order of their prefix, cut so that they have no others.

        Some of the chunks may not be cached. A run whose predecessor was not follows it if it is again.
        """
        where, size, at, last = self._where, self.size, 0, len(keys)
        runs: list[NodeRecord] = []
        while at < last:
            run = where.get(keys[at])
            if run is None:
                at += 1
                continue
            if run.keys[0] != keys[at]:
                self._split(run, run.keys.index(keys[at]))
            own = run.keys
            count = len(own)
            if own != keys[at : at + count]:
                count = 1  # the first is the same
                while at + count < last and own[count] == keys[at + count]:
                    count += 1
                run = self._split(run, count)
            above = run.parent
            if path is not None and above is not None and run.depth != above.depth + above.tokens:
                before = self._before(path, (run.depth // size + 1) * step, step)
                if before is not None:
                    self._follow(run, before)
            runs.append(run)
            at += count
        return runs

    def _before(self, path: _Path, end: int, step: int) -> Run | None:
        """The run of the last cached chunk before the one that ends at a token, cut so that it ends there.

        Only chunks that the request has named count: those without a gap, but for some that could not be
        stored or are evicted.
        """
        depth = (end // step - 1) * self.size
        while (key := path.at.get(end - step)) is not None:
            run = self._where.get(key)
            if run is not None:
                if run.keys[-1] != key:
                    run = self._split(run, run.keys.index(key) + 1)
                return run if run.depth + run.tokens <= depth else None
            end -= step
        return None

    def _follow(self, run: Run, before: Run) -> None:
        """Let a run follow another one, if that is nearer than what it follows now.

        Depths rise along a path whatever vLLM says of positions, so there is no circle.
        """
        above = run.parent
        end = 0 if above is None else above.depth + above.tokens
        if end < before.depth + before.tokens <= run.depth:
            self.pool.move(run, before)

    def _split(self, run: Run, count: int) -> Run:
        """Split the first chunks off a run; returns them as a run of their own."""
        prefix = Run(run.parent, run.depth, run.keys[:count], self.size)
        self._where.update(dict.fromkeys(prefix.keys, prefix))
        run.keys = run.keys[count:]
        pool = self.pool
        pool.split(prefix, run)
        if run.busy:
            prefix.busy = len(self._busy.intersection(prefix.keys))
            run.busy -= prefix.busy
            if prefix.busy:
                pool.pin(prefix)
            if not run.busy:
                pool.unpin(run)
        return prefix

    def forget(self, key: bytes) -> None:
        """Take a chunk out, whatever follows it."""
        if self._new:
            self._flush()
        pool, run = self.pool, self._where[key]
        at = run.keys.index(key)
        if at:
            self._split(run, at)
        after: list[NodeRecord] = []
        if len(run.keys) > 1:
            after = [run]
            run = self._split(run, 1)
        elif run.live_children:
            after = [record for record in pool.live.values() if record.parent is run]
        for record in after:
            pool.move(record, run.parent or pool.root)
        if key in self._busy:
            self.end_transfer(key)
        pool.remove(run)
        del self._where[key], self.held[key]

    def clear(self) -> None:
        """Forget all chunks and start the policy afresh."""
        self._cleared += 1
        self._new, self._context = [], None
        self._where.clear()
        self._busy.clear()
        self.held.clear()
        self.pool.reset()

    def least_recent_first(self) -> Iterator[bytes]:
        """The keys in the order of LRU, so that vLLM's can take over; those in no run come first."""
        where = self._where
        yield from (key for key in self.held if key not in where)
        runs = [run for run in self.pool.live.values() if isinstance(run, Run)]
        for run in sorted(runs, key=lambda run: (run.recency, -run.depth)):
            yield from (key for key in reversed(run.keys) if key in self.held)

    # -- evictions ---------------------------------------------------------------------------

    def evict(self, count: int, protected: Iterable[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict so many chunks, none of them protected or in transfer; all or none.

        Returns:
            The keys and the status objects of the victims; None if there are too few.
        """
        if self._new:
            self._flush()
        if count <= 0:
            return []
        pool, where, held, missing = self.pool, self._where, self.held, count * self.size
        kept = {run.serial: run for key in protected if (run := where.get(key)) is not None}
        pins = [kept[serial] for serial in sorted(kept)]
        for run in pins:
            pool.pin(run)
        taken: list[bytes] = []
        self._taken = taken
        if missing <= pool.evictable:  # then the pool frees that much, whatever the policy does
            pool.evict(missing, watermark=False)
        for run in pins:
            pool.unpin(run)
        if not taken:
            return None
        if len(taken) != count:
            raise AssertionError(f"{len(taken)} chunks were evicted instead of {count}")
        return [(key, held.pop(key)) for key in taken]

    def take(self, victim: Victim, needed: int) -> int | Refused:
        """Free as much of the tail of a run as ``needed`` asks for; the pool calls this."""
        run, pool = victim.record, self.pool
        if (
            not isinstance(run, Run)
            or run.live_children
            or victim.action is not _DELETE
            or pool.live.get(run.serial) is not run
        ):
            return Refused.NOT_A_LEAF
        if run.locks:
            return Refused.LOCKED
        keys, where, size = run.keys, self._where, self.size
        at = max(0, len(keys) - (victim.at_most(needed) // size or 1))
        gone = keys[at:]
        for key in gone:
            del where[key]
        self._taken += reversed(gone)
        if at:
            pool.trim(run, len(gone) * size)
            run.keys = keys[:at]
        else:
            pool.remove(run)
        return len(gone) * size
