"""Prints the measurements of ``replay.py``, beside the simulator's prediction for the same requests and pool.

    python benchmarks/gpu/report.py FILE.jsonl ... [--traces FOLDER] > benchmarks/results/gpu.md
    python benchmarks/gpu/report.py FILE.jsonl [--decode-seconds S] > benchmarks/results/gpu_host_tier.md
    python benchmarks/gpu/report.py FILE.jsonl ... > benchmarks/results/gpu_vllm.md

The simulator's serving mode gets the tokens that were sent, the times at which they were due, the pool, and
one measured figure: the time per generated token. Its prefill times were measured on one H100, so there is no
prediction for several GPUs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from models import MODELS
from replay import SERVERS
from workload import Workload, build

from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.settings import ServingSettings, TiersBelow
from costcache.sim.tiered import make_tiered_run
from costcache.sim.workloads import WORKLOADS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _report import table  # in the folder above

BLOCKS = 20
"""Blocks of consecutive requests, for the standard error of a mean: neighbours affect each other's waits."""

EDGES = (0, 128, 512, 1024, 2048, 4096, 1 << 30)
"""Buckets of times to first token, by a request's new tokens."""

TIMES = ("mean TTFT, ms", "predicted")
SETTINGS = {
    "sglang": {
        "lru": Settings(policy="lru", trim="off"),  # SGLang's own cache frees whole leaves
        "costcache:lru": Settings(policy="lru"),
        "costcache": Settings(),
    },
    "vllm": {
        "stock": Settings(policy="lru"),
        "lru": Settings(policy="lru"),
        "costcache": Settings(),
        "hazard": Settings(policy="hazard"),
        # One policy in both tiers is what the simulator knows.
        "stock+vllm-lru": Settings(policy="lru"),
        "hazard+hazard": Settings(policy="hazard"),
    },
}
"""The simulator's settings for policies that it can predict, by server and name."""


