"""Agents: long runs of short steps, tool results between them, and sub-agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, ValidationInfo, field_validator

from costcache.sim.workloads.settings import (
    MOST_REQUESTS,
    LogNormal,
    PromptSet,
    Rate,
    Share,
    Steps,
    Uniform,
    WorkloadSettings,
)

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.workloads.build import Blocks, Context, Request

__all__ = ["AgenticSettings", "agentic"]


class AgenticSettings(WorkloadSettings):
    """Agentic: runs of tool-calling agents.

    A step is one request. The next step's input includes its output, followed by the result of a tool. Some
    steps wait for a person instead of a tool. Some start sub-agents, which run concurrently from the end of
    the step, each on its own task. They take steps like any agent, but start no sub-agents themselves. The
    parent continues once the last of them has ended, with the last outputs of all of them in its input.
    """

    requests: int = Field(default=16_000, ge=1, le=MOST_REQUESTS)
    """Requests to generate: the first ones by time."""
    run_rate: Rate = 0.09
    """Runs started per second, as a Poisson process."""
    system: PromptSet = PromptSet(count=6, tokens=Uniform(low=3000, high=9000))
    """System prompts of runs."""
    task: LogNormal = LogNormal(median=400, shape=1.0)
    """Tokens of the task, of runs and of sub-agents."""
    steps: Steps = Steps(first=3, mean=16, most=80)
    """Steps of an agent."""
    output: LogNormal = LogNormal(median=150, shape=0.8)
    """Tokens generated in a step."""
    decode_rate: Rate = 40.0
    """Tokens generated per second; the tool starts when the output is complete."""
    tool_result: LogNormal = LogNormal(median=500, shape=1.2)
    """Tokens of a tool's result, or of the person's message."""
    tool_pause: LogNormal = LogNormal(median=3, shape=1.2)
    """Seconds that a tool takes."""
    person_share: Share = 0.05
    """Share of the steps that wait for a person."""
    person_pause: LogNormal = LogNormal(median=120, shape=1.0)
    """Seconds that the person takes."""
    sub_agent_share: Share = 0.06
    """Share of a run's steps that start sub-agents."""
    sub_agents: Uniform = Uniform(low=2, high=4)
    """Sub-agents started at once."""
    fork_share: Share = 0.4
    """Share of the sub-agents that start with the parent's whole context."""
    sub_agent_system: PromptSet = PromptSet(count=4, tokens=Uniform(low=2000, high=5000))
    """System prompts of the other sub-agents."""
    most_tokens: int = Field(default=120_000, ge=1, le=2**20)
    """An agent ends once its context exceeds this many tokens."""

    @field_validator("sub_agent_share")
    @classmethod
    def _beside_person_share(cls, share: float, info: ValidationInfo) -> float:
        if share + info.data.get("person_share", 0.0) > 1:
            raise ValueError("with person_share it adds up to more than 1")
        return share


def agentic(
    settings: AgenticSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of runs, in order of their starts."""
    from costcache.sim.workloads.build import Prompts, arrivals

    systems = Prompts(settings.system, blocks, rng)
    sub_agent_systems = Prompts(settings.sub_agent_system, blocks, rng)

    def run(context: Context, seconds: float, nested: bool) -> tuple[list[Request], float, int]:
        """Requests of an agent and its sub-agents, the time of its end, and the tokens of its last output."""
        context.extend(settings.task.tokens(rng))
        requests = []
        left = settings.steps.draw(rng)
        while True:
            output = settings.output.tokens(rng)
            requests.append(context.request(seconds, output))
            seconds += output / settings.decode_rate
            context.extend(output)
            left -= 1
            if not left or context.tokens > settings.most_tokens:
                return requests, seconds, output
            what = rng.random()
            if what < settings.person_share:
                seconds += settings.person_pause.draw(rng)
                context.extend(settings.tool_result.tokens(rng))
            elif what < settings.person_share + settings.sub_agent_share and not nested:
                ends = []
                answers = 0
                for _ in range(settings.sub_agents.tokens(rng)):
                    forks = rng.random() < settings.fork_share
                    child = context.fork() if forks else sub_agent_systems.begin()
                    made, end, answer = run(child, seconds, nested=True)
                    requests += made
                    ends.append(end)
                    answers += answer
                seconds = max(ends)
                context.extend(answers)
            else:
                seconds += settings.tool_pause.draw(rng)
                context.extend(settings.tool_result.tokens(rng))
            if context.tokens > settings.most_tokens:
                return requests, seconds, output

    for start in arrivals(settings.run_rate, rng):
        yield start, run(systems.begin(), start, nested=False)[0]
