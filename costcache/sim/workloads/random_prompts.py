"""Random prompts, which share nothing, so nothing can hit: a test of a cache's overhead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from costcache.sim.workloads.settings import LogNormal, Rate, WorkloadSettings

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.workloads.build import Blocks, Request

__all__ = ["RandomSettings", "random_prompts"]


class RandomSettings(WorkloadSettings):
    """Random: prompts that share nothing."""

    rate: Rate = 10.0
    """Requests per second, as a Poisson process."""
    prompt: LogNormal = LogNormal(median=800, shape=1.0, low=20, high=16_000)
    """Tokens of the prompt."""
    output: LogNormal = LogNormal(median=200, shape=0.6)
    """Tokens generated, as in chat."""


def random_prompts(
    settings: RandomSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of sessions of one request, in order of arrival."""
    from costcache.sim.workloads.build import Context, arrivals

    for seconds in arrivals(settings.rate, rng):
        context = Context(blocks, settings.prompt.tokens(rng))
        yield seconds, [context.request(seconds, settings.output.tokens(rng))]
