"""Many replays of one trace, in this process or in several."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

from costcache.errors import SettingsError
from costcache.sim.cell import Cell
from costcache.sim.engine import Simulator

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from costcache.sim.results import Outcome, Run

__all__ = ["Cell", "outcomes", "sweep"]


def sweep(
    simulator: Simulator,
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    ray: bool = False,
    progress: Callable[[Cell, int], None] | None = None,
) -> list[Run]:
    """Replay all cells; the runs are in the order of the cells, whichever finishes first.

    Args:
        simulator: The simulator with the trace.
        cells: The replays to run.
        jobs: Processes; with more than one, each loads its plugins again, so they must be installed.
        ray: Spread the replays over a Ray cluster instead; see :func:`costcache.sim.cluster.on_ray`.
        progress: Called now and then with the running cell and the number of requests done since
            the last call.

    Raises:
        SettingsError: If ``jobs`` is under 1, or a process died; or as :meth:`Simulator.run` does.
        PluginError: As :meth:`Simulator.run` does.
    """
    found = outcomes(simulator, cells, jobs=jobs, ray=ray, progress=progress)
    return [cell.figures(simulator, outcome) for cell, outcome in zip(cells, found, strict=True)]


def outcomes(
    simulator: Simulator,
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    ray: bool = False,
    progress: Callable[[Cell, int], None] | None = None,
) -> list[Outcome]:
    """Replay as :func:`sweep` does, and return the results of each request instead of the figures."""
    if jobs < 1:
        raise SettingsError(f"jobs is {jobs}: give 1 process or more")
    if ray:
        from costcache.sim.cluster import on_ray

        return on_ray(simulator, cells, progress=progress)
    if jobs == 1 or len(cells) < 2:
        return [
            cell.outcome(simulator, None if progress is None else functools.partial(progress, cell))
            for cell in cells
        ]
    context = multiprocessing.get_context("spawn")  # a fork may inherit a lock that another thread holds
    others = set(multiprocessing.active_children())
    # Through a file: a process that dies while it is sent something would leave this one waiting for ever.
    with tempfile.TemporaryDirectory(prefix="costcache-") as folder:
        prepared = Path(folder) / "simulator"
        with prepared.open("wb") as stream:
            pickle.dump(simulator.arguments, stream, pickle.HIGHEST_PROTOCOL)
        pool = ProcessPoolExecutor(min(jobs, len(cells)), context, initializer=_prepare, initargs=(prepared,))
        return _in(pool, simulator, cells, jobs, others, progress)


def _in(
    pool: ProcessPoolExecutor,
    simulator: Simulator,
    cells: Sequence[Cell],
    jobs: int,
    others: set[BaseProcess],
    progress: Callable[[Cell, int], None] | None,
) -> list[Outcome]:
    """Replay all cells in a pool of processes, which ends with this."""
    try:
        with _interrupts_held():
            # Not `map`, which cancels what is left when it fails: a broken pool fails on what is cancelled.
            coming = [pool.submit(_outcome, cell) for cell in cells]
        found = []
        for cell, future in zip(cells, coming, strict=True):
            found.append(future.result())
            if progress is not None:
                progress(cell, len(simulator.trace))
    except BaseException as error:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()  # what it computes, nobody wants any more, and it has nothing to tidy up
        if not isinstance(error, BrokenProcessPool):
            raise
        raise SettingsError(
            f"jobs is {jobs}, and one of the processes died, which is mostly for want of memory: give fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    return found


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back Ctrl-C for a moment; a process that is started meanwhile never hears it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "pthread_sigmask"):  # Windows has no such masks
        yield
        return
    came: list[int] = []
    # The mask is for the processes. Here it does not suffice: threads of numerical libraries take the signal.
    handler = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(signal.SIGINT, None)


_simulator: Simulator | None = None


def _prepare(prepared: Path) -> None:
    global _simulator  # noqa: PLW0603 # the trace is read once per worker, not with every cell
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with prepared.open("rb") as stream:
        trace, model, deployment, options = pickle.load(stream)
    _simulator = Simulator(trace, model, deployment, **options)


def _end_with_parent() -> None:
    """Wait for the process that started this one; if it was killed, nobody else ends this one."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _outcome(cell: Cell) -> Outcome:
    if _simulator is None:
        raise RuntimeError("the worker was not prepared")
    return cell.outcome(_simulator)
