"""Decisions of a policy in a few replays, to compare two builds: ``python -m tests.unit.decisions NAME``."""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

from costcache._version import described
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.serving import ServingSettings
from costcache.sim.workloads import generate, workload_settings

__all__ = ["decisions"]


def decisions(policy: str) -> list[Any]:
    """Of each replay: tokens found, a checksum of those of each request, tokens evicted, and fallbacks."""
    found = []
    for workload, page_size in (("chat", 16), ("few-shot", 64), ("multi-turn", 16)):
        trace = generate(workload, workload_settings(workload, {"requests": 500}))
        simulator = Simulator(trace, ModelSpec.preset("deepseek-v3"), Deployment(page_size=page_size))
        pages = trace.distinct_pages(page_size)
        for settings in ({}, {"objective": "flops"}) if policy == "hazard" else ({},):
            for share, serving in ((0.03, None), (0.2, None), (0.1, ServingSettings())):
                outcome = simulator.outcome(
                    Settings(policy=policy, policy_settings=settings),
                    int(pages * share) * page_size,
                    tree=True,
                    serving=serving,
                )
                checksum = zlib.crc32(outcome.matched.tobytes())
                found.append([int(outcome.matched.sum()), checksum, outcome.evicted, outcome.fallbacks])
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps([described(), *decisions(sys.argv[1])]))
