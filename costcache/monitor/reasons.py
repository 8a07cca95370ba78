"""Why a server's hit rate is low, from its figures, and from a recording if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.monitor.events import EventFigures
    from costcache.monitor.figures import Figures
    from costcache.sim.recordings.misses import Misses

__all__ = ["Reason", "reasons"]

_ENOUGH = 0.5
"""Hit rate from which on nobody asks why."""
_MUCH = 0.05
"""Share of the prompt tokens from which on a reason is named."""
_LARGE_PAGE = 32
_STARTS = "Put what changes, such as times, names and ids, after what all prompts share."
_PAGES = "Use smaller pages, if the attention backend can."
_RESETS = (
    "Find what resets it: SGLang's /flush_cache and new weights, vLLM's /reset_prefix_cache and sleep. Call "
    "these less often."
)


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
    rate, events = now.hit_rate, now.events
    if misses is not None and misses.tokens:
        return found + _resets(now) + _recorded(misses)
    if rate is None and (events is None or not events.stored):
        idle = Reason("idle", "No prompt has been processed in this time.", "Send requests, and watch again.")
        return [*found, *_resets(now), idle]
    if rate is not None and rate >= _ENOUGH:
        return found
    if events is not None and events.stored:
        found += _stored(events)
        if all(reason.name != "reset" for reason in found):
            found += _resets(now)
    else:
        found += _resets(now) + _guessed(now, rate or 0.0)
    return found + _counted(now)


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
            _STARTS,
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
            _PAGES,
        ),
    }
    shares = {name: getattr(misses, name) / misses.tokens for name in texts}
    return [
        Reason(name.replace("_", "-"), f"{shares[name]:.1%} {texts[name][0]}", texts[name][1])
        for name in sorted(texts, key=lambda name: -shares[name])
        if shares[name] >= _MUCH
    ]


def _resets(now: Figures) -> list[Reason]:
    """Resets that are known, without what they cost."""
    if not now.resets:
        return []
    times = "once" if now.resets == 1 else f"{now.resets:,.0f} times"
    return [Reason("reset", f"The cache was reset {times}, and began empty each time.", _RESETS)]


def _stored(events: EventFigures) -> list[Reason]:
    """Why the tokens that were stored had not been found, the largest share first."""
    block = f"blocks of {events.block_size:,} tokens"
    texts = {
        "evicted": (
            events.after_eviction,
            "of the tokens stored had been cached before, and evicted: the pool is too small for them.",
            "Record the requests (`costcache record setup`): a replay says what more memory would find.",
        ),
        "reset": (
            events.after_reset,
            "of the tokens stored had been cached before, and dropped when the cache was reset.",
            _RESETS,
        ),
        "page-size": (
            events.cut,
            f"of the tokens stored begin as an earlier block, and go on otherwise: {block} are too large.",
            _PAGES,
        ),
    }
    new = events.stored - sum(tokens for tokens, _, _ in texts.values())
    found = {name: tokens / events.stored for name, (tokens, _, _) in texts.items()}
    reasons = [
        Reason(name, f"{found[name]:.1%} {texts[name][1]}", texts[name][2])
        for name in sorted(texts, key=lambda name: -found[name])
        if found[name] >= _MUCH
    ]
    if new > events.stored / 2:
        reasons.append(
            Reason(
                "nothing-shared",
                f"{new / events.stored:.1%} of the tokens stored had never been cached: prompts share "
                "little, or differ at their start.",
                _STARTS,
            )
        )
    return reasons


def _guessed(now: Figures, rate: float) -> list[Reason]:
    """Guess the reason from counts of tokens."""
    found = []
    prompt = now.prompt_tokens or 0.0
    missed = prompt * (1.0 - rate)
    if now.pools and not now.evicted:
        found.append(
            Reason(
                "nothing-shared",
                "Nothing was evicted, so what was not found had never been computed: prompts share little, "
                "or differ at their start.",
                _STARTS,
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
    cut = (now.requests or 0.0) * (now.page_size or 0.0) / 2
    if now.page_size and now.page_size >= _LARGE_PAGE and prompt and cut > _MUCH * prompt:
        found.append(
            Reason(
                "page-size",
                f"Matches end at pages of {now.page_size:,.0f} tokens, half a page per prompt in the mean.",
                _PAGES,
            )
        )
    return found


def _counted(now: Figures) -> list[Reason]:
    """The reasons that counts of costcache give for certain."""
    found = []
    prompt = now.prompt_tokens or 0.0
    short = sum(pool.short for pool in now.pools)
    if now.lost and now.lost > _MUCH * prompt:
        found.append(
            Reason(
                "regret",
                f"LRU would have found {now.lost:,.0f} tokens that the policy did not"
                + (f"; the policy found {now.gained:,.0f} that LRU would not." if now.gained else "."),
                "Nothing if this is new: LRU steps in. Else replay a recording under other policies.",
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
    if now.server and not now.pools:
        found.append(
            Reason(
                "unknown",
                "The server has no metrics of costcache, so evictions are unknown.",
                "Start it with a policy of costcache; `costcache record setup` shows how.",
            )
        )
    return found
