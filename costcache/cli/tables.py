"""Tables of ``costcache simulate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache.cli.options import console, new_table, say, show

if TYPE_CHECKING:
    from costcache.sim.results import Run
    from costcache.sim.trace import Trace

__all__ = ["print_details", "print_runs"]


def print_runs(
    trace: Trace,
    model: str,
    page_size: int,
    distinct: int,
    ideal: float,
    kept: float | None,
    runs: list[Run],
) -> None:
    """Print what was replayed and the main figures."""
    from costcache.sim.results import gap_closed

    out = console()
    say(
        out,
        f"{trace.name}: {len(trace):,} requests, {int(trace.input_tokens.sum()):,} prompt tokens; "
        f"{model}, pages of {page_size}",
    )
    also = "" if kept is None else f", {kept:.2%} with generated tokens kept"
    say(out, f"{distinct:,} distinct whole pages; unlimited, {ideal:.2%} of the tokens hit{also}")
    say(out)
    gaps = [gap_closed(run, runs) for run in runs]
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
        ">requests\n/s",
    )
    last = None
    for run, gap in zip(runs, gaps, strict=True):
        if last not in (None, run.capacity):
            table.add_section()
        last = run.capacity
        table.add_row(
            run.capacity,
            "unlimited" if run.capacity_tokens is None else f"{run.capacity_tokens:,}",
            run.policy,
            f"{run.token_hit_rate:.2%}",
            f"{run.flops_saved_rate:.2%}",
            *([] if not any(gaps) else ["-" if gap is None else f"{gap:.0%}"]),
            _seconds(run.ttft_p50),
            _seconds(run.ttft_p99),
            f"{run.evicted_tokens:,}",
            f"{run.requests_per_second:,.0f}",
        )
    show(out, table)
    say(out)
    meant = {r.policy: r.policy_in_force for r in runs if r.policy != r.policy_in_force and not r.fallbacks}
    for name, policy in meant.items():
        say(out, f"{name} means {policy} for {model}")
    # The same for every policy: it is a matter of lengths.
    for capacity, oversized in {r.capacity: r.oversized_requests for r in runs}.items():
        if oversized:
            say(out, f"{oversized:,} requests are longer than the pool of {capacity}: their heads are cached")
    for run in runs:
        if run.fallbacks:
            say(out, f"policy {run.policy!r} failed at {run.capacity} and was replaced by lru")
        if run.clamped:
            say(
                out,
                f"{run.clamped:,} answers of plugin {run.plugin!r} were out of bounds at {run.capacity} "
                f"({run.policy}) and were replaced",
            )


def print_details(runs: list[Run]) -> None:
    """Print all times to first token, bytes, shortfalls and the wall time of an eviction."""
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
        ">one\neviction",
    )
    last = None
    for run in runs:
        if last not in (None, run.capacity):
            table.add_section()
        last = run.capacity
        took = run.decision_microseconds
        table.add_row(
            run.capacity,
            run.policy,
            *map(_seconds, (run.ttft_mean, run.ttft_p50, run.ttft_p90, run.ttft_p99)),
            f"{run.kv_bytes_avoided / 2**30:,.1f} GiB",
            f"{run.shortfall_tokens:,}",
            f"{run.evicted_tokens:,}",
            "-" if took is None else f"{took:,.1f} µs",
        )
    show(out, table)
    say(out)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 10 else f"{value:.1f} s"
