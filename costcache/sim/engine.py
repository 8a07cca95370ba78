"""The simulator: one trace, one deployed model, any number of policies and capacities.

Policies come from plugins; two offline ones are built in: ``infinite``, a pool without limit, and
``optimum``. Plain LRU is replayed page by page, or read off one pass over the trace at every capacity,
wherever that equals the result of the tree: with tails trimmed exactly, no headroom, and a plugin that evicts
the exact shortfall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from costcache.binding import Binding
from costcache.cost import longest_window, sequence_bytes, split_tokens
from costcache.deployment import SWA_RATIO
from costcache.errors import SettingsError
from costcache.plugins import PluginManager, get_plugins
from costcache.radix.tree import RadixTree
from costcache.sim.results import Outcome, Run, first_token_seconds, make_run
from costcache.sim.ttft import prefill_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from costcache.deployment import Deployment, WindowLayout
    from costcache.model import ModelSpec
    from costcache.orders import VictimOrder
    from costcache.radix.states import StateTree
    from costcache.radix.windows import WindowTree
    from costcache.records import NodeRecord
    from costcache.settings import Settings
    from costcache.sim.paths import PageOutcome, PagePaths
    from costcache.sim.requests import Known
    from costcache.sim.runs import PageRuns
    from costcache.sim.serving import Server
    from costcache.sim.settings import ServingSettings, TiersBelow
    from costcache.sim.stack import LRUCurve
    from costcache.sim.tiers.outcome import TieredOutcome
    from costcache.sim.trace import Trace

__all__ = ["OFFLINE", "Simulator"]

OFFLINE = {
    "infinite": "A pool without limit: no policy can hit more.",
    "optimum": "The offline optimum at this capacity: Belady's rule on the pages of the tree.",
}
"""The simulator's own policies, each with a description."""

_MOST_PAGES = 6_000_000
"""Most pages, of all prompts together, for a pass page by page: it takes about 200 bytes a page."""

_MOST_MOVED = 2048
"""Tokens that are evicted and moved between tiers at once, at most."""
_LATENCY, _DISK_LATENCY = 50e-6, 200e-6
"""Seconds of a transfer besides its bytes: a copy's launch and completion, and a read of an NVMe drive."""


