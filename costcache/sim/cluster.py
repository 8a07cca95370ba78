"""Replays spread over a Ray cluster, for sweeps that outgrow one machine; needs the extra ``ray``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from costcache.errors import SettingsError
from costcache.sim.engine import Simulator

if TYPE_CHECKING:
    from costcache.sim.cell import Cell
    from costcache.sim.results import Outcome

__all__ = ["on_ray"]


_RESTARTS = 3
"""Times that a worker that died is started anew."""


class _Worker:
    """A worker process, with its trace prepared once."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        trace, model, deployment, options = arguments
        self._simulator = Simulator(trace, model, deployment, **options)

    def outcome(self, cell: Cell) -> Outcome:
        return cell.outcome(self._simulator)


def on_ray(
    simulator: Simulator,
    cells: Sequence[Cell],
    *,
    progress: Callable[[Cell, int], None] | None = None,
) -> list[Outcome]:
    """Replay all cells on a Ray cluster; the outcomes are in the order of the cells.

    Uses the cluster that the process is connected to, and leaves it running. Without one, Ray looks for a
    cluster as usual (``RAY_ADDRESS``), and starts one on this machine if there is none. costcache and the
    plugins in use must be installed on every machine. A worker that dies, with its machine say, is started
    anew, and its replay is done again.

    Args:
        simulator: The simulator with the trace.
        cells: The replays to run.
        progress: Called with each finished cell and its number of requests.

    Raises:
        SettingsError: If Ray is not installed, or workers keep dying; or as :meth:`Simulator.run` does.
    """
    try:
        import ray
        from ray.exceptions import RayActorError, RayTaskError
        from ray.util import ActorPool
    except ImportError as error:
        raise SettingsError("--ray needs the package ray: pip install 'costcache[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False, include_dashboard=False)
    try:
        # The trace is sent once, and shared by the workers of a machine.
        arguments = ray.put(simulator.arguments)
        workers = max(1, min(len(cells), int(ray.cluster_resources().get("CPU", 1))))
        actor = ray.remote(num_cpus=1, max_restarts=_RESTARTS, max_task_retries=_RESTARTS)(_Worker)
        pool = ActorPool([actor.remote(arguments) for _ in range(workers)])
        found: list[Outcome] = []
        for cell, outcome in zip(cells, pool.map(lambda a, c: a.outcome.remote(c), cells), strict=True):
            found.append(outcome)
            if progress is not None:
                progress(cell, len(simulator.trace))
        return found
    except RayActorError as error:
        raise SettingsError(
            f"--ray: a worker died {_RESTARTS + 1} times, which is mostly for want of memory: give its "
            "machine more, or replay a shorter trace"
        ) from error
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
    finally:
        if started:
            ray.shutdown()
