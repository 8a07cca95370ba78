"""Gives hostile inputs to every surface, and reports tracebacks, hangs, memory and wrong answers.

    python -m tests.fuzz.driver --inputs 5000 --seed 1

Inputs run in a process of their own, which is watched: an input that takes more than 10 seconds, or 1 GB more
memory than the process had, is a failure, and a new process goes on with the next one. An input is made from
the seed and its number alone: ``--only NUMBER`` runs that one again, and shows its traceback.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import costcache.files
from tests.fuzz.surfaces import SURFACES, prepare

__all__ = ["Failure", "fuzz"]

SECONDS = 10.0
MEGABYTES = 1000
PATIENCE = 0.05
"""Seconds that the program waits for the other end of a pipe, here."""


class Failure(NamedTuple):
    """An input that the program did not stand."""

    number: int
    surface: str
    what: str


def surface_of(seed: int, number: int) -> str:
    """The surface of an input."""
    names, shares = list(SURFACES), [share for share, _ in SURFACES.values()]
    return random.Random(f"{seed}/{number}/surface").choices(names, shares)[0]


def peak() -> float:
    """The most memory that this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(channel: Connection, seed: int, numbers: Sequence[int]) -> None:
    """Run inputs in a process, and report each before and after it runs."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # logs of policies that fail, which is expected
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = prepare(Path(name))
        for number in numbers:
            surface = surface_of(seed, number)
            channel.send((number, surface, None))
            before, said = peak(), ""
            try:
                SURFACES[surface][1](random.Random(f"{seed}/{number}"), folder)
            except BaseException as error:  # whatever comes through is the failure
                where = traceback.extract_tb(error.__traceback__)[-1]
                said = f"{type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})"
            if not said and peak() - before > MEGABYTES:
                said = f"took {peak() - before:,.0f} MB"
            channel.send((number, surface, said))


def fuzz(seed: int, inputs: int, *, seconds: float = SECONDS) -> tuple[list[Failure], Counter[str]]:
    """Run inputs; returns the failures, and how many inputs each surface got."""
    costcache.files._PATIENCE = PATIENCE  # the process inherits it
    failures: list[Failure] = []
    counts: Counter[str] = Counter()
    context = multiprocessing.get_context("fork")  # the program is loaded once
    left = list(range(inputs))
    while left:
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, seed, left), daemon=True)
        process.start()
        theirs.close()
        number, surface, said = -1, "", ""
        while left:
            try:
                if not ours.poll(seconds if number >= 0 else 60.0):
                    failures.append(Failure(number, surface, f"hangs: not done after {seconds:g} s"))
                    left = left[left.index(number) + 1 :]
                    break
                number, surface, said = ours.recv()
            except EOFError:
                process.join()
                failures.append(Failure(number, surface, f"ended the process, with {process.exitcode}"))
                left = left[left.index(number) + 1 :] if number >= 0 else []
                break
            if said is None:
                continue
            counts[surface] += 1
            left = left[1:] if left[0] == number else left[left.index(number) + 1 :]
            if said:
                failures.append(Failure(number, surface, said))
                if said.startswith("took"):  # the peak of a process does not fall
                    break
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        ours.close()
    return failures, counts


def main() -> int:
    """Run the driver."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run the input of this number, and show its traceback")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
            surface = surface_of(options.seed, options.only)
            sys.stdout.write(f"{surface}\n")
            SURFACES[surface][1](random.Random(f"{options.seed}/{options.only}"), prepare(Path(name)))
        return 0
    started = time.monotonic()
    failures, counts = fuzz(options.seed, options.inputs)
    for failure in failures:
        sys.stdout.write(f"{failure.number} {failure.surface}: {failure.what}\n")
    shares = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    took = time.monotonic() - started
    sys.stdout.write(f"{sum(counts.values())} inputs ({shares}) in {took:.0f} s: {len(failures)} failures\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
