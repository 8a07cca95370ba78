"""Recommends a policy and a pool size, in plain words, with the command that serves with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costcache.deployment import SWA_RATIO
from costcache.report.choice import ENOUGH, MATTERS, choose, failed, mean_rate
from costcache.report.words import listed, points, seconds, share, size
from costcache.settings import Settings

if TYPE_CHECKING:
    from costcache.report.choice import Choice
    from costcache.report.material import Material, Replay

__all__ = ["Advice", "advise", "losses"]

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
    choice = choose(material)
    if choice is None:
        return _nothing(material, caveats)
    chosen = choice.replay
    run, policy = chosen.run, chosen.run.policy
    lru = _by_capacity(material, "lru").get(run.capacity)
    reasons = [_pool(material, choice), *_policy(material, choice)]
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
    reasons += _failed(material)
    pool = material.pool(run)
    named = "lru, SGLang's default policy," if policy == "lru" else policy
    if choice.ties:
        named = f"{policy} (tied with {listed([r.run.policy for r in choice.ties])})"
    if material.state_bytes:
        headline = f"Serve with {named} and {size(pool * material.token_bytes)} per GPU for KV and states."
    else:
        headline = f"Serve with {named} and a pool of {pool:,} tokens{_per_gpu(material, pool)}."
    return Advice(
        headline, tuple(reasons), _command(material, chosen), losses(material, choice), caveats, chosen
    )


def _nothing(material: Material, caveats: tuple[str, ...]) -> Advice:
    if material.policies:
        why = "every policy replayed failed, and was lru from then on"
    else:
        why = "only policies that know the future were replayed"
    reasons = ("Replay lru and costcache too.", *_failed(material))
    return Advice(f"Nothing to deploy: {why}.", reasons, "", (), caveats, None)


def _by_capacity(material: Material, policy: str) -> dict[str, Replay]:
    return {r.run.capacity: r for r in material.of(policy)}


def _pool(material: Material, choice: Choice) -> str:
    """Why this pool size."""
    run, ceiling = choice.replay.run, material.ceiling
    if not ceiling:
        return "No prompt shares a whole page of prefix with an earlier one: a cache of any size never hits."
    # Only the capacities that could be chosen: no unlimited one beside limited ones.
    limited = run.capacity_tokens is not None
    mine = [r for r in material.of(run.policy) if (r.run.capacity_tokens is not None) == limited]
    found = share(run.token_hit_rate / ceiling, 0)
    if len(mine) == 1:
        return (
            f"Only the pool of {run.capacity} was replayed; {run.policy} gets {found} of the hits of an "
            "unlimited pool there. Replay larger and smaller ones to see what memory is worth."
        )
    if choice.enough:
        return (
            f"The pool of {run.capacity} is the smallest one replayed at which a policy gets at least "
            f"{share(ENOUGH, 0)} of the hits of an unlimited pool ({share(ceiling)} of the prompt tokens); "
            f"{run.policy} gets {found}."
        )
    before = mine[-2].run
    gain = run.token_hit_rate - before.token_hit_rate
    return (
        f"Use as much memory as you can: at the largest pool replayed, {run.capacity}, {run.policy} gets "
        f"{found} of the hits of an unlimited pool ({points(gain)} of token hit rate over the pool of "
        f"{before.capacity})."
    )


def _policy(material: Material, choice: Choice) -> list[str]:
    """Why this policy, and how all that are tied with it or behind it do at the pool."""
    run = choice.replay.run
    rate = f"{run.policy} ({share(run.token_hit_rate, 2)})"
    if not choice.rivals:
        return [f"{run.policy} is the only policy replayed: replay others to see whether one beats it."]
    behind = [r for r in choice.rivals if r not in choice.ties]
    others = f" Behind: {_rates(behind)}." if behind else ""
    if not choice.ties:
        return [
            f"At that pool, {rate} has the best token hit rate of {len(choice.rivals) + 1} policies.{others}"
        ]
    text = (
        f"At that pool, {_rates(choice.ties)} {'is' if len(choice.ties) == 1 else 'are'} tied with {rate}: "
        "within half a point of the best token hit rate, another day's traffic may reverse the order."
        f"{others}"
    )
    if run.policy == "lru":
        return [text, "No policy beats LRU by half a point there: keep it, since it needs no change."]
    means = [mean_rate(material, r.run.policy) for r in choice.ties]
    mine = mean_rate(material, run.policy)
    if len(material.capacities) > 1 and mine > max(means):
        return [
            text,
            f"Of these, {run.policy} is advised for the best mean over the pool sizes: {share(mine, 2)}.",
        ]
    return [text]


def _rates(replays: Sequence[Replay]) -> str:
    return listed([f"{r.run.policy} ({share(r.run.token_hit_rate, 2)})" for r in replays])


def _failed(material: Material) -> list[str]:
    """Which policies are not advised because they failed, and where their figures are ahead all the same."""
    broken = failed(material)
    said = []
    for policy in broken:
        ahead = [
            r.run.capacity
            for r in material.of(policy)
            if all(
                r.run.token_hit_rate > other.run.token_hit_rate
                for other in material.at(r.run.capacity)
                if other.run.policy not in broken
            )
        ]
        leading = f", though its figures are ahead at {listed(ahead)}" if ahead else ""
        said.append(
            f"{policy} failed in a replay, and lru took over there: it is not advised{leading}, since its "
            "figures are not its own."
        )
    return said


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
    if not at or chosen.run.token_hit_rate - at[-1] < MATTERS:
        return ""
    needed = next((tokens for tokens, rate in material.lru if rate >= chosen.run.token_hit_rate), None)
    if needed is None:
        return ""
    return (
        f"LRU would need a pool of about {needed:,} tokens{_per_gpu(material, needed)} for the same hit "
        f"rate: {needed / pool:.1f} times the memory."
    )


def losses(material: Material, choice: Choice) -> tuple[str, ...]:
    """Return where the chosen policy is worse than LRU or than another policy.

    At the chosen pool every policy that is ahead is named, elsewhere the best one if the difference matters.
    """
    policy, chosen = choice.replay.run.policy, choice.replay
    lru = _by_capacity(material, "lru")
    broken = failed(material)
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
        if mine is chosen:
            lost += _behind(choice)
            continue
        rivals = [r for r in material.at(capacity) if r.run.policy not in broken]
        top = max(rivals, key=lambda r: r.run.token_hit_rate)
        if top.run.token_hit_rate - mine.run.token_hit_rate >= MATTERS:
            lost.append(f"At {capacity}, {top.run.policy} is better by {_lead(top, mine)}.")
    if policy != "lru" and not lru:
        lost.append("LRU was not replayed, so the gain over it is unknown: add lru to --policy.")
    elif policy != "lru" and not lost:
        lost.append("Nowhere at the pool sizes replayed.")
    return tuple(lost)


def _behind(choice: Choice) -> list[str]:
    """Name what is better than the chosen policy at its own pool, by any figure."""
    mine, run = choice.replay, choice.replay.run
    lost = [
        f"At {run.capacity}, the pool advised, {r.run.policy} is ahead by {_lead(r, mine)}, which is a tie."
        for r in choice.ahead
    ]
    if not choice.rivals:
        return lost
    saver = max(choice.rivals, key=lambda r: r.run.flops_saved_rate)
    if saver.run.flops_saved_rate - run.flops_saved_rate >= MATTERS:
        lost.append(
            f"At {run.capacity}, {saver.run.policy} saves more of the prefill compute: "
            f"{share(saver.run.flops_saved_rate)} instead of {share(run.flops_saved_rate)}."
        )
    faster = min(choice.rivals, key=lambda r: r.run.ttft_mean)
    if faster.run.ttft_mean < run.ttft_mean * 0.99:
        lost.append(
            f"At {run.capacity} the mean time to first token is shorter under {faster.run.policy}: "
            f"{seconds(faster.run.ttft_mean)} instead of {seconds(run.ttft_mean)}."
        )
    return lost


def _lead(better: Replay, worse: Replay) -> str:
    lead = better.run.token_hit_rate - worse.run.token_hit_rate
    return points(lead)[1:] if lead >= 0.0005 else "less than 0.1 points"


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
        ratio = material.window_ratio
        split = [] if ratio in (None, SWA_RATIO) else [f"--swa-full-tokens-ratio {ratio:g}"]
        return [f"--max-total-tokens {pool}", *split]
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
