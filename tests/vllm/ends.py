"""Managers of several KV cache groups, and what has to hold of the blocks of ends."""

from __future__ import annotations

from collections import Counter
from math import lcm
from typing import Any

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from costcache.vllm.ends import End, EndRuns, WideRun, WideRuns
from costcache.vllm.shadow import ShadowEnds

SIZE = 16
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full(size: int = SIZE) -> KVCacheSpec:
    return FullAttentionSpec(block_size=size, **SHAPE)


def window(tokens: int, size: int = SIZE) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=size, sliding_window=tokens, **SHAPE)


def chunked(tokens: int, size: int = SIZE) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=tokens, **SHAPE)


def states(size: int = SIZE) -> KVCacheSpec:
    return MambaSpec(
        block_size=size, shapes=((SIZE * 16,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


def mixed(blocks: int, *specs: KVCacheSpec, retention: int | None = 0, **more: Any) -> Any:
    """vLLM's own manager of several groups, with so many blocks for prompts."""
    sizes = [spec.block_size for spec in specs]
    config = KVCacheConfig(
        num_blocks=blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer {n}"], spec) for n, spec in enumerate(specs)],
        prefix_cache_retention_interval=retention,
    )
    return KVCacheManager(
        config,
        max_model_len=1 << 22,
        scheduler_block_size=lcm(*sizes),
        hash_block_size=more.pop("hash_block_size", min(sizes)),
        enable_caching=True,
        **more,
    )


def check_ends(server: Any, runs: WideRuns) -> None:
    """Assert that each cached free block is needed by something, or spare; and that all counts are right."""
    pool = server.pool
    kv = Counter(
        block.block_id
        for run in runs.pool.live.values()
        for row in (run.blocks, *run.rows)  # type: ignore[attr-defined]  # a WideRun
        for block in row
    )
    assert kv == runs._kv
    users: dict[int, list[End]] = {}
    for run in runs.pool.live.values():
        assert isinstance(run, WideRun)
        for group, row in zip(runs.groups.others, run.rows, strict=True):
            assert len(row) == run.end // group.size - run.depth // group.size
        if run.state is not None:
            assert isinstance(run.state, End)
            assert run.state.run is run
            assert run.end % runs.groups.step == 0
            for block in run.state.blocks:
                users.setdefault(block.block_id, []).append(run.state)
                assert block.block_hash is not None
    assert {number: set(map(id, ends)) for number, ends in users.items()} == {
        number: set(map(id, ends)) for number, ends in runs._ends.items()
    }
    for number, block in enumerate(pool.blocks):
        needed = number in kv or number in users
        spare = runs.spare.get(number)
        assert spare is None or spare is block
        assert not (needed and spare)
        if spare:
            assert block.ref_cnt == 0
            assert block.block_hash is not None
        elif block.ref_cnt == 0 and block.block_hash is not None and not block.is_null:
            assert needed or number in pool._reuse_watchers, block
    free = 0
    for ends in users.values():
        for end in ends:
            assert end.held == sum(block.ref_cnt > 0 for block in end.blocks)
            alone = [b for b in end.blocks if b.block_id not in kv and users[b.block_id] == [end]]
            assert end.alone == len(alone)
    for end in {id(end): end for ends in users.values() for end in ends}.values():
        free += 0 if end.held else end.alone
    if isinstance(runs, EndRuns):
        assert runs._free == free
        if runs._shadow is not None:
            check_shadow(runs._shadow)


def check_shadow(shadow: ShadowEnds) -> None:
    """Assert that LRU's blocks are those of a tree of ends, and all counts of it right."""
    blocks, known = 0.0, [shadow._root]
    for stretch in known:  # which grows
        known += stretch.after
        for each in stretch.after:
            assert each.above is stretch
            assert each.start == stretch.stop
    for stretch in known[1:]:
        blocks += len(stretch.names) * shadow._density + stretch.own
        before = stretch.above
        while before is not None and not before.is_end:
            before = before.above
        size = shadow._size
        own = shadow._groups.own(0 if before is None else before.stop * size, stretch.stop * size)
        assert stretch.own == (own if stretch.is_end else 0)
        assert stretch not in shadow._line or (stretch.is_end and not stretch.pins)
        if stretch.is_end and not stretch.pins and stretch not in shadow._line:
            assert not shadow._frees(stretch)
        if not stretch.after and stretch.names and not stretch.is_end:
            assert stretch in shadow._dead or stretch.grows
    assert abs(shadow.blocks - blocks) < 1e-6
    assert set(shadow._ends.values()) <= {each for each in known if each.is_end}
    assert set(shadow._first.values()) <= set(known)