@dataclass(frozen=True)
class Run:
    """One run of one policy, as written by ``replay.py``."""

    line: dict[str, Any]

    @property
    def server(self) -> str:
        """Name of the server."""
        return server_of(self.line)

    @property
    def policy(self) -> str:
        """Its name, with its settings and its other build, if any."""
        settings = json.dumps(self.settings) if self.settings else ""
        return f"{self.name}{settings}@{self.folder}" if self.folder else self.name + settings

    @property
    def name(self) -> str:
        """Its name alone."""
        return str(self.line["policy"])

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings."""
        return dict(self.line.get("settings", {}))

    @property
    def folder(self) -> str:
        """Folder from which its costcache was imported; empty for the installed one."""
        return str(self.line.get("folder", ""))

    @property
    def label(self) -> str:
        """The policy, with costcache's build if the line names it."""
        _, known, build = str(self.line["packages"].get("costcache", "")).partition(" (")
        if self.server == "sglang":
            ours = self.name.startswith("costcache")
        else:
            ours = any(not part.startswith(("stock", "vllm-")) for part in self.name.split("+"))
        return f"{self.policy} ({build}" if known and ours else self.policy

    def column(self, key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One figure per request."""
        return np.array([each[key] for each in self.line["requests"]], np.float64)

    @property
    def new(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Tokens that each request had to compute."""
        return self.column("prompt") - self.column("cached")

    @property
    def cached(self) -> float:
        """Share of prompt tokens that the cache had, in %."""
        return 100.0 * float(self.column("cached").sum() / self.column("prompt").sum())

    @property
    def host(self) -> float:
        """Share of prompt tokens that was loaded back from the host tier, in %."""
        tokens = self.line["host"] if "host" in self.line else self.column("host").sum()
        return 100.0 * float(tokens / self.column("prompt").sum())

    @property
    def device(self) -> float:
        """Share of prompt tokens found on the device, in %."""
        return self.cached - self.host

    @property
    def seconds_per_token(self) -> float:
        """Seconds per generated token after the first, median over requests."""
        outputs = self.column("output")
        more = outputs > 1
        times = (self.column("seconds") - self.column("ttft"))[more] / (outputs[more] - 1)
        return float(np.median(times)) if times.size else 0.0

    def metric(self, name: str) -> float:
        """Growth of a metric during the run, summed over ranks; 0 if it was not reported."""
        return float(self.line["metrics"].get(name, 0.0))

    @property
    def ranks(self) -> int:
        """Number of processes that each evict, and count evictions, on their own."""
        return int(self.line["engine"].get("tp_size", 1))


def server_of(line: dict[str, Any]) -> str:
    """Name of the server that was measured."""
    return str(line.get("server", "sglang"))


def same(line: dict[str, Any]) -> str:
    """Key that the runs of one comparison share; they may come from several calls of ``replay.py``."""
    keys = ("model", "workload", "clients", "pool", "engine")
    return json.dumps([server_of(line), {key: line[key] for key in keys}], sort_keys=True)


@dataclass(frozen=True)
class Predicted:
    """What the simulator says of a policy: shares of the prompt tokens in %, and mean TTFT in seconds."""

    device: float
    host: float
    ttft: float


def has_host(line: dict[str, Any]) -> bool:
    """Whether the Engines had a tier in host memory."""
    return bool(line["engine"].get("enable_hierarchical_cache") or line["engine"].get("kv_transfer_config"))


def vllm_tier(line: dict[str, Any]) -> int:
    """Bytes of vLLM's tier in host memory."""
    return int(line["engine"]["kv_transfer_config"]["kv_connector_extra_config"]["cpu_bytes_to_use"])


def predict(runs: Sequence[Run], traces: Path, decode: float | None) -> dict[str, Predicted]:
    """Simulate each policy; without other builds, and empty for hybrid models and several GPUs.

    Args:
        runs: Runs of one comparison.
        traces: Folder of recorded traces.
        decode: Seconds per generated token; None for the measured ones.
    """
    line = runs[0].line
    if runs[0].ranks > 1:
        return {}
    name = line["model"]
    # A preset where there is one: its times to first token were measured.
    known = name in ModelSpec.presets()
    model = ModelSpec.preset(name) if known else ModelSpec.from_config(MODELS.get(name, name))
    if model.has_states:
        return {}
    settings = dict(line["workload"])
    if settings["source"] not in WORKLOADS:
        settings["source"] = str(traces / settings["source"])
    trace = build(Workload(**settings))
    engine, pool = line["engine"], line["pool"]
    vllm = server_of(line) == "vllm"
    page = engine["block_size"] if vllm else engine.get("page_size", 1)
    simulator = Simulator(trace, model, Deployment(page_size=page))
    pool -= pool % page
    clients = line["clients"]
    serving = ServingSettings(
        concurrency=clients or engine["max_num_seqs" if vllm else "max_running_requests"],
        decode_seconds=statistics.median(run.seconds_per_token for run in runs) if decode is None else decode,
        load="clients" if clients else "open",
        spread_bursts=False,
    )
    found = {}
    for policy, run in {run.policy: run for run in runs}.items():
        if run.name not in SETTINGS[run.server] or run.folder:
            continue
        chosen = settings_of(run)
        if has_host(line):
            host = vllm_tier(line) if vllm else int(engine["hicache_ratio"] * pool * simulator.token_bytes)
            below = TiersBelow(host=host, write=engine.get("hicache_write_policy", "write_through"))
            outcome = simulator.tiered(chosen, pool, below, serving=serving)
            tiered = make_tiered_run(outcome, simulator, chosen, "", pool, below)
            rates = tiered.device_hit_rate, tiered.tier_hit_rate
            found[policy] = Predicted(100 * rates[0], 100 * rates[1], tiered.ttft_mean)
        else:
            replay = simulator.run(chosen, pool, serving=serving)
            found[policy] = Predicted(100 * replay.token_hit_rate, 0.0, replay.ttft_mean)
    return found


def settings_of(run: Run) -> Settings:
    """Build the simulator's settings for a run's policy."""
    return Settings(**{**SETTINGS[run.server][run.name].model_dump(exclude_unset=True), **run.settings})


def show(runs: Sequence[Run], traces: Path, decode: float | None) -> None:
    """Print one comparison; for the arguments see :func:`predict`."""
    line = runs[0].line
    workload = line["workload"]
    name = Workload(**workload).name
    prompts, outputs = runs[0].column("prompt"), runs[0].column("output")
    arrive = f"{line['clients']} clients" if line["clients"] else f"{workload['rate']:g} requests a second"
    gpus = f" on {runs[0].ranks} GPUs" if runs[0].ranks > 1 else ""
    commands = dict.fromkeys(command(run.line) for run in runs)
    print(f"## {line['model']}{gpus}, {name}, {arrive}\n\n" + "".join(f"    {each}\n" for each in commands))
    print(
        f"{len(prompts):,} requests, {arrive}; lengths divided by {workload['shrink']}, generated tokens "
        f"scaled by {workload['outputs']:g}: prompts of {prompts.mean():,.0f} tokens on average and "
        f"{prompts.max():,.0f} at most, {outputs.mean():.0f} generated tokens. The pool has "
        f"{line['pool']:,} tokens, {100 * line['pool'] / line['distinct']:.1f} % of the "
        f"{line['distinct']:,} distinct prompt tokens.\n"
    )
    engine = line["engine"]
    if has_host(line) and runs[0].server == "vllm":
        print(
            f"The tier in host memory has {vllm_tier(line) / 1e9:.1f} GB, and everything is stored in it. A "
            "policy is NAME+TIER; `vllm-lru` and `vllm-arc` are vLLM's own.\n"
        )
    elif has_host(line):
        print(
            f"Host memory has {engine['hicache_ratio']:g} times the pool's tokens, and is written by "
            f"`{engine['hicache_write_policy']}`; pages of {engine['page_size']}.\n"
        )
    print("Runs in chronological order; times to first token in ms.\n")
    tiers = ["device, %", "host, %"] if has_host(line) else []
    table(
        ["policy", "cached, %", *tiers, "recomputed tokens", "mean", "p50", "p90", "p99", "requests/s"],
        [
            [
                run.label,
                f"{run.cached:.2f}",
                *([f"{run.device:.2f}", f"{run.host:.2f}"] if tiers else []),
                f"{run.new.sum():,.0f}",
                f"{1e3 * run.column('ttft').mean():.1f}",
                *(f"{1e3 * np.percentile(run.column('ttft'), at):.1f}" for at in (50, 90, 99)),
                f"{len(prompts) / run.line['seconds']:.2f}",
            ]
            for run in runs
        ],
    )
    print("".join(differences(runs)) + "Times to first token by new tokens, median in ms (requests).\n")
    table(["policy", *map(bucket, pairwise(EDGES))], [[run.label, *by_new(run)] for run in runs])
    predictions = predict(runs, traces, decode)
    if predictions:
        token = statistics.median(run.seconds_per_token for run in runs)
        assumed = "measured" if decode is None else f"taken as {1e3 * decode:g} ms, and measured"
        print(f"Predictions of the simulator. A generated token is {assumed} as {1e3 * token:.1f} ms.\n")
        tiers = ["device, %", "host, %"] if has_host(line) else []
        figures = ["cached, %", *tiers]
        table(
            ["policy", *(head for each in figures for head in (each, "predicted", "off by")), *TIMES],
            [compared(policy, runs, said) for policy, said in predictions.items()],
        )
    print(f"Evictions{' of one rank' if gpus else ''}.\n")
    if runs[0].server == "vllm":
        heads = ["evictions", "tokens", "victims", "decision, µs", "of the run, %", "fallbacks"]
        heads += ["LRU stepped in", "preemptions"]
        table(["policy", *heads], [vllm_evictions(run) for run in runs])
    else:
        heads = ["evictions", "tokens", "victims", "decision, µs", "with freeing, µs", "of the run, %"]
        table(["policy", *heads, "fallbacks"], [evictions(run) for run in runs])


def differences(runs: Sequence[Run]) -> Iterable[str]:
    """Yield the mean time to first token of each policy against the first one's, request by request."""
    times = {
        policy: np.mean([run.column("ttft") for run in runs if run.policy == policy], axis=0)
        for policy in dict.fromkeys(run.policy for run in runs)
    }
    first, *others = times
    for policy in others:
        blocks = np.array([block.mean() for block in np.array_split(times[policy] - times[first], BLOCKS)])
        error = blocks.std(ddof=1) / BLOCKS**0.5
        yield (
            f"Mean time to first token of {policy} minus that of {first}, means of their runs: "
            f"{1e3 * (times[policy] - times[first]).mean():+.1f} ± {1e3 * error:.1f} ms (standard error over "
            f"{BLOCKS} blocks of requests).\n\n"
        )


def command(line: dict[str, Any]) -> str:
    """Command that repeats these runs."""
    workload = line["workload"]
    arrive = f"--clients {line['clients']}" if line["clients"] else f"--rate {workload['rate']:g}"
    server = server_of(line)
    defaults = SERVERS[server].defaults
    extra = {key: value for key, value in line["engine"].items() if defaults.get(key) != value}
    engine = f" --engine '{json.dumps(extra)}'" if extra else ""
    return (
        f"python benchmarks/gpu/replay.py {'--server vllm ' * (server == 'vllm')}--out {file_of(line)} "
        f"--model {line['model']} "
        f"--workload {workload['source']} --requests {workload['requests']} --shrink {workload['shrink']} "
        f"--outputs {workload['outputs']:g} {arrive} --pool {line['pool']}{engine} "
        f"--policies {shlex.join(line['order'])}"
    )


def file_of(line: dict[str, Any]) -> str:
    """Name of the file with the figures, for the commands."""
    return "gpu_vllm.jsonl" if server_of(line) == "vllm" else "gpu.jsonl"


def bucket(edges: tuple[int, int]) -> str:
    """Heading of a bucket."""
    low, high = edges
    return f"{low:,} up" if high == EDGES[-1] else f"{low:,} to {high - 1:,}"


def by_new(run: Run) -> Iterable[str]:
    """Yield the median time to first token in each bucket, with its number of requests."""
    for low, high in pairwise(EDGES):
        times = run.column("ttft")[(run.new >= low) & (run.new < high)]
        yield f"{1e3 * np.median(times):.1f} ({times.size})" if times.size else ""


def compared(policy: str, runs: Sequence[Run], said: Predicted) -> list[str]:
    """Row of measured and predicted figures, means over a policy's runs."""
    own = [run for run in runs if run.policy == policy]
    pairs = [(statistics.mean(run.cached for run in own), said.device + said.host)]
    if has_host(own[0].line):
        pairs.append((statistics.mean(run.device for run in own), said.device))
        pairs.append((statistics.mean(run.host for run in own), said.host))
    shares = [(f"{found:.2f}", f"{share:.2f}", f"{share - found:+.2f}") for found, share in pairs]
    times = statistics.mean(1e3 * float(run.column("ttft").mean()) for run in own)
    return [
        policy,
        *(text for each in shares for text in each),
        f"{times:.1f}",
        f"{1e3 * said.ttft:.1f}",
    ]


def evictions(run: Run) -> list[str]:
    """Row of eviction times: choosing victims alone, which only costcache measures, and in all."""

    def of_one(name: str) -> float:
        return run.metric(name) / run.ranks  # all ranks evict the same

    count, whole = (of_one(f"sglang:eviction_duration_seconds_{part}") for part in ("count", "sum"))
    decided, choosing = (of_one(f"costcache:decision_seconds_{part}") for part in ("count", "sum"))
    return [
        run.label,
        f"{count:,.0f}",
        f"{of_one('sglang:evicted_tokens_total'):,.0f}",
        f"{of_one('costcache:victims_total'):,.0f}" if decided else "",
        f"{1e6 * choosing / decided:.0f}" if decided else "",
        f"{1e6 * whole / count:.0f}" if count else "",
        f"{100 * whole / run.line['seconds']:.2f}",
        f"{run.metric('costcache:fallbacks_total'):.0f}" if decided else "",
    ]


def vllm_evictions(run: Run) -> list[str]:
    """Row of the evictions from vLLM's blocks: vLLM itself counts none, and times none."""
    preemptions = f"{run.metric('vllm:num_preemptions_total'):.0f}"
    failures = max(run.metric("costcache:fallbacks_total"), run.line["took_over"])
    decided, choosing = (run.metric(f"costcache:decision_seconds_{part}") for part in ("count", "sum"))
    if not decided:
        return [run.label, "", "", "", "", "", f"{failures:.0f}", "", preemptions]
    return [
        run.label,
        f"{run.metric('costcache:evictions_total'):,.0f}",
        f"{run.metric('costcache:evicted_units_total'):,.0f}",
        f"{run.metric('costcache:victims_total'):,.0f}",
        f"{1e6 * choosing / decided:.0f}",
        f"{100 * choosing / run.line['seconds']:.2f}",
        f"{failures:.0f}",
        f"{run.metric('costcache:step_ins_total'):.0f}",
        preemptions,
    ]


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description="Tables of measurements on a GPU.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="recorded traces")
    parser.add_argument(
        "--decode-seconds",
        type=float,
        help="predict with this time of a generated token, in place of the one that was measured",
    )
    chosen = parser.parse_args()
    groups: dict[str, list[Run]] = {}
    for file in chosen.files:
        for text in file.read_text().splitlines():
            line = json.loads(text)
            groups.setdefault(same(line), []).append(Run(line))
    first = next(iter(groups.values()))[0].line
    decode = chosen.decode_seconds
    given = "" if decode is None else f" --decode-seconds {decode:g}"
    if server_of(first) == "vllm":
        title = "vLLM on a GPU"
    else:
        title = "SGLang's host tier on a GPU" if has_host(first) else "SGLang on a GPU"
    print(f"# {title}\n\n    python benchmarks/gpu/report.py {file_of(first)}{given}\n")
    # The tables name the builds.
    versions = {name: version.partition(" (")[0] for name, version in first["packages"].items()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    print(f"Engines: `{json.dumps(first['engine'])}`.\n")
    for runs in groups.values():
        show(runs, chosen.traces, decode)


if __name__ == "__main__":
    main()
