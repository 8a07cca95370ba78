"""What an operator should do, in plain words, with the command that does it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costcache.settings import Settings

if TYPE_CHECKING:
    from costcache.report.material import Material, Replay

__all__ = ["Advice", "advise", "share", "size"]

_MATTERS = 0.005
"""Half a point of token hit rate: less is within what another day's traffic would change."""
_ENOUGH = 0.9
"""Share of what an unlimited pool would find, beyond which more memory brings little."""
_SERVED_PAGE = 64
"""Tokens in the largest page that servers commonly run; larger ones are a trace's grain, not a choice."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation.

    Attributes:
        headline: What to do, in one sentence.
        reasons: Why, and what is won, one sentence or two each.
        command: The command to serve with; empty where there is nothing to recommend.
        losses: Where the recommendation loses.
        caveats: What the report cannot say.
        chosen: The replay that is recommended; None where no policy that a server can run was replayed.
    """

    headline: str
    reasons: tuple[str, ...]
    command: str
    losses: tuple[str, ...]
    caveats: tuple[str, ...]
    chosen: Replay | None


def advise(material: Material) -> Advice:
    """Say which policy to run, with how much memory, what it wins and where it loses."""
    caveats = _caveats(material)
    if not material.policies:
        return Advice(
            "Nothing to deploy: only policies that know the future were replayed.",
            ("Replay lru and costcache beside them.",),
            "",
            (),
            caveats,
            None,
        )
    policy, why = _policy(material)
    chosen, how_much = _capacity(material, policy)
    run = chosen.run
    lru = _by_capacity(material, "lru").get(run.capacity)
    reasons = [why, how_much]
    if lru is not None and policy != "lru":
        reasons.append(_won(chosen, lru))
    else:
        reasons.append(
            f"There it finds {share(run.token_hit_rate)} of the prompt tokens in the cache and saves "
            f"{share(run.flops_saved_rate)} of the prefill compute; half of the requests get their first "
            f"token within {seconds(run.ttft_p50)}."
        )
    equal = _lru_memory(material, chosen)
    if equal:
        reasons.append(equal)
    headline = (
        f"Serve with {policy} and a pool of {run.capacity_tokens or material.distinct_tokens:,} tokens"
        f"{_gib(material, material.pool(run))}."
    )
    if policy == "lru":
        headline = headline.replace("with lru", "with lru, SGLang's default policy,")
    return Advice(
        headline, tuple(reasons), _command(material, chosen), _losses(material, policy), caveats, chosen
    )


def _by_capacity(material: Material, policy: str) -> dict[str, Replay]:
    return {r.run.capacity: r for r in material.replays if r.run.policy == policy}


def _mean(material: Material, policy: str) -> float:
    rates = [r.run.token_hit_rate for r in _choices(material, policy)]
    return sum(rates) / len(rates)


def _choices(material: Material, policy: str) -> list[Replay]:
    """A policy's replays from the smallest pool to the largest, without the unlimited if there are others."""
    replays = sorted(_by_capacity(material, policy).values(), key=lambda r: material.pool(r.run))
    return [r for r in replays if r.run.capacity_tokens is not None] or replays


def _policy(material: Material) -> tuple[str, str]:
    """The policy with the best mean hit rate; the simplest of those that are as good."""
    # One that failed was lru from then on: it is nothing to recommend.
    failed = {r.run.policy for r in material.replays if r.run.fallbacks}
    names = [name for name in material.policies if name not in failed] or material.policies
    means = {name: _mean(material, name) for name in names}
    best = max(names, key=lambda name: means[name])
    alike = [name for name in names if means[best] - means[name] < _MATTERS]
    if len(names) == 1:
        return best, f"{best} is the only policy that was replayed: replay others to know whether it is best."
    if "lru" in alike:
        others = [name for name in names if name != "lru"]
        return "lru", (
            f"No other policy that was replayed ({', '.join(others)}) beats LRU by half a point of token hit "
            "rate on average over the pool sizes: keep it."
        )
    chosen = "costcache" if "costcache" in alike else best
    ties = [name for name in alike if name != chosen]
    lru = f", lru {share(means['lru'])}" if "lru" in means else ""
    standing = "the best token hit rate" if chosen == best else "one of the best token hit rates"
    also = f" {' and '.join(ties)} {'is' if len(ties) == 1 else 'are'} within half a point." if ties else ""
    return chosen, (
        f"Of the {len(names)} policies that were replayed, {chosen} has {standing} on average over the pool "
        f"sizes: {share(means[chosen])}{lru}.{also}"
    )


