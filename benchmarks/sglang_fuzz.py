"""100,000 random operations on real SGLang caches under our orders, over all combinations of components.

    python benchmarks/sglang_fuzz.py [--steps 100000] [--only NAME] [--seed 0]

After each operation it runs SGLang's own ``sanity_check``, counts every slot of each pool, those of windows
and of states too, and compares our records with its tree. A request that reuses a prefix checks that its
slots hold its tokens, and its state what was computed for it. Mixes named ``rust`` run on SGLang's Rust core.
At the end of each part everything is evicted, and no slot may be missing. Needs SGLang on CPU.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
warnings.simplefilter("ignore")

import pytest  # noqa: E402  # its MonkeyPatch

import tests.sglang.shims.torchvision_ops  # noqa: E402, F401  # before SGLang is imported
from tests.sglang import hicache  # noqa: E402  # as above
from tests.sglang.test_fuzz import MIXES, POLICIES, run  # noqa: E402  # as above

PART = 500


def main() -> None:
    """Run the operations, mix by mix, and print their counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="operations over all mixes")
    parser.add_argument("--only", default="", help="mixes whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    names = [name for name in MIXES if options.only in name]
    parts = -(-options.steps // (PART * len(names)))
    hicache.patch(pytest.MonkeyPatch())
    total, began = 0, time.perf_counter()
    for name in names:
        operations = evictions = freed = trimmed = 0
        for part in range(parts):
            policy = POLICIES[part % len(POLICIES)]
            fuzz = run(name, PART, 1000 * options.seed + part, policy)
            operations += sum(fuzz.counts.values())
            for pool in fuzz.server.cache.pools.by_name.values():
                evictions += pool.counters.evictions
                freed += pool.counters.evicted
                trimmed += pool.counters.trimmed
        total += operations
        print(
            f"{name:32} {operations:7,} operations  {evictions:6,} evictions  {freed:9,} units freed  "
            f"{trimmed:5,} trimmed",
            flush=True,
        )
    seconds = time.perf_counter() - began
    print(f"{total:,} operations in {seconds:.0f} s: no assertion, no lost slot")


if __name__ == "__main__":
    main()
