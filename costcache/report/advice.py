"""Recommends a policy and a pool size, in plain words, with the command that serves with them."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from costcache.report.words import points, seconds, share, size
from costcache.settings import Settings

if TYPE_CHECKING:
    from costcache.report.material import Material, Replay

__all__ = ["Advice", "advise", "losses"]

_MATTERS = 0.005
"""Half a point of token hit rate; smaller differences are within the variation from day to day."""
_ENOUGH = 0.9
"""Share of an unlimited pool's hits beyond which more memory gains little."""
_SERVED_PAGE = 64
"""Tokens in the largest page that servers commonly use; larger ones come from the trace's block size."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation.

    Attributes:
        headline: The recommendation, in one sentence.
        reasons: Reasons and the gain, one or two sentences each.
        command: The command to serve with; empty if there is nothing to recommend.
        losses: Where the recommendation loses.
        caveats: Limits of the report.
        chosen: The recommended replay; None if no policy that a server can run was replayed.
    """

    headline: str
    reasons: tuple[str, ...]
    command: str
    losses: tuple[str, ...]
    caveats: tuple[str, ...]
    chosen: Replay | None


def advise(material: Material) -> Advice:
    """Recommend a policy and a pool size, with the gains and the losses."""
    caveats = _caveats(material)
    if not material.policies:
        return Advice(
            "Nothing to deploy: only policies that know the future were replayed.",
            ("Replay lru and costcache too.",),
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
            f"There the token hit rate is {share(run.token_hit_rate)}, {share(run.flops_saved_rate)} of the "
            f"prefill compute is saved, and the median time to first token is {seconds(run.ttft_p50)}."
        )
    equal = _lru_memory(material, chosen)
    if equal:
        reasons.append(equal)
    pool = material.pool(run)
    named = "lru, SGLang's default policy," if policy == "lru" else policy
    if material.state_bytes:
        headline = f"Serve with {named} and {size(pool * material.token_bytes)} per GPU for KV and states."
    else:
        headline = f"Serve with {named} and a pool of {pool:,} tokens{_per_gpu(material, pool)}."
    return Advice(
        headline, tuple(reasons), _command(material, chosen), losses(material, policy), caveats, chosen
    )


def _by_capacity(material: Material, policy: str) -> dict[str, Replay]:
    return {r.run.capacity: r for r in material.of(policy)}


def _choices(material: Material, policy: str) -> list[Replay]:
    """A policy's replays in limited pools, smallest first; the unlimited one if there is no other."""
    replays = material.of(policy)
    return [r for r in replays if r.run.capacity_tokens is not None] or replays


def _policy(material: Material) -> tuple[str, str]:
    """The policy with the best mean hit rate, or the simplest within half a point of it; and why."""
    # A policy that failed was lru from then on, so it is not recommended.
    failed = {r.run.policy for r in material.replays if r.run.fallbacks}
    names = [name for name in material.policies if name not in failed] or material.policies
    means = {name: fmean(r.run.token_hit_rate for r in _choices(material, name)) for name in names}
    best = max(names, key=lambda name: means[name])
    alike = [name for name in names if means[best] - means[name] < _MATTERS]
    if len(names) == 1:
        return best, f"{best} is the only policy replayed: replay others to see whether one beats it."
    if "lru" in alike:
        others = [name for name in names if name != "lru"]
        return "lru", (
            f"No other policy replayed ({', '.join(others)}) beats LRU's token hit rate by half a point on "
            "average over the pool sizes: keep it."
        )
    chosen = "costcache" if "costcache" in alike else best
    ties = [name for name in alike if name != chosen]
    lru = f", lru {share(means['lru'])}" if "lru" in means else ""
    standing = "the best token hit rate" if chosen == best else "one of the best token hit rates"
    also = f" {' and '.join(ties)} {'is' if len(ties) == 1 else 'are'} within half a point." if ties else ""
    return chosen, (
        f"Of the {len(names)} policies replayed, {chosen} has {standing} on average over the pool "
        f"sizes: {share(means[chosen])}{lru}.{also}"
    )


def _capacity(material: Material, policy: str) -> tuple[Replay, str]:
    """The smallest pool with nearly all the hits of an unlimited one, else the largest; and why."""
    replays = _choices(material, policy)
    ceiling = material.ceiling
    enough = [r for r in replays if r.run.token_hit_rate >= _ENOUGH * ceiling]
    chosen = (enough or replays)[0 if enough else -1]
    found = chosen.run.token_hit_rate / ceiling if ceiling else 0.0
    if not ceiling:
        nothing = (
            "No prompt shares a whole page of prefix with an earlier one: a cache of any size never hits."
        )
        return replays[0], nothing
    if enough:
        text = (
            f"The pool of {chosen.run.capacity} is the smallest one replayed that gets at least "
            f"{share(_ENOUGH, 0)} of the hits of an unlimited pool ({share(ceiling)} of the prompt tokens)."
        )
    elif len(replays) > 1:
        before = replays[-2]
        gain = chosen.run.token_hit_rate - before.run.token_hit_rate
        text = (
            f"Use as much memory as you can: the largest pool replayed, {chosen.run.capacity}, gets "
            f"{share(found, 0)} of the hits of an unlimited pool ({points(gain)} of token hit rate over "
            f"the pool of {before.run.capacity})."
        )
    else:
        text = (
            f"Only the pool of {chosen.run.capacity} was replayed; it gets {share(found, 0)} of the hits of "
            "an unlimited pool. Replay larger and smaller ones to see what memory is worth."
        )
    return chosen, text


