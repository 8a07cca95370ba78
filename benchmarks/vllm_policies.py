"""Policies in vLLM's own KV cache manager: hit rates, and the time of a request, managers taking turns.

    python benchmarks/vllm_policies.py [--trace conversation] [--shares 2,5,10] [--policies lru,hazard] \
        [--block 512] [--requests 0] [--markdown]

Replays a recorded trace of Mooncake's, one request at a time, through vLLM's real ``KVCacheManager``: each request is
matched, gets its blocks and frees them. "stock" is vLLM's own LRU. The pool has a share of the trace's distinct pages
of 512 tokens. With ``--block 16`` each page is 32 blocks, which is what a server would have.

The time is that of all calls of the manager for one request. Every manager serves each request before the next one
begins, and ratios are to stock's time in the same run: of the means, and of the medians. Managers hit different
prefixes, and so have different work.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import logging
import statistics
import time
from dataclasses import dataclass, field
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
from costcache.vllm.blocks import attach

PAGE = 512
"""Tokens of a page of the trace."""
STOCK = "stock"
MODEL = "llama-3-8b"


@dataclass
class Server:
    """One manager, and what it has served.

    Attributes:
        policy: The policy in the manager.
        manager: vLLM's manager.
        found: Tokens found.
        times: Seconds of each request.
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
        manager, began = self.manager, time.perf_counter()
        blocks, found, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, tokens - found, found, blocks) is None:
            raise AssertionError("a request alone must fit")
        request.num_computed_tokens = tokens
        request.status = RequestStatus.FINISHED_STOPPED
        manager.free(request)
        self.times.append(time.perf_counter() - began)
        self.found += found


def serve_all(requests: list[list[int]], blocks: int, size: int, policies: list[str]) -> list[Server]:
    """Replay requests, given by the pages of their prompts, through one manager for each policy."""
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    servers = []
    for policy in [STOCK, *policies]:
        config = KVCacheConfig(
            num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        manager = KVCacheManager(config, max_model_len=1 << 22, scheduler_block_size=size, hash_block_size=size)
        if policy != STOCK:
            model = ModelSpec.preset(MODEL)
            attach(manager, Binding.of(model, Deployment(page_size=size), Settings(policy=policy)))
        servers.append(Server(policy, manager))
    gc.collect()
    gc.freeze()  # as vLLM does
    for number, pages in enumerate(requests):
        hashes = hashes_of(pages, size)[: blocks - 1]
        for turn in range(len(servers)):
            servers[(number + turn) % len(servers)].serve(str(number), hashes, size)
    gc.unfreeze()
    return servers


def hashes_of(pages: list[int], size: int) -> list[bytes]:
    """Chained hashes of the blocks of some pages."""
    hashes, last = [], b""
    for page in pages:
        last = hashlib.sha256(last + page.to_bytes(8, "little")).digest()
        if size == PAGE:
            hashes.append(last)
        else:
            hashes += [hashlib.sha256(last + part.to_bytes(2, "little")).digest() for part in range(PAGE // size)]
    return hashes


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
    with gzip.open(path, "rt") as lines:
        requests = [
            (record := json.loads(line))["hash_ids"][: record["input_length"] // PAGE] for line in lines
        ]
    distinct = len({page for pages in requests for page in pages})
    requests = requests[: options.requests or None]
    tokens = sum(len(pages) for pages in requests) * PAGE
    print(f"costcache {described()}; load {load():.1f}, calibration {calibrate():.0f} µs")
    for share in options.shares.split(","):
        blocks = int(distinct * float(share) / 100) * (PAGE // options.block)
        servers = serve_all(requests, blocks, options.block, options.policies.split(","))
        stock = servers[0]
        for server in servers:
            mean, median = statistics.fmean(server.times), statistics.median(server.times)
            worst = statistics.quantiles(server.times, n=100)[98]
            row = [
                options.trace,
                f"{share} %",
                f"{blocks:,} of {options.block}",
                server.policy,
                f"{100 * server.found / tokens:.2f}",
                f"{1e6 * mean:,.0f}",
                f"{1e6 * median:,.0f}",
                f"{1e6 * worst:,.0f}",
                f"{mean / statistics.fmean(stock.times):.2f}",
                f"{median / statistics.median(stock.times):.2f}",
            ]
            print("| " + " | ".join(row) + " |" if options.markdown else "  ".join(row), flush=True)
            runs = getattr(server.manager.block_pool, "runs", None)
            if runs is not None and (runs.pool.fallbacks or runs.pool.counters.short):
                print(f"  {server.policy}: {runs.pool.fallbacks} fallbacks, {runs.pool.counters}")


if __name__ == "__main__":
    main()