class Simulator:
    """Replays one trace.

    Attributes:
        trace: The requests, in order of time.
        keys: Their pages.
        cost: Bytes and FLOPs of the model's tokens.
        prefill: Seconds of a prefill.
        warmup: Requests at the start that rates and times leave out.
        state_share: Models with states: share of the memory reserved for states; None if it has one pool.
    """

    def __init__(
        self,
        trace: Trace,
        model: ModelSpec,
        deployment: Deployment,
        *,
        plugins: PluginManager | None = None,
        prefill: str = "auto",
        warmup: int = 0,
        state_share: float | None = None,
        known: Known = "server",
    ) -> None:
        """Prepare a trace for replay.

        Args:
            trace: The requests, in order of time.
            model: The model's architecture facts.
            deployment: Page size, parallelism and KV dtype.
            plugins: Plugin manager; the process's own by default.
            prefill: Name of the prefill model; see :func:`costcache.sim.ttft.prefill_model`.
            warmup: Requests at the start that rates and times leave out.
            state_share: Models with states: share of the memory reserved for states; None for one pool
                of KV and states, counted in bytes. Capacities are in tokens of KV either way.
            known: What policies are told of a request: ``"server"`` for what a server would know of it,
                ``"all"`` for all that the trace says; see :class:`~costcache.sim.requests.RequestInfos`.

        Raises:
            PluginError: If no plugin can serve the model.
            SettingsError: If there is no such prefill model, or the warm-up leaves no requests.
        """
        if warmup < 0 or (warmup and warmup >= len(trace)):
            raise SettingsError(f"warmup is {warmup} requests of {len(trace)}: leave some to measure")
        self.trace = trace
        self.warmup = warmup
        self._model = model
        self._deployment = deployment
        self._plugins = get_plugins() if plugins is None else plugins
        self._architecture = self._plugins.match(model)
        self.cost = self._architecture.cost(deployment)
        self.prefill = prefill_model(prefill, self.cost)
        self._prefill_name = prefill
        self.state_share = state_share
        self._known = known
        self.keys = trace.page_keys(deployment.page_size)
        self._curve: LRUCurve | None = None
        self._lru_was_run = False

    @property
    def arguments(self) -> tuple[Trace, ModelSpec, Deployment, dict[str, Any]]:
        """Arguments to rebuild this simulator in another process, except the plugins."""
        options = {
            "prefill": self._prefill_name,
            "warmup": self.warmup,
            "state_share": self.state_share,
            "known": self._known,
        }
        return self.trace, self._model, self._deployment, options

    @cached_property
    def paths(self) -> PagePaths:
        """The trace's pages, numbered."""
        from costcache.sim.paths import page_paths

        return page_paths(self.keys)

    @cached_property
    def runs(self) -> PageRuns:
        """The trace's pages, run by run."""
        from costcache.sim.runs import page_runs

        return page_runs(self.keys)

    def run(
        self,
        settings: Settings,
        capacity_tokens: int | None,
        *,
        capacity: str = "",
        serving: ServingSettings | None = None,
        always_free: bool = False,
        tree: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Run:
        """Replay the trace under one policy at one capacity.

        Args:
            settings: Policy and its settings, headroom, trimming.
            capacity_tokens: Tokens in the pool; None for no limit.
            capacity: The capacity as it was written, for the report.
            serving: Replay on a server with a queue, locks and output; None for the plain mode.
            always_free: Restore the free target after every request, not only when an eviction has a
                shortfall.
            tree: Replay through the tree even where a pass page by page gives the same result.
            progress: Called now and then with the number of requests done since the last call.

        Raises:
            PluginError: If there is no such policy, or it cannot serve the model.
            SettingsError: If a setting is wrong.
        """
        outcome = self.outcome(
            settings, capacity_tokens, serving=serving, always_free=always_free, tree=tree, progress=progress
        )
        return self.figures(outcome, settings, capacity_tokens, capacity=capacity)

    def outcome(
        self,
        settings: Settings,
        capacity_tokens: int | None,
        *,
        serving: ServingSettings | None = None,
        always_free: bool = False,
        tree: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Replay as :meth:`run` does, and return the result of each request instead of the figures.

        Raises:
            PluginError: If there is no such policy, or it cannot serve the model.
            SettingsError: If a setting is wrong, or the pool is smaller than a page.
        """
        self.check(settings, capacity_tokens)
        if self._model.has_states and (serving is not None or always_free):
            raise SettingsError(
                f"model {self._model.name!r} has states, and is replayed in the plain mode "
                "alone: leave out --serving and --always-free"
            )
        if settings.policy == "infinite" and serving is not None:
            unlimited = self._tree(
                settings.model_copy(update={"policy": "lru"}), None, serving, False, progress
            )
            return replace(unlimited, policy="infinite")
        if settings.policy in OFFLINE:
            if serving is not None:
                raise SettingsError(f"policy {settings.policy!r} is for the plain mode: leave out --serving")
            limit = None if settings.policy == "infinite" else capacity_tokens
            return self._offline(settings, limit, progress)
        if not tree and serving is None and self._by_pages(settings):
            outcome = self._pages("lru", lambda: self._lru_pages(self._in_pages(capacity_tokens)))
            if progress is not None:
                progress(len(self.trace))
            return outcome
        return self._tree(settings, capacity_tokens, serving, always_free, progress)

    def tiered(
        self,
        settings: Settings,
        capacity_tokens: int,
        tiers: TiersBelow | None,
        *,
        serving: ServingSettings | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TieredOutcome:
        """Replay on a server with tiers of memory below its device; see :mod:`costcache.sim.tiers`.

        Args:
            settings: Policy of every tier, and its settings.
            capacity_tokens: Tokens of KV that fit on the device; states take room from them.
            tiers: The tiers below; None for the device alone.
            serving: The server, with the queue that it has in any case.
            progress: Called now and then with the number of requests done since the last call.

        Raises:
            PluginError: If there is no such policy, or it cannot serve the model.
            SettingsError: If a setting is wrong, or the model's windows are in a pool of their own.
        """
        from costcache.sim.settings import ServingSettings
        from costcache.sim.tiers import Below, TieredServer
        from costcache.sim.tiers.extents import extents
        from costcache.tiers import make_writing

        if settings.policy in OFFLINE:
            raise SettingsError(
                f"policy {settings.policy!r} has no tiers: leave it out, or leave out the host"
            )
        if self.window_layout not in (None, "one-pool"):
            raise SettingsError(
                f"model {self._model.name!r} keeps sliding windows apart, which are not replayed over tiers: "
                "set window_layout to one-pool (--window-layout one-pool)"
            )
        self.check(settings, capacity_tokens)
        below = []
        if tiers is not None:
            below.append(Below("host", tiers.host, tiers.link, _LATENCY))
            if tiers.disk is not None and tiers.disk_bandwidth is not None:
                below.append(Below("disk", tiers.disk, tiers.disk_bandwidth, _DISK_LATENCY))
        return TieredServer(
            self.trace,
            extents(self.runs, self._deployment.page_size, _MOST_MOVED),
            self._bind(settings),
            int(capacity_tokens * self.token_bytes),
            below,
            make_writing(tiers.write if tiers is not None else "write_back"),
            self.prefill,
            serving or ServingSettings(),
            known=self._known,
            progress=progress,
        ).run()

    def figures(
        self, outcome: Outcome, settings: Settings, capacity_tokens: int | None, *, capacity: str = ""
    ) -> Run:
        """The figures of an :meth:`outcome` of these settings and this capacity."""
        return make_run(
            outcome,
            self.trace,
            self.cost,
            self.prefill,
            policy=settings.policy,
            plugin=self._architecture.name,
            capacity=capacity,
            capacity_tokens=None if settings.policy == "infinite" else capacity_tokens,
            warmup=self.warmup,
        )

    def ttft(self, outcome: Outcome) -> NDArray[np.float64]:
        """Seconds to the first token of each request after the warm-up, float64 of shape [requests]."""
        return first_token_seconds(outcome, self.trace, self.prefill, self.warmup)

    def lru_curve(self, settings: Settings) -> LRUCurve | None:
        """LRU at every capacity, in the plain mode; None if it cannot be read off one pass.

        Args:
            settings: Settings with policy ``lru``.
        """
        return self._lru_curve() if self._by_pages(settings) else None

    def check(self, settings: Settings, capacity_tokens: int | None) -> str:
        """Check that a replay can begin, and return the policy's own name.

        Raises:
            PluginError: If there is no such policy, or it cannot serve the model.
            SettingsError: If a setting is wrong, the pool is smaller than a page, or the model keeps no KV.
        """
        if self._model.has_states and not self.cost.token.kv_bytes:
            raise SettingsError(
                f"model {self._model.name!r} keeps states and no KV, which is not replayed; 'costcache plan' "
                "says how many states fit"
            )
        page = self._deployment.page_size
        if capacity_tokens is not None and capacity_tokens < page:
            raise SettingsError(
                f"capacity_tokens is {capacity_tokens}: give a page of {page} tokens or more, or None for "
                "no limit"
            )
        if settings.policy not in OFFLINE:
            self._plugins.check_settings(settings, self._architecture)
            return self._plugins.policy_name(settings.policy, self._architecture)
        if settings.policy_settings:
            raise SettingsError(
                f"policy {settings.policy!r} has no settings: leave out policy_settings, which has "
                f"{', '.join(map(repr, settings.policy_settings))}"
            )
        return settings.policy

    def _empty_tree(self, settings: Settings, capacity_tokens: int | None, outputs: int = 0) -> RadixTree:
        if self._model.has_states:
            return self._empty_state_tree(settings, capacity_tokens)
        if capacity_tokens is None:
            tokens = int(self.trace.input_tokens.sum()) + outputs
            rest = max(self._deployment.page_size, self.trace.block_size)  # partial pages and blocks
            capacity_tokens = tokens + (2 * len(self.trace) + 1) * rest
            unlimited: int | None = capacity_tokens if self.window_layout == "own-pool" else None
        else:
            unlimited = None
        if self.window_layout in ("own-pool", "shared-pages"):
            return self._empty_window_tree(settings, capacity_tokens, unlimited)
        return RadixTree(self._bind(settings), capacity_tokens, page_bytes=self.keys.bytes_per_page)

    def _empty_window_tree(self, settings: Settings, tokens: int, unlimited: int | None) -> WindowTree:
        from costcache.radix.windows import WindowTree

        windows = self.window_capacity(tokens) if unlimited is None else unlimited
        return WindowTree(
            self._bind(settings), tokens, window_capacity=windows, page_bytes=self.keys.bytes_per_page
        )

    @cached_property
    def window_layout(self) -> WindowLayout | None:
        """Place of the sliding windows in the replay; None for a model without any.

        Models with states, and those whose every layer slides, are replayed with one pool of all layers.
        """
        token = self.cost.token
        if not token.swa_bytes:
            return None
        if self._model.has_states or not token.kv_bytes:
            return "one-pool"
        return self._deployment.window_layout

    @property
    def window_ratio(self) -> float:
        """Tokens of the pool of windows per token of the full pool."""
        return self._deployment.swa_full_tokens_ratio or SWA_RATIO

    @property
    def token_bytes(self) -> Fraction:
        """Bytes on one rank per token of a capacity: a token's KV, and its share of the pool of windows."""
        token = self.cost.token
        share = Fraction(1)
        if self.window_layout == "own-pool":
            share = Fraction(self.window_ratio).limit_denominator(10**6)
        return token.kv_bytes + share * token.swa_bytes

    @property
    def windows(self) -> str:
        """Place of the sliding windows in the replay, in words; empty for a model without any."""
        layout = self.window_layout
        if layout is None:
            return ""
        tokens = longest_window(self._model)
        if layout == "own-pool":
            where = f"in a pool of their own, {self.window_ratio:g} tokens for each token of the full pool"
        elif layout == "shared-pages":
            where = "in pages that they share with full KV"
        elif self._model.has_states:
            where = "in one pool of all layers, as for every model with states"
        elif not self.cost.token.kv_bytes:
            where = "in one pool of all layers, since every layer slides"
        else:
            where = "in one pool of all layers, which cache every token"
        return f"windows of {tokens:,} tokens {where}"

    def fitting(self, capacity_tokens: int, sequence: int) -> tuple[int, int]:
        """Tokens of sequences of one length that a capacity can cache: as assumed, and in one pool."""
        token, served = self.cost.token, self.cost.deployment
        memory = int(capacity_tokens * self.token_bytes)
        one = memory // (token.kv_bytes + token.swa_bytes)
        layout = self.window_layout
        if layout == "own-pool":
            windows = self.window_capacity(capacity_tokens) or 0
            fits = split_tokens(self._model, served, capacity_tokens, windows, sequence)
        elif layout == "shared-pages":
            fits = memory * sequence // sequence_bytes(self._model, served, token, sequence, layout)
        else:
            fits = one
        page = served.page_size
        return fits // page * page, one // page * page

    def window_capacity(self, capacity_tokens: int) -> int | None:
        """Tokens of the pool of windows beside a full pool of so many; None without one."""
        if self.window_layout != "own-pool":
            return None
        page = self._deployment.page_size
        return int(capacity_tokens * self.window_ratio) // page * page

    def _bind(self, settings: Settings) -> Binding:
        return Binding.of(self._model, self._deployment, settings, plugins=self._plugins, drops_slow=False)

    def _tree(
        self,
        settings: Settings,
        capacity_tokens: int | None,
        serving: ServingSettings | None,
        always_free: bool,
        progress: Callable[[int], None] | None,
    ) -> Outcome:
        from costcache.sim.replay import replay
        from costcache.sim.serving import serve

        outputs = 0
        if serving is not None:
            outputs = int(self.trace.output_tokens.sum())
            settings = self._as_recorded(settings)
        tree = self._empty_tree(settings, capacity_tokens, outputs)
        if serving is None:
            return replay(
                self.trace, self.keys, tree, always_free=always_free, known=self._known, progress=progress
            )
        server: type[Server] | None = None
        if self.window_layout in ("own-pool", "shared-pages"):
            from costcache.sim.windowed import WindowServer

            server = WindowServer
        return serve(
            self.trace,
            self.keys,
            tree,
            self.prefill,
            serving,
            always_free=always_free,
            known=self._known,
            progress=progress,
            server=server,
        )

    def _as_recorded(self, settings: Settings) -> Settings:
        """The settings with the trimming of the recorded server, for the policy that it had."""
        server = self.trace.server
        if server is None or server.trim is None or settings.trim != "auto":
            return settings
        if self._plugins.policy_name(settings.policy, self._architecture) != server.policy:
            return settings  # whose victims it might cut in another way
        trim = {"trim": "chunk", "trim_chunk": server.trim} if server.trim else {"trim": "off"}
        return settings.model_copy(update=trim)

    def _empty_state_tree(self, settings: Settings, capacity_tokens: int | None) -> StateTree:
        from costcache.radix.states import StateTree

        token = self.cost.token
        if capacity_tokens is None:
            states = 2 * len(self.trace) + 1
            whole = int(self.keys.tokens.sum()) + self._deployment.page_size
            memory = whole * token.kv_bytes + states * token.state_bytes
        else:
            memory = capacity_tokens * token.kv_bytes
        return StateTree(
            self._bind(settings),
            memory,
            state_share=None if capacity_tokens is None else self.state_share,
            page_bytes=self.keys.bytes_per_page,
        )

    def watched(
        self,
        settings: Settings,
        capacity_tokens: int | None,
        watch: Callable[[VictimOrder], VictimOrder],
        *,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[Outcome, list[NodeRecord]]:
        """Replay through the tree in the plain mode, with the policy's order wrapped.

        Args:
            settings: Policy and its settings, headroom, trimming.
            capacity_tokens: Tokens in the pool; None for no limit.
            watch: Given the policy's new order, returns the order to use.
            progress: Called now and then with the number of requests done since the last call.

        Returns:
            The outcome, and the nodes that are cached at the end.

        Raises:
            PluginError: If there is no such policy, or it cannot serve the model.
            SettingsError: If a setting is wrong, or the pool is smaller than a page.
        """
        from costcache.sim.replay import replay

        tree = self._empty_tree(settings, capacity_tokens)
        tree.pool.rank_by(tree.pool.policy, watch(tree.pool.order))
        outcome = replay(self.trace, self.keys, tree, known=self._known, progress=progress)
        return outcome, tree.pool.records()

    def _offline(
        self, settings: Settings, capacity_tokens: int | None, progress: Callable[[int], None] | None
    ) -> Outcome:
        policy = settings.policy
        if not self._model.has_states:
            from costcache.sim.optimum import optimum

            pages = self._in_pages(self._most_tokens(capacity_tokens))
            return self._pages(policy, lambda: optimum(self.runs, pages, progress))
        from costcache.sim.future import Clairvoyant
        from costcache.sim.replay import replay

        tree = self._empty_state_tree(settings.model_copy(update={"policy": "lru"}), capacity_tokens)
        if policy == "optimum":
            token, page = self.cost.token, self._deployment.page_size
            tree.pool.rank_by(policy, Clairvoyant(self.runs, page, token.kv_bytes, token.state_bytes))
        return replace(replay(self.trace, self.keys, tree, progress=progress), policy=policy)

    def _lru_pages(self, pages: int | None) -> PageOutcome:
        """LRU at one capacity; all capacities at once from the second one on."""
        from costcache.sim.stack import lru

        if self._curve is None and not self._lru_was_run and pages is not None:
            self._lru_was_run = True
            return lru(self.paths, pages)
        return self._lru_curve().at(pages)

    def _lru_curve(self) -> LRUCurve:
        from costcache.sim.stack import LRUCurve

        if self._curve is None:
            self._curve = LRUCurve(self.paths)
        return self._curve

    def _pages(self, policy: str, replay: Callable[[], PageOutcome]) -> Outcome:
        started = time.perf_counter()
        run = replay()
        seconds = time.perf_counter() - started
        page = self._deployment.page_size
        return Outcome(
            matched=run.matched * page,
            evictions=run.evictions,
            shortfall=run.shortfall * page,
            evicted=run.evicted * page,
            trimmed=None,
            oversized=run.oversized,
            seconds=seconds,
            policy=policy,
            tree=False,
        )

    def _most_tokens(self, capacity_tokens: int | None) -> int | None:
        """Tokens of full KV that fit if windows took nothing: the offline bound knows no windows."""
        if capacity_tokens is None or self.window_layout != "shared-pages":
            return capacity_tokens
        return int(capacity_tokens * self.token_bytes) // self.cost.token.kv_bytes

    def _in_pages(self, capacity_tokens: int | None) -> int | None:
        return None if capacity_tokens is None else capacity_tokens // self._deployment.page_size

    def _by_pages(self, settings: Settings) -> bool:
        architecture = self._architecture
        return (
            not self._model.has_states
            and self.window_layout in (None, "one-pool")
            and not settings.headroom
            and not settings.architecture
            and settings.trim in ("auto", "exact")
            and self._plugins.policy_name(settings.policy, architecture) == "lru"
            and int(self.keys.tokens.sum()) // self._deployment.page_size <= _MOST_PAGES
            and architecture.evicts_exactly(settings, self._deployment.page_size)
        )
