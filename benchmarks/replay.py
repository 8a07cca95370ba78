"""Requests per second of a replay, parsing excluded, for each built-in policy.

    python benchmarks/replay.py [TRACE] [--json | --markdown] [--repeats N]

Without TRACE it is the recorded Mooncake conversation, in $COSTCACHE_TRACES or ../shared/traces, and,
where that is missing, a generated chat workload.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from _report import Report, check

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies import BUILTIN
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.workloads import generate
from costcache.sizes import parse_capacity

CAPACITIES = ("unlimited", "14054pages", "5%")
WANTED = 40_000.0


def recorded() -> Path:
    """Where the recorded conversation would be."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    return Path(os.environ.get("COSTCACHE_TRACES", beside)) / "mooncake_conversation.jsonl.gz"


def trace_of(path: str | None) -> Trace:
    """The trace asked for, the recorded one, or a generated one."""
    if path is not None:
        return load_trace(path)
    return load_trace(recorded()) if recorded().exists() else generate("chat")


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description="Requests per second of a replay.")
    parser.add_argument("trace", nargs="?", help="a file of Mooncake JSONL")
    form = parser.add_mutually_exclusive_group()
    for name in ("json", "markdown"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="table")
    parser.add_argument("--repeats", type=int, default=5, help="replays of each; 5 by default")
    options = parser.parse_args()
    trace = trace_of(options.trace)
    served = Deployment(page_size=trace.block_size)
    distinct = trace.distinct_pages(served.page_size)
    simulator = Simulator(trace, ModelSpec.preset("deepseek-v3"), served)
    what = f"{trace.name}, {len(trace):,} requests, pages of {served.page_size}"
    report = Report(f"Replay of {what}: best of {options.repeats}", "requests/s", higher_is_better=True)
    for text in CAPACITIES:
        size = parse_capacity(text).tokens(distinct_pages=distinct, page_size=served.page_size, token_bytes=1)
        for policy in BUILTIN:
            runs = [simulator.run(Settings(policy=policy), size, tree=True) for _ in range(options.repeats)]
            check(len({run.hit_tokens for run in runs}) == 1, "the same hits every time")
            rates = [run.requests_per_second for run in runs]
            wanted = WANTED if policy == "lru" and text != "5%" else None
            report.add(f"{text}, {policy}", max(rates), wanted, median=statistics.median(rates))
    report.show(options.form)


if __name__ == "__main__":
    main()
