"""Records every policy's decisions over fixed streams, to check that a change of the code changes none.

    python benchmarks/decisions.py [--sections cache states simulator sglang] [--only TEXT] [--out FILE]
    python benchmarks/decisions.py --compare BEFORE AFTER
    python benchmarks/decisions.py --sections cache --show KEY

Records digests of all that a run shows: tokens found, slots, victims in their order, events, counts. Section
``cache`` is ``RadixCache`` and ``states`` is ``StateCache`` under random operations of several clients;
``simulator`` is replays of every kind; ``sglang`` is the adapter on SGLang's own classes, and needs SGLang
on CPU. Without ``--sections``, all but the last. A record does not depend on clock, hash seed or build: two
made on one machine differ only where decisions do. Figures beside the digests say roughly what happened,
``fallbacks`` among them. ``--compare`` prints each difference and ends with status 1 if there is one;
``--show`` prints a run's own lines, for ``diff``. Remarks (log messages, why a policy is refused) are
recorded and not compared.

The sources are those that Python finds first, which need not be the ones beside this script; ``--tests``
names the folder of tests that section ``sglang`` takes its servers from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _decisions.log import Case, differences, run

import costcache
from costcache._version import described

PLAIN = ("cache", "states", "simulator")
SECTIONS = (*PLAIN, "sglang")


def cases(section: str, tests: Path) -> Iterator[tuple[str, Case]]:
    """The runs of a section by key."""
    found: Callable[[], Iterator[tuple[str, Case]]]
    if section == "simulator":
        from _decisions.simulator import simulator_cases as found
    elif section == "sglang":
        sys.path.insert(0, str(tests.resolve().parent))
        from _decisions.adapter import adapter_cases as found
    elif section == "states":
        from _decisions.caches import state_cases as found
    else:
        from _decisions.caches import cache_cases as found
    return found()


def record(sections: list[str], only: str, tests: Path) -> dict[str, Any]:
    """Run the sections; progress goes to standard error."""
    kept: dict[str, dict[str, Any]] = {}
    remarks: dict[str, list[str]] = {}
    for section in sections:
        began = time.perf_counter()
        entries = kept[section] = {}
        for key, case in cases(section, tests):
            if only in key:
                entries[key], notes, _ = run(case)
                if notes:
                    remarks[f"{section}/{key}"] = notes
        print(f"{section}: {len(entries)} runs, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    about = {"costcache": described(), "sources": str(Path(costcache.__file__).parent)}
    return {"about": about, "sections": kept, "remarks": remarks}


def show(section: str, key: str, tests: Path) -> None:
    """Print the lines of one run."""
    for name, case in cases(section, tests):
        if name == key:
            entry, notes, lines = run(case)
            print(*lines, *notes, json.dumps(entry), sep="\n")
            return
    raise SystemExit(f"section {section} has no run {key!r}")


def compare(before: Path, after: Path) -> int:
    """Print the differences of two records; returns how many there are."""
    first, second = (json.loads(path.read_text()) for path in (before, after))
    found = list(differences(first, second))
    runs = sum(map(len, first["sections"].values()))
    print(*found, f"{len(found)} differences in {runs} runs", sep="\n")
    return len(found)


def main() -> None:
    """Record, show or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    beside = Path(__file__).resolve().parents[1] / "tests"
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(PLAIN), metavar="SECTION")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs whose key contains this")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write; standard output by default")
    parser.add_argument(
        "--tests", type=Path, default=beside, help="the tests whose servers SGLang's runs use"
    )
    parser.add_argument("--show", metavar="KEY", help="print the lines of one run of the first section")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        sys.exit(bool(compare(*options.compare)))
    if options.show:
        show(options.sections[0], options.show, options.tests)
        return
    text = json.dumps(record(options.sections, options.only, options.tests), indent=1) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
