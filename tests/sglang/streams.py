"""Streams of prompts like a server's, for several tests and a benchmark."""

from __future__ import annotations

import random

SYSTEMS = (128, 192, 256)
"""Tokens of the assistants' system prompts, the most popular one first."""
PACES = (1.0, 0.5, 0.2)
"""Weight of a chat when the next to continue is drawn."""
LONGEST = 900
"""A chat that has more tokens ends."""


def chats_and_scans(seed: int, requests: int = 100) -> list[list[int]]:
    """Eight chats at a time, between bursts of three to six documents that are asked about once.

    The chats share three system prompts, continue at different paces, and end after five turns in the mean.

    A turn repeats the chat so far, and adds 48 to 112 tokens: the answer, and the next question.
    """
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    systems = [words(size) for size in SYSTEMS]
    chats: list[tuple[list[int], float]] = []
    prompts: list[list[int]] = []
    while len(prompts) < requests:
        if rng.random() < 0.06:
            prompts += [words(rng.randint(256, 448)) for _ in range(rng.randint(3, 6))]
        elif len(chats) < 8:
            (system,) = rng.choices(systems, [1 / rank for rank in range(1, len(systems) + 1)])
            chats.append((system + words(rng.randint(32, 96)), rng.choice(PACES)))
            prompts.append(list(chats[-1][0]))
        else:
            (chat,) = rng.choices(chats, [pace for _, pace in chats])
            chat[0].extend(words(rng.randint(48, 112)))
            prompts.append(list(chat[0]))
            if rng.random() < 0.2 or len(chat[0]) > LONGEST:
                chats.remove(chat)
    return prompts[:requests]
