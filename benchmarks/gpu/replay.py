r"""Measures eviction policies on real SGLang Engines: the same requests through each, in turn, on one GPU.

    python benchmarks/gpu/replay.py --out gpu.jsonl --model llama-3-8b --workload chat --requests 1500 \
        --rate 18 --outputs 0.125 --pool 5% --policies lru costcache costcache:lru costcache lru
    python benchmarks/gpu/report.py gpu.jsonl > benchmarks/results/gpu.md

Needs SGLang 0.5.23 with costcache installed beside it, and a GPU. ``lru`` is SGLang's own cache; costcache's
names are those of ``--radix-eviction-policy``. One Engine per distinct policy is started, all at once; then
they run one at a time, in the order given. Give an order that is a palindrome, so that drift over time
affects all policies alike. Before each run the Engine is warmed up and its cache is emptied.

``costcache{"headroom": 0.005}`` is the policy ``costcache`` with settings: the JSON object of
``--radix-eviction-policy-config``. ``costcache@FOLDER`` is the policy of another build, imported from FOLDER:
for example plain Python beside the compiled package, installed with
``COSTCACHE_COMPILE=0 pip install --target FOLDER .``. The report lists it separately. Both together are
``costcache{"headroom": 0.005}@FOLDER``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from models import write_model
from server import Job, main
from workload import Workload, build

from costcache.sim.trace import Trace

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "random_seed": 0,
    "enable_metrics": True,
    "max_running_requests": 64,
    "chunked_prefill_size": 8192,
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 24, 32, 48, 64],
    "cuda_graph_bs_prefill": [64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192],
}


class Policy(NamedTuple):
    """A policy to measure.

    Attributes:
        text: The policy as given on the command line.
        name: Its ``--radix-eviction-policy``.
        settings: Its ``--radix-eviction-policy-config``.
        folder: Folder from which costcache is imported; empty for the installed one.
    """

    text: str
    name: str
    settings: dict[str, Any]
    folder: str

    @classmethod
    def read(cls, text: str) -> Policy:
        """Read ``NAME``, ``NAME{JSON}``, ``NAME@FOLDER`` or ``NAME{JSON}@FOLDER``.

        Raises:
            ArgumentTypeError: If the text has none of these forms.
        """
        name, at, folder = text.partition("@")
        settings: Any = {}
        if "{" in name:
            name, brace, rest = text.partition("{")
            try:
                settings, end = json.JSONDecoder().raw_decode(brace + rest)
            except json.JSONDecodeError as error:
                raise ArgumentTypeError(
                    f"{text!r} has settings that are not a JSON object ({error.msg}, column {error.colno} of "
                    'them): give NAME{"SETTING": VALUE}, quoted for the shell'
                ) from None
            between, at, folder = (brace + rest)[end:].partition("@")
            if between:
                raise ArgumentTypeError(
                    f"{text!r} has {between!r} after its settings: only @FOLDER may follow"
                )
        if not name:
            raise ArgumentTypeError(f"{text!r} has no policy name: give NAME, NAME{{JSON}} or NAME@FOLDER")
        if at and not folder:
            raise ArgumentTypeError(f"{text!r} has no folder after the @: give NAME@FOLDER")
        return cls(text, name, settings, folder)

    @property
    def arguments(self) -> dict[str, Any]:
        """Engine arguments that choose this policy."""
        chosen: dict[str, Any] = {"radix_eviction_policy": self.name}
        if self.settings:
            chosen["radix_eviction_policy_config"] = self.settings
        return chosen


class Server(NamedTuple):
    """A process with an Engine; ``policy`` is as given on the command line."""

    policy: str
    process: Any
    pipe: Connection
    log: Path

    def answer(self) -> dict[str, Any]:
        """Wait for its next answer.

        Raises:
            RuntimeError: If the Engine failed.
        """
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except EOFError:
            answer = {"error": "its process ended"}
        if "error" in answer:
            raise RuntimeError(f"the Engine of {self.policy} failed: {answer['error']}\nlog: {self.log}")
        return answer


def start(
    policies: list[Policy], model: Path, pool: int, extra: dict[str, Any], folder: Path
) -> list[Server]:
    """Start an Engine for each policy and wait until all of them are up."""
    context = multiprocessing.get_context("spawn")
    servers = []
    for number, policy in enumerate(policies):
        arguments = {
            **ENGINE,
            "model_path": str(model),
            "max_total_tokens": pool,
            **policy.arguments,
            "port": 31000 + 1000 * number,
            **extra,
        }
        ours, theirs = context.Pipe()
        log = folder / f"{number}-{policy.name.replace(':', '-')}.log"
        process = context.Process(target=main, args=(theirs, arguments, log))
        with imports_from(policy.folder):
            process.start()
        theirs.close()
        servers.append(Server(policy.text, process, ours, log))
    return servers


@contextmanager
def imports_from(folder: str) -> Iterator[None]:
    """Make processes started within, and their children, import from this folder first.

    Raises:
        FileNotFoundError: If there is no costcache in the folder.
    """
    if not folder:
        yield
        return
    path = Path(folder).resolve()
    if not (path / "costcache").is_dir():
        raise FileNotFoundError(f"--policies has @{folder}, and {path} has no costcache: install it there")
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))


def pool_of(text: str, trace: Trace) -> int:
    """Size of a pool in tokens, from a number or a share of the prompts' distinct tokens."""
    if text.endswith("%"):
        return int(trace.distinct_pages(1) * float(text[:-1]) / 100)
    return int(text)


