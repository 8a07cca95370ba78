"""Hit rates of models of several KV cache groups in vLLM's own KV cache manager, stock beside ours.

    python benchmarks/vllm_groups.py [--policies lru,hazard] > benchmarks/results/vllm_groups.md

The cases are those of ``tests/vllm/test_group_cases.py``, at more sizes: failures that were reported against
vLLM, and conversations beside documents. "dense" keeps window blocks and states all along a prompt (no
interval, the default when they were reported), "sparse" at the ends of prompts alone (an interval of 0, the
default now). Needs vLLM's classes, no accelerator; takes some minutes.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _report import load

from costcache._version import described

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.vllm.test_group_cases import HYBRIDS, chats, deepseek_v4, gemma, resent, seats  # the path first

MODES = {"dense": None, "sparse": 0}


def cells() -> Iterator[tuple[str, Callable[[str | None], float]]]:
    """Each case by name, with what gives its hit rate under a policy."""
    for mode, kept in MODES.items():
        for count in (8, 12, 24, 28, 32):
            yield (
                f"48435: {count} sessions in turn, windows, {mode}",
                lambda policy, kept=kept, count=count: seats(gemma(kept), policy, count, rounds=8),  # type: ignore[misc]
            )
    for mode, kept in MODES.items():
        for count in (4, 8, 16):
            yield (
                f"42948: {count} prompts in turn, five groups, {mode}",
                lambda policy, kept=kept, count=count: resent(deepseek_v4(kept), policy, count),  # type: ignore[misc]
            )
    for hybrid, make in HYBRIDS.items():
        for mode, kept in MODES.items():
            yield (
                f"conversations beside documents, {hybrid}, {mode}",
                lambda policy, make=make, kept=kept: chats(make(kept), policy, requests=2400),  # type: ignore[misc]
            )


def main() -> None:
    """Print a table of hit rates in per cent."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default="lru,hazard")
    policies: list[Any] = [None, *parser.parse_args().policies.split(",")]
    logging.disable(logging.WARNING)
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
