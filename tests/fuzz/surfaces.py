"""Makes hostile inputs, one kind to a surface of the program, and says what is wrong with an answer.

Each input is made from a generator of random numbers alone, so that its seed and number reproduce it.
"""

from __future__ import annotations

import copy
import gzip
import json
import lzma
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

from costcache import Deployment, ModelSpec, RadixCache
from costcache.binding import Binding
from costcache.cli import COMMANDS, cli
from costcache.errors import CostcacheError
from costcache.hints import HINTS, NO_HINTS, read_hints
from costcache.model.presets import PRESETS
from costcache.plugins import get_plugins
from costcache.sim.traces import load_trace, write_trace
from costcache.sim.traces.azure import HEADER
from costcache.sim.workloads import WORKLOADS, generate, workload_settings
from costcache.vllm.build import read_config
from costcache.vllm.offload_settings import OffloadSettings, read_offload_config
from tests.unit.commands import costcache_
from tests.unit.test_trace_formats import FEW_SHOT, SAMPLES, TABLES, archive, lines

__all__ = ["SURFACES", "Problem", "prepare"]

Rng = random.Random


class Problem(Exception):  # noqa: N818 # a finding, not an error
    """The program did not do with an input what it has to."""


NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 16, 64, 255, 512, 2**20, 2**20 + 1, 2**31, 2**32, 2**40, 2**40 + 1, 2**53, 2**63 - 1,
    2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e15, 1e18, 1e300,
)  # fmt: skip
TEXTS = (
    "", " ", "x", "lru", "-", "--help", "null", "NaN", "Infinity", "-1", "1e999", "\x00", "\x1b[2J", "\n",
    "\u202e", "\U0001f600", "a" * 5000, "/dev/null", "../..", "%s%n", "{0}", "[red]", "$(id)", "100%",
    "80GiB", "0.1%", ",", "=", "\udcff",
)  # fmt: skip


def value(rng: Rng, depth: int = 0) -> Any:
    """Any JSON value, mostly at some bound."""
    kind = rng.randrange(10 if depth < 2 else 7)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 6:
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice((None, True, False))
    if kind < 9:
        return [value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 5, 50)))]
    return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def places(root: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    keys = list(root) if isinstance(root, dict) else range(len(root)) if isinstance(root, list) else ()
    for key in keys:
        yield root, key
        yield from places(root[key])


def mutated(rng: Rng, root: Any) -> Any:
    """A JSON value with one to three of its parts replaced, removed, doubled or renamed."""
    root = copy.deepcopy(root)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(root))
        if not found:
            return value(rng)
        where, key = rng.choice(found)
        change = rng.randrange(6)
        if change < 3:
            where[key] = value(rng)
        elif change == 3:
            del where[key]
        elif change == 4 and isinstance(where, list):
            where.insert(key, copy.deepcopy(where[key]))
        elif isinstance(where, dict):
            where[rng.choice((*TEXTS, *map(str, where)))] = where.pop(key)
    return root


def damaged(rng: Rng, data: bytes) -> bytes:
    """Bytes cut, doubled, flipped or mixed with others."""
    at = rng.randrange(len(data) + 1)
    change = rng.randrange(6)
    if change == 0:
        return data[:at]
    if change == 1:
        return data[at:]
    if change == 2:
        return data[:at] + rng.randbytes(rng.choice((1, 4, 100))) + data[at:]
    if change == 3:
        return data[:at] + data
    if change == 4:
        return data.replace(b"\n", rng.choice((b"", b"\r\n", b"\n\n", b"\x00", b" ")))
    return rng.choice((b"\xef\xbb\xbf", b"[", b"{", b"\x1f\x8b", b"\xfd7zXZ\x00", b"\n \n")) + data