def note(began: float, text: str) -> None:
    """Log progress to stderr."""
    print(f"[{time.perf_counter() - began:5.0f} s] {text}", file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Eviction policies on real Engines.")
    parser.add_argument("--out", type=Path, required=True, help="file to which lines of JSON are appended")
    parser.add_argument(
        "--model", default="llama-3-8b", help="a name in models.py, or a folder with a config"
    )
    parser.add_argument("--workload", default="chat", help="a generated workload, or the path of a trace")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--shrink", type=int, default=1, help="divide prompt lengths by this")
    parser.add_argument("--outputs", type=float, default=1.0, help="scale the number of generated tokens")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument(
        "--clients",
        type=int,
        nargs="+",
        default=[0],
        help="concurrent clients instead of --rate; several numbers are measured in turn, 0 means --rate",
    )
    parser.add_argument("--pool", default="5%", help="tokens, or a share of the prompts' distinct tokens")
    parser.add_argument(
        "--policies",
        type=Policy.read,
        nargs="+",
        default=[Policy.read(name) for name in ("lru", "costcache", "costcache", "lru")],
        metavar="POLICY",
        help="in running order; NAME{JSON} has settings, NAME@FOLDER is imported from a folder",
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="more Engine arguments, as JSON")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the Engines' logs")
    return parser.parse_args()


def run() -> None:
    """Run all policies and append their figures to the file."""
    chosen = options()
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="costcache-gpu-"))
    logs = chosen.logs or folder
    logs.mkdir(parents=True, exist_ok=True)
    model = write_model(chosen.model, folder)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    workload = Workload(
        chosen.workload, chosen.requests, chosen.shrink, chosen.outputs, chosen.rate, vocabulary
    )
    trace = build(workload)
    pool = pool_of(chosen.pool, trace)
    distinct = trace.distinct_pages(1)
    note(began, f"{workload.name}: {int(trace.input_tokens.sum()):,} prompt tokens, {distinct:,} distinct")
    edges = trace.offsets.tolist()
    prompts = [trace.ids[start:stop].tolist() for start, stop in pairwise(edges)]
    outputs, times = trace.output_tokens.tolist(), trace.timestamps.tolist()
    servers = start(
        list({policy.text: policy for policy in chosen.policies}.values()), model, pool, chosen.engine, logs
    )
    failed = False
    try:
        ups = {server.policy: server.answer() for server in servers}
        for policy, up in ups.items():
            note(began, f"{policy}: up in {up['seconds']} s, costcache {up['packages'].get('costcache')}")
        common = {
            "model": chosen.model,
            "workload": workload.as_dict(),
            "pool": pool,
            "distinct": distinct,
            "engine": {**ENGINE, **chosen.engine},
            "order": [policy.text for policy in chosen.policies],
        }
        by_policy = {server.policy: server for server in servers}
        with chosen.out.open("a") as out:
            for clients in (number or None for number in chosen.clients):
                job = Job(prompts, outputs, times, clients)
                for turn, policy in enumerate(chosen.policies):
                    by_policy[policy.text].pipe.send(job)
                    found = by_policy[policy.text].answer()
                    line = {
                        **common,
                        "clients": clients,
                        "packages": ups[policy.text]["packages"],
                        "policy": policy.name,
                        "settings": policy.settings,
                        "folder": policy.folder,
                        "turn": turn,
                    }
                    out.write(json.dumps({**line, **found}) + "\n")
                    out.flush()
                    note(began, f"{policy.text}: {summary(found)}")
    except BaseException:
        failed = True
        raise
    finally:
        for server in servers:
            server.pipe.close()
        for server in servers:
            server.process.join(timeout=5 if failed else 30)
            if server.process.is_alive():
                server.process.terminate()


def summary(found: dict[str, Any]) -> str:
    """Summarise a run in one line."""
    requests = found["requests"]
    prompt, cached, host = (sum(each[key] for each in requests) for key in ("prompt", "cached", "host"))
    times = sorted(each["ttft"] for each in requests)
    late = max((each.get("late", 0.0) for each in requests), default=0.0)
    points = " ".join(
        f"p{share} {1e3 * times[min(len(times) - 1, len(times) * share // 100)]:.1f}"
        for share in (50, 90, 99)
    )
    return (
        f"{found['seconds']:.1f} s, cached {cached / prompt:.4f} "
        f"(from the host {host / prompt:.4f}), recomputed {prompt - cached:,}, "
        f"TTFT ms mean {1e3 * sum(times) / len(times):.1f} {points}, sent late at most {1e3 * late:.0f} ms"
    )


if __name__ == "__main__":  # the Engines' processes import this file again
    run()
