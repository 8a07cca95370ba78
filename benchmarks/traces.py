"""Reading trace files: seconds and memory for each recorded format, including all of the largest file.

    python benchmarks/traces.py [--json | --markdown]

Recorded traces are looked for in $COSTCACHE_TRACES, else in ../shared/traces; without any, the samples of the
repository are read. Each file is read in a process of its own, from its stored form to columns in memory. Its
known sizes are checked.
"""

from __future__ import annotations

import argparse
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

from _report import Report, check, recorded_traces

from costcache.sim.traces import load_trace

# Requests and input tokens, counted by other programs; the ideal hit rate at the block size.
FILES = {
    "mooncake_conversation.jsonl.gz": (12_031, 144_793_823, 0.3736),
    "ragpulse_0_trace.jsonl.gz": (7_106, 20_851_449, 0.3153),
    "weka_cc_v8_local_60sessions.jsonl.gz": (3_464, 423_744_236, 0.9620),
    "weka_cc_v6_global.jsonl.xz": (26_752, 2_427_154_886, 0.9586),
}
SAMPLES = Path(__file__).resolve().parents[1] / "examples" / "traces"
SAMPLE_FILES = {
    "bailian.jsonl": (24, 16_379, 0.8274),
    "dynamo.jsonl": (24, 16_379, 0.8274),
}
MOST_SECONDS, MOST_MIB = 300.0, 4096.0


def measure(path: Path, requests: int, tokens: int, ideal: float) -> tuple[float, float]:
    """Measure the seconds to read a file, and the peak memory of the process in MiB."""
    start = perf_counter()
    trace = load_trace(path)
    seconds = perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    check(len(trace) == requests and int(trace.input_tokens.sum()) == tokens, "the known size")
    check(abs(trace.ideal_hit_rate(trace.block_size) - ideal) < 0.001, "the known ideal hit rate")
    return seconds, memory


def main() -> None:
    """Read all files and print the report."""
    parser = argparse.ArgumentParser(description="Seconds to read trace files.")
    form = parser.add_mutually_exclusive_group()
    for name in ("json", "markdown"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="table")
    options = parser.parse_args()
    report = Report("Reading traces", "s")
    folder, files = recorded_traces(), FILES
    if not any((folder / name).is_file() for name in files):
        print(f"no recorded traces in {folder}: reading the samples, which are too small to measure speed by")
        folder, files = SAMPLES, SAMPLE_FILES
    for name, known in files.items():
        path = folder / name
        if not path.is_file():
            print(f"{path} is missing: skipped")
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            seconds, memory = alone.submit(measure, path, *known).result()
        check(memory < MOST_MIB, f"less than {MOST_MIB:.0f} MiB")
        report.add(name, seconds, MOST_SECONDS if name.endswith(".xz") else None, MiB=memory)
    report.show(options.form)


if __name__ == "__main__":
    main()
