"""Replays of generated and recorded workloads, of every kind that the simulator has."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from _report import recorded_traces

from _decisions.log import Case, Log
from _decisions.policies import OTHER_SETTINGS, policies
from costcache import Deployment, ModelSpec, Settings
from costcache.sim.engine import Simulator
from costcache.sim.explain import explain
from costcache.sim.serving import ServingSettings
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.workloads import generate, workload_settings

__all__ = ["simulator_cases"]

WORKLOADS = {
    "agentic": 500,
    "chat": 800,
    "few-shot": 800,
    "multi-turn": 600,
    "random": 400,
}
"""Requests of each."""
PAGES = {"agentic": 64, "few-shot": 64}
"""Tokens per page, where not 16."""
SHARES = (0.03, 0.15)
"""Pools as shares of all distinct pages."""
SERVERS = {
    "default": ServingSettings(),
    "slow": ServingSettings(concurrency=6, decode_seconds=0.05, load="open", rate=4.0),
    "clients": ServingSettings(concurrency=8, load="clients", outputs=False),
    "unspread": ServingSettings(concurrency=16, load="open", rate=20.0, spread_bursts=False),
}
SERVED = ("chat", "agentic", "few-shot")
"""Workloads that servers get."""
HYBRID = ("chat", "agentic", "multi-turn")
HYBRID_SHARES = (0.05, 0.25)
TRIMS: dict[str, dict[str, Any]] = {
    "chunk": {"trim": "chunk", "trim_chunk": 128},
    "off": {"trim": "off", "headroom": 0.05},
}
TRACES = {
    "mooncake": ("mooncake_conversation.jsonl.gz", 512),
    "weka": ("weka_cc_v6_global_57sessions.jsonl.gz", 512),
}
"""Recorded traces, and tokens per page."""
RECORDED_POLICIES = ("hazard", "lru", "s3fifo", "lhd")
RECORDED_REQUESTS = 1500


@functools.cache
def _generated(workload: str) -> Trace:
    return generate(workload, workload_settings(workload, {"requests": WORKLOADS[workload], "seed": 7}))


@functools.cache
def _recorded(name: str) -> Trace:
    trace = load_trace(recorded_traces() / TRACES[name][0]).in_time_order()
    return trace.take(np.arange(min(RECORDED_REQUESTS, len(trace))))


@functools.lru_cache(maxsize=2)  # of what runs in a row
def _simulator(
    workload: str, model: str = "llama-3-8b", page_size: int = 16, state_share: float | None = None
) -> Simulator:
    trace = _recorded(workload) if workload in TRACES else _generated(workload)
    return Simulator(
        trace, ModelSpec.preset(model), Deployment(page_size=page_size), state_share=state_share, warmup=50
    )


def _capacity(simulator: Simulator, page_size: int, share: float) -> int:
    return int(simulator.trace.distinct_pages(page_size) * share) * page_size


def _note(log: Log, outcome: Any) -> Mapping[str, Any]:
    """All of an outcome but its wall times."""
    log("matched", outcome.matched)
    for at in range(0, len(outcome.matched), 10):
        log(f"{at}:", outcome.matched[at : at + 10])
    if outcome.ttft is not None:
        for at in range(0, len(outcome.ttft), 10):
            log(f"seconds {at}:", outcome.ttft[at : at + 10])
    names = ("evictions", "shortfall", "evicted", "trimmed", "oversized", "clamped", "fallbacks", "policy")
    figures = {name: getattr(outcome, name) for name in names}
    log("figures", *figures.values())
    return {"found": int(outcome.matched.sum()), **figures}


def _replay(
    arguments: tuple[Any, ...],
    page_size: int,
    share: float | None,
    settings: dict[str, Any],
    options: dict[str, Any],
    log: Log,
) -> Mapping[str, Any]:
    simulator = _simulator(*arguments)
    capacity = None if share is None else _capacity(simulator, page_size, share)
    chosen = Settings(**settings)
    outcome = simulator.outcome(chosen, capacity, **options)
    figures = _note(log, outcome)
    log("ttft", simulator.ttft(outcome))
    run = simulator.figures(outcome, chosen, capacity)
    log("rates", run.token_hit_rate, run.flops_saved_rate, run.kv_bytes_avoided, run.policy_in_force)
    return figures


def _numbers(value: Any) -> Iterator[float]:
    """The numbers of nested data, in their order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def _explained(
    arguments: tuple[Any, ...], page_size: int, share: float, settings: dict[str, Any], log: Log
) -> Mapping[str, Any]:
    """Classes and their figures, not their names; and a replay that starts from what was learned."""
    simulator = _simulator(*arguments)
    capacity = _capacity(simulator, page_size, share)
    told = explain(simulator, Settings(policy="hazard", policy_settings=settings), capacity)
    figures = dict(_note(log, told.outcome))
    log("ages", np.array(told.ages))
    for account in told.classes:
        log("class", list(_numbers(astuple(account))))
    for fall in told.step_ins:
        log("fall", astuple(fall))
    figures |= {"gained": told.gained, "lost": told.lost, "falls": len(told.step_ins)}
    log("against lru", told.unit, told.compared, told.gained, told.lost)
    if told.tables is None:
        return figures
    tables = json.loads(told.tables)
    log("tables", np.array(list(_numbers(tables))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tables.json")
        path.write_text(told.tables)
        loaded = Settings(policy="hazard", policy_settings={**settings, "tables": path})
        figures["found with tables"] = _note(log, simulator.outcome(loaded, capacity, tree=True))["found"]
    return figures


def _tree_cases() -> Iterator[tuple[str, Case]]:
    for workload in WORKLOADS:
        page = PAGES.get(workload, 16)
        for model in ("llama-3-8b", "deepseek-v3") if workload == "chat" else ("llama-3-8b",):
            arguments = (workload, model, page)
            for policy, variant, settings in policies(variants=True):
                for share in SHARES:
                    key = "/".join(filter(None, ("plain", policy, variant, workload, model, str(share))))
                    chosen = {"policy": policy, "policy_settings": settings}
                    yield key, functools.partial(_replay, arguments, page, share, chosen, {"tree": True})
        arguments = (workload, "llama-3-8b", page)
        for share in (*SHARES, None):
            for policy in ("lru", "optimum", "infinite"):  # LRU: first one capacity, then all at once
                key = f"pages/{policy}/{workload}/{share}"
                yield key, functools.partial(_replay, arguments, page, share, {"policy": policy}, {})
        yield (
            f"tree/lru/{workload}/None",
            functools.partial(_replay, arguments, page, None, {"policy": "lru"}, {"tree": True}),
        )
    arguments, page = ("multi-turn", "deepseek-v3", 16), 16
    for policy, _, _ in policies(variants=False):
        for name, trim in TRIMS.items():
            chosen = {"policy": policy, **trim}
            key = f"trim/{policy}/{name}"
            yield key, functools.partial(_replay, arguments, page, 0.1, chosen, {"tree": True})
        chosen = {"policy": policy, "headroom": 0.1}
        key = f"always free/{policy}"
        yield key, functools.partial(_replay, arguments, page, 0.1, chosen, {"always_free": True})


def _serving_cases() -> Iterator[tuple[str, Case]]:
    for workload in SERVED:
        page = PAGES.get(workload, 16)
        for policy, variant, settings in (*policies(variants=workload == "chat"), ("infinite", "", {})):
            for name, server in SERVERS.items():
                key = "/".join(filter(None, ("serving", policy, variant, workload, name)))
                chosen = {"policy": policy, "policy_settings": settings, "headroom": 0.02}
                options = {"serving": server, "always_free": name == "slow"}
                arguments = (workload, "llama-3-8b", page)
                yield key, functools.partial(_replay, arguments, page, 0.08, chosen, options)


def _hybrid_cases() -> Iterator[tuple[str, Case]]:
    for workload in HYBRID:
        for states in (None, 0.5):
            arguments = (workload, "qwen3-next", 64, states)
            offline = (("optimum", "", {}), ("infinite", "", {}))
            for policy, variant, settings in (*policies(variants=True), *offline):
                for share in HYBRID_SHARES:
                    parts = ("hybrid", policy, variant, workload, f"states {states}", str(share))
                    chosen = {"policy": policy, "policy_settings": settings}
                    yield (
                        "/".join(filter(None, parts)),
                        functools.partial(_replay, arguments, 64, share, chosen, {}),
                    )


def _explain_cases() -> Iterator[tuple[str, Case]]:
    for workload in WORKLOADS:
        page = PAGES.get(workload, 16)
        for variant, settings in {"": {}, **OTHER_SETTINGS["hazard"]}.items():
            key = "/".join(filter(None, ("explain/hazard", variant, workload)))
            yield key, functools.partial(_explained, (workload, "llama-3-8b", page), page, 0.1, settings)
    for workload in HYBRID:
        for states in (None, 0.5):
            arguments = (workload, "qwen3-next", 64, states)
            key = f"explain/hazard/hybrid/{workload}/states {states}"
            yield key, functools.partial(_explained, arguments, 64, 0.1, {})


def _recorded_cases() -> Iterator[tuple[str, Case]]:
    for name, (file, page) in TRACES.items():
        if not (recorded_traces() / file).is_file():
            continue
        arguments = (name, "llama-3-8b", page)
        for policy in RECORDED_POLICIES:
            for share in (0.02, 0.1):
                chosen = {"policy": policy}
                key = f"recorded/{policy}/{name}/{share}"
                yield key, functools.partial(_replay, arguments, page, share, chosen, {"tree": True})
            key = f"recorded/{policy}/{name}/serving"
            options = {"serving": ServingSettings()}
            yield key, functools.partial(_replay, arguments, page, 0.05, {"policy": policy}, options)
        yield f"explain/hazard/{name}", functools.partial(_explained, arguments, page, 0.05, {})


def simulator_cases() -> Iterator[tuple[str, Case]]:
    """Cases of the simulator."""
    yield from _tree_cases()
    yield from _serving_cases()
    yield from _hybrid_cases()
    yield from _explain_cases()
    yield from _recorded_cases()