def _capacity(material: Material, policy: str) -> tuple[Replay, str]:
    """The smallest pool that finds nearly all that could be found, or the largest."""
    replays = _choices(material, policy)
    ceiling = material.ceiling
    enough = [r for r in replays if r.run.token_hit_rate >= _ENOUGH * ceiling]
    chosen = (enough or replays)[0 if enough else -1]
    found = chosen.run.token_hit_rate / ceiling if ceiling else 0.0
    if not ceiling:
        nothing = "No prompt begins like an earlier one for a whole page: a cache of any size finds nothing."
        return replays[0], nothing
    if enough:
        text = (
            f"The pool of {chosen.run.capacity} is the smallest replayed one that finds at least "
            f"{share(_ENOUGH, 0)} of what an unlimited one would ({share(ceiling)} of the prompt tokens)."
        )
    elif len(replays) > 1:
        before = replays[-2]
        gain = chosen.run.token_hit_rate - before.run.token_hit_rate
        text = (
            f"Take as much memory as you can: the largest replayed pool, {chosen.run.capacity}, finds "
            f"{share(found, 0)} of what an unlimited one would ({points(gain)} of token hit rate "
            f"against the pool of {before.run.capacity})."
        )
    else:
        text = (
            f"Only the pool of {chosen.run.capacity} was replayed; it finds {share(found, 0)} of what an "
            "unlimited one would. Replay larger and smaller ones to see what memory is worth."
        )
    return chosen, text


def _won(chosen: Replay, lru: Replay) -> str:
    run, base = chosen.run, lru.run
    gain = run.token_hit_rate - base.token_hit_rate
    closed = (
        ""
        if chosen.gap_closed is None
        else f", {share(chosen.gap_closed, 0)} of the way from LRU to the best that is possible"
    )
    mean = (run.ttft_mean - base.ttft_mean) / base.ttft_mean if base.ttft_mean else 0.0
    slower = "longer" if mean > 0 else "shorter"
    return (
        f"Against LRU with the same pool: {share(run.token_hit_rate)} of the prompt tokens found instead of "
        f"{share(base.token_hit_rate)} ({points(gain)}{closed}), {share(run.flops_saved_rate)} of the "
        f"prefill compute saved instead of {share(base.flops_saved_rate)}, and a mean time to first token "
        f"that is {share(abs(mean), 0)} {slower} ({seconds(run.ttft_mean)} instead of "
        f"{seconds(base.ttft_mean)})."
    )


def _lru_memory(material: Material, chosen: Replay) -> str:
    """How much memory LRU would need for the same."""
    if chosen.run.policy == "lru" or not material.lru:
        return ""
    pool = material.pool(chosen.run)
    at = [rate for tokens, rate in material.lru if tokens <= pool]
    if not at or chosen.run.token_hit_rate - at[-1] < _MATTERS:
        return ""
    needed = next((tokens for tokens, rate in material.lru if rate >= chosen.run.token_hit_rate), None)
    if needed is None:
        return ""
    return (
        f"LRU would need a pool of about {needed:,} tokens{_gib(material, needed)} for the same hit rate: "
        f"{needed / pool:.1f} times the memory."
    )


def _losses(material: Material, policy: str) -> tuple[str, ...]:
    lru = _by_capacity(material, "lru")
    lost = []
    for capacity, _ in material.capacities:
        mine, base = _by_capacity(material, policy).get(capacity), lru.get(capacity)
        if policy == "lru" or mine is None or base is None:
            continue
        hits = mine.run.token_hit_rate - base.run.token_hit_rate
        if hits < -0.0005:
            lost.append(f"At {capacity} it finds less than LRU: {points(hits)} of token hit rate.")
        if mine.run.ttft_p99 > base.run.ttft_p99 * 1.01:
            lost.append(
                f"At {capacity} the slowest one in a hundred requests waits longer than under LRU: "
                f"{seconds(mine.run.ttft_p99)} instead of {seconds(base.run.ttft_p99)}."
            )
    best: dict[str, Replay] = {}
    for replay in material.replays:
        held = best.get(replay.run.capacity)
        if replay.online and (held is None or replay.run.token_hit_rate > held.run.token_hit_rate):
            best[replay.run.capacity] = replay
    for capacity, _ in material.capacities:
        mine, top = _by_capacity(material, policy).get(capacity), best.get(capacity)
        if mine is None or top is None:
            continue
        behind = top.run.token_hit_rate - mine.run.token_hit_rate
        if behind >= _MATTERS:
            lost.append(f"At {capacity}, {top.run.policy} is better by {points(behind)[1:]}.")
    if policy != "lru" and not lru:
        lost.append(
            "LRU was not replayed, so what is won or lost against it is not known: add lru to --policy."
        )
    elif policy != "lru" and not lost:
        lost.append("None was found at the pool sizes replayed.")
    return tuple(lost)


