"""Why a server's hit rate is low, from its figures, and from a recording if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.monitor.figures import Figures
    from costcache.sim.recordings.misses import Misses

__all__ = ["Reason", "reasons"]

_ENOUGH = 0.5
"""Hit rate from which on nobody asks why."""
_MUCH = 0.05
"""Share of the prompt tokens from which on a reason is named."""
_LARGE_PAGE = 32


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason, and what to do.

    Attributes:
        name: A word for programs.
        text: The reason in a sentence.
        fix: What to do.
    """

    name: str
    text: str
    fix: str


def reasons(now: Figures, misses: Misses | None = None) -> list[Reason]:
    """The reasons for the hit rate of a span, the surest first; none if it is high.

    Args:
        now: The figures.
        misses: Why tokens of a recording of the same server were not found; it replaces what can only be
            guessed from figures.
    """
    found = _of_the_policy(now)
    rate = now.hit_rate
    if misses is not None and misses.tokens:
        found += _recorded(misses)
    elif rate is None:
        found.append(
            Reason("idle", "No prompt has been processed in this time.", "Send requests, and watch again.")
        )
    elif rate < _ENOUGH:
        found += _guessed(now, rate)
    return found


def _of_the_policy(now: Figures) -> list[Reason]:
    found = []
    if now.fallbacks:
        found.append(
            Reason(
                "fallback",
                f"A policy failed {now.fallbacks:,.0f} times, and LRU took its place.",
                "Read why in the server's log, under 'costcache'.",
            )
        )
    if now.in_force:
        found.append(
            Reason(
                "lru-in-force",
                "LRU is in force: it has lately found more than the policy would have.",
                "Nothing: the policy returns when it is better. `costcache explain` on a recording says why.",
            )
        )
    elif now.policy == "vllm":
        found.append(
            Reason(
                "vllms-own",
                "vLLM's own LRU chooses: no policy can, for this model or these options.",
                "Read why in the server's log, under 'costcache'.",
            )
        )
    return found


def _recorded(misses: Misses) -> list[Reason]:
    """The shares of a recording that are worth a word, the largest first."""
    texts = {
        "gone": (
            "of the prompt tokens had been cached and were gone: the pool is too small, or was reset.",
            "Replay the recording with more capacity and other policies: `costcache simulate`.",
        ),
        "other_start": (
            "of the prompt tokens are in prompts that begin as no other: nothing is shared.",
            "Put what changes, such as times, names and ids, after what all prompts share.",
        ),
        "new": (
            "of the prompt tokens are new, after a beginning that is shared.",
            "Nothing: no cache has them.",
        ),
        "running": (
            "of the prompt tokens were being computed by another request at that moment.",
            "Send one request of a batch first, and the others when it has begun to answer.",
        ),
        "cut": (
            "of the prompt tokens were cached in a page that is not the same to its end.",
            "Use smaller pages, if the attention backend can.",
        ),
    }
    shares = {name: getattr(misses, name) / misses.tokens for name in texts}
    return [
        Reason(name.replace("_", "-"), f"{shares[name]:.1%} {texts[name][0]}", texts[name][1])
        for name in sorted(texts, key=lambda name: -shares[name])
        if shares[name] >= _MUCH
    ]


def _guessed(now: Figures, rate: float) -> list[Reason]:
    found = []
    prompt = now.prompt_tokens or 0.0
    missed = prompt * (1.0 - rate)
    short = sum(pool.short for pool in now.pools)
    if now.pools and not now.evicted:
        found.append(
            Reason(
                "nothing-shared",
                "Nothing was evicted, so what was not found had never been computed: prompts share little, "
                "or differ at their start.",
                "Put what changes, such as times, names and ids, after what all prompts share.",
            )
        )
    elif now.pools and now.capacity:
        turns = now.evicted / now.capacity
        every = ""
        if now.seconds and turns:
            every = f" Its contents are replaced every {now.seconds / turns:,.0f} s."
        found.append(
            Reason(
                "evicted",
                f"{now.evicted:,.0f} tokens were evicted, and {missed:,.0f} had to be computed: the pool of "
                f"{now.capacity:,.0f} tokens may be too small for what comes back.{every}",
                "Record the requests (`costcache record setup`): --recording then says how many tokens were "
                "gone, and a replay what more memory or another policy would find.",
            )
        )
    if now.lost and now.lost > _MUCH * prompt:
        found.append(
            Reason(
                "regret",
                f"LRU would have found {now.lost:,.0f} tokens that the policy did not"
                + (f"; the policy found {now.gained:,.0f} that LRU would not." if now.gained else "."),
                "Nothing if this is new: LRU steps in. Else replay a recording under other policies.",
            )
        )
    cut = (now.requests or 0.0) * (now.page_size or 0.0) / 2
    if now.page_size and now.page_size >= _LARGE_PAGE and prompt and cut > _MUCH * prompt:
        found.append(
            Reason(
                "page-size",
                f"Matches end at pages of {now.page_size:,.0f} tokens, half a page per prompt in the mean.",
                "Use smaller pages, if the attention backend can.",
            )
        )
    if short:
        found.append(
            Reason(
                "pinned",
                f"{short:,.0f} evictions freed less than was needed: running requests pin the pool.",
                "Let fewer requests run at once, or give the pool more memory.",
            )
        )
    if not now.pools:
        found.append(
            Reason(
                "unknown",
                "The server has no metrics of costcache, so evictions are unknown.",
                "Start it with a policy of costcache; `costcache record setup` shows how.",
            )
        )
    return found
