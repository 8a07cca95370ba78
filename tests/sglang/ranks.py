"""One stream of random operations, as a process of its own: prints every victim as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

STEPS = 250


def victims(shape: Any, seed: int, policy: str) -> list[Any]:
    """Every victim of a stream: pool, node, place, tokens, uses and recency."""
    from tests.sglang.fuzz import Fuzz
    from tests.sglang.pools import cost_cache
    from tests.sglang.serving import Server

    fuzz = Fuzz(Server(cost_cache(shape, policy=policy), shape), seed)
    seen: list[Any] = []
    for pool in fuzz.server.cache.pools.by_name.values():
        pool.pipeline = Recorded(pool.pipeline, seen)
    for _ in range(STEPS):
        fuzz.step()
    fuzz.end()
    return seen


class Recorded:
    """A pipeline whose evictions are written down."""

    def __init__(self, pipeline: Any, seen: list[Any]) -> None:
        self._pipeline, self._seen = pipeline, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def evict(self, shortfall: int, **named: Any) -> Any:
        eviction = self._pipeline.evict(shortfall, **named)
        self._seen.append([self._pipeline.pool, shortfall, *map(list, eviction.victims)])
        return eviction


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
