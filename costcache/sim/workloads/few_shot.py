"""Few-shot prompting: long shared prompts of examples, each followed by a short question."""

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

__all__ = ["FewShotSettings", "few_shot"]


class FewShotSettings(WorkloadSettings):
    """Few-shot: shared examples, then one question."""

    rate: Rate = 10.0
    """Requests per second, as a Poisson process."""
    prompts: PromptSet = PromptSet(count=300, tokens=Uniform(low=1500, high=6000), zipf=0.7)
    """Prompts of examples."""
    question: LogNormal = LogNormal(median=100, shape=0.5)
    """Tokens of the question."""
    output: LogNormal = LogNormal(median=60, shape=0.6)
    """Tokens generated."""


def few_shot(
    settings: FewShotSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of sessions of one request, in order of arrival."""
    from costcache.sim.workloads.build import Prompts, arrivals

    prompts = Prompts(settings.prompts, blocks, rng)
    for seconds in arrivals(settings.rate, rng):
        context = prompts.begin()
        context.extend(settings.question.tokens(rng))
        yield seconds, [context.request(seconds, settings.output.tokens(rng))]
