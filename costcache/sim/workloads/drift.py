"""Drift: few-shot prompts whose popularity moves from one set to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from costcache.sim.workloads.settings import LogNormal, PromptSet, Rate, Uniform, WorkloadSettings

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.workloads.build import Blocks, Request

__all__ = ["DriftSettings", "drift"]


class DriftSettings(WorkloadSettings):
    """Drift: few-shot prompts of one set, then of another, over and over.

    The sets are disjoint. Only one is in use at a time, so what was popular becomes useless at once, and is
    popular again when its set's turn comes back.
    """

    rate: Rate = 10.0
    """Requests per second, as a Poisson process."""
    sets: int = Field(default=3, ge=1, le=1000)
    """Sets of prompts, in use one after another."""
    period: int = Field(default=1000, ge=1, le=10**8)
    """Requests for which a set is in use."""
    prompts: PromptSet = PromptSet(count=100, tokens=Uniform(low=1500, high=6000), zipf=0.7)
    """Prompts of a set."""
    question: LogNormal = LogNormal(median=100, shape=0.5)
    """Tokens of the question."""
    output: LogNormal = LogNormal(median=60, shape=0.6)
    """Tokens generated."""


def drift(
    settings: DriftSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of sessions of one request, in order of arrival."""
    from costcache.sim.workloads.build import Prompts, arrivals

    sets = [Prompts(settings.prompts, blocks, rng) for _ in range(settings.sets)]
    for number, seconds in enumerate(arrivals(settings.rate, rng)):
        context = sets[number // settings.period % len(sets)].begin()
        context.extend(settings.question.tokens(rng))
        yield seconds, [context.request(seconds, settings.output.tokens(rng))]
