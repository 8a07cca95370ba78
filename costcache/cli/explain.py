"""``costcache explain``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import Field

from costcache.cli import completing
from costcache.cli.from_models import Options, model_options
from costcache.cli.options import json_option, model_option
from costcache.cli.output import console, duration, echo_json, new_table, say, show
from costcache.cli.progress import Task, progress_display
from costcache.cli.replaying import (
    CAPACITIES,
    pool_tokens,
    replay_options,
    with_own_settings,
)
from costcache.cli.tables import print_heading, trace_facts
from costcache.cli.writing import Output, write_outputs
from costcache.hookspecs import PROJECT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costcache.cli.reading import TraceOptions
    from costcache.cli.replaying import ReplayOptions
    from costcache.deployment import Deployment
    from costcache.settings import Settings
    from costcache.sim.explain import ClassReport, Explanation

__all__ = ["ExplainOptions", "explain"]


class ExplainOptions(Options):
    """Options of this command alone."""

    policy: str = Field(PROJECT, description="The policy; it must be one that sorts nodes into classes.")
    capacity: str = Field("5%", description="Pool size.")
    top: int = Field(15, ge=1, description="Classes in the table.")
    plot: Path | None = Field(
        None, description="Plot the reuse intervals of the main classes to FILE (.png, .svg, .pdf)."
    )
    tables: Path | None = Field(
        None,
        description="Write what the policy learned to FILE; its setting 'tables' starts from such a file.",
    )


@click.command(epilog=CAPACITIES)
@click.argument("trace_path", metavar="TRACE", shell_complete=completing.files)
@model_option
@model_options(
    ExplainOptions,
    "options",
    policy={"metavar": "NAME", "shell_complete": completing.policies},
    capacity={"metavar": "SIZE"},
    plot={"metavar": "FILE"},
    tables={"flag": "--save-tables", "metavar": "FILE"},
)
@replay_options()
@json_option
def explain(
    trace_path: str,
    model_name: str,
    options: ExplainOptions,
    replay: ReplayOptions,
    settings: Settings,
    reading: TraceOptions,
    deployment: Deployment,
    as_json: bool,
) -> None:
    """Replay TRACE and show which classes of nodes the policy kept and evicted.

    The replay is that of 'costcache simulate' with the same options, one request at a time. Per class, the
    table shows tokens seen and the share of them reused; tokens hit; tokens evicted, and those regretted,
    which a later request asked for; their median age at eviction; and what the class is worth at the end.
    """
    from costcache.plugins import get_plugins
    from costcache.report.files import check_distinct, check_folder, write_whole
    from costcache.sim.engine import Simulator
    from costcache.sim.explain import explain as account_for
    from costcache.sim.explain import explainable
    from costcache.sim.results import TIMING
    from costcache.sizes import parse_capacity

    plot, tables = options.plot, options.tables
    if plot is not None:
        from costcache.report.picture import check_picture

        check_picture(plot)
    if tables is not None:
        check_folder("--save-tables", tables)
    check_distinct([trace_path, reading.retime], {"--plot": plot, "--save-tables": tables})
    size = parse_capacity(options.capacity)
    plugins = get_plugins()
    model = plugins.resolve(model_name)
    own = replay.own_settings([options.policy], plugins.policy_name(PROJECT, plugins.match(model)))
    chosen = with_own_settings(settings, options.policy, own)
    # Before the trace is read, which may take long.
    explainable(chosen, model, plugins, tables=tables is not None)
    trace = reading.read(trace_path)[0].in_time_order()
    # Classes are of nodes with KV of all layers.
    served = replay.paged(deployment, trace).model_copy(update={"window_layout": "one-pool"})
    simulator = Simulator(
        trace, model, served, plugins=plugins, state_share=replay.state_share, known=replay.known
    )
    distinct = trace.distinct_pages(served.page_size)
    tokens = pool_tokens(size, simulator, distinct)
    with progress_display() as bar:
        task = Task(bar, f"{options.policy} at {size.text}", len(trace))
        found = account_for(simulator, chosen, tokens, progress=task.by)
        task.done()
    run = simulator.figures(found.outcome, chosen, tokens, capacity=size.text)
    outputs: list[Output] = []
    if plot is not None:
        from costcache.report.curves import write_curves

        longest = float(trace.timestamps[-1] - trace.timestamps[0])
        title = f"{found.policy} on {trace.name}, pool of {size.text}"
        outputs.append(("plot", plot, lambda path: write_curves(found, title, longest, path)))
    if tables is not None and found.tables is not None:
        learned = found.tables.encode()
        outputs.append(("tables", tables, lambda path: write_whole(path, learned)))
    if as_json:
        echo_json(
            {
                "trace": trace_facts(trace) | {"distinct_pages": distinct},
                "model": model.name,
                "deployment": served.model_dump(mode="json"),
                "settings": {"headroom": settings.headroom, "trim": settings.trim, "own": own},
                "known": replay.known,
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
        write_outputs(outputs, quiet=True)
        return
    out = console()
    print_heading(out, simulator)
    pool = "no limit" if tokens is None else f"{size.text}, {tokens:,} tokens"
    say(out, f"{found.policy}, pool of {pool}: {run.token_hit_rate:.2%} of the tokens hit")
    say(out)
    _print_classes(found, options.top)
    _print_verdicts(found)
    write_outputs(outputs, quiet=False)


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
            "-" if only is None or only.eviction_age is None else duration(only.eviction_age),
            "-" if only is None or only.worth is None else f"{3600 * only.worth:.3g}",
        )
    show(out, table)
    say(out)
    evicted, returned = _sum(found.classes, "evicted"), _sum(found.classes, "returned")
    share = f" ({returned / evicted:.1%})" if evicted else ""
    say(out, f"{evicted:,} {found.unit} evicted, of which {returned:,}{share} were requested again")


def _print_verdicts(found: Explanation) -> None:
    out = console()
    if not found.compared:
        say(out, f"{found.policy} does not compare itself with LRU for this model")
        return
    say(
        out,
        f"against LRU: {found.gained:,} tokens hit that LRU would have missed, "
        f"{found.lost:,} missed that LRU would have hit",
    )
    if not found.step_ins:
        say(out, "LRU never stepped in")
    for step_in in found.step_ins:
        back = "to the end" if step_in.back is None else f"to {step_in.back:,}"
        say(
            out,
            f"LRU stepped in from request {step_in.request:,} {back}, "
            f"{step_in.delay:,} requests after the lead over it peaked: "
            f"it was ahead by {step_in.regret:,} tokens in {step_in.run:,} requests",
        )


def _sum(accounts: Sequence[ClassReport], field: str) -> int:
    return sum(getattr(account, field) for account in accounts)


def _short(amount: int) -> str:
    if amount < 10_000:
        return f"{amount:,}"
    return f"{amount / 1e3:,.0f}k" if amount < 10_000_000 else f"{amount / 1e6:,.1f}M"
