"""Workloads of the benchmarks of hit rates, each with several starts: seeds, or places in a trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _report import check, recorded_traces

from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.workloads import WORKLOADS, generate

__all__ = [
    "FILES",
    "GENERATED",
    "HELD_OUT_FILES",
    "HELD_OUT_SEED",
    "Workload",
    "generated",
    "held_out",
    "later",
    "recorded",
    "workloads",
]

FILES = {
    "mooncake conversation": ("mooncake_conversation.jsonl.gz", 512),
    "mooncake synthetic": ("mooncake_synthetic.jsonl.gz", 512),
    "weka v6, 57 sessions": ("weka_cc_v6_global_57sessions.jsonl.gz", 512),
    "weka v8, 60 sessions": ("weka_cc_v8_local_60sessions.jsonl.gz", 512),
    "ragpulse": ("ragpulse_0_trace.jsonl.gz", 64),
    "sharegpt": ("sharegpt_turn_lengths.jsonl.gz", 16),
}
"""Recorded traces, with their page size in tokens."""
HELD_OUT_FILES = {
    "mooncake arxiv": ("mooncake_arxiv_first1000.jsonl.gz", 512),
    "mini-swe agents": ("lmcache_miniswe.jsonl.gz", 16),
    "bbh": ("bbh_original.tar.gz", 16),
    "gsm8k": ("gsm8k_original.tar.gz", 16),
}
"""Those that no policy was tuned on."""
GENERATED = tuple(name for name in WORKLOADS if name != "random")  # it shares no prefix: nothing hits
HELD_OUT_SEED = 20
"""The first seed of held-out workloads."""

_CLOCKED = ("mooncake conversation", "mooncake synthetic", "ragpulse", "mooncake arxiv")
"""Recorded traces with a clock; in the others, session starts are drawn from a seed."""
_STEP = 0.1
"""Share of the requests of a trace with a clock by which each start is later than the one before."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload.

    Attributes:
        name: Its name.
        page: Tokens in a page.
        build: Builds the trace of a start, counted from 0.
    """

    name: str
    page: int
    build: Callable[[int], Trace]


def workloads(names: tuple[str, ...] | None = None) -> list[Workload]:
    """The workloads on which policies were tuned, the traffic shifts among them; all, or those named."""
    found = recorded(FILES, 0)
    found += [Workload(name, 16, functools.partial(generated, name, 0)) for name in GENERATED]
    found += [
        Workload("few-shot, then chat", 16, after),
        Workload("multi-turn and chat at once", 16, together),
    ]
    return [each for each in found if names is None or each.name in names]


def held_out() -> list[Workload]:
    """The workloads on which nothing was tuned."""
    found = recorded(HELD_OUT_FILES, HELD_OUT_SEED, "words")
    found += [
        Workload(f"{name}, other seeds", 16, functools.partial(generated, name, HELD_OUT_SEED))
        for name in GENERATED
    ]
    mooncake, azure, weka = (
        recorded_traces() / name
        for name in (
            "mooncake_synthetic.jsonl.gz",
            "azure2023_conv.csv.gz",
            "weka_cc_v8_local_60sessions.jsonl.gz",
        )
    )
    if mooncake.is_file() and azure.is_file():
        name = "mooncake synthetic, azure's times"
        found.append(Workload(name, 512, lambda start: later(load_trace(mooncake, retime=azure), start)))
    if weka.is_file():
        name = "weka v8, other starts, gaps as recorded"
        found.append(Workload(name, 512, lambda start: recorded_gaps(weka, start)))
    return found


def recorded(files: Mapping[str, tuple[str, int]], seed: int, tokenizer: str | None = None) -> list[Workload]:
    """Those of some recorded traces that exist; the others are named on standard error.

    Args:
        files: File and page size by name.
        seed: The first seed of session starts.
        tokenizer: For texts, which have pages of 16 tokens.
    """
    found = []
    for name, (file, page) in files.items():
        path = recorded_traces() / file
        if not path.is_file():
            print(f"{path} is missing: {name} is skipped", file=sys.stderr)
            continue
        by = tokenizer if page == 16 else None
        build = functools.partial(from_place if name in _CLOCKED else from_seed, path, seed, by)
        found.append(Workload(name, page, build))
    return found


def from_seed(path: Path, seed: int, tokenizer: str | None, start: int) -> Trace:
    """A recorded trace whose sessions start at random."""
    return load_trace(path, seed=seed + start, tokenizer=tokenizer)


def from_place(path: Path, _: int, tokenizer: str | None, start: int) -> Trace:
    """A recorded trace with a clock, from some place on."""
    return later(load_trace(path, tokenizer=tokenizer), start)


def later(trace: Trace, start: int) -> Trace:
    """A trace without its first requests."""
    return trace.take(np.arange(int(len(trace) * _STEP * start), len(trace)))


def generated(name: str, seed: int, start: int) -> Trace:
    """A generated workload, of its default size."""
    return generate(name, WORKLOADS[name].settings(seed=seed + start))


def recorded_gaps(path: Path, start: int) -> Trace:
    """Sessions by their own clock, started within an hour."""
    return load_trace(path, seed=HELD_OUT_SEED + start, arrivals="uniform:1h", gaps="recorded")


def after(start: int) -> Trace:
    """A trace of few-shot, then chat."""
    first, second = generated("few-shot", 0, start), generated("chat", 0, start)
    return joined("few-shot, then chat", first, second, float(first.timestamps[-1]))


def together(start: int) -> Trace:
    """A trace of multi-turn and chat at once."""
    first, second = generated("multi-turn", 0, start), generated("chat", 0, start)
    return joined("multi-turn and chat at once", first, second, 0.0).in_time_order()


def joined(name: str, first: Trace, second: Trace, start: float) -> Trace:
    """Join two traces of one block size; the second begins at ``start`` and shares nothing with the first."""
    check(first.block_size == second.block_size, "two traces of one block size")
    apart = int(first.ids.max()) + 1 - int(second.ids.min())
    return Trace(
        name=name,
        block_size=first.block_size,
        timestamps=np.concatenate((first.timestamps, second.timestamps + start)),
        input_tokens=np.concatenate((first.input_tokens, second.input_tokens)),
        output_tokens=np.concatenate((first.output_tokens, second.output_tokens)),
        ids=np.concatenate((first.ids, second.ids + apart)),
        offsets=np.concatenate((first.offsets, second.offsets[1:] + first.offsets[-1])),
    )
