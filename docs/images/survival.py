"""Draw survival.png: survival curves that the hazard policy learned on two recorded traces.

    python docs/images/survival.py

Needs matplotlib (the extra ``plot``), and the traces in $COSTCACHE_TRACES or ../shared/traces.
"""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib.pyplot as plt  # noqa: TID253 # a script that draws, and nothing else
import numpy as np

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.bins import edges
from costcache.radix.tree import RadixTree
from costcache.settings import Settings
from costcache.sim.replay import replay
from costcache.sim.traces import load_trace

HERE = Path(__file__).resolve().parent
TRACES = Path(os.environ.get("COSTCACHE_TRACES", HERE.parents[2] / "shared" / "traces"))
FILES = {
    "Mooncake conversation": "mooncake_conversation.jsonl.gz",
    "Claude Code agents (Weka v8)": "weka_cc_v8_local_60sessions.jsonl.gz",
}


def main() -> None:
    """Replay both with a pool of 5 % and draw the classes of which most was seen."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, (name, file) in zip(axes, FILES.items(), strict=True):
        trace = load_trace(TRACES / file)
        capacity = trace.distinct_pages(512) // 20 * 512
        keys = trace.page_keys(512)
        binding = Binding.of(
            ModelSpec.preset("llama-3-8b"), Deployment(page_size=512), Settings(policy="hazard")
        )
        tree = RadixTree(binding, capacity, page_bytes=keys.bytes_per_page)
        replay(trace, keys, tree)
        order = tree.pool.order
        if not isinstance(order, Hazard):
            raise TypeError("the policy was dropped")
        for each in sorted(order.snapshot().classes, key=lambda c: -c.ended)[:6]:
            axis.plot(edges()[1:], np.cumprod(1 - np.array(each.shares)), label=each.name)
        axis.set(xscale="log", xlim=(0.5, trace.timestamps[-1] if "conv" in file else 20_000), title=name)
        axis.set_xlabel("seconds since the last use")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share not used again yet")
    figure.savefig(HERE / "survival.png", dpi=110)


if __name__ == "__main__":
    main()
