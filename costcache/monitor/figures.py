"""Figures of a server's cache over a span of time, from two samples of its metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from costcache.counts import BY_USES, BY_USES_LABEL, COUNTERS, FALLBACKS, IN_FORCE, INFO, VERDICT
from costcache.eviction import USES

if TYPE_CHECKING:
    from costcache.monitor.events import EventFigures
    from costcache.monitor.samples import Sample

__all__ = ["Figures", "PoolFigures", "figures"]

_OURS = "costcache:"
_VLLMS_PAGES = "vllm:cache_config_info"
_COUNTS = ("evictions", "victims", "trimmed", "evicted", "short", "clamped", "slow", "resets")


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Evictions of one pool in the span.

    Attributes:
        name: The pool.
        evictions: Evictions.
        victims: Nodes evicted.
        trimmed: Those evicted in part.
        evicted: Units freed: tokens, or states in the pool ``state``.
        short: Evictions that freed less than their shortfall.
        clamped: Answers of a plugin that were out of bounds.
        slow: Decisions of a plugin's policy that took longer than its time budget.
        resets: Times that all was dropped at once.
        by_uses: The victims by class: by the requests that had used them.
    """

    name: str
    evictions: float
    victims: float
    trimmed: float
    evicted: float
    short: float
    clamped: float
    slow: float
    resets: float
    by_uses: dict[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """A server's cache over a span of time. Counts are those of the span, None where they are not exposed.

    Attributes:
        server: ``"sglang"``, ``"vllm"``, or empty if it is neither.
        seconds: The span; None if it reaches back to the server's start.
        policy: Policies asked for.
        lru: Whether LRU chooses in some pool now.
        capacity: Tokens that the pool holds.
        page_size: Tokens per page.
        used: Share of the pool that running requests hold.
        occupied: Share that they hold or that is cached.
        running: Requests that run.
        waiting: Requests that wait.
        requests: Requests that ended.
        prompt_tokens: Prompt tokens.
        found_tokens: Those that were found.
        lower_tokens: Those found in a lower tier, such as the host's memory.
        gained: Tokens found that LRU would not have found.
        lost: Tokens that LRU would have found, and the policy did not: its regret.
        step_ins: Times that LRU stepped in by the policy's verdict.
        in_force: Whether it is in force by that verdict.
        fallbacks: Orders dropped for LRU, since the server's start.
        pools: Evictions by pool; empty without metrics of costcache.
        events: What the KV events of the span say; None without any.
    """

    server: str
    seconds: float | None
    policy: str
    lru: bool | None
    capacity: float | None
    page_size: float | None
    used: float | None
    occupied: float | None
    running: float | None
    waiting: float | None
    requests: float | None
    prompt_tokens: float | None
    found_tokens: float | None
    lower_tokens: float | None
    gained: float | None
    lost: float | None
    step_ins: float | None
    in_force: bool | None
    fallbacks: float
    pools: tuple[PoolFigures, ...]
    events: EventFigures | None = None

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found; None if no token was asked for."""
        if self.found_tokens is None or not self.prompt_tokens:
            return None
        return self.found_tokens / self.prompt_tokens

    @property
    def evicted(self) -> float:
        """Tokens evicted in all pools that hold tokens of the device."""
        return sum(pool.evicted for pool in self.pools if pool.name in ("kv", "memory"))

    @property
    def resets(self) -> float:
        """Times that the cache was reset."""
        counted = max((pool.resets for pool in self.pools), default=0.0)  # a reset is of all pools
        return counted or (0.0 if self.events is None else self.events.resets)


def figures(now: Sample, before: Sample | None = None, events: EventFigures | None = None) -> Figures:
    """Figures of the time between two samples, or since the server's start."""

    def added(name: str, **labels: str) -> float | None:
        value = now.total(name, **labels)
        if value is None or before is None:
            return value
        earlier = before.total(name, **labels) or 0.0
        return value - earlier if value >= earlier else value  # the server has been started again

    def ours(name: str, **labels: str) -> float | None:
        return added(_OURS + name, **labels)

    sglang = any(name.startswith("sglang:") for name in now.values)
    vllm = any(name.startswith("vllm:") for name in now.values)
    counters = {field: name for field, (name, _) in COUNTERS.items()}
    names = dict.fromkeys(
        have.get("pool", "") for have, _ in now.values.get(_OURS + counters["evictions"], ())
    )
    pools = tuple(
        PoolFigures(
            name=name,
            **{field: ours(counters[field], pool=name) or 0.0 for field in _COUNTS},
            # Versions that do not count these have none.
            by_uses={uses: ours(BY_USES[0], pool=name, **{BY_USES_LABEL: uses}) or 0.0 for uses in USES},
        )
        for name in names
    )
    info = _OURS + INFO[0]
    in_force = now.total(_OURS + IN_FORCE[0])
    shape = _of_sglang(now) if sglang else _of_vllm(now)
    if sglang:
        requests = added("sglang:num_requests_total")
        prompt, found = added("sglang:prompt_tokens_total"), added("sglang:cached_tokens_total")
        device = added("sglang:cached_tokens_total", cache_source="device")
        lower = None if found is None else found - (device or 0.0)
        found = 0.0 if found is None and prompt is not None else found  # exposed from the first hit on
    else:
        requests = added("vllm:request_success_total")
        prompt, found = added("vllm:prefix_cache_queries_total"), added("vllm:prefix_cache_hits_total")
        lower = added("vllm:external_prefix_cache_hits_total")
    return Figures(
        server="sglang" if sglang else "vllm" if vllm else "",
        seconds=now.time - before.time if before is not None else None,
        policy=", ".join(now.label(info, "policy")),
        lru=None if info not in now.values else "yes" in now.label(info, "lru"),
        requests=requests,
        prompt_tokens=prompt,
        found_tokens=found,
        lower_tokens=lower,
        gained=ours(VERDICT["gained"][0]),
        lost=ours(VERDICT["lost"][0]),
        step_ins=ours(VERDICT["falls"][0]),
        in_force=None if in_force is None else in_force > 0,
        fallbacks=now.total(_OURS + FALLBACKS[0]) or 0.0,
        pools=pools,
        events=events,
        **shape,
    )


def _of_sglang(now: Sample) -> dict[str, float | None]:
    capacity = now.total("sglang:max_total_num_tokens")
    used, cached = now.total("sglang:kv_used_tokens"), now.total("sglang:kv_evictable_tokens")
    held = None if used is None or cached is None else used + cached
    return {
        "capacity": capacity,
        "page_size": _first(now, "sglang:page_size"),
        "used": used / capacity if used is not None and capacity else _first(now, "sglang:token_usage"),
        "occupied": held / capacity if held is not None and capacity else None,
        "running": now.total("sglang:num_running_reqs"),
        "waiting": now.total("sglang:num_queue_reqs"),
    }


def _of_vllm(now: Sample) -> dict[str, float | None]:
    sizes = now.label(_VLLMS_PAGES, "block_size")
    page = float(sizes[0]) if sizes and sizes[0].isdecimal() else None
    blocks = [have.get("num_gpu_blocks", "") for have, _ in now.values.get(_VLLMS_PAGES, ())]
    whole = [int(count) - 1 for count in blocks if count.isdecimal()]  # one block is vLLM's own
    return {
        "capacity": sum(whole) * page if whole and page else None,
        "page_size": page,
        "used": _mean(now, "vllm:kv_cache_usage_perc"),
        "occupied": None,
        "running": now.total("vllm:num_requests_running"),
        "waiting": now.total("vllm:num_requests_waiting"),
    }


def _first(now: Sample, name: str) -> float | None:
    return next((value for _, value in now.values.get(name, ())), None)


def _mean(now: Sample, name: str) -> float | None:
    values = [value for _, value in now.values.get(name, ())]
    return sum(values) / len(values) if values else None
