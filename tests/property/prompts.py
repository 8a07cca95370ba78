"""Prompts for state machines over a cache."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from costcache import RadixCache

__all__ = ["GROWING", "Prompts", "prompts"]


class Prompts:
    """Makes prompts for a state machine over a cache: many begin alike, and end within a page.

    Attributes:
        cache: The cache.
        history: Prompts so far, whole pages of them; the first one is empty.
    """

    cache: RadixCache
    history: list[tuple[int, ...]]

    def tokens(self, base: int, cut: int, more: list[int], tail: int) -> tuple[int, ...]:
        """Some pages of an earlier prompt, some new ones, and part of a page."""
        size = self.cache.page_size
        # Pages that differ only in their last token, and pages that differ in all.
        page = [(0,) * size, (0,) * (size - 1) + (1,), (1,) * size]
        kept = self.history[base % len(self.history)][: cut * size]
        whole = kept + tuple(token for symbol in more for token in page[symbol])
        self.history.append(whole)
        return whole + (0,) * min(tail, size - 1)


GROWING: dict[str, Any] = {
    "base": st.integers(0, 200),
    "cut": st.integers(0, 10),
    "more": st.lists(st.integers(0, 2), min_size=2, max_size=6),
}
"""Arguments of a rule with a prompt that grows by ``more``, page by page."""


def prompts(spaces: list[Any], names: Any) -> dict[str, Any]:
    """Arguments of a rule with a prompt: those of :meth:`Prompts.tokens`, a namespace, a request's name."""
    return {
        "base": st.integers(0, 200),
        "cut": st.integers(0, 10),
        "more": st.lists(st.integers(0, 2), max_size=6),
        "tail": st.integers(0, 3),
        "space": st.sampled_from(spaces),
        "name": names,
    }
