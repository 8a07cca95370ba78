"""One stream of random operations, as a process of its own: prints every victim as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

STEPS = 250


def victims(shape: Any, seed: int, policy: str) -> list[Any]:
    """Every victim of a stream: pool, node, place, tokens, uses, recency, what was needed, what it gave."""
    from tests.sglang.fuzz import Fuzz
    from tests.sglang.pools import cost_cache
    from tests.sglang.serving import Server

    fuzz = Fuzz(Server(cost_cache(shape, policy=policy), shape), seed)
    seen: list[Any] = []
    for pool in fuzz.server.cache.pools.by_name.values():
        pool.pipeline.host = Recorded(pool.name, pool.pipeline.host, seen)
    for _ in range(STEPS):
        fuzz.step()
    fuzz.end()
    return seen


class Recorded:
    """The host of a pipeline, with what is asked of it written down."""

    def __init__(self, pool: str, host: Any, seen: list[Any]) -> None:
        self._pool, self._host, self._seen = pool, host, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def take(self, victim: Any, needed: int) -> int:
        record = victim.record
        asked = [self._pool, record.serial, record.depth, record.tokens, record.uses, record.recency, needed]
        taken: int = self._host.take(victim, needed)
        self._seen.append([*asked, taken])
        return taken


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    import tests.sglang.shims.torchvision_ops  # noqa: F401  # before SGLang is imported
    from tests.sglang.pools import Shape

    logging.disable(logging.WARNING)
    out = {}
    for job in json.loads(sys.argv[1]):
        shape = Shape(job["kind"], job["page_size"], tokens=2048, states=20, core=job["core"])
        out[json.dumps(job)] = victims(shape, job["seed"], job["policy"])
    sys.stdout.write("\n" + json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
