"""Multi-turn chat: each input is the whole conversation so far and a new message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from costcache.sim.workloads.settings import (
    LogNormal,
    PromptSet,
    Rate,
    Steps,
    Uniform,
    WorkloadSettings,
)

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.workloads.build import Blocks, Request

__all__ = ["MultiTurnSettings", "multi_turn"]


class MultiTurnSettings(WorkloadSettings):
    """Multi-turn: sessions of a person and a model, on a few system prompts."""

    session_rate: Rate = 2.2
    """Sessions started per second, as a Poisson process."""
    system: PromptSet = PromptSet(count=10, tokens=Uniform(low=200, high=1500), zipf=1.0)
    """System prompts."""
    turns: Steps = Steps(first=1, mean=4.5, most=30)
    """Turns of a session."""
    user: LogNormal = LogNormal(median=120, shape=1.0)
    """Tokens of a message."""
    output: LogNormal = LogNormal(median=250, shape=0.7)
    """Tokens generated, which are part of the next input."""
    decode_rate: Rate = 40.0
    """Tokens generated per second; the pause starts when the answer is complete."""
    pause: LogNormal = LogNormal(median=45, shape=1.0, low=3, high=1800)
    """Seconds between an answer and the next message."""


def multi_turn(
    settings: MultiTurnSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of sessions, in order of their starts."""
    from costcache.sim.workloads.build import Prompts, arrivals

    prompts = Prompts(settings.system, blocks, rng)
    for start in arrivals(settings.session_rate, rng):
        context = prompts.begin()
        seconds = start
        session = []
        for _ in range(settings.turns.draw(rng)):
            context.extend(settings.user.tokens(rng))
            output = settings.output.tokens(rng)
            session.append(context.request(seconds, output))
            context.extend(output)
            seconds += output / settings.decode_rate + settings.pause.draw(rng)
        yield start, session
