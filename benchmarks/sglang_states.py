"""Cached tokens of a hybrid model on SGLang's own classes, under stock and under our policies.

    python benchmarks/sglang_states.py [--policies stock,hazard] [--seeds 0-4,5-14] [--requests 100]
                                       > benchmarks/results/sglang_states.md

The streams are those of ``tests/sglang/streams.py``: chats that share system prompts and continue at their
own pace, and bursts of documents that are asked about once. Pages of 64, 2,048 KV slots, 16 states,
``extra_buffer``, prefill in chunks of 512: the settings of the test on a real Engine. States are kept where
SGLang's forward pass keeps them: at the last whole page of a chunk, or instead at a branch seen before. Needs
SGLang on CPU.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
warnings.simplefilter("ignore")

import torch  # noqa: E402, TID253  # once warnings are off; all of this script is SGLang's, which needs it

import tests.sglang.shims.torchvision_ops  # noqa: E402, F401  # before SGLang is imported

# isort: split
from sglang.srt.mem_cache.allocation import alloc_req_slots  # noqa: E402, TID253  # as above
from sglang.srt.mem_cache.common import checkpoint_kv_cache  # noqa: E402, TID253  # as above

from tests.sglang.pools import Shape, cost_cache, stock_cache  # noqa: E402  # as above
from tests.sglang.serving import Server  # noqa: E402  # as above
from tests.sglang.streams import chats_and_scans  # noqa: E402  # as above

PAGE = 64
CHUNK = 512
DECODE_GRID = 256
SHAPE = Shape("mamba", PAGE, tokens=2048, states=16, requests=4)


class Streamed(Server):
    """A server that prefills in chunks, each of which leaves one state."""

    def start(self, req: Any) -> int:
        """Prefill a request; returns its cached tokens."""
        cache, rows = self.cache, self.rows
        req.init_next_round_input(cache)
        cached = at = int(req.prefix_len)
        req.lock = cache.lock(req.last_node)
        prefix = cache.prefix_device_indices(req) if cached else torch.empty(0, dtype=torch.int64)
        tokens = req.full_untruncated_fill_ids
        self.verify(prefix, tokens[:cached])
        alloc_req_slots(rows, [req], cache)
        row = req.kv.req_pool_idx
        rows.write((row, slice(0, cached)), prefix.to(torch.int32))
        while at < len(tokens):
            end = req.extend_end = min(len(tokens), at + CHUNK)
            slots = self._extend(rows.req_to_token[row][:at].to(torch.int64), end)
            self._write(slots, tokens[at:end])
            rows.write((row, slice(at, end)), slots.to(torch.int32))
            req.kv.kv_committed_len = req.kv.kv_allocated_len = end
            if end - at >= PAGE:
                branch = req.mamba_branching_seqlen
                whole = at + (end - at) // PAGE * PAGE
                here = branch is not None and at < branch < end and not (branch - at) % PAGE
                req.kv.mamba_last_track_seqlen = branch if here else whole
            checkpoint_kv_cache(req, cache)
            at = end
        self.running.append(req)
        return cached

    def _track_state(self, req: Any, size: int) -> None:
        if not size % DECODE_GRID:
            req.kv.mamba_last_track_seqlen = size


def found(policy: str, prompts: list[list[int]]) -> int:
    """Serve a stream from an empty cache; returns its cached tokens."""
    cache = stock_cache(SHAPE) if policy == "stock" else cost_cache(SHAPE, policy=policy)
    server = Streamed(cache, SHAPE)
    tokens = sum(server.serve(prompt, output=[3, 4, 5, 6]) for prompt in prompts)
    server.drain()
    return tokens


def main() -> None:
    """Serve all streams and print the table."""
    parser = argparse.ArgumentParser(description="Cached tokens of a hybrid model on SGLang's classes.")
    parser.add_argument("--policies", default="stock,hazard")
    parser.add_argument("--seeds", default="0-4,5-14", help="ranges of streams")
    parser.add_argument("--requests", type=int, default=100, help="per stream")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    policies = options.policies.split(",")
    print(f"# A hybrid model on SGLang's classes\n\n{(__doc__ or '').split('sglang_states.md')[1].strip()}\n")
    print("| cached tokens | " + " | ".join(policies) + " |")
    print("|---|" + "---:|" * len(policies), flush=True)
    for seeds in options.seeds.split(","):
        first, _, last = seeds.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        streams = {seed: chats_and_scans(seed, options.requests) for seed in numbers}
        each = {seed: [found(policy, stream) for policy in policies] for seed, stream in streams.items()}
        for seed, row in each.items():
            print(f"| seed {seed} | " + " | ".join(f"{tokens:,}" for tokens in row) + " |")
        sums = [sum(row[at] for row in each.values()) for at in range(len(policies))]
        print(f"| sum of {seeds} | " + " | ".join(f"{tokens:,}" for tokens in sums) + " |")
        whole = [prompt for stream in streams.values() for prompt in stream]
        in_a_row = [found(policy, whole) for policy in policies]
        print(f"| {seeds} in a row, one cache | " + " | ".join(f"{n:,}" for n in in_a_row) + " |", flush=True)


if __name__ == "__main__":
    main()
