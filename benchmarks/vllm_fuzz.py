"""100,000 random requests on vLLM's real KV cache manager, beside vLLM's own order block by block.

    python benchmarks/vllm_fuzz.py [--requests 100000] [--policies lru] [--blocks 200] [--part 1000]
        [--seed 0] [--traces conversation synthetic]

Two managers get the same requests, one of them with vLLM's own order and one with our ``lru``: chunked
prompts, answers, copies of prefixes, preemption, aborts, deferred frees and resets. Every block that one
hands out is compared with the other's. For other policies there is nothing to compare: one manager has blocks
that lose their contents, connectors that hold some, and more resets, too, and it is checked that none is lost
and that each record is what vLLM has. In half of the pools the first
eight bytes of all hashes are the same, by which costcache tells evicted prefixes apart.

With ``--traces``, recorded requests of Mooncake's are served instead, one at a time, in blocks of 512 tokens:
5 % of those that the trace has.

Needs vLLM's classes, no accelerator. One process; 100,000 requests of one policy take four minutes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

from _report import load, recorded_traces, table

sys.path.append(str(Path(__file__).resolve().parents[1]))
warnings.simplefilter("ignore")

from vllm.utils.hashing import sha256  # noqa: E402  # after the filter

from costcache._version import described  # noqa: E402  # as above
from tests.vllm.fuzz import Fuzz  # noqa: E402  # after the path
from tests.vllm.recorded import PAGE, recorded_prompts, replay  # noqa: E402  # as above
from tests.vllm.serving import Server, colliding, manager  # noqa: E402  # as above

CHECK = 100
"""Operations between two checks of everything."""


def run(policy: str, blocks: int, seed: int, requests: int) -> Counter[str]:
    """Serve so many requests from an empty pool on; returns what was counted."""
    compared, defer, hashing = policy == "lru", bool(seed % 2), sha256 if seed % 4 < 2 else colliding
    names = (None, policy) if compared else (policy,)
    servers = [Server(manager(blocks), name, defer=defer, hashing=hashing) for name in names]
    fuzz, ours, step = Fuzz(*servers, seed=seed, evictions=not compared), servers[-1], 0
    while len(fuzz.requests) < requests:
        fuzz.step()
        step += 1
        if step % CHECK == 0:
            compare(servers)
    fuzz.close()
    compare(servers)
    if len(ours.free_list()) != blocks:
        raise AssertionError(f"{blocks - len(ours.free_list())} blocks are missing")
    runs = ours.pool.costcache.runs
    if runs is None or runs.pool.fallbacks or runs.pool.policy != policy:
        raise AssertionError(f"seed {seed}: {policy} has been replaced")
    counters = runs.pool.counters
    return Counter(
        requests=len(fuzz.requests),
        operations=step,
        preemptions=fuzz.counts.get("preempt", 0),
        aborts=fuzz.counts.get("abort", 0),
        resets=fuzz.counts.get("reset", 0),
        blocks_handed_out=fuzz.compared,
        blocks_evicted=counters.evicted // ours.size,
        tokens_found=ours.hits,
    )


def replay_trace(trace: str) -> Counter[str]:
    """Serve all requests of a recorded trace in both managers; returns what was counted."""
    requests = list(recorded_prompts(recorded_traces() / f"mooncake_{trace}.jsonl.gz"))
    blocks = len({page for pages in requests for page in pages}) // 20
    servers, handed_out = [Server(manager(blocks, size=PAGE), policy) for policy in (None, "lru")], 0
    for number, count in enumerate(replay(requests, servers, blocks - 1)):
        handed_out += count
        if number % CHECK == 0:
            compare(servers)
    compare(servers)
    counters = servers[1].pool.costcache.runs.pool.counters
    return Counter(
        requests=len(requests),
        blocks=blocks,
        blocks_handed_out=handed_out,
        blocks_evicted=counters.evicted // PAGE,
        tokens_found=servers[1].hits,
    )


def compare(servers: list[Server]) -> None:
    """Check our server, and compare its free list with that of vLLM's."""
    servers[-1].check()
    orders = [server.free_list() for server in servers]
    if orders[0] != orders[-1]:
        raise AssertionError(f"the free lists differ: {orders}")


def main() -> None:
    """Run the requests, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="of each policy")
    parser.add_argument("--policies", nargs="+", default=["lru"], metavar="NAME")
    parser.add_argument("--blocks", type=int, default=200, help="blocks of 16 tokens in the pool")
    parser.add_argument("--part", type=int, default=1000, help="requests from an empty pool to the next one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", nargs="+", default=[], metavar="NAME", help="of Mooncake's")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    if options.traces:
        counted = {trace: replay_trace(trace) for trace in options.traces}
        print(f"# Recorded traces\n\n    {command}\n")
        headings = [name.replace("_", " ") for name in next(iter(counted.values()))]
        table(
            ["trace", *headings],
            [[trace, *(f"{count:,}" for count in total.values())] for trace, total in counted.items()],
        )
        print(f"Each block was vLLM's, and so was the order of all free blocks every {CHECK} requests.")
        return
    rows, began = [], time.perf_counter()
    for policy in options.policies:
        total: Counter[str] = Counter()
        while total["requests"] < options.requests:
            part = min(options.part, options.requests - total["requests"])
            total.update(run(policy, options.blocks, options.seed, part))
            options.seed += 1
            if total["requests"] % 10_000 == 0:
                print(f"{policy}: {total['requests']:,} requests", file=sys.stderr, flush=True)
        rows.append([policy, *(f"{count:,}" for count in total.values())])
        headings = [name.replace("_", " ") for name in total]
    import vllm

    print(f"# Random requests on vLLM's KV cache manager\n\n    {command}\n")
    print(
        f"costcache {described()}, vLLM {vllm.__version__}; {time.perf_counter() - began:,.0f} s in one "
        f"process, load {load():.1f} at the end. Pools of {options.blocks} blocks of 16 tokens, begun anew "
        f"every {options.part:,} requests, every other one with deferred\nfrees. If a seed is 2 or 3 mod 4, "
        f"all hashes have the same first eight bytes; the last seed was {options.seed - 1}.\n"
    )
    table(["policy", *headings], rows)
    print(
        "No assertion failed, and no block was lost. Under `lru` each block that was handed out was the one "
        f"that vLLM's\nown manager handed out at that moment, and every {CHECK} operations the order of all "
        "free blocks was the same."
    )


if __name__ == "__main__":
    main()
