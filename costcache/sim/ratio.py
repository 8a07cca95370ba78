"""The split of memory between states and KV, for a server with a fixed pool for each.

SGLang's ``--mamba-full-memory-ratio`` r gives states r times the bytes of KV. The best ratio depends on the
workload: many short conversations need states, few long ones need KV. Replays at several ratios find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from costcache.binding import Binding
from costcache.errors import SettingsError
from costcache.radix.states import StateTree
from costcache.settings import Settings
from costcache.sim.replay import replay

if TYPE_CHECKING:
    from costcache.deployment import Deployment
    from costcache.model import ModelSpec
    from costcache.plugins import PluginManager
    from costcache.sim.trace import Trace

__all__ = ["CHUNK", "DEFAULT_RATIO", "RATIOS", "RatioFit", "RatioRun", "fit_ratio"]

CHUNK = 64
"""Checkpoints are at multiples of this many tokens: the chunk size of linear-attention kernels."""
DEFAULT_RATIO = 0.9
"""SGLang's own ``--mamba-full-memory-ratio``."""
RATIOS = (0.05, 0.1, 0.2, 0.4, DEFAULT_RATIO, 1.8, 3.6, 7.2)
"""The ratios to try."""


@dataclass(frozen=True, slots=True)
class RatioRun:
    """The result of one ratio.

    Attributes:
        ratio: Bytes of states over bytes of KV; None for one pool of bytes that both share.
        states: States that fit into the memory; of a shared pool, if it cached nothing else.
        tokens: Tokens that fit into it, likewise.
        token_hit_rate: Share of the prompt tokens that need no prefill.
    """

    ratio: float | None
    states: int
    tokens: int
    token_hit_rate: float


@dataclass(frozen=True, slots=True)
class RatioFit:
    """The results of all ratios.

    Attributes:
        memory: Bytes for states and KV, on one rank.
        page_size: Tokens per page of the replay.
        policy: Policy in force.
        requests: Requests of the trace.
        runs: The result of each ratio, in ascending order.
        shared: The result of one pool of bytes.
    """

    memory: int
    page_size: int
    policy: str
    requests: int
    runs: tuple[RatioRun, ...]
    shared: RatioRun

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for JSON, with the best ratio."""
        return asdict(self) | {"best": self.best.ratio}

    @property
    def best(self) -> RatioRun:
        """The run with the highest hit rate; among equals, the one nearest to SGLang's default."""
        return max(
            self.runs, key=lambda run: (run.token_hit_rate, -abs(math.log((run.ratio or 1) / DEFAULT_RATIO)))
        )


def fit_ratio(
    trace: Trace,
    model: ModelSpec,
    deployment: Deployment,
    memory: int,
    *,
    policy: str = "lru",
    ratios: Sequence[float] = RATIOS,
    plugins: PluginManager | None = None,
    progress: Callable[[int], None] | None = None,
) -> RatioFit:
    """Replay a trace at several ratios of state memory to KV memory.

    As in the plain mode: prompts only, one request at a time, with checkpoints at the ends of prompts and
    where two prompts branch. Pages are the least common multiple of the deployment's and :data:`CHUNK`.

    Args:
        trace: The requests, in order of time.
        model: A model with states.
        deployment: Page size, parallelism and KV dtype.
        memory: Bytes for states and KV, on one rank.
        policy: Eviction policy of the server.
        ratios: Ratios to try. Those that leave no room for a state or a page are skipped.
        plugins: Plugin manager; the process's own by default.
        progress: Called now and then with the number of requests done since the last call.

    Raises:
        SettingsError: If the model has no states, a ratio is not above 0, or at no ratio a state and a
            page fit into the memory.
        PluginError: If there is no such policy, or it cannot serve the model.
    """
    if not model.has_states:
        raise SettingsError(
            f"model {model.name!r} keeps no states: there is no --mamba-full-memory-ratio to choose"
        )
    for ratio in ratios:
        if not 0 < ratio < math.inf:
            raise SettingsError(f"ratio is {ratio}: give bytes of states over bytes of KV, above 0")
    page = math.lcm(deployment.page_size, CHUNK)
    served = deployment.model_copy(update={"page_size": page})
    keys = trace.page_keys(page)
    total = int(trace.input_tokens.sum())
    in_force = policy

    def run(ratio: float | None) -> RatioRun:
        nonlocal in_force
        tree = StateTree(
            Binding.of(model, served, Settings(policy=policy), plugins=plugins, drops_slow=False),
            memory,
            state_share=None if ratio is None else ratio / (1 + ratio),
            page_bytes=keys.bytes_per_page,
        )
        found = int(replay(trace, keys, tree, progress=progress).matched.sum())
        in_force = tree.pool.policy
        states = memory // tree.state_bytes if tree.state_capacity is None else tree.state_capacity
        return RatioRun(ratio, states, tree.capacity, found / total if total else 0.0)

    shared = run(None)
    runs = []
    for ratio in sorted(ratios):
        try:
            runs.append(run(ratio))
        except SettingsError:
            continue  # no room for one state, or for one page
    if not runs:
        raise SettingsError(f"memory is {memory:,} bytes: no ratio leaves room for a state and a page")
    return RatioFit(memory, page, in_force, len(trace), tuple(runs), shared)
