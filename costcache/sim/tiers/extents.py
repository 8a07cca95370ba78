"""The pages of a trace as extents: parts of its runs, small enough to be moved between tiers one by one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.sim.runs import PageRuns

__all__ = ["ROOT", "Extents", "extents"]

ROOT = -1
"""In place of the parent of a prompt's first extent."""


@dataclass(frozen=True, eq=False)
class Extents:
    """The whole pages of all prompts, extent by extent; an extent is evicted or moved whole.

    Attributes:
        parents: The extent before each one, :data:`ROOT` for none.
        depths: Tokens of the prefix before each extent.
        tokens: Tokens of each extent.
        ends_run: Whether a run ends with the extent: a prompt does, or prompts branch after it.
        paths: The extents of each prompt, from its first token on.
    """

    parents: list[int]
    depths: list[int]
    tokens: list[int]
    ends_run: list[bool]
    paths: list[list[int]]

    def __len__(self) -> int:
        return len(self.parents)

    def prefix(self, path: list[int], count: int) -> int:
        """Tokens of the first ``count`` extents of a path."""
        return self.depths[path[count - 1]] + self.tokens[path[count - 1]] if count else 0


def extents(runs: PageRuns, page_size: int, most: int) -> Extents:
    """Divide runs into extents of at most ``most`` tokens, whole pages; one page if that is more.

    Args:
        runs: The runs of all prompts.
        page_size: Tokens per page.
        most: Tokens of the longest extent.
    """
    step = max(1, most // page_size)
    found = Extents([], [], [], [], [])
    of_run: dict[int, list[int]] = {}
    lengths, visits = runs.lengths.tolist(), runs.visits.tolist()
    for first, last in pairwise(runs.offsets.tolist()):
        path: list[int] = []
        depth = 0
        for run in visits[first:last]:
            parts = of_run.get(run)
            if parts is None:
                parts, left = [], lengths[run]
                while left:
                    pages = min(step, left)
                    left -= pages
                    found.parents.append(parts[-1] if parts else path[-1] if path else ROOT)
                    found.depths.append(depth + (lengths[run] - left - pages) * page_size)
                    found.tokens.append(pages * page_size)
                    found.ends_run.append(not left)
                    parts.append(len(found.parents) - 1)
                of_run[run] = parts
            path += parts
            depth += lengths[run] * page_size
        found.paths.append(path)
    return found
