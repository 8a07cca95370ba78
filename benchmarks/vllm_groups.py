"""Hit rates of models of several KV cache groups in vLLM's own KV cache manager, stock beside ours.

    python benchmarks/vllm_groups.py [--policies lru,hazard] > benchmarks/results/vllm_groups.md
    python benchmarks/vllm_groups.py --time 6000,24000

The cases are those of ``tests/vllm/test_group_cases.py``, at more sizes: failures that were reported against
vLLM, and conversations beside documents. "dense" keeps window blocks and states all along a prompt (no
interval, the default when they were reported), "sparse" at the ends of prompts alone (an interval of 0, the
default now). Needs vLLM's classes, no accelerator; takes some minutes.

With ``--time`` it measures the processor time of a request instead, from its look-up to its end:
conversations and documents in pools of so many blocks, one group of full attention and two of windows of
1,024. The managers are in one process and take turns of 50 requests.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _report import load

from costcache._version import described

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.vllm.ends import full, mixed, window  # the path first
from tests.vllm.serving import Server
from tests.vllm.test_group_cases import HYBRIDS, chats, deepseek_v4, gemma, resent, seats, words

MODES = {"dense": None, "sparse": 0}


def cells() -> Iterator[tuple[str, Callable[[str | None], float]]]:
    """Each case by name, with what gives its hit rate under a policy."""
    for mode, kept in MODES.items():
        for count in (8, 12, 24, 28, 32):
            yield (
                f"48435: {count} sessions in turn, windows, {mode}",
                lambda policy, kept=kept, count=count: seats(gemma(kept), policy, count, rounds=8),  # type: ignore[misc]  # defaults bind now
            )
    for mode, kept in MODES.items():
        for count in (4, 8, 16):
            yield (
                f"42948: {count} prompts in turn, five groups, {mode}",
                lambda policy, kept=kept, count=count: resent(deepseek_v4(kept), policy, count),  # type: ignore[misc]  # defaults bind now
            )
    for hybrid, make in HYBRIDS.items():
        for mode, kept in MODES.items():
            yield (
                f"conversations beside documents, {hybrid}, {mode}",
                lambda policy, make=make, kept=kept: chats(make(kept), policy, requests=2400),  # type: ignore[misc]  # defaults bind now
            )


def requests(blocks: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and answers: conversations, as many as nearly fill the pool twice, and documents."""
    rng = random.Random(0)
    system = words(rng, 1024)
    histories = [list(system) for _ in range(blocks // 150)]
    while True:
        if rng.random() < 0.3:
            yield words(rng, rng.randrange(1000, 12_000)), words(rng, 32)
            continue
        drawn = rng.randrange(len(histories)) if rng.random() < 0.7 else int(rng.expovariate(0.02))
        who = min(drawn, len(histories) - 1)
        prompt, answer = histories[who] + words(rng, rng.randrange(50, 800)), words(rng, 100)
        histories[who] = prompt + answer if len(prompt) < 16_000 else list(system)
        yield prompt, answer


def times(blocks: int, policies: list[str | None]) -> None:
    """Print the time of a request under each policy, once the pool is full."""
    servers = {
        policy: Server(mixed(blocks, full(), window(1024), window(1024)), policy) for policy in policies
    }
    taken: dict[str | None, list[float]] = {policy: [] for policy in policies}
    gc.collect()
    gc.freeze()  # as vLLM's engine does once it has started
    stream, count = requests(blocks), blocks // 16
    for start in range(0, count, 50):
        batch = list(itertools.islice(stream, 50))
        for policy, server in servers.items():
            for at, (prompt, answer) in enumerate(batch, start):
                began = time.process_time()
                server.serve(str(at), prompt, answer, chunk=2048)
                taken[policy].append(time.process_time() - began)
    stock = taken[None][count // 3 :]
    for policy in policies:
        own = taken[policy][count // 3 :]
        mean, median = statistics.fmean(own), statistics.median(own)
        print(
            f"| {blocks:,} | {policy or 'vLLM'} | {mean * 1e6:,.0f} | {mean / statistics.fmean(stock):.2f} "
            f"| {median * 1e6:,.0f} | {median / statistics.median(stock):.2f} |",
            flush=True,
        )


def main() -> None:
    """Print a table of hit rates in per cent, or of times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default="lru,hazard")
    parser.add_argument("--time", help="measure the time of a request instead, in pools of so many blocks")
    options = parser.parse_args()
    policies: list[Any] = [None, *options.policies.split(",")]
    logging.disable(logging.WARNING)
    if options.time:
        print("| blocks | | mean, µs | to vLLM's | median, µs | to vLLM's |\n|---:|---|---:|---:|---:|---:|")
        for blocks in options.time.split(","):
            times(int(blocks), policies)
        print(f"\ncostcache {described()}. The load was {load():.1f} at the end.")
        return
    command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
    import vllm

    print(f"# Models of several KV cache groups in vLLM's KV cache manager\n\n    {command}\n")
    print(
        f"costcache {described()}, vLLM {vllm.__version__}. Tokens found in % of those asked for; the cases "
        "are in tests/vllm/test_group_cases.py.\n"
    )
    print("| | vLLM | " + " | ".join(f"`{policy}`" for policy in policies[1:]) + " |")
    print("|---|" + "---:|" * len(policies))
    losses = []
    for name, rate in cells():
        rates = {policy: rate(policy) for policy in policies}
        print(f"| {name} | " + " | ".join(f"{each:.1f}" for each in rates.values()) + " |", flush=True)
        losses += [
            f"| `{policy}` | {name} | {rates[policy] - best:+.1f} |"
            for policy in policies[1:]
            if rates[policy] < (best := max(rates[other] for other in (None, "lru") if other in rates)) - 0.05
        ]
    print("\nPoints under the better of vLLM's own LRU and our `lru`:\n\n| policy | cell | points |")
    print("|---|---|---:|", *losses, sep="\n")
    print(f"\nThe load was {load():.1f} at the end.")


if __name__ == "__main__":
    main()
