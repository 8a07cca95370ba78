"""Prompts as servers get them, as arrays: chats on shared heads, repeats, cuts, and scans."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Prompt", "Prompts", "Tokens"]

Tokens = NDArray[np.int64]

CHATS = 10
"""Chats that go on at a time."""
LONGEST = 500
"""Tokens, times the scale, at which a chat ends."""


@dataclass(slots=True)
class Prompt:
    """A prompt, and what is known of the request.

    Attributes:
        tokens: int64 of shape [n].
        space: Arguments that name the namespace.
        priority: Of the request.
        session: Its session, None where it has none.
    """

    tokens: Tokens
    space: dict[str, Any]
    priority: int = 0
    session: str | None = None


class Prompts:
    """A stream of prompts. All words are new: two prompts share what one copied from the other."""

    def __init__(self, rng: random.Random, scale: int) -> None:
        self._rng, self._scale = rng, scale
        self._words = 1
        self._heads = [
            Prompt(self.words(low, high), space)
            for low, high, space in (
                (20, 40, {}),
                (60, 90, {}),
                (110, 140, {}),
                (40, 60, {"extra_key": "lora"}),
                (40, 60, {"cache_salt": "salt"}),
            )
        ]
        self._chats: list[Prompt] = []
        self._begun = 0

    def words(self, low: int, high: int) -> Tokens:
        """New tokens, of a size in a range that is scaled."""
        size = self._rng.randint(low * self._scale, high * self._scale)
        self._words += size
        return np.arange(self._words - size, self._words, dtype=np.int64)

    def next(self) -> Prompt:
        """The next prompt."""
        rng = self._rng
        if rng.random() < 0.12:
            return Prompt(self.words(40, 250), {})
        if len(self._chats) < CHATS:
            (head,) = rng.choices(self._heads, (6, 4, 2, 1, 1))
            self._begun += 1
            tokens = np.concatenate((head.tokens, self.words(5, 40)))
            chat = Prompt(tokens, head.space, rng.choice((-1, 0, 0, 0, 2)), f"chat {self._begun}")
            self._chats.append(chat)
            return Prompt(chat.tokens, chat.space, chat.priority, chat.session)
        at = min(rng.randrange(CHATS), rng.randrange(CHATS))  # some go on more often than others
        chat, kind = self._chats[at], rng.random()
        if kind < 0.1:
            return Prompt(chat.tokens, chat.space, chat.priority, chat.session)
        if kind < 0.25:  # an edit in the middle, or a stop there
            cut = rng.randrange(1, len(chat.tokens) + 1)
            tokens = np.concatenate((chat.tokens[:cut], self.words(0, 20)))
            return Prompt(tokens, chat.space, chat.priority)
        chat.tokens = np.concatenate((chat.tokens, self.words(5, 60)))
        if rng.random() < 0.12 or len(chat.tokens) > LONGEST * self._scale:
            del self._chats[at]
        return Prompt(chat.tokens, chat.space, chat.priority, chat.session)

    def add(self, prompt: Prompt, output: Tokens) -> None:
        """A chat goes on from the answer to its latest prompt."""
        for chat in self._chats:
            if chat.session == prompt.session and len(chat.tokens) == len(prompt.tokens):
                chat.tokens = np.concatenate((chat.tokens, output))