def _won(chosen: Replay, lru: Replay) -> str:
    run, base = chosen.run, lru.run
    gain = run.token_hit_rate - base.token_hit_rate
    closed = (
        ""
        if chosen.gap_closed is None
        else f", {share(chosen.gap_closed, 0)} of the gap to the optimum closed"
    )
    mean = (run.ttft_mean - base.ttft_mean) / base.ttft_mean if base.ttft_mean else 0.0
    slower = "longer" if mean > 0 else "shorter"
    return (
        f"Against LRU with the same pool: a token hit rate of {share(run.token_hit_rate)} instead of "
        f"{share(base.token_hit_rate)} ({points(gain)}{closed}), {share(run.flops_saved_rate)} of the "
        f"prefill compute saved instead of {share(base.flops_saved_rate)}, and a mean time to first token "
        f"{share(abs(mean), 0)} {slower} ({seconds(run.ttft_mean)} instead of {seconds(base.ttft_mean)})."
    )


def _lru_memory(material: Material, chosen: Replay) -> str:
    """The memory that LRU needs for the same hit rate, in a sentence; empty if not known or not more."""
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
        f"LRU would need a pool of about {needed:,} tokens{_per_gpu(material, needed)} for the same hit "
        f"rate: {needed / pool:.1f} times the memory."
    )


def losses(material: Material, policy: str) -> tuple[str, ...]:
    """Return where a policy is worse than LRU, or clearly worse than the best policy replayed."""
    lru = _by_capacity(material, "lru")
    lost = []
    for capacity, _ in material.capacities:
        mine, base = _by_capacity(material, policy).get(capacity), lru.get(capacity)
        if policy == "lru" or mine is None or base is None:
            continue
        hits = mine.run.token_hit_rate - base.run.token_hit_rate
        if hits < -0.0005:
            lost.append(f"At {capacity} it hits less than LRU: {points(hits)} of token hit rate.")
        if mine.run.ttft_p99 > base.run.ttft_p99 * 1.01:
            lost.append(
                f"At {capacity} the 99th percentile of the time to first token is longer than LRU's: "
                f"{seconds(mine.run.ttft_p99)} instead of {seconds(base.run.ttft_p99)}."
            )
    for capacity, _ in material.capacities:
        mine = _by_capacity(material, policy).get(capacity)
        if mine is None:
            continue
        top = max(material.at(capacity), key=lambda r: r.run.token_hit_rate)
        margin = top.run.token_hit_rate - mine.run.token_hit_rate
        if margin >= _MATTERS:
            lost.append(f"At {capacity}, {top.run.policy} is better by {points(margin)[1:]}.")
    if policy != "lru" and not lru:
        lost.append("LRU was not replayed, so the gain over it is unknown: add lru to --policy.")
    elif policy != "lru" and not lost:
        lost.append("Nowhere at the pool sizes replayed.")
    return tuple(lost)


def _caveats(material: Material) -> tuple[str, ...]:
    mode = (
        "The replay models a queue, reserved memory and generated tokens, but decoding and batching only "
        "roughly. The line of the unlimited pool counts prompts alone: a server that hits generated tokens "
        "too can exceed it."
        if material.serving
        else "Requests were replayed one at a time, without queueing and without the memory that running "
        "requests reserve: a server needs a larger pool for the same hits, and its times are longer."
    )
    caveats = [
        (
            "This is one trace. Another day's or another application's traffic can reverse the order of the "
            "policies: replay yours before you change a server."
        ),
        mode,
        f"Times to first token are estimated, not measured: {material.prefill}.",
    ]
    if any(r.run.oversized_requests for r in material.replays):
        caveats.append(
            "Some requests are longer than the smallest pool, which caches only what fits. A server with "
            "that pool would refuse them."
        )
    if material.state_bytes:
        caveats.append(
            f"{material.model} also caches states, of {size(material.state_bytes)} each per GPU. A pool is "
            f"memory for KV and states {_division(material)}; its size in tokens is what KV alone would fill."
        )
    if material.page_size > _SERVED_PAGE:
        caveats.append(
            f"Pages of {material.page_size} tokens come from the trace's block size. Keep your server's page "
            "size, which the command leaves out: smaller pages hit as much or slightly more."
        )
    if material.always_free:
        caveats.append(
            "The free target was restored after every request; a server evicts only when it lacks room."
        )
    if "lru" in material.policies and not any(r.settings.trim == "off" for r in material.replays):
        caveats.append(
            "SGLang's own lru evicts whole nodes; the LRU replayed here trims the last victim to the pages "
            "needed, as costcache:lru does, and may hit more. Replay with --trim off to see the difference."
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
    parts += _sizes(material, chosen)
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


def _sizes(material: Material, chosen: Replay) -> list[str]:
    """SGLang's options for the sizes of the pools; those of a shared or unlimited memory are left to it."""
    pool, part = material.pool(chosen.run), material.state_share
    if not material.state_bytes:
        return [f"--max-total-tokens {pool}"]
    if part is None:
        return ["--enable-unified-memory"]
    if chosen.run.capacity_tokens is None:
        return []
    memory = pool * material.token_bytes
    kv = int(memory * (1 - part))
    tokens = kv // (material.token_bytes * material.page_size) * material.page_size
    return [f"--max-total-tokens {tokens}", f"--max-mamba-cache-size {(memory - kv) // material.state_bytes}"]


def _division(material: Material) -> str:
    part = material.state_share
    return "together" if part is None else f"in fixed parts, {share(part, 0)} of it for states"


def _per_gpu(material: Material, tokens: int) -> str:
    return f" ({size(tokens * material.token_bytes)} per GPU)" if material.token_bytes else ""
