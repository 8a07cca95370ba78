"""One replay of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.settings import Settings
    from costcache.sim.engine import Simulator
    from costcache.sim.results import Outcome, Run
    from costcache.sim.serving import ServingSettings

__all__ = ["Cell"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay of a sweep: the arguments of :meth:`Simulator.run`."""

    settings: Settings
    capacity: str
    capacity_tokens: int | None
    serving: ServingSettings | None = None
    always_free: bool = False
    tree: bool = False

    def outcome(self, simulator: Simulator, progress: Callable[[int], None] | None = None) -> Outcome:
        """Replay this cell."""
        return simulator.outcome(
            self.settings,
            self.capacity_tokens,
            serving=self.serving,
            always_free=self.always_free,
            tree=self.tree,
            progress=progress,
        )

    def figures(self, simulator: Simulator, outcome: Outcome) -> Run:
        """Compute the figures of this cell's outcome."""
        return simulator.figures(outcome, self.settings, self.capacity_tokens, capacity=self.capacity)
