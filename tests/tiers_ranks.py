"""Ranks of one model over tiers: one stream of requests, copies that end as they like, the same victims.

As a script it runs the whole: ``python -m tests.tiers_ranks --steps 10000``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.tiers import MemoryStore, Prompts, Server, plugins_with

TIMEOUT = 120
"""Seconds without an end of one run, after which it counts as a deadlock."""


def serve(layout: str, write: str, policy: str, steps: int, folder: Path, *, restart: bool) -> dict[str, Any]:
    """Serve a stream of requests on this rank; returns what all ranks have to agree on."""
    from costcache.tiers import GroupRanks

    ranks = GroupRanks()
    chance = random.Random(ranks.rank + 1)  # of this rank's delays alone
    stream, prompts = random.Random(7), Prompts(11)
    store = MemoryStore()
    digest, evictions, ahead = hashlib.blake2b(digest_size=16), 0, 0

    def make() -> Server:
        server = Server(
            layout,
            write=write,
            policy=policy,
            slots=160 if write == "by_cost" else 64,  # of which a tenth has room for more than a page
            host=64 if layout == "hybrid" else 48,
            disk=160,
            path=folder,
            storage="tested",
            plugins=plugins_with(store),
            ranks=ranks,
            in_flight=1 << 14,
        )
        for line in server.tiers._lines:
            line.copies.before = lambda _: time.sleep(chance.choice((0.0, 0.0, 0.0005, 0.002)))
        mover = server.tiers._mover
        assert mover is not None

        make_ahead = mover.make_ahead

        def counted() -> int:
            nonlocal ahead
            made = make_ahead()
            ahead += made
            digest.update(f"ahead {made};".encode())
            return made

        setattr(mover, "make_ahead", counted)  # noqa: B010 # a method, to the type checker

        def victim(tier: str, node: Any) -> None:
            nonlocal evictions
            evictions += 1
            digest.update(f"{tier} {node.serial} {node.depth} {node.tokens};".encode())

        for tier in (mover.host, mover.disk):
            if tier is not None:
                tier.leaving = _both(tier.leaving, lambda node, name=tier.name: victim(name, node))
        server.cache.before_eviction(lambda node, _: _both(mover.demote, lambda n: victim("device", n))(node))
        return server

    server = make()
    begun: list[Any] = []
    served = found = 0
    for step in range(steps):
        what = stream.random()
        if what < 0.5 and len(begun) < 3:
            begun.append(server.begin(prompts.next()))
        elif what < 0.85 and begun:
            found += server.end(begun.pop(stream.randrange(len(begun))), cancel=stream.random() < 0.1)
            served += 1
        elif what < 0.9:
            server.tiers.prefetch(prompts.next())
        server.tiers.step()
        digest.update(f"{server.tiers.cached('host')} {server.tiers.cached('disk')} ".encode())
        # Faults of this rank alone: the others have to follow.
        store.refused = OSError(28, "no space left") if chance.random() < 0.02 else None
        store.denied = OSError(5, "input/output error") if chance.random() < 0.02 else None
        if restart and step == steps // 2:
            for request in begun:
                server.end(request, cancel=True)
            begun = []
            server.tiers.close()
            if ranks.rank == 1 and store.values:
                del store.values[next(iter(store.values))]
            server = make()
    for request in begun:
        found += server.end(request)
    server.tiers.drain()
    facts = {
        "digest": digest.hexdigest(),
        "evictions": evictions,
        "ahead": ahead,
        "fallbacks": [tier.pool.fallbacks for tier in tiers_of(server)],
        "served": served,
        "found": found,
        "checked": server.checked,
        "counters": {name: str(count) for name, count in server.tiers.counters.items()},
    }
    server.tiers.close()
    return facts


def tiers_of(server: Server) -> list[Any]:
    """All tiers of a server."""
    mover = server.tiers._mover
    return [] if mover is None else [tier for tier in (mover.device, mover.host, mover.disk) if tier]


def _both(first: Any, second: Any) -> Any:
    def call(node: Any) -> None:
        second(node)
        if first is not None:
            first(node)

    return call


def run(
    layout: str, write: str, policy: str, steps: int, *, size: int = 2, restart: bool = True
) -> list[Any]:
    """Run all ranks, each in a process of its own; returns the facts of each.

    Raises:
        TimeoutError: They did not end.
        RuntimeError: One of them failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [layout, write, policy, str(steps), folder, str(int(restart))]
        started = []
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path]),
            }
            started.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "tests.tiers_ranks", "--rank", *arguments],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            answers = [process.communicate(timeout=max(TIMEOUT, steps // 3)) for process in started]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the ranks did not end: {layout}, {write}, {policy}") from error
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        for process, (_, errors) in zip(started, answers, strict=True):
            if process.returncode:
                raise RuntimeError(errors[-3000:])
        return [json.loads(out.splitlines()[-1]) for out, _ in answers]


def main() -> None:
    """Run one rank, or all of them over several settings."""
    if sys.argv[1:2] == ["--rank"]:
        from torch import distributed

        layout, write, policy, steps, folder, restart = sys.argv[2:]
        distributed.init_process_group(  # they find each other by a file: no port to be taken meanwhile
            "gloo",
            init_method=f"file://{folder}/ranks",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        facts = serve(layout, write, policy, int(steps), Path(folder) / "kv", restart=bool(int(restart)))
        sys.stdout.write(json.dumps(facts) + "\n")
        distributed.destroy_process_group()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    for layout, write, policy in (
        ("mla", "write_back", "hazard"),
        ("mha", "by_cost", "hazard"),
        ("hybrid", "write_through", "lru"),
        ("windows", "write_through_selective", "s3fifo"),
        ("apart", "write_back", "hazard"),
        ("apart", "by_cost", "hazard"),
        ("hybrid", "by_cost", "hazard"),
    ):
        began = time.perf_counter()
        first, second = run(layout, write, policy, options.steps)
        same = "the same victims" if first == second else f"DIFFERENT: {first} and {second}"
        sys.stdout.write(
            f"{layout:8} {write:24} {policy:7} {options.steps} steps, {first['evictions']} evictions: {same} "
            f"({time.perf_counter() - began:.0f} s)\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
