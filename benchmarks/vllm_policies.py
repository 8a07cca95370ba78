"""Policies in vLLM's own KV cache manager: hit rates, and the time of a request, managers taking turns.

    python benchmarks/vllm_policies.py [--trace conversation] [--shares 2,5,10] [--policies lru,hazard] \
        [--block 512] [--requests 0] [--markdown]

Replays a recorded trace of Mooncake's, one request at a time, through vLLM's real ``KVCacheManager``: each
request is matched, gets its blocks and frees them. "stock" is vLLM's own LRU. The pool has a share of the
trace's distinct pages of 512 tokens. With ``--block 16`` each page is 32 blocks, which is what a server would
have.

The time is the processor's, for all calls of the manager for one request. Each manager has a process of its
own, as on a server: in one process the classes of the others would slow down the code that they share. The
processes take turns of a few requests each, and ratios are to stock's time in the same run: of the means, and
of the medians. Managers hit different prefixes, and so have different work.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _report import calibrate, load, recorded_traces
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from costcache._version import described
from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.vllm.mixed import attach

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.vllm.recorded import PAGE, chained, recorded_prompts  # the path first

STOCK = "stock"
MODEL = "llama-3-8b"
TURN = 50
"""Requests that a process serves before the next one's turn."""


@dataclass
class Server:
    """One manager, and what it has served.

    Attributes:
        policy: The policy in the manager.
        manager: vLLM's manager.
        found: Tokens found.
        times: Seconds of processor time of each request.
    """

    policy: str
    manager: Any
    found: int = 0
    times: list[float] = field(default_factory=list)

    def serve(self, name: str, hashes: list[bytes], size: int) -> None:
        """Serve a prompt of whole blocks and one token more."""
        tokens = len(hashes) * size + 1
        request = Request(name, [0] * tokens, SamplingParams(max_tokens=1), None)
        request.block_hashes = hashes
        manager, began = self.manager, time.thread_time()
        blocks, found, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, tokens - found, found, blocks) is None:
            raise AssertionError("a request alone must fit")
        request.num_computed_tokens = tokens
        request.status = RequestStatus.FINISHED_STOPPED
        manager.free(request)
        self.times.append(time.thread_time() - began)
        self.found += found


def make(policy: str, blocks: int, size: int) -> Server:
    """A manager with a policy, or vLLM's own."""
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    manager = KVCacheManager(config, max_model_len=1 << 22, scheduler_block_size=size, hash_block_size=size)
    if policy != STOCK:
        model = ModelSpec.preset(MODEL)
        attach(manager, Binding.of(model, Deployment(page_size=size), Settings(policy=policy)))
    return Server(policy, manager)


def work(pipe: Connection, policy: str, blocks: int, size: int, requests: list[list[int]]) -> None:
    """Serve so many requests as the pipe says, until it says 0; then send what was served."""
    logging.disable(logging.WARNING)
    server, at = make(policy, blocks, size), 0
    gc.collect()
    gc.freeze()  # as vLLM does
    while count := pipe.recv():
        for number in range(at, min(at + count, len(requests))):
            server.serve(str(number), chained(requests[number], PAGE // size)[: blocks - 1], size)
        at += count
        pipe.send(at)
    blocks = getattr(server.manager.block_pool, "costcache", None)
    runs = None if blocks is None else blocks.runs
    trouble = (
        ""
        if runs is None or not (runs.pool.fallbacks or runs.pool.counters.short)
        else repr(runs.pool.counters)
    )
    pipe.send((server.policy, server.found, server.times, trouble))


def serve_all(
    requests: list[list[int]], blocks: int, size: int, policies: list[str]
) -> list[tuple[str, int, list[float], str]]:
    """Replay requests, given by the pages of their prompts, through one manager for each policy."""
    pipes = []
    context = multiprocessing.get_context("fork")
    for policy in [STOCK, *policies]:
        pipe, end = context.Pipe()
        context.Process(target=work, args=(end, policy, blocks, size, requests), daemon=True).start()
        pipes.append(pipe)
    for turn in range(-(-len(requests) // TURN)):
        for offset in range(len(pipes)):
            pipe = pipes[(turn + offset) % len(pipes)]
            pipe.send(TURN)
            pipe.recv()
    for pipe in pipes:
        pipe.send(0)
    return [pipe.recv() for pipe in pipes]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--shares", default="2,5,10")
    parser.add_argument("--policies", default="lru,hazard")
    parser.add_argument("--block", type=int, default=PAGE)
    parser.add_argument("--requests", type=int, default=0, help="requests to replay, 0 for all")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    kv_cache_utils.init_none_hash(sha256)
    path = recorded_traces() / f"mooncake_{options.trace}.jsonl.gz"
    requests = list(recorded_prompts(path))
    distinct = len({page for pages in requests for page in pages})
    requests = requests[: options.requests or None]
    tokens = sum(len(pages) for pages in requests) * PAGE
    print(f"costcache {described()}; load {load():.1f}, calibration {calibrate():.0f} µs")
    for share in options.shares.split(","):
        blocks = int(distinct * float(share) / 100) * (PAGE // options.block)
        rows = serve_all(requests, blocks, options.block, options.policies.split(","))
        stock = rows[0][2]
        for policy, found, times, trouble in rows:
            mean, median = statistics.fmean(times), statistics.median(times)
            row = [
                options.trace,
                f"{share} %",
                f"{blocks:,} of {options.block}",
                policy,
                f"{100 * found / tokens:.2f}",
                f"{1e6 * mean:,.0f}",
                f"{1e6 * median:,.0f}",
                f"{1e6 * statistics.quantiles(times, n=100)[98]:,.0f}",
                f"{mean / statistics.fmean(stock):.2f}",
                f"{median / statistics.median(stock):.2f}",
                trouble,
            ]
            print("| " + " | ".join(row) + " |" if options.markdown else "  ".join(row), flush=True)


if __name__ == "__main__":
    main()
