"""Headings of a replay, and the tables of ``costcache simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costcache.cli.output import console, new_table, say, show
from costcache.cost import longest_window
from costcache.planning import LENGTHS

if TYPE_CHECKING:
    from rich.console import Console

    from costcache.sim.engine import Simulator
    from costcache.sim.results import Run
    from costcache.sim.trace import Trace

__all__ = ["print_details", "print_heading", "print_runs", "trace_facts"]


def trace_facts(trace: Trace) -> dict[str, Any]:
    """Return the trace's name and sizes for JSON."""
    return {
        "name": trace.name,
        "requests": len(trace),
        "input_tokens": int(trace.input_tokens.sum()),
        "block_size": trace.block_size,
    }


def print_heading(out: Console, simulator: Simulator) -> None:
    """Print the trace, the model and the page size of a replay."""
    trace = simulator.trace
    say(
        out,
        f"{trace.name}: {len(trace):,} requests, {int(trace.input_tokens.sum()):,} prompt tokens; "
        f"{simulator.cost.spec.name}, pages of {simulator.keys.page_size}",
    )


def print_runs(
    simulator: Simulator, distinct: int, ideal: float, with_outputs: float | None, runs: list[Run]
) -> None:
    """Print the main figures, and the notes that a reader needs to compare them.

    Args:
        simulator: The trace and the model.
        distinct: Distinct whole pages of the trace.
        ideal: Token hit rate of an unlimited pool.
        with_outputs: The same if generated tokens are cached too; None if they are not.
        runs: The figures.
    """
    from costcache.sim.results import gap_closed

    out, model = console(), simulator.cost.spec.name
    print_heading(out, simulator)
    also = "" if with_outputs is None else f", {with_outputs:.2%} with generated tokens cached"
    say(out, f"{distinct:,} distinct whole pages; an unlimited pool hits {ideal:.2%} of the tokens{also}")
    if simulator.windows:
        say(out, f"assumed: {simulator.windows}")
    say(out)
    gaps = [gap_closed(run, runs) for run in runs]
    timed = any(run.requests_per_second for run in runs)
    last = {run.capacity: run for run in runs}
    table = new_table(
        ">capacity",
        ">pool\ntokens",
        "policy",
        ">tokens\nhit",
        ">FLOPs\nsaved",
        *([">gap\nclosed"] if any(gaps) else []),
        ">TTFT\np50",
        ">TTFT\np99",
        ">evicted\ntokens",
        *([">requests\n/s"] if timed else []),
    )
    for run, gap in zip(runs, gaps, strict=True):
        table.add_row(
            run.capacity,
            "unlimited" if run.capacity_tokens is None else f"{run.capacity_tokens:,}",
            _marked(run),
            f"{run.token_hit_rate:.2%}",
            f"{run.flops_saved_rate:.2%}",
            *([] if not any(gaps) else ["-" if gap is None else f"{gap:.0%}"]),
            _seconds(run.ttft_p50),
            _seconds(run.ttft_p99),
            f"{run.evicted_tokens:,}",
            *(
                []
                if not timed
                else ["-" if run.requests_per_second is None else f"{run.requests_per_second:,.0f}"]
            ),
            end_section=run is last[run.capacity],
        )
    show(out, table)
    say(out)
    meant = {r.policy: r.policy_in_force for r in runs if r.policy != r.policy_in_force and not r.fallbacks}
    for name, policy in meant.items():
        say(out, f"{name} means {policy} for {model}")
    # The same for every policy, since it depends on lengths alone.
    for capacity, oversized in {r.capacity: r.oversized_requests for r in runs}.items():
        if oversized:
            say(
                out,
                f"{oversized:,} requests are longer than the pool of {capacity}: only what fits is cached",
            )
    sizes = {run.capacity: run.capacity_tokens for run in runs if run.capacity_tokens is not None}
    for capacity, tokens in sizes.items() if simulator.windows else ():
        fits = [simulator.fitting(tokens, length) for length in LENGTHS]
        held = [f"{fit:,} of {length:,}" for length, (fit, _) in zip(LENGTHS, fits, strict=True)]
        held[0] = held[0].replace(" of ", " tokens of sequences of ")
        say(out, f"{capacity} caches {', '.join(held)}; {fits[0][1]:,} in one pool of all layers")
    for capacity, tokens in sizes.items():
        room, page = simulator.window_capacity(tokens), simulator.keys.page_size
        window = longest_window(simulator.cost.spec)
        if room is not None and room <= window + page:
            say(
                out,
                f"the pool of windows of {capacity} has room for {room:,} tokens, no more than a window of "
                f"{window:,} and a page: SGLang would not start with it",
            )
    for run in runs:
        if run.fallbacks:
            say(out, f"policy {run.policy!r} failed at {run.capacity} and was replaced by lru")
        if run.clamped:
            say(
                out,
                f"{run.clamped:,} answers of plugin {run.plugin!r} were out of bounds at {run.capacity} "
                f"({run.policy}) and were replaced",
            )


def _marked(run: Run) -> str:
    """The policy of a row; figures of one that failed are not its own."""
    return f"{run.policy} (failed, then lru)" if run.fallbacks else run.policy


def print_details(runs: list[Run]) -> None:
    """Print all TTFT percentiles, bytes, shortfalls and the wall time per eviction."""
    out = console()
    say(out)
    table = new_table(
        ">capacity",
        "policy",
        ">TTFT\nmean",
        ">TTFT\np50",
        ">TTFT\np90",
        ">TTFT\np99",
        ">KV not\ncomputed",
        ">shortfall\ntokens",
        ">evicted\ntokens",
        ">time per\neviction",
    )
    last = {run.capacity: run for run in runs}
    for run in runs:
        took = run.decision_microseconds
        table.add_row(
            run.capacity,
            _marked(run),
            *map(_seconds, (run.ttft_mean, run.ttft_p50, run.ttft_p90, run.ttft_p99)),
            f"{run.kv_bytes_avoided / 2**30:,.1f} GiB",
            f"{run.shortfall_tokens:,}",
            f"{run.evicted_tokens:,}",
            "-" if took is None else f"{took:,.1f} µs",
            end_section=run is last[run.capacity],
        )
    show(out, table)
    say(out)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"
