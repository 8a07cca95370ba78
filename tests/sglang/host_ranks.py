"""One of two ranks, in a process of its own: prints every victim of streams without and with a host tier.

The ranks talk over torch.distributed's gloo, as SGLang's do. Copies between the tiers take a while that is
random and differs between the ranks.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from typing import Any

LONGEST = 0.002  # seconds of a copy


def victims(job: dict[str, Any], rank: int) -> list[Any]:
    """Every victim of one stream of random operations, on every tier."""
    import pytest
    import torch

    from tests.sglang import hicache
    from tests.sglang.fuzz import Fuzz
    from tests.sglang.pools import Shape, cost_cache
    from tests.sglang.ranks import recorded
    from tests.sglang.serving import Server

    delays = random.Random(1000 * rank + job["seed"])
    plain = dict(hicache.REPLACED)

    def slowly(copy: Any) -> Any:
        def slow_copy(*args: Any, **named: Any) -> None:
            time.sleep(delays.random() * LONGEST)
            copy(*args, **named)

        return slow_copy

    hicache.REPLACED.update({name: slowly(copy) for name, copy in plain.items()})
    group = torch.distributed.group.WORLD
    shape = Shape(
        job["kind"],
        job["page_size"],
        tokens=2048,
        states=20,
        window_tokens=1024,
        hicache=job["write"],
        params={"tp_cache_group": group},
    )
    with pytest.MonkeyPatch.context() as patch:
        hicache.patch(patch)
        fuzz = Fuzz(Server(cost_cache(shape, policy=job["policy"]), shape), job["seed"])
        seen: list[Any] = []
        for pool in fuzz.server.cache.pools.by_name.values():
            pool.take = recorded(pool.name, pool.take, seen)
        for _ in range(job["steps"]):
            fuzz.step()
        fuzz.end()
    hicache.REPLACED.update(plain)
    return seen


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    import torch

    import tests.sglang.shims.torchvision_ops  # noqa: F401  # before SGLang is imported
    from tests.sglang import ranks
    from tests.sglang.pools import Shape

    logging.disable(logging.WARNING)
    rank, store, plain, tiers = int(sys.argv[1]), sys.argv[2], *map(json.loads, sys.argv[3:])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    out = {json.dumps(job): victims(job, rank) for job in tiers}
    for job in plain:
        shape = Shape(job["kind"], job["page_size"], tokens=2048, states=20, core=job["core"])
        out[json.dumps(job)] = ranks.victims(shape, job["seed"], job["policy"])
    sys.stdout.write("\n" + json.dumps(out) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
