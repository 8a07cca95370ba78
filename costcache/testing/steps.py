"""What happens to a cache, step by step: requests that overlap, evictions, waits, resets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from costcache.records import RequestInfo

__all__ = ["Evict", "Finish", "Request", "Reset", "Serve", "Start", "Step", "Wait", "stream"]


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        prompt: Its prompt, token ids.
        output: The tokens that it generates.
        info: What is known of it when it ends.
        priority: Its priority.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    info: RequestInfo = field(default_factory=RequestInfo)
    priority: int = 0


@dataclass(frozen=True)
class Serve:
    """Serve a request from start to end."""

    request: Request


@dataclass(frozen=True)
class Start:
    """Start a request, which runs, and pins what it matched, until it is finished."""

    request: Request


@dataclass(frozen=True)
class Finish:
    """Finish a running request.

    Attributes:
        which: Any number: of the running ones in order, the one at this place, counted round and round.
    """

    which: int = 0


@dataclass(frozen=True)
class Evict:
    """Evict because of a shortfall of so many tokens."""

    tokens: int


@dataclass(frozen=True)
class Wait:
    """A waiting request wants this prompt: it becomes recent without a use."""

    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Reset:
    """Empty the cache."""


Step = Serve | Start | Finish | Evict | Wait | Reset


def stream(seed: int, steps: int = 300) -> list[Step]:
    """A mixed stream: chats that come back, system prompts, documents sent once, requests that overlap.

    Args:
        seed: Equal seeds give equal streams, in every process.
        steps: Number of steps.
    """
    rng = random.Random(seed)

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1000) for _ in range(count))

    systems = [words(24) for _ in range(3)]
    chats = [rng.choice(systems) for _ in range(6)]
    made: list[Step] = []
    while len(made) < steps:
        draw = rng.random()
        reason = rng.choice(["stop", "length", "tool_call", "abort", None])
        if draw < 0.25:
            made.append(Serve(Request(words(rng.randrange(1, 60)), words(rng.randrange(9)))))
        elif draw < 0.85:
            at = rng.randrange(len(chats))
            prompt, output = chats[at] + words(rng.randrange(1, 12)), words(rng.randrange(12))
            info = RequestInfo(
                output_tokens=len(output),
                finish_reason=reason,
                priority=rng.randrange(-1, 2),
                session=f"chat {at}",
                tenant=f"tenant {at % 2}",
                ending=output[-2:],
                returns_after=rng.choice([None, 2.0, 500.0, "search"]),
                session_ends=rng.random() < 0.05,
            )
            request = Request(prompt, output, info, info.priority)
            made.append(Start(request) if rng.random() < 0.3 else Serve(request))
            chats[at] = prompt + output if len(prompt) < 150 else rng.choice(systems)
        elif draw < 0.92:
            made.append(Finish(rng.randrange(4)))
        elif draw < 0.97:
            made.append(Evict(rng.randrange(1, 80)))
        else:
            made.append(Wait(rng.choice(chats)))
    return made
