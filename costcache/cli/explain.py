"""``costcache explain``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from costcache.cli.options import (
    console,
    deployment_of,
    deployment_options,
    echo_json,
    json_option,
    model_option,
    new_table,
    say,
    show,
)
from costcache.cli.progress import Task, progress_display
from costcache.cli.reading import read, trace_options
from costcache.cli.replaying import (
    CAPACITIES,
    eviction_options,
    eviction_settings,
    own_settings,
    page_size_option,
    states_option,
)
from costcache.hookspecs import PROJECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costcache.sim.explain import ClassReport, Explanation

__all__ = ["explain"]


@click.command(epilog=CAPACITIES)
@click.argument("trace_path", metavar="TRACE")
@model_option
@click.option(
    "--policy",
    default="costcache",
    show_default=True,
    metavar="NAME",
    help="The policy; one that tells classes of nodes apart.",
)
@click.option("--capacity", default="5%", show_default=True, metavar="SIZE", help="The pool's size.")
@page_size_option
@trace_options
@eviction_options
@states_option
@click.option(
    "--top", type=click.IntRange(min=1), default=15, show_default=True, help="Classes in the table."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw how long the main classes wait for their next use to FILE (.png, .svg, .pdf).",
)
@click.option(
    "--save-tables",
    "tables",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what the policy learned to FILE, for its setting 'tables' to start from.",
)
@deployment_options
@json_option
def explain(
    trace_path: str,
    model_name: str,
    policy: str,
    capacity: str,
    page_size: int | None,
    block_size: int | None,
    arrivals: str | None,
    seed: int,
    gaps: str,
    retime: str | None,
    tokenizer: str | None,
    headroom: float,
    trim: str,
    assignments: tuple[str, ...],
    state_share: float | None,
    top: int,
    plot: Path | None,
    tables: Path | None,
    as_json: bool,
    **deployment: Any,
) -> None:
    """Replay TRACE and show which classes of nodes the policy kept and dropped.

    The replay is that of 'costcache simulate' with the same options, one request at a time. Of each class:
    how much of it was seen, and reused; what hits it served; what was evicted of it, and regretted, since a
    later request asked for it; how long that had waited; and what it is worth at the end.
    """
    from costcache.model import ModelSpec
    from costcache.plugins import get_plugins
    from costcache.report.files import check_distinct, check_folder
    from costcache.sim.engine import Simulator
    from costcache.sim.explain import explain as account_for
    from costcache.sim.explain import explainable
    from costcache.sim.results import TIMING
    from costcache.sizes import parse_capacity

    if plot is not None:
        from costcache.report.picture import check_picture

        check_picture(plot)
    if tables is not None:
        check_folder("--save-tables", tables)
    check_distinct([trace_path, retime], {"--plot": plot, "--save-tables": tables})
    size = parse_capacity(capacity)
    model = ModelSpec.resolve(model_name)
    plugins = get_plugins()
    own = own_settings(assignments, [policy], plugins.policy_name(PROJECT, plugins.match(model)))
    settings = eviction_settings(policy, own, headroom, trim)
    explainable(
        settings, model, plugins, tables=tables is not None
    )  # before the trace is read, which may take long
    how = {
        "block_size": block_size,
        "arrivals": arrivals,
        "seed": seed,
        "gaps": gaps,
        "retime": retime,
        "tokenizer": tokenizer,
    }
    trace = read(trace_path, how)[0].in_time_order()
    served = deployment_of(page_size=page_size or trace.block_size, **deployment)
    simulator = Simulator(trace, model, served, plugins=plugins, state_share=state_share)
    token = simulator.cost.token
    distinct = trace.distinct_pages(served.page_size)
    tokens = size.tokens(
        distinct_pages=distinct,
        page_size=served.page_size,
        token_bytes=token.kv_bytes + token.swa_bytes,
    )
    with progress_display() as bar:
        task = Task(bar, f"{policy} at {size.text}", len(trace))
        found = account_for(simulator, settings, tokens, progress=task.by)
        task.done()
    run = simulator.figures(found.outcome, settings, tokens, capacity=size.text)
    if plot is not None:
        from costcache.report.curves import write_curves

        longest = float(trace.timestamps[-1] - trace.timestamps[0])
        write_curves(found, f"{found.policy} on {trace.name}, pool of {size.text}", longest, plot)
    if tables is not None and found.tables is not None:
        from costcache.report.files import write_whole

        write_whole(tables, found.tables.encode())
    if as_json:
        echo_json(
            {
                "trace": {
                    "name": trace.name,
                    "requests": len(trace),
                    "input_tokens": int(trace.input_tokens.sum()),
                    "block_size": trace.block_size,
                    "distinct_pages": distinct,
                },
                "model": model.name,
                "deployment": served.model_dump(mode="json"),
                "settings": {"headroom": headroom, "trim": trim, "own": own},
                "run": {name: value for name, value in asdict(run).items() if name not in TIMING},
                "policy": found.policy,
                "unit": found.unit,
                "against_lru": {
                    "gained_tokens": found.gained,
                    "lost_tokens": found.lost,
                    "falls": [asdict(fall) for fall in found.step_ins],
                }
                if found.compared
                else None,
                "classes": [_as_json(account) for account in found.classes],
            }
        )
        return
    out = console()
    say(
        out,
        f"{trace.name}: {len(trace):,} requests, {int(trace.input_tokens.sum()):,} prompt tokens; "
        f"{model.name}, pages of {served.page_size}",
    )
    pool = "no limit" if tokens is None else f"{size.text}, {tokens:,} tokens"
    say(out, f"{found.policy}, pool of {pool}: {run.token_hit_rate:.2%} of the tokens hit")
    say(out)
    _print_classes(found, top)
    _print_verdicts(found)
    for kind, path in (("plot", plot), ("tables", tables)):
        if path is not None:
            say(out, f"{kind}: {path}")


def _as_json(account: ClassReport) -> dict[str, Any]:
    fields = asdict(account)
    del fields["unused"]
    return fields | {"seen": account.seen, "reused": account.reused}


def _print_classes(found: Explanation, top: int) -> None:
    states = found.unit == "states"
    out = console()
    table = new_table(
        "~class",
        f">{found.unit}\nseen",
        ">reused",
        ">tokens\nhit",
        f">{found.unit}\nevicted",
        ">regretted",
        *([">KV tokens\nevicted"] if states else []),
        ">median age\nat eviction",
        ">worth now\n/ hour",
    )
    shown, others = found.classes[:top], found.classes[top:]
    rows = [(account.name, [account]) for account in shown]
    if others:
        rows.append((f"{len(others)} more classes", others))
    for name, accounts in rows:
        seen = _sum(accounts, "seen")
        reused = _sum(accounts, "used") + _sum(accounts, "returned")
        only = accounts[0] if len(accounts) == 1 else None
        table.add_row(
            name,
            _short(seen),
            f"{reused / seen:.1%}" if seen else "-",
            *(_short(_sum(accounts, field)) for field in ("hit_tokens", "evicted", "returned")),
            *([_short(_sum(accounts, "evicted_tokens"))] if states else []),
            "-" if only is None or only.eviction_age is None else _wait(only.eviction_age),
            "-" if only is None or only.worth is None else f"{3600 * only.worth:.3g}",
        )
    show(out, table)
    say(out)
    evicted, returned = _sum(found.classes, "evicted"), _sum(found.classes, "returned")
    share = f" ({returned / evicted:.1%})" if evicted else ""
    say(out, f"{evicted:,} {found.unit} evicted, of which {returned:,}{share} were asked for again")


def _print_verdicts(found: Explanation) -> None:
    out = console()
    if not found.compared:
        say(out, f"{found.policy} does not compare itself with LRU for this model")
        return
    say(
        out,
        f"against LRU: {found.gained:,} tokens found that LRU would not have found, "
        f"{found.lost:,} the reverse",
    )
    if not found.step_ins:
        say(out, "LRU never stepped in")
    for fall in found.step_ins:
        back = "to the end" if fall.back is None else f"to {fall.back:,}"
        say(
            out,
            f"LRU stepped in from request {fall.request:,} {back}, {fall.delay:,} requests after the lead "
            "over it was greatest",
        )


def _sum(accounts: Sequence[ClassReport], field: str) -> int:
    return sum(getattr(account, field) for account in accounts)


def _short(amount: int) -> str:
    if amount < 10_000:
        return f"{amount:,}"
    return f"{amount / 1e3:,.0f}k" if amount < 10_000_000 else f"{amount / 1e6:,.1f}M"


def _wait(seconds: float) -> str:
    for limit, size, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min")):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"
