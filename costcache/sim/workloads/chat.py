"""Chat of one turn, with many shared system prompts of skewed popularity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from costcache.sim.workloads.settings import (
    LogNormal,
    PromptSet,
    Rate,
    Uniform,
    WorkloadSettings,
)

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.workloads.build import Blocks, Request

__all__ = ["ChatSettings", "chat"]


class ChatSettings(WorkloadSettings):
    """Chat: a shared system prompt, then a user's own text."""

    rate: Rate = 10.0
    """Requests per second, as a Poisson process."""
    system: PromptSet = PromptSet(count=200, tokens=Uniform(low=500, high=3000), zipf=0.9)
    """System prompts."""
    user: LogNormal = LogNormal(median=150, shape=0.8, low=10, high=4000)
    """Tokens of the user's message."""
    output: LogNormal = LogNormal(median=200, shape=0.6)
    """Tokens generated."""


def chat(
    settings: ChatSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of sessions of one request, in order of arrival."""
    from costcache.sim.workloads.build import Prompts, arrivals

    prompts = Prompts(settings.system, blocks, rng)
    for seconds in arrivals(settings.rate, rng):
        context = prompts.begin()
        context.extend(settings.user.tokens(rng))
        yield seconds, [context.request(seconds, settings.output.tokens(rng))]
