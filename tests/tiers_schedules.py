"""Random schedules over tiers with real files: every byte that is served is compared with what it has to be.

As a script it runs the whole: ``python -m tests.tiers_schedules --schedules 1000``. On a machine with a GPU,
``--device cuda`` has the device's tier there.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from costcache.tiers.writing import WRITINGS
from tests.tiers import DEVICE, LAYERS, Prompts, Server

PROMPTS = 40


def schedule(seed: int, folder: Path, *, storage: str = "file", device: str = DEVICE) -> Counter[str]:
    """Serve one random stream on random tiers, with one restart; returns the tokens that each tier gave."""
    chance = random.Random(seed)
    layout = sorted(LAYERS)[seed % len(LAYERS)]
    policies = ("lru", "hazard") if layout == "hybrid" else ("lru", "hazard", "gdsf", "s3fifo")
    made: dict[str, Any] = {
        "layout": layout,
        "policy": chance.choice(policies),
        "write": chance.choice(sorted(WRITINGS)),
        "slots": chance.choice((40, 64, 96)),
        "host": chance.choice((56, 96, 200)),
        "disk": chance.choice((48, 160, 600)),
        "path": folder,
        "storage": storage,
        "device": device,
    }
    prompts, found = Prompts(seed), Counter[str]()
    for _ in range(2):
        server = Server(**made)
        for line in server.tiers._lines:
            line.copies.before = lambda _: time.sleep(chance.choice((0.0, 0.0, 0.001)))
        begun: list[Any] = []
        for _ in range(PROMPTS // 2):
            begun.append(server.begin(prompts.next()))
            while begun and (len(begun) > 2 or chance.random() < 0.6):
                server.end(begun.pop(chance.randrange(len(begun))), cancel=chance.random() < 0.1)
            if chance.random() < 0.5:
                server.tiers.step()
        for request in begun:
            server.end(request)
        server.tiers.drain()
        found["device"] += server.checked
        for name, counters in server.tiers.counters.items():
            found[name] += counters.loaded
            assert not counters.lost, "nothing failed, so nothing is lost"
        server.tiers.close()
    return found


def main() -> None:
    """Run many schedules and say what they compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--storage", default="file")
    parser.add_argument("--device", default=DEVICE)
    options = parser.parse_args()
    total, began = Counter[str](), time.perf_counter()
    for seed in range(options.first, options.first + options.schedules):
        with tempfile.TemporaryDirectory() as folder:
            total += schedule(seed, Path(folder) / "s", storage=options.storage, device=options.device)
    sys.stdout.write(
        f"{options.schedules} schedules in {time.perf_counter() - began:.0f} s on {options.device}, "
        f"{options.storage}: {total['device']:,} tokens compared, {total['host']:,} loaded from the host and "
        f"{total['disk']:,} from the disk, all bit-equal\n"
    )


if __name__ == "__main__":
    main()
