r"""Measures eviction policies on real Engines of SGLang or vLLM: the same requests through each, in turn.

    python benchmarks/gpu/replay.py --out gpu.jsonl --model llama-3-8b --workload chat --requests 1500 \
        --rate 18 --outputs 0.125 --pool 5% --policies lru costcache costcache:lru costcache lru
    python benchmarks/gpu/report.py gpu.jsonl > benchmarks/results/gpu.md

    python benchmarks/gpu/replay.py --server vllm --out gpu_vllm.jsonl --requests 1500 --rate 18 \
        --outputs 0.125 --pool 5% --policies stock hazard hazard stock
    python benchmarks/gpu/report.py gpu_vllm.jsonl > benchmarks/results/gpu_vllm.md

Needs SGLang 0.5.23 or vLLM 0.33.0 with costcache installed beside it, and a GPU. For SGLang ``lru`` is its
own cache; costcache's names are those of ``--radix-eviction-policy``. For vLLM ``stock`` is vLLM itself;
other names are those of ``costcache plugins``. One Engine per distinct policy is started, all at once; then
they run one at a time, in the order given. Give an order that is a palindrome, so that drift over time
affects all policies alike. Before each run the Engine is warmed up and its cache is emptied.

With vLLM's offload tier (``kv_transfer_config`` in ``--engine``) a policy is ``NAME+TIER``:
``stock+vllm-lru`` is vLLM's own in both, ``stock+vllm-arc`` has vLLM's ARC in the tier, and
``hazard+hazard`` costcache's in both.

``costcache{"headroom": 0.005}`` is the policy ``costcache`` with settings: the JSON object of
``--radix-eviction-policy-config`` or, in vLLM, the other keys of costcache's entry in
``--additional-config``. ``costcache@FOLDER`` is the policy of another build, imported from FOLDER: for
example plain Python beside the compiled package, installed with
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
from server import Job, Server, main
from sglang_server import SglangServer
from vllm_server import VllmServer
from workload import Workload, build

from costcache.sim.trace import Trace

SERVERS: dict[str, type[Server]] = {"sglang": SglangServer, "vllm": VllmServer}


class Policy(NamedTuple):
    """A policy to measure.

    Attributes:
        text: The policy as given on the command line.
        name: Its name in the server.
        settings: Its settings.
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


class Running(NamedTuple):
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
    kind: type[Server], policies: list[Policy], model: Path, pool: int, extra: dict[str, Any], folder: Path
) -> list[Running]:
    """Start an Engine for each policy and wait until all of them are up."""
    context = multiprocessing.get_context("spawn")
    each = [kind.arguments(model, pool, one.name, one.settings, at, extra) for at, one in enumerate(policies)]
    servers = []
    for number, (policy, chosen) in enumerate(zip(policies, each, strict=True)):
        ours, theirs = context.Pipe()
        log = folder / f"{number}-{policy.name.replace(':', '-')}.log"
        process = context.Process(target=main, args=(theirs, kind, {**kind.defaults, **chosen}, log))
        with imports_from(policy.folder):
            process.start()
        theirs.close()
        servers.append(Running(policy.text, process, ours, log))
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
    parser.add_argument("--server", choices=SERVERS, default="sglang")
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
        default=None,
        metavar="POLICY",
        help="in running order; NAME{JSON} has settings, NAME@FOLDER is imported from a folder",
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="more Engine arguments, as JSON")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the Engines' logs")
    chosen = parser.parse_args()
    if chosen.policies is None:
        stock = Policy.read(SERVERS[chosen.server].stock)
        ours = Policy.read("costcache")
        chosen.policies = [stock, ours, ours, stock]
    return chosen


def run() -> None:
    """Run all policies and append their figures to the file."""
    chosen = options()
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="costcache-gpu-"))
    kind = SERVERS[chosen.server]
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
        kind,
        list({policy.text: policy for policy in chosen.policies}.values()),
        model,
        pool,
        chosen.engine,
        logs,
    )
    failed = False
    try:
        ups = {server.policy: server.answer() for server in servers}
        for policy, up in ups.items():
            note(began, f"{policy}: up in {up['seconds']} s, costcache {up['packages'].get('costcache')}")
        common = {
            "server": chosen.server,
            "model": chosen.model,
            "workload": workload.as_dict(),
            "pool": pool,
            "distinct": distinct,
            "engine": {**kind.defaults, **chosen.engine},
            "order": [policy.text for policy in chosen.policies],
        }
        by_policy = {server.policy: server for server in servers}
        with chosen.out.open("a") as out:
            for clients in (number or None for number in chosen.clients):
                job = Job(prompts, outputs, times, clients)
                for turn, policy in enumerate(chosen.policies):
                    by_policy[policy.text].pipe.send(job)
                    found = by_policy[policy.text].answer()
                    log = by_policy[policy.text].log.read_text(errors="replace")
                    line = {
                        **common,
                        "clients": clients,
                        "packages": ups[policy.text]["packages"],
                        "policy": policy.name,
                        "settings": policy.settings,
                        "folder": policy.folder,
                        "turn": turn,
                        "took_over": log.count("takes over"),
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
    prompt, cached = (sum(each[key] for each in requests) for key in ("prompt", "cached"))
    times = sorted(each["ttft"] for each in requests)
    late = max((each.get("late", 0.0) for each in requests), default=0.0)
    points = " ".join(
        f"p{share} {1e3 * times[min(len(times) - 1, len(times) * share // 100)]:.1f}"
        for share in (50, 90, 99)
    )
    return (
        f"{found['seconds']:.1f} s, cached {cached / prompt:.4f} "
        f"(from the host {found['host'] / prompt:.4f}), recomputed {prompt - cached:,}, "
        f"TTFT ms mean {1e3 * sum(times) / len(times):.1f} {points}, sent late at most {1e3 * late:.0f} ms"
    )


if __name__ == "__main__":  # the Engines' processes import this file again
    run()