def encoded(rows: Any) -> bytes:
    """Rows as lines of JSON; what JSON has no word for is written as Python does."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def packed(rng: Rng, data: bytes) -> bytes:
    """Bytes, compressed or not, and damaged or not."""
    data = rng.choice((bytes, bytes, bytes, gzip.compress, lzma.compress))(data)
    return damaged(rng, data) if rng.random() < 0.15 else data


@dataclass(frozen=True)
class Folder:
    """Where inputs are written; it has a good trace and good tables."""

    path: Path

    def write(self, name: str, data: bytes) -> Path:
        path = self.path / name
        path.write_bytes(data)
        return path

    @property
    def good(self) -> Path:
        return self.path / "good.jsonl"


def prepare(path: Path) -> Folder:
    """Make the files that inputs build on."""
    folder = Folder(path)
    os.chdir(path)  # some inputs name files
    write_trace(generate("chat", workload_settings("chat", {"requests": 30})), folder.good)
    ran = costcache_("explain", folder.good, "--model", "llama-3-8b", "--save-tables", path / "tables.json")
    assert ran.exit_code == 0, ran.output
    for name, rows in TABLES.items():
        folder.write(f"ragpulse_{name}.jsonl", lines(rows))
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")
    (path / "nowhere").symlink_to("missing/x")
    os.mkfifo(path / "pipe")
    folder.write("\udcff\x1b[2J\n.jsonl", folder.good.read_bytes())
    return folder


# -- the command line ----------------------------------------------------------------------


def run(*words: str | Path, stdin: bytes | None = None) -> Any:
    """Run a command; returns its JSON if it succeeds and printed some, else None.

    Raises:
        Problem: It ended with a traceback, with more than one line of error, or printed what it must not.
    """
    arguments = [str(word).replace("\x00", "") for word in words]  # no system passes a NUL
    result = costcache_(*arguments, stdin=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code not in (0, 1, 2, 3):
        raise Problem(f"exit status {result.exit_code}")
    for text in (result.stdout, result.stderr):
        if not all(line.isprintable() for line in text.split("\n")):
            raise Problem(f"control characters in {text[:300]!r}")
    if result.exit_code == 1 and not result.stderr.startswith("Error: ") and "plugins" not in arguments:
        raise Problem(f"exit status 1 and no error: {result.output[:300]!r}")
    if result.exit_code == 1 and result.stderr.count("\n") != 1:
        raise Problem(f"an error of several lines: {result.stderr[:300]!r}")
    if result.exit_code == 0 and not result.output:
        raise Problem("success and no word")
    if result.exit_code == 0 and "--json" in arguments and result.stdout.startswith("{"):
        return json.loads(result.stdout)
    return None


def check_info(path: Path, found: dict[str, Any], options: tuple[str, ...]) -> None:
    """Compare what ``trace info`` says with a naive count."""
    trace = load_trace(path, tokenizer="words", block_size=int(options[1]) if options else None)
    page, total = found["page_size"], int(trace.input_tokens.sum())
    if total > 200_000 or len(trace.ids) > 50_000:
        return
    ratio = page // trace.block_size
    if page % trace.block_size:
        return
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for i in range(len(trace)):
        ids = trace.ids[trace.offsets[i] : trace.offsets[i + 1]].tolist()
        for end in range(1, int(trace.input_tokens[i]) // page + 1):
            path_ids = tuple(ids[: end * ratio])
            hits += path_ids in seen
            seen.add(path_ids)
    told = (found["requests"], found["input_tokens"], found["distinct_pages"])
    if told != (len(trace), total, len(seen)):
        raise Problem(f"trace info says {told}, and it is {(len(trace), total, len(seen))}")
    if abs(found["ideal_token_hit_rate"] * total - hits * page) > 1e-6 * max(total, 1):
        raise Problem(f"ideal rate {found['ideal_token_hit_rate']}, counted {hits} pages")


def check_runs(found: dict[str, Any]) -> None:
    """Check the figures of a replay against each other."""
    rates: dict[str, dict[str, float]] = {}
    for each in found["runs"]:
        if not 0 <= each["hit_tokens"] <= each["input_tokens"]:
            raise Problem(f"{each['policy']} hit {each['hit_tokens']} of {each['input_tokens']} tokens")
        if each["fallbacks"] or each["clamped"]:
            raise Problem(f"{each['policy']} failed, or its plugin")
        rates.setdefault(each["capacity"], {})[each["policy"]] = each["hit_tokens"]
    for hits in rates.values():
        if "optimum" in hits and "lru" in hits and hits["lru"] > hits["optimum"]:
            raise Problem(f"lru hit more than the optimum: {hits}")
        if "infinite" in hits and max(hits.values()) > hits["infinite"]:
            raise Problem(f"more hits than in an unlimited pool: {hits}")


POLICIES = ("lru", "hazard", "optimum", "infinite", "lfu", "gdsf", "s3fifo", "arc", "tlru")


def read_somehow(rng: Rng, folder: Folder, path: Path, options: tuple[str, ...] = ()) -> None:
    """Give a trace to a command, and check its answer."""
    text = ("--tokenizer", rng.choice(("words", "bytes")))
    command = rng.randrange(6)
    if command < 2:
        found = run("trace", "info", path, "--json", "--tokenizer", "words", *options)
        if found is not None:
            check_info(path, found, options)
    elif command == 2:
        out = folder.path / "converted.jsonl.gz"
        out.unlink(missing_ok=True)
        run("trace", "convert", path, "--out", out, *text, *options)
        if out.exists():
            page = ("--page-size", "512", "--json")
            one = run("trace", "info", path, *text, *options, *page)
            other = run("trace", "info", out, *page)
            for field in ("requests", "input_tokens", "pages", "distinct_pages", "output_tokens"):
                if one[field] != other[field]:
                    raise Problem(f"converted, {field} is {other[field]} and was {one[field]}")
    elif command < 5:
        policies = ",".join(rng.sample(POLICIES, 3))
        model = rng.choice(("llama-3-8b", "deepseek-v3"))
        size = rng.choice(("20%", "3pages", "60%", "unlimited"))
        extra = rng.choice(
            ((), ("--serving",), ("--tree",), ("--page-size", "64"), ("--round-up",), ("--known", "all"))
        )
        if "--serving" in extra:
            policies = "lru,hazard"
        line = ("--model", model, "--policy", policies, "--capacity", size, *extra, *text, *options)
        found = run("simulate", path, *line, "--json")
        if found is not None and "--serving" not in extra:
            check_runs(found)
    else:
        run("explain", path, "--model", "llama-3-8b", "--capacity", "30%", *text, *options, "--json")


def traces(rng: Rng, folder: Folder) -> None:
    """Traces of every format, with wrong fields, damaged bytes and damaged compression."""
    name = rng.choice((*SAMPLES, "few_shot", "good"))
    if name == "few_shot":
        files = {file: damaged(rng, data) for file, data in rng.choice(list(FEW_SHOT.values())).items()}
        data = archive(files)
    else:
        if name == "good":
            rows = [
                json.loads(line) for line in folder.good.read_bytes().splitlines()[: rng.choice((1, 5, 30))]
            ]
        else:
            rows = copy.deepcopy(SAMPLES[name]) * rng.choice((1, 1, 3))
        at = rng.randrange(len(rows))
        rows[at] = mutated(rng, rows[at])
        data = (
            encoded(rows) if rng.random() < 0.85 else json.dumps(rows, indent=rng.choice((None, 1))).encode()
        )
        if name == "ragpulse" and rng.random() < 0.3:
            table = rng.choice(list(TABLES))
            folder.write(f"ragpulse_{table}.jsonl", encoded(mutated(rng, TABLES[table]) or []))
    path = folder.write(f"{name}_0_trace.jsonl", packed(rng, data))
    options = ("--block-size", rng.choice(("1", "16", "512"))) if rng.random() < 0.2 else ()
    try:
        read_somehow(rng, folder, path, options)
    finally:
        for table, chunks in TABLES.items():
            folder.write(f"ragpulse_{table}.jsonl", lines(chunks))


def configs(rng: Rng, folder: Folder) -> None:
    """Configs of known models with wrong fields."""
    config = mutated(rng, PRESETS[rng.choice(sorted(PRESETS))])
    data = json.dumps(config).encode()
    path = folder.write("config.json", damaged(rng, data) if rng.random() < 0.1 else data)
    try:
        found = run("plan", "--model", path, "--memory", "80GiB", "--weights", "10GiB", "--json")
        if (
            found is not None
            and found["tokens"] is not None
            and (found["token_bytes"] - 1) * found["tokens"] > 70 << 30  # it is rounded up
        ):
            raise Problem(f"{found['tokens']} tokens do not fit")
    finally:
        path.unlink()


def tables(rng: Rng, folder: Folder) -> None:
    """Files of what ``hazard`` has learned."""
    good = json.loads((folder.path / "tables.json").read_text())
    data = json.dumps(mutated(rng, good)).encode()
    path = folder.write("mutated.json", damaged(rng, data) if rng.random() < 0.15 else data)
    line = ("--model", "llama-3-8b", "--policy", "hazard,lru", "--capacity", "20%")
    found = run("simulate", folder.good, *line, "--set", f"hazard.tables={path}", "--json")
    if found is not None:
        check_runs(found)


def arrivals(rng: Rng, folder: Folder) -> None:
    """Files of arrival times."""
    rows = [f"2023-11-16 18:15:{second:02}.6805900,{second},5" for second in range(5)]
    rows[rng.randrange(5)] = ",".join(
        rng.choice((*TEXTS, "2023-11-16 18:15:46", "9999-12-31 23:59:59", "3", "0"))
        for _ in range(rng.choice((1, 3, 3, 4)))
    )
    path = folder.write(
        "times.csv", packed(rng, HEADER + b"\n" + "\n".join(rows).encode("utf-8", "surrogateescape") + b"\n")
    )
    run("trace", "info", folder.good, "--retime", path, *rng.choice(((), ("--json",))))


def options(rng: Rng, folder: Folder) -> None:
    """Values of every option of every command."""
    name = rng.choice(sorted(COMMANDS))
    command = cli.get_command(click.Context(cli), name)
    words: list[str] = [name]
    if isinstance(command, click.Group):
        name = rng.choice(sorted(command.commands))
        words.append(name)
        command = command.commands[name]
    assert command is not None
    required = {"--model": "llama-3-8b", "--memory": "80GiB", "--out": str(folder.path / "new.jsonl")}
    required["--from"] = "sglang-log"
    good = str(folder.good)
    arguments = {"trace_path": good, "path": good, "paths": good, "folder": good, "name": "chat"}
    arguments |= {"shell": "bash", "server": "vllm"}
    hostile = [
        *map(str, NUMBERS),
        *TEXTS,
        "5%",
        "0%",
        "1e5%",
        "1B",
        "3pages",
        "lru,lru",
        "a=b",
        "chat.requests=3",
    ]
    taken = [param for param in command.params if isinstance(param, click.Option)]
    for param in rng.sample(taken, min(len(taken), rng.choice((1, 1, 2, 4)))):
        flag = param.opts[0]
        # Processes, what the memory is bounded by, and other machines.
        if flag in ("--ray", "--jobs", "--max-line", "--url"):
            continue
        required.pop(flag, None)
        words.append(flag)
        if not param.is_flag:
            words.append(
                rng.choice(
                    list(param.type.choices)
                    if isinstance(param.type, click.Choice) and rng.random() < 0.5
                    else hostile
                )
            )
    if "--requests" in words and (asked := words[words.index("--requests") + 1]).isdigit():
        words[words.index("--requests") + 1] = asked if int(asked) > 10**9 else str(min(int(asked), 1000))
    for param in taken:
        if param.opts[0] in required and param.required:
            words += [param.opts[0], required[param.opts[0]]]
    if name == "watch" and "--file" not in words:
        words += ["--file", good]
    if name == "workload" and "--requests" not in words:
        words += ["--requests", "20"]
    for given in command.params:
        if isinstance(given, click.Argument):
            words.append(rng.choice(hostile) if rng.random() < 0.1 else arguments[given.name or ""])
    run(*words)


def settings(rng: Rng, folder: Folder) -> None:
    """Settings of policies, plugins and workloads."""
    said = rng.choice((*map(json.dumps, (value(rng), value(rng))), *TEXTS))
    if rng.random() < 0.5:
        name = rng.choice(sorted(WORKLOADS))
        fields = workload_settings(name).model_dump()
        chosen = rng.choice(sorted(fields))
        inner = fields[chosen]
        field = (
            f"{chosen}.{rng.choice(sorted(inner))}"
            if isinstance(inner, dict) and rng.random() < 0.8
            else chosen
        )
        bounds = ("--requests", "20") if field != "requests" else ()
        if field == "requests" and said.isdigit() and 1000 < int(said) < 10**9:
            said = "1000"  # what is asked for is made, and takes its time
        run("workload", name, "--out", folder.path / "new.jsonl", *bounds, "--set", f"{field}={said}")
        return
    policy = rng.choice([each for each in get_plugins().describe()["policies"] if each["settings"]])
    field = rng.choice(list(policy["settings"]))
    line = (
        "--model",
        rng.choice(("llama-3-8b", "qwen3-next")),
        "--policy",
        f"{policy['name']},lru",
        "--capacity",
        "20%",
    )
    found = run("simulate", folder.good, *line, "--set", f"{policy['name']}.{field}={said}", "--json")
    if found is not None:
        check_runs(found)


def paths(rng: Rng, folder: Folder) -> None:
    """Files that are no files, and names that are no names."""
    names = (
        "folder",
        "loop",
        "nowhere",
        "pipe",
        "missing",
        "\udcff\x1b[2J\n.jsonl",
        "x" * 300,
        "folder/..",
        "",
        "-",
    )
    place = rng.choice(
        (*(str(folder.path / name) for name in names[:-1]), "-", "/dev/null", "/dev/zero", "/dev/full")
    )
    line = rng.choice(
        (
            ("trace", "info", place),
            ("trace", "convert", folder.good, "--out", place),
            ("trace", "info", folder.good, "--retime", place),
            ("workload", "random", "--requests", "3", "--out", place),
            ("plan", "--model", place or "x", "--memory", "80GiB"),
            ("simulate", place, "--model", "llama-3-8b", "--capacity", "20%"),
            ("simulate", folder.good, "--model", "llama-3-8b", "--capacity", "20%", "--plot", place),
            ("simulate", folder.good, "--model", "llama-3-8b", "--capacity", "20%", "--report", place),
            ("explain", folder.good, "--model", "llama-3-8b", "--save-tables", place),
            ("explain", folder.good, "--model", "llama-3-8b", "--set", f"hazard.tables={place}"),
        )
    )
    if "converted" in line:
        return
    run(*line, stdin=rng.choice((b"", folder.good.read_bytes(), rng.randbytes(100))))
    if not folder.good.stat().st_size or not (folder.path / "pipe").is_fifo():
        raise Problem("a file was written over")
    left = [path.name for path in folder.path.iterdir() if path.name.startswith(".costcache-")]
    if left:
        raise Problem(f"left behind: {left}")


KEYS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: [rng.randrange(4) for _ in range(rng.randrange(40))],
    lambda rng: np.array(
        [rng.randrange(4) for _ in range(rng.randrange(40))], rng.choice(("i4", "i8", "u2"))
    ),
    lambda rng: rng.choice(
        (None, 3, "text", b"12345678", [1.5], [[1]], [2**70], [-1], {1: 2}, np.zeros((2, 2)))
    ),
    lambda rng: [value(rng)],
)


def cache(rng: Rng, folder: Folder) -> None:  # the signature of a surface
    """Calls of ``RadixCache``, right and wrong: an error at the call, and a cache that adds up."""
    policy = rng.choice(("lru", "hazard", "lfu", "s3fifo", "gdsf"))
    pool = RadixCache("deepseek-v3", rng.choice((16, 64, 200)), rng.choice((1, 4)), policy)
    held: list[Any] = []
    slots: list[Any] = []
    for step in range(rng.choice((10, 40))):
        tokens = KEYS[0 if rng.random() < 0.8 else rng.randrange(len(KEYS))](rng)
        call = rng.randrange(7)
        try:
            if call < 2:
                held.append(pool.match_prefix(tokens, request=step).node)
            elif call < 4:
                pool.insert(tokens, request=step)
            elif call == 4:
                amount = rng.randrange(20) if rng.random() < 0.8 else value(rng)
                slots.append(pool.allocate(amount))
            elif call == 5:
                pool.evict(rng.randrange(20) if rng.random() < 0.8 else value(rng))
            elif held and rng.random() < 0.5:
                node = held[-1]
                pool.lock(node)
                pool.unlock(node)
            elif slots:
                pool.release(slots.pop())
            else:
                pool.finish(step)
        except (CostcacheError, ValueError, TypeError, OverflowError, RuntimeError) as error:
            if not str(error):
                raise Problem(f"{type(error).__name__} without a word") from error
        if pool.free + pool.cached + pool.reserved != pool.pool_size or min(pool.free, pool.cached) < 0:
            raise Problem(
                f"{pool.free} free + {pool.cached} cached + {pool.reserved} reserved, {pool.pool_size} in all"
            )


def plugin_names(rng: Rng, folder: Folder) -> None:
    """Names and folders of new plugins: a whole distribution is written, or nothing."""
    letters = "abz09-_./ \n$"
    made = "".join(rng.choice(letters) for _ in range(rng.choice((1, 3, 3, 300))))
    name = rng.choice(
        (made, made, rng.choice(TEXTS), "lru", "costcache", "class", "mla", f"a{rng.randrange(99)}")
    )
    own = folder.path / "plugin"
    target = own / rng.choice(("", "x", "folder/../y", "x" * 300))
    place = rng.choice(
        (target, target, folder.path / "folder", folder.good, folder.path / "loop", "/dev/null")
    )
    result = costcache_(
        rng.choice(("new-policy", "new-architecture")), "--out", str(place), "--", name.replace("\x00", "")
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code == 0:
        files = list(Path(place).rglob("*.py"))
        if len(files) < 2:
            raise Problem(f"wrote {files} only")
        for path in files:
            compile(path.read_text(encoding="utf-8"), str(path), "exec")
        shutil.rmtree(place)
        (folder.path / "folder").mkdir(exist_ok=True)  # other inputs need it
    elif result.exit_code == 1 and result.stderr.count("\n") != 1:
        raise Problem(f"an error of several lines: {result.stderr[:300]!r}")
    elif any(own.rglob("*.*")):
        shutil.rmtree(own)  # or every later input finds them
        raise Problem("an error left files behind")


def hints(rng: Rng, folder: Folder) -> None:
    """What a client sends along: read, or left out, and never an error."""
    given = {rng.choice((*sorted(HINTS), *TEXTS)): value(rng) for _ in range(rng.randrange(4))}
    said: Any = rng.choice((given, given, value(rng)))
    if rng.random() < 0.4:
        said = json.dumps(said)
        said = said[: rng.randrange(len(said) + 1)] if rng.random() < 0.3 else said
    info = read_hints(said)
    pool = RadixCache("deepseek-v3", 64, 1, rng.choice(("hazard", "lru", "wild")))
    for at in range(3):
        pool.insert([at % 2] * 40, request=at)
        pool.finish(at, info)
    if info != NO_HINTS and not isinstance(said, dict | str):
        raise Problem(f"{said!r} was read as {info}")


def vllm_settings(rng: Rng, folder: Folder) -> None:
    """Settings inside vLLM and its offload tier: read, or an error of one line that says what is wrong."""
    fields = sorted(OffloadSettings.model_fields)
    given: Any = {rng.choice((*fields, *TEXTS)): value(rng) for _ in range(rng.randrange(1, 4))}
    said = rng.choice((given, given, value(rng), rng.choice(TEXTS), json.dumps(given)))
    own = rng.choice((None, {rng.choice(fields): value(rng)}, value(rng)))
    transfer = SimpleNamespace(kv_connector_extra_config={"costcache": own})
    config = SimpleNamespace(
        additional_config=rng.choice(({"costcache": said}, said)),
        kv_transfer_config=rng.choice((None, transfer)),
    )
    policy = rng.choice((None, None, "lru", rng.choice(TEXTS)))
    try:
        server = read_config(config)
        settings = read_offload_config(config, policy)
        if server is not None:
            Binding.of(ModelSpec.preset("llama-3-8b"), Deployment(), server)
        Binding.of(ModelSpec.preset("llama-3-8b"), Deployment(), settings)
    except CostcacheError as error:
        if not str(error) or "\n" in str(error):
            raise Problem(f"not one line: {str(error)[:300]!r}") from error


SURFACES: dict[str, tuple[int, Callable[[Rng, Folder], None]]] = {
    "traces": (8, traces),
    "options": (4, options),
    "configs": (3, configs),
    "settings": (3, settings),
    "cache": (2, cache),
    "tables": (2, tables),
    "paths": (1, paths),
    "arrivals": (1, arrivals),
    "plugin names": (1, plugin_names),
    "hints": (1, hints),
    "vllm settings": (2, vllm_settings),
}
"""Surfaces with the share of inputs that each gets."""
