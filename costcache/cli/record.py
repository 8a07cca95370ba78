"""``costcache record``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from costcache.cli import completing
from costcache.cli.options import json_option
from costcache.cli.output import console, duration, echo_json, new_table, say, show
from costcache.cli.plain import plain

if TYPE_CHECKING:
    from costcache.sim.recordings.joining import Report

__all__ = ["record"]

_OUT = click.option(
    "--out",
    required=True,
    metavar="FILE",
    shell_complete=completing.files,
    help="File to write; compressed if it ends in .gz or .xz.",
)


@click.group()
def record() -> None:
    """Record a server's requests as a trace without their tokens; inspect, merge and convert recordings."""


@record.command()
@click.argument("server", type=click.Choice(["sglang", "vllm"]))
@click.argument("folder", shell_complete=completing.files)
def setup(server: str, folder: str) -> None:
    """Print how SERVER is started so that it records into FOLDER."""
    import json
    import shlex

    from costcache.recording.settings import ENVIRONMENT, SALT

    settings = shlex.quote(json.dumps({"record": {"folder": folder, "most_bytes": "1GiB"}}))
    if server == "sglang":
        click.echo(
            "sglang serve --model-path MODEL --radix-eviction-policy costcache:lru \\\n"
            f"  --radix-eviction-policy-config {settings}"
        )
        click.echo("# costcache:lru evicts as SGLang does; any policy of costcache records.")
    else:
        click.echo(f"{ENVIRONMENT}={shlex.quote(plain(folder))} vllm serve MODEL")
        click.echo(
            "# vLLM's own LRU stays in force unless COSTCACHE_VLLM or --additional-config names a policy."
        )
    click.echo(f"# {ENVIRONMENT} takes the folder, or the JSON of the settings, in either server.")
    click.echo(f"# Set {SALT} to a secret if recordings of several servers are to be compared.")


@record.command()
@click.argument("paths", metavar="RECORDING...", nargs=-1, required=True, shell_complete=completing.files)
@json_option
def info(paths: tuple[str, ...], as_json: bool) -> None:
    """Summarize RECORDING, and say why tokens were not found.

    RECORDING is a file, or a folder of files, of one server or of several.
    """
    from dataclasses import asdict

    from costcache.sim.recordings.joining import read_recordings, report

    found = report(read_recordings(paths)[0])
    if as_json:
        echo_json(asdict(found))
    else:
        _print(found, paths)


@record.command()
@click.argument("paths", metavar="RECORDING...", nargs=-1, required=True, shell_complete=completing.files)
@_OUT
def merge(paths: tuple[str, ...], out: str) -> None:
    """Write all RECORDINGs, files or folders, as one, in order of time."""
    from costcache.report.files import check_distinct
    from costcache.sim.recordings.joining import expand, read_recordings, write_recording
    from costcache.sim.traces.files import check_output
    from costcache.sim.traces.recording import join_headers

    check_output(out)
    check_distinct(list(map(str, expand(paths))), {"--out": Path(out)})
    recorded, rows = read_recordings(paths)
    header = join_headers(recorded.headers)
    write_recording(header, rows, out)
    _say_written(len(rows), out)
    if "+" in header.salt:
        click.echo(
            "their salts differ, so prefixes that several servers had count as different ones: "
            "give all servers the same COSTCACHE_RECORD_SALT",
            err=True,
        )


@record.command()
@click.argument("paths", metavar="LOG...", nargs=-1, required=True, shell_complete=completing.files)
@click.option(
    "--from",
    "form",
    required=True,
    type=click.Choice(["sglang-log", "sglang-dump", "vllm-kv-events"]),
    help="What LOG is: what --log-requests wrote at level 3, a file of --crash-dump-folder, or the payloads "
    "of KV events one after another.",
)
@_OUT
@click.option(
    "--block-size",
    type=click.IntRange(min=1),
    help="Tokens per hash.  [default: 16; of KV events, that of their blocks]",
)
@click.option(
    "--tokenizer",
    metavar="PATH",
    shell_complete=completing.files,
    help="For prompts that were sent as text: a tokenizer.json or its folder, or 'words' or 'bytes', which "
    "approximate one.",
)
def convert(
    paths: tuple[str, ...], form: str, out: str, block_size: int | None, tokenizer: str | None
) -> None:
    """Make a recording of LOGs of a server.

    The result holds no tokens: it is what the server would have recorded itself.
    """
    from costcache.report.files import check_distinct
    from costcache.sim.recordings import converting
    from costcache.sim.recordings.joining import write_recording
    from costcache.sim.traces.files import check_output

    check_output(out)
    check_distinct(list(paths), {"--out": Path(out)})
    known = next(name for name in converting.FORMS if name == form)
    header, rows = converting.convert(known, paths, block_size=block_size, tokenizer=tokenizer)
    write_recording(header, rows, out)
    _say_written(len(rows), out)


def _say_written(requests: int, out: str) -> None:
    click.echo(f"wrote {requests:,} requests to {'standard output' if out == '-' else plain(out)}", err=True)


def _pool(capacity: int | None, page_size: int | None) -> str:
    size = "size not recorded" if capacity is None else f"{capacity:,} tokens"
    if page_size is None:
        return "not recorded" if capacity is None else f"{size}, page size not recorded"
    return f"{size} in pages of {page_size:,}" if capacity is not None else f"{size}, pages of {page_size:,}"


def _print(found: Report, paths: tuple[str, ...]) -> None:
    out = console()

    def number(value: int | None) -> str:
        return "not recorded" if value is None else f"{value:,}"

    for name, text in (
        ("server", f"{found.server or 'unknown'}, policy {found.policy or 'unknown'}"),
        ("pool", _pool(found.capacity, found.page_size)),
        ("requests", f"{found.requests:,}, {found.dropped:,} more were not recorded"),
        ("sessions", number(found.sessions)),
        ("tenants", number(found.tenants)),
        ("duration", duration(found.duration_seconds)),
        ("input tokens", f"{found.input_tokens:,}, hashed in blocks of {found.block_size}"),
        ("output tokens", f"{found.output_tokens:,}"),
        (
            "hit rate",
            "not recorded" if found.hit_rate is None else f"{found.hit_rate:.2%} of input tokens",
        ),
    ):
        say(out, f"{name:<15} {text}")
    if found.misses is None:
        return
    say(out)
    table = new_table("prompt tokens", ">tokens", ">share", "~")
    misses, total = found.misses, max(found.misses.tokens, 1)
    for name, tokens, text in (
        ("found", misses.found, ""),
        ("gone", misses.gone, "computed before, and evicted or reset since"),
        ("running", misses.running, "in a request that had not ended yet"),
        ("cut", misses.cut, "in a page that is not the same to its end"),
        ("other start", misses.other_start, "in prompts that begin as no other before"),
        ("new", misses.new, "after a beginning that was seen before"),
    ):
        table.add_row(name, f"{tokens:,}", f"{tokens / total:.1%}", text)
    show(out, table)
    say(out)
    say(out, f"A cache of unlimited size would have found {misses.unlimited:.2%}.")
    if found.capacity and found.page_size and len(paths) == 1 and not Path(paths[0]).is_dir():
        say(out, "With other policies and sizes, for the model that was served:")
        say(
            out,
            f"  costcache simulate {paths[0]} --model MODEL --serving --page-size {found.page_size} "
            f"--policy costcache,lru --capacity {found.capacity}tok,{2 * found.capacity}tok",
        )
