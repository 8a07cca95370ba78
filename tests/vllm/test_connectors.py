"""KV connectors behind vLLM's real scheduler, with policies among the GPU's blocks.

What a worker does needs a device; here a transfer is complete as soon as its step is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput

from tests.vllm.stepping import SIZE, Stepper, check, serve

BYTES = SIZE * 32 * 2 * 4
"""Of a block: keys and values of one head of 32 numbers."""
LAYERS = "layers" in KVCacheTensor.__dataclass_fields__
since_033 = pytest.mark.skipif(not LAYERS, reason="vLLM's KVCacheTensor has other fields before 0.33")


class Simple(Stepper):
    """With vLLM's ``SimpleCPUOffloadConnector``."""

    def __init__(self, policy: Any, *, lazy: bool, chunks: int = 100, **more: Any) -> None:
        extra = {"cpu_bytes_to_use": chunks * BYTES, "lazy_offload": lazy}
        super().__init__(policy, connector=("SimpleCPUOffloadConnector", extra), **more)
        self.offload = self.scheduler.connector.scheduler_manager
        self.stored = self.loaded = self.evicted = self.kept = 0
        self.read: set[int] = set()  # blocks that it could see when it looked last
        original = self.pool._maybe_evict_cached_block

        def evicting(block: Any) -> bool:
            if block.block_hash is not None and block.block_id in self.read:
                self.evicted += 1
                on_cpu = self.offload.cpu_block_pool.cached_block_hash_to_block
                self.kept += on_cpu.get_one_block(block.block_hash) is not None
            return bool(original(block))

        self.pool._maybe_evict_cached_block = evicting

    def tensors(self, blocks: int) -> list[Any]:
        return [KVCacheTensor(blocks * BYTES, ["layer"], BYTES, BYTES, 0)]

    def step(self) -> Any:
        out = super().step()
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        self.read = free | set(out.kv_connector_metadata.store_gpu_blocks)
        return out

    def transferred(self, out: Any) -> KVConnectorOutput:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        meta = out.kv_connector_metadata
        stores = {meta.store_event: 1} if meta.store_event >= 0 else {}
        self.stored += len(meta.store_gpu_blocks)
        self.loaded += len(meta.load_gpu_blocks)
        return KVConnectorOutput(
            finished_recving=set(meta.load_event_to_reqs.get(meta.load_event, ())),
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stores),
        )


@since_033
@pytest.mark.parametrize("policy", [None, "lru", "hazard", "mru"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_simple_offload_stores_and_loads(lazy: bool, asynchronous: bool, policy: str | None) -> None:
    stepper = Simple(policy, lazy=lazy, asynchronous=asynchronous)
    serve(stepper, seed=1)
    check(stepper)
    assert stepper.stored > 100
    assert stepper.loaded > 50
    cpu = stepper.offload.cpu_block_pool
    assert cpu.get_num_free_blocks() == len(cpu.blocks) - 1  # nothing is held there, either


@since_033
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_lazy_offload_copies_what_the_policy_evicts(policy: str) -> None:
    """It reads ``iter_blocks_after``. What was freed and evicted between two readings it cannot know."""
    stepper = Simple(policy, lazy=True, chunks=4000, blocks=150)
    stepper.offload._target_free = 40
    serve(stepper, seed=2)
    check(stepper)
    assert stepper.evicted > 300
    if policy == "lru":
        assert stepper.kept == stepper.evicted
    else:  # what follows nothing any more may come sooner than it was thought
        assert stepper.kept > 0.95 * stepper.evicted


class Files(Stepper):
    """With vLLM's ``ExampleConnector``, which shares prompts as files of a folder."""

    def __init__(self, policy: Any, folder: Path, **more: Any) -> None:
        extra = {"shared_storage_path": str(folder)}
        super().__init__(policy, connector=("ExampleConnector", extra), **more)
        self.stored = self.loaded = 0

    def transferred(self, out: Any) -> None:
        connector = self.scheduler.connector
        for request in out.kv_connector_metadata.requests:
            if request.is_store:
                self.stored += 1
                connector._generate_foldername_debug(request.token_ids, request.mm_hashes, create_folder=True)
            else:
                self.loaded += 1


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_prompts_shared_through_files_are_loaded(policy: str, tmp_path: Path) -> None:
    """The same requests in two servers: the second finds the prompts of the first in the folder."""
    loaded = []
    for number in range(2):
        stepper = Files(policy, tmp_path, seed=number)
        serve(stepper, seed=3, requests=80)
        check(stepper)
        loaded.append(stepper.loaded)
    assert loaded[1] > loaded[0]
    assert loaded[1] > 10


def test_with_files_lru_schedules_what_vllm_would(tmp_path: Path) -> None:
    """A connector that loads in the step itself holds no blocks of its own."""
    steppers = [Files(policy, tmp_path / str(policy)) for policy in (None, "lru")]
    for name in ("None", "lru"):
        (tmp_path / name).mkdir()
    serve(*steppers, seed=4)
    assert steppers[0].scheduled == steppers[1].scheduled
    for each in steppers:
        check(each)