def _caveats(material: Material) -> tuple[str, ...]:
    mode = (
        "The replay has a queue, held memory and output, but its decoding and batching are a simple model of "
        "a server's. The line of a pool without limit counts prompts alone: a server that finds generated "
        "tokens again can exceed it."
        if material.serving
        else "Requests were replayed one at a time: queueing and the memory that running requests hold are "
        "left out, so a server needs a larger pool than this for the same hits, and its times are longer."
    )
    caveats = [
        (
            "This is one trace. Another day's or another application's traffic can reverse the order of the "
            "policies: replay yours before you change a server."
        ),
        mode,
        f"Times to first token are calculated, not measured here: {material.prefill}.",
    ]
    if any(r.run.oversized_requests for r in material.replays):
        caveats.append(
            "Some requests are longer than the smallest pool: only their heads could be kept there. "
            "A server with that pool would refuse them."
        )
    if material.state_bytes:
        caveats.append(
            f"{material.model} also keeps states, of {size(material.state_bytes)} each on a GPU. They are "
            "neither in these pools nor in these hits: a server needs memory for them, and a prefix without "
            "a live state is not found."
        )
    if material.page_size > _SERVED_PAGE:
        caveats.append(
            f"Pages of {material.page_size} tokens are the trace's own grain. Keep your server's page size, "
            "which is left out of the command: smaller pages find as much or a little more."
        )
    if material.always_free:
        caveats.append(
            "The free target was restored after every request, which a server does not do: it evicts when "
            "it lacks room."
        )
    if "lru" in material.policies and not any(r.settings.trim == "off" for r in material.replays):
        caveats.append(
            "SGLang's own lru drops whole nodes; the LRU replayed here cuts the last one to the pages "
            "needed, as costcache:lru does, and may find more. Replay with --trim off to see the difference."
        )
    return tuple(caveats)


def _command(material: Material, chosen: Replay) -> str:
    policy = chosen.run.policy
    settings = chosen.settings
    own = {
        key: value
        for key, value in settings.model_dump(mode="json", exclude_defaults=True).items()
        if key != "policy" and value != Settings.model_fields[key].get_default(call_default_factory=True)
    }
    name = policy if policy == "costcache" else f"costcache:{policy}"
    if policy == "lru" and own in ({}, {"trim": "off"}):
        own = {}
        name = "lru"
    parts = ["sglang serve", "--model-path YOUR_MODEL", f"--radix-eviction-policy {name}"]
    if own:
        text = json.dumps(own, sort_keys=True)
        parts.append(f"--radix-eviction-policy-config {shlex.quote(text)}")
    parts.append(f"--max-total-tokens {material.pool(chosen.run)}")
    served = material.deployment
    if 1 < material.page_size <= _SERVED_PAGE:
        parts.append(f"--page-size {material.page_size}")
    for field, option in (("tp", "--tp-size"), ("pp", "--pp-size")):
        if served.get(field, 1) > 1:
            parts.append(f"{option} {served[field]}")
    if served.get("dp_attention", 1) > 1:
        parts.append(f"--dp-size {served['dp_attention']} --enable-dp-attention")
    if str(served.get("kv_dtype", "bf16")).startswith("fp8"):
        parts.append(f"--kv-cache-dtype {served['kv_dtype']}")
    return " \\\n    ".join(parts)


def _gib(material: Material, tokens: int) -> str:
    return f" ({size(tokens * material.token_bytes)} on each GPU)" if material.token_bytes else ""


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def share(value: float, digits: int = 1) -> str:
    """A share as a percentage."""
    return f"{value * 100:.{digits}f} %"


def points(difference: float) -> str:
    """A difference of two rates."""
    return f"{difference * 100:+.1f} points"


def seconds(value: float) -> str:
    """A time as people read it."""
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
