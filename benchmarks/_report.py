"""Shared by the benchmarks: calibration of the machine, medians, and three formats to print them in."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter_ns

from costcache._version import described

__all__ = ["Figure", "Report", "calibrate", "check", "load", "recorded_traces", "table"]


BUSY = 0.7
"""Load average from which other work disturbs the measurement."""


def calibrate(repeats: int = 200) -> float:
    """Median microseconds of a loop of 1,000 dict look-ups and additions in pure Python.

    A figure divided by this one is about the same on a fast and on a slow machine.
    """
    table = {i: i for i in range(1000)}
    times = []
    for _ in range(repeats):
        start = perf_counter_ns()
        total = 0
        for i in range(1000):
            total += table[i]
        times.append(perf_counter_ns() - start)
    return statistics.median(times) / 1000


def load() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def recorded_traces() -> Path:
    """Folder of the recorded traces: ``$COSTCACHE_TRACES``, or ``../shared/traces``. It may not exist."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    return Path(os.environ.get("COSTCACHE_TRACES", beside))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> None:
    """Print a Markdown table whose first ``texts`` columns are text and whose others are numbers."""
    print("| " + " | ".join(headings) + " |")
    print("|---" * texts + "|---:" * (len(headings) - texts) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def check(condition: bool, what: str) -> None:
    """End the benchmark if it does not measure what it claims to.

    Raises:
        RuntimeError: If the condition is false; the message names what was expected.
    """
    if not condition:
        raise RuntimeError(f"the benchmark does not measure what it claims to: expected {what}")


@dataclass(frozen=True)
class Figure:
    """One line of a report.

    Attributes:
        name: What was measured.
        value: The figure, in the report's unit.
        ratio: The figure in calibration loops.
        wanted: The target value; None without one.
        more: Further columns.
    """

    name: str
    value: float
    ratio: float
    wanted: float | None = None
    more: dict[str, float] = field(default_factory=dict)


class Report:
    """Figures of one run, with facts about the machine."""

    def __init__(self, title: str, unit: str, *, higher_is_better: bool = False) -> None:
        self.title = title
        self.unit = unit
        self.figures: list[Figure] = []
        self._higher = higher_is_better
        self._load = load()
        self._calibrations = [calibrate()]

    def add(self, name: str, value: float, wanted: float | None = None, **more: float) -> None:
        """Add a figure. Its ratio is in calibration loops or, for a rate, in calibration loops per item.

        The loop runs again each time, since the speed of a shared machine varies.
        """
        loop = calibrate(30)
        self._calibrations.append(loop)
        ratio = 1e6 / value / loop if self._higher else value / loop
        self.figures.append(Figure(name, value, ratio, wanted, more))

    def add_times(self, name: str, nanoseconds: list[int], wanted: float | None = None) -> None:
        """Add the median of single times, and the bound that the fastest tenth of them stay under.

        The two are far apart if the machine was disturbed, by its own load or by its host.
        """
        times = sorted(nanoseconds)
        fast = times[len(times) // 10] / 1000
        self.add(name, statistics.median(times) / 1000, wanted, **{"fastest tenth": fast})

    @property
    def calibration(self) -> float:
        """Median microseconds of the calibration loop over the run."""
        return statistics.median(self._calibrations)

    def machine(self) -> dict[str, object]:
        """Facts about the machine: build, processor, Python, load and calibration."""
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return {
            "processor": models[0] if models else platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "costcache": described(),
            "load_before": self._load,
            "load_after": load(),
            "calibration_us": self.calibration,
        }

    def show(self, form: str) -> None:
        """Print the report as ``table``, ``json`` or ``markdown``."""
        if form == "json":
            figures = [asdict(figure) for figure in self.figures]
            print(
                json.dumps(
                    {"title": self.title, "unit": self.unit, "figures": figures, **self.machine()}, indent=2
                )
            )
        elif form == "markdown":
            self._markdown()
        else:
            self._table()

    def _rows(self) -> tuple[list[str], list[list[str]]]:
        more = list(dict.fromkeys(name for figure in self.figures for name in figure.more))
        headings = ["", self.unit, *more, "wanted", "calibration loops"]
        rows = []
        for figure in self.figures:
            wanted, sign = figure.wanted, "≥" if self._higher else "≤"
            missed = wanted is not None and (figure.value < wanted if self._higher else figure.value > wanted)
            extra = [self._number(figure.more[name]) if name in figure.more else "" for name in more]
            goal = "" if wanted is None else f"{sign} {self._number(wanted)}" + (" missed" if missed else "")
            rows.append([figure.name, self._number(figure.value), *extra, goal, f"{figure.ratio:.3f}"])
        return headings, rows

    def _number(self, value: float) -> str:
        return f"{value:,.0f}" if self._higher and value >= 100 else f"{value:,.2f}"

    def _about(self) -> str:
        about = self.machine()
        busy = self._load >= BUSY or load() >= 1 + BUSY  # at the end the benchmark itself is a load of 1
        return (
            f"costcache {about['costcache']}; {about['processor']}, {about['cores']} cores, "
            f"Python {about['python']}; "
            f"load {self._load:.2f} at the start and {load():.2f} at the end; "
            f"calibration loop {self.calibration:.1f} µs, from {min(self._calibrations):.1f} to "
            f"{max(self._calibrations):.1f}"
            + ("; the machine was busy with other work, which makes the figures worse" if busy else "")
        )

    def _table(self) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        headings, rows = self._rows()
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for i, heading in enumerate(headings):
            table.add_column(heading, justify="left" if not i else "right")
        for row in rows:
            table.add_row(*row)
        out = Console(highlight=False, markup=False)
        if not out.is_terminal:
            out.width = max(out.width, 110)
        out.print(f"{self.title}\n{self._about()}\n", soft_wrap=True)
        out.print(table)

    def _markdown(self) -> None:
        headings, rows = self._rows()
        command = " ".join(["python", Path(sys.argv[0]).as_posix(), *sys.argv[1:]])
        print(f"# {self.title}\n\n    {command}\n\n{self._about()}.\n")
        print("| " + " | ".join(headings) + " |")
        print("|---" + "|---:" * (len(headings) - 1) + "|")
        for row in rows:
            print("| " + " | ".join(row) + " |")
