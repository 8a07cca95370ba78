"""Hit rates of orders of states and KV on hybrid models, in one run.

    python benchmarks/hybrid.py [--seeds 0,1,2,3,4] [--traces DIR] [--quick] [--gaps recorded]
                                [--only chat,agentic] [--shares 1,2] > benchmarks/results/hybrid.md

Qwen3-Next (24,576 bytes of KV a token, 77 MB a state), pages of 512 tokens, prompts only, one request at a
time. Memory is a share of the KV bytes of all distinct whole pages. "Separate" gives 47 % of it to states, as
SGLang does by default; all others use one shared pool, priced in bytes. "refresh consumed" is `consumed-lru`.
The last column knows the future and is greedy: a bound in practice, not the optimum.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from _report import recorded_traces

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.trace import Trace
from costcache.sim.traces.reading import load_trace
from costcache.sim.workloads import generate, workload_settings

PAGE = 512
STATES = 0.47
SHARES = (1, 2, 5, 10)
MODEL = ModelSpec.preset("qwen3-next")
COLUMNS: tuple[tuple[str, str, dict[str, float], float | None], ...] = (
    ("separate LRU", "lru", {}, STATES),
    ("joint LRU", "lru", {}, None),
    ("refresh consumed", "consumed-lru", {}, None),
    ("seglen 0.15", "seglen", {"seglen_eff_weight": 0.15}, None),
    ("seglen 0.3", "seglen", {"seglen_eff_weight": 0.3}, None),
    ("seglen 0.85", "seglen", {"seglen_eff_weight": 0.85}, None),
    ("marconi", "marconi", {}, None),
    ("hazard", "hazard", {}, None),
    ("clairvoyant, greedy", "optimum", {}, None),
)
JOINT, SEPARATE, HAZARD = 1, 0, 7
WEKA = "weka v6"


def traces(
    folder: Path, seeds: list[int], quick: bool, gaps: Literal["answers", "recorded"]
) -> Iterator[tuple[str, list[Callable[[], Trace]]]]:
    """Yield each trace's name with its builders, one per seed if it has seeds."""
    yield "mooncake conversation", [lambda: load_trace(folder / "mooncake_conversation.jsonl.gz")]
    if not quick:
        weka = folder / "weka_cc_v6_global.jsonl.xz"
        # Defaults bind now.
        yield WEKA, [lambda seed=seed: load_trace(weka, seed=seed, gaps=gaps) for seed in seeds]  # type: ignore[misc] # see above
    requests = 4000 if quick else 20_000
    for name in ("chat", "few-shot", "multi-turn", "agentic"):
        settings = workload_settings(
            name, {"requests": min(requests, 16_000) if name == "agentic" else requests}
        )
        yield name, [lambda name=name, settings=settings: generate(name, settings)]  # type: ignore[misc] # as above


def rates(trace: Trace, share: int) -> list[float]:
    """Measure the token hit rate in % of each column."""
    found = []
    served = Deployment(page_size=PAGE)
    capacity = trace.distinct_pages(PAGE) * PAGE * share // 100
    for _, policy, settings, states in COLUMNS:
        simulator = Simulator(trace, MODEL, served, state_share=states)
        outcome = simulator.outcome(Settings(policy=policy, policy_settings=settings), capacity)
        found.append(100 * int(outcome.matched.sum()) / int(trace.input_tokens.sum()))
    return found


def main() -> None:
    """Run all replays and print the tables."""
    parser = argparse.ArgumentParser(description="Orders of states and KV.")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="of the session starts; the table has medians")
    parser.add_argument("--traces", type=Path, default=recorded_traces())
    parser.add_argument("--quick", action="store_true", help="short workloads, without Weka")
    parser.add_argument(
        "--gaps", choices=("answers", "recorded"), default="answers", help="for Weka; as in a replay"
    )
    parser.add_argument("--only", help="workloads, separated by commas; all by default")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="memory in %%, with commas")
    options = parser.parse_args()
    shares = [int(share) for share in options.shares.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    about = (__doc__ or "").split("benchmarks/results/hybrid.md")[1].strip()
    print(f"# Hit rates of hybrid models\n\n{about}\n")
    print("| % of tokens found | memory | " + " | ".join(column[0] for column in COLUMNS) + " |")
    print("|---|---:" + "|---:" * len(COLUMNS) + "|")
    cells: dict[tuple[str, int], list[float]] = {}
    for name, makers in traces(options.traces, seeds, options.quick, options.gaps):
        if options.only and name not in options.only.split(","):
            continue
        found: dict[int, list[list[float]]] = {share: [] for share in shares}
        for make in makers:
            trace = make().in_time_order()
            for share in shares:
                found[share].append(rates(trace, share))
        for share in shares:
            row = [statistics.median(rate) for rate in zip(*found[share], strict=True)]
            cells[name, share] = row
            print(f"| {name} | {share} % | " + " | ".join(f"{rate:.2f}" for rate in row) + " |", flush=True)
    print("\n| demand | found | wanted | |\n|---|---:|---:|---|")
    if (WEKA, 2) in cells:
        row = cells[WEKA, 2]
        demand("joint over separate, weka v6 at 2 %", row[JOINT] - row[SEPARATE], 20.0)
        demand("hazard over joint, weka v6 at 2 %", row[HAZARD] - row[JOINT], 3.0)
    worst = min(cells, key=lambda cell: cells[cell][HAZARD] - cells[cell][JOINT])
    demand(
        f"hazard over joint, worst cell ({worst[0]}, {worst[1]} %)",
        cells[worst][HAZARD] - cells[worst][JOINT],
        -0.5,
    )


def demand(what: str, found: float, wanted: float) -> None:
    """Print one line of the table of demands."""
    print(f"| {what} | {found:+.2f} | ≥ {wanted:+g} | {'' if found >= wanted else 'missed'} |")


if __name__ == "__main__":
    main()
