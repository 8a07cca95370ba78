"""The KV cache groups of a model, and what a request needs of each to resume at a boundary.

All groups take their blocks, of one size in bytes, from one pool. A prefix can be used if each group of full
attention has all of its blocks, each group of sliding windows the blocks of the last window, and each group
of recurrent layers the state at the very end. Such an end is a multiple of all groups' block sizes.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Group", "Groups", "why_not_groups"]

FAR = 1 << 40
"""Tokens of a prompt that is longer than any window."""


class Group:
    """One KV cache group.

    Attributes:
        manager: vLLM's manager of the group.
        number: Its place among the groups, and in the tables of a request.
        size: Tokens per block.
        chunk: Tokens of a chunk of local attention; None in other groups.
        ahead: Blocks that have to be there beyond the boundary, which a drafter recomputes: 0 or 1.
    """

    __slots__ = ("_window", "ahead", "chunk", "manager", "number", "size")

    def __init__(self, manager: Any, number: int) -> None:
        spec = manager.kv_cache_spec
        self.manager = manager
        self.number = number
        self.size: int = manager.block_size
        self.ahead = int(manager.use_eagle)
        self.chunk: int | None = getattr(spec, "attention_chunk_size", None)
        window: int | None = getattr(spec, "sliding_window", None)
        # A state is one block, the last; of a window the token itself is not needed.
        self._window = 1 if window is None else -(-(window - 1) // self.size)
        if hasattr(spec, "mamba_cache_mode"):
            self.ahead = 0

    def span(self, boundary: int) -> tuple[int, int]:
        """First block that a request needs to resume at a boundary, and the end of those blocks."""
        stop = boundary // self.size + self.ahead
        if self.chunk is not None:
            return boundary // self.chunk * self.chunk // self.size, stop
        return max(0, stop - self._window - self.ahead), stop

    def blocks_of_an_end(self, step: int) -> float:
        """Blocks of an end far into a prompt: of a chunk, their mean over the boundaries, every ``step``."""
        if self.chunk is None:
            start, stop = self.span(FAR)
            return stop - start
        spans = [self.span(at) for at in range(0, lcm(step, self.chunk), step)]
        return sum(stop - start for start, stop in spans) / len(spans)


class Groups:
    """The groups of one KV cache manager.

    Attributes:
        first: The first group of full attention, whose blocks make the tree.
        others: The other groups of full attention.
        ends: Groups of which only the end of a prefix is needed.
        proven: Groups of full attention of which one more block is needed, see :attr:`Group.ahead`.
        step: Tokens of which every boundary is a multiple.
        density: Blocks of full attention for each block of the first group.
        block_bytes: Bytes of a block on one rank.
        end_blocks: Blocks of an end, beside those of full attention; their mean, if ends differ.
        free_ends: Tokens between boundaries where an end needs blocks of full attention alone; 0 without.
    """

    def __init__(self, manager: Any) -> None:
        coordinator = manager.coordinator
        self._managers: tuple[Any, ...] = coordinator.single_type_managers
        full: list[Group] = []
        self.ends: list[Group] = []
        for number, each in enumerate(self._managers):
            if not each.kv_cache_spec.prefix_cacheable:
                continue
            (full if _is_full(each) else self.ends).append(Group(each, number))
        self.first: Group = full[0]
        self.others: list[Group] = full[1:]
        self.proven = [group for group in full if group.ahead]
        self._ahead = any(group.ahead for group in (*full, *self.ends))
        self.step: int = coordinator.scheduler_block_size
        self.density = sum(self.first.size / group.size for group in full)
        self._retention: int | None = coordinator.retention_interval
        config = coordinator.kv_cache_config
        self.block_bytes: int = max(
            group.kv_cache_spec.page_size_bytes * max(1, len(group.layer_names))
            for group in config.kv_cache_groups
        )
        self.free_ends = 0
        if self.ends and all(group.chunk for group in self.ends):
            self.free_ends = lcm(self.step, *(group.chunk or 1 for group in self.ends))
        self.end_blocks = sum(group.blocks_of_an_end(self.step) for group in self.ends)

    @property
    def needs_ends(self) -> bool:
        """Whether a prefix needs more than its blocks of full attention."""
        return bool(self.ends)

    def cached(self, request_id: str) -> int:
        """Blocks of the first group that a request has cached, as far as the others have theirs, too."""
        first = self.first
        count: int = first.manager.num_cached_block.get(request_id, 0)
        for group in self.others:
            tokens = group.manager.num_cached_block.get(request_id, 0) * group.size
            count = min(count, tokens // first.size)
        return count

    def tables(self, request_id: str) -> list[list[Any]]:
        """Return vLLM's lists of the blocks of a request, of all groups."""
        return [manager.req_to_blocks[request_id] for manager in self._managers]

    def boundaries(
        self, request: Any, tables: Sequence[list[Any]], start: int, stop: int, *, ended: bool
    ) -> Iterator[int]:
        """Where a request may have left what others need to resume there, from ``start`` to ``stop``.

        The end of its prompt, where it parts from others as far as vLLM has noticed, where it ``ended``, and
        wherever there is a state. vLLM keeps windows only there by default; those that it keeps in between,
        if told to, are spare.
        """
        step = self.step
        found: set[int] = set()
        prompt, shared = request.num_prompt_tokens, request.shared_prefix_boundary
        for tokens in (prompt - 1, prompt, shared, stop if ended else 0):
            at = tokens // step * step
            found.add(at)
            if self._ahead:
                found.add(at - step)
        if self._retention:
            first = start // self._retention + 1
            found.update(range(first * self._retention, stop + 1, self._retention))
        for group in self.ends:
            if group.chunk is not None:  # a new chunk needs nothing of those before it
                found.update(range(group.chunk, stop + 1, group.chunk))
            if hasattr(group.manager, "mamba_cache_mode"):
                size, table = group.size, tables[group.number]
                found.update(
                    (at + 1) * size
                    for at in range(start // size, min(stop // size, len(table)))
                    if table[at].block_hash is not None
                )
        return iter(sorted(at for at in found if start < at <= stop and at % step == 0))

    def own(self, before: int, boundary: int) -> int:
        """Blocks, beside those of full attention, of an end that one at ``before`` does not have."""
        own = 0
        for group in self.ends:
            start, stop = group.span(boundary)
            if before:
                start = min(max(start, group.span(before)[1]), stop)
            own += stop - start
        return own

    def adds(self, boundary: int, after: Iterable[int]) -> bool:
        """Whether an end has blocks, beside those of full attention, that no end ``after`` it has."""
        first = [
            (group, start) for group in self.ends for start, stop in (group.span(boundary),) if start < stop
        ]
        for each in after:
            first = [(group, start) for group, start in first if start < group.span(each)[0]]
            if not first:
                break
        return bool(first)

    def end(self, tables: Sequence[list[Any]], boundary: int) -> list[Any] | None:
        """The blocks, beside those of full attention, from which a request resumes at a boundary.

        None if any is missing.
        """
        blocks: list[Any] = []
        for group in self.ends:
            start, stop = group.span(boundary)
            table = tables[group.number]
            if stop > len(table):
                return None
            needed = table[start:stop]
            if None in [block._block_hash for block in needed]:  # the null block has none either
                return None
            blocks += needed
        return blocks


def _is_full(manager: Any) -> bool:
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    return type(manager) is FullAttentionManager


def why_not_groups(manager: Any) -> str | None:
    """Say why no policy can choose among the blocks of a manager of several groups; None if one can."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        FullAttentionManager,
        MambaManager,
        SlidingWindowManager,
    )

    served = (FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager, MambaManager)
    coordinator, pool = manager.coordinator, manager.block_pool
    groups = [each for each in coordinator.single_type_managers if each.kv_cache_spec.prefix_cacheable]
    if type(coordinator) is not HybridKVCacheCoordinator:
        return f"its groups are managed by {type(coordinator).__name__}"
    for group in groups:
        if type(group) not in served:
            return f"a group has layers of the kind {type(group.kv_cache_spec).__name__}"
        if group.block_pool is not pool:
            return "its groups have several pools of blocks"
    if not any(type(group) is FullAttentionManager for group in groups):
        return "no group has full attention"
    if coordinator.enable_partial_hash_hits:
        return "prefixes are found in parts of a block (prefix_match_unit)"
    return None
