"""The same as :mod:`costcache.vllm.blocks`, for a model of several KV cache groups.

vLLM reports blocks group by group. What a request found, and what it has cached, is read from vLLM's tables
once all groups are done; references are followed block by block, since windows lose theirs while a request
runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.vllm.blocks import NAME, Blocks
from costcache.vllm.ends import EndRuns, WideRuns
from costcache.vllm.groups import Groups
from costcache.vllm.requests import info, life_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from costcache.binding import Binding
    from costcache.vllm.requests import Life
    from costcache.vllm.runs import Held, Runs

__all__ = ["MixedBlocks", "attach"]


def attach(manager: Any, binding: Binding) -> Blocks:
    """Let a policy choose the victims of a KV cache manager, of one group or of several."""
    kind = Blocks if len(manager.coordinator.single_type_managers) == 1 else MixedBlocks
    blocks = kind(manager, binding)
    setattr(manager.block_pool, NAME, blocks)
    return blocks


class MixedBlocks(Blocks):
    """Stands in for methods of a KV cache manager of several groups."""

    runs: WideRuns | None

    def __init__(self, manager: Any, binding: Binding) -> None:
        """Replace the methods."""
        self._groups = Groups(manager)
        super().__init__(manager, binding)
        pool, coordinator = self._pool, manager.coordinator
        pool.cache_full_blocks = self._cache_full_blocks  # vLLM's own again
        self._unpin_blocks = pool.unpin_blocks
        self._allocate_new_computed_blocks = coordinator.allocate_new_computed_blocks
        self._cache_blocks = manager.cache_blocks
        pool.unpin_blocks = self.unpin_blocks
        coordinator.allocate_new_computed_blocks = self.allocate_new_computed_blocks
        manager.cache_blocks = self.cache_blocks

    def _make_runs(self, manager: Any, binding: Binding) -> Runs:  # noqa: ARG002  # the groups have it
        groups = self._groups
        self._group = groups.first.manager
        kind = EndRuns if groups.needs_ends else WideRuns
        return kind(binding, self._pool, self, groups)

    # -- requests ----------------------------------------------------------------------------

    def allocate_new_computed_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Give a request the blocks that were found for it."""
        self._allocate_new_computed_blocks(*args, **kwargs)
        request, tokens = self.request, kwargs.get("num_local_computed_tokens", 0)
        if request is not None and tokens:
            self._guarded("following a request", self._found, request, tokens)

    def _found(self, runs: WideRuns, request: Any, tokens: int) -> None:
        life = life_of(request, runs.pool)
        if life.held is not None:
            return
        record, before = life.record, life.record.counted
        if not record.counted:  # a resumed request finds its own tokens
            record.matched = tokens
        held = self._hold(runs, life, request)
        runs.advance(held, held.tables[self._groups.first.number], tokens // runs.size, found=True)
        if isinstance(runs, EndRuns):
            runs.mark(request, held, tokens, found=True, counts=tokens > before)

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocate blocks for a request, and cache those that are full."""
        self.request = request
        try:
            allocated = self._allocate_slots(request, *args, **kwargs)
        finally:
            self.request = None
        self._cached(request)
        return allocated

    def cache_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Cache the full blocks of a request."""
        self._cache_blocks(request, *args, **kwargs)
        self._cached(request)

    def _cached(self, request: Any) -> None:
        """Blocks of a request may be full. Those of its prompt are reported at once, others at its end."""
        runs = self.runs
        if runs is None:
            return
        life: Life | None = getattr(request, "_costcache", None)
        held = None if life is None else life.held
        done = 0 if held is None else held.length
        prompt = request.num_prompt_tokens // runs.size
        if done < prompt:
            count = min(self._groups.cached(request.request_id), prompt)
            if count > done:
                self._guarded("following a request", self._computed, request, count, new=True)

    def _computed(self, runs: WideRuns, request: Any, count: int, *, new: bool) -> None:
        """A request has computed blocks up to number ``count``: ``new`` ones, which nobody else has seen."""
        life = life_of(request, runs.pool)
        held = life.held or self._hold(runs, life, request)
        start = held.length * runs.size
        runs.advance(held, held.tables[self._groups.first.number], count, new=new)
        if isinstance(runs, EndRuns):
            stop = count * runs.size
            for boundary in self._groups.boundaries(request, held.tables, start, stop, ended=not new):
                runs.mark(request, held, boundary)

    def _hold(self, runs: WideRuns, life: Life, request: Any) -> Held:
        held = life.held = runs.hold(life.record)
        held.tables = self._groups.tables(request.request_id)
        if isinstance(runs, EndRuns):
            runs.follow(held, request)
        return held

    def _leave(self, request: Any) -> Held | None:
        """A request is about to give up its blocks: returns its path, to be released once they are free."""
        runs, name = self.runs, request.request_id
        if runs is None or not self._group.req_to_blocks.get(name):
            return None
        count = self._groups.cached(name)
        life: Life | None = getattr(request, "_costcache", None)
        done = 0 if life is None or life.held is None else life.held.length
        if count > done:
            self._guarded("following a request", self._computed, request, count, new=False)
        if self.runs is None:
            return None
        try:
            life = life_of(request, runs.pool)
            held, life.held = life.held, None
            if held is not None and request.is_finished():
                held.info = info(request, life.record)
            return held
        except Exception as error:
            self.give_up("ending a request", error)
            return None

    # -- the block pool ----------------------------------------------------------------------

    def touch(self, blocks: Sequence[Any]) -> None:
        """Blocks have one more reference each."""
        self._touch(blocks)
        self._tell("following references", "touched", blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Blocks have one reference less each; if they are those of a request, it ends."""
        ordered = list(ordered_blocks)
        self._free_blocks(ordered)
        self._tell("following references", "freed", ordered)
        if self.leaving and ordered:
            self.release(self.leaving.pop(ordered[0].block_id, None))

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Any) -> None:
        """Blocks have one reference less each, and those that are free go last."""
        unpinned = list(blocks)
        self._unpin_blocks(unpinned, on_reuse)
        self._tell("following references", "freed", unpinned)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Blocks lost their contents: they and what cannot be found without them are next."""
        blocks = [self._pool.blocks[number] for number in sorted(block_ids)]
        cached = [block for block in blocks if block.block_hash is not None]
        self._evict_blocks(block_ids)
        for block in cached:
            # The runs of a request in use keep such a block until the request has ended.
            if not block.ref_cnt:
                self._tell("evicting blocks", "lose", block)
                if self.runs is not None:
                    self.discard([block])
            else:
                self._tell("evicting blocks", "lose_in_use", block)

    def _tell(self, what: str, name: str, *args: Any) -> None:
        runs = self.runs
        if runs is not None:
            try:
                getattr(runs, name)(*args)
            except Exception as error:
                self.give_up(what, error)

    def _guarded(self, what: str, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Tell the runs something; vLLM's own LRU takes over if that fails."""
        runs = self.runs
        if runs is not None:
            try:
                act(runs, *args, **kwargs)
            except Exception as error:
                self.give_up(what, error)
