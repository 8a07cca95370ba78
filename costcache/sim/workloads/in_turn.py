"""Prompts in turn: a cyclic scan, of which LRU finds nothing once it is larger than the pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from costcache.sim.workloads.settings import LogNormal, Rate, Share, Uniform, WorkloadSettings

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.workloads.build import Blocks, Request

__all__ = ["InTurnSettings", "in_turn"]


class InTurnSettings(WorkloadSettings):
    """In turn: the same prompts again and again, in a fixed order.

    With a pool slightly smaller than all prompts together, LRU evicts each prompt just before its next use.
    """

    rate: Rate = 1.0
    """Requests per second, as a Poisson process."""
    prompts: int = Field(default=12, ge=1, le=1_000_000)
    """Prompts asked in turn."""
    tokens: Uniform = Uniform(low=2048, high=6144)
    """Tokens of a prompt."""
    growth: int = Field(default=0, ge=0, le=2**20)
    """Tokens by which a prompt is longer each time it is asked."""
    most_tokens: int = Field(default=32_768, ge=1, le=2**20)
    """A growing prompt that exceeds this many tokens is replaced by a new one."""
    one_shot_share: Share = 0.0
    """Share of the requests that are one-shot prompts, asked in between."""
    one_shot: LogNormal = LogNormal(median=4096, shape=0.5)
    """Tokens of a one-shot prompt."""
    output: LogNormal = LogNormal(median=100, shape=0.5)
    """Tokens generated."""


def in_turn(
    settings: InTurnSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of sessions of one request, in order of arrival."""
    from costcache.sim.workloads.build import Context, arrivals

    prompts = [Context(blocks, settings.tokens.tokens(rng)) for _ in range(settings.prompts)]
    turn = 0
    for seconds in arrivals(settings.rate, rng):
        if rng.random() < settings.one_shot_share:
            context = Context(blocks, settings.one_shot.tokens(rng))
        else:
            which = turn % len(prompts)
            if turn >= len(prompts) and settings.growth:
                prompts[which].extend(settings.growth)
                if prompts[which].tokens > settings.most_tokens:
                    prompts[which] = Context(blocks, settings.tokens.tokens(rng))
            context = prompts[which]
            turn += 1
        yield seconds, [context.request(seconds, settings.output.tokens(rng))]
