"""Recorded traces have the sizes and ideal hit rates that were published or counted with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.traces.azure import read_arrivals
from costcache.sim.traces.files import open_source
from costcache.sim.traces.summary import summarize
from costcache.sim.traces.weka import read_weka

pytestmark = pytest.mark.traces


class Known(NamedTuple):
    requests: int
    sessions: int | None
    input_tokens: int
    output_tokens: int
    ideal: float


# Counted once by other programs than this one; the rates are of whole and partial blocks of inputs.
KNOWN = {
    "mooncake_conversation.jsonl.gz": Known(12_031, None, 144_793_823, 4_122_048, 0.3736),
    "mooncake_synthetic.jsonl.gz": Known(3_993, None, 61_194_628, 595_432, 0.6512),
    "mooncake_arxiv_first1000.jsonl.gz": Known(1_000, None, 9_792_030, 199_084, 0.3907),
    "weka_cc_v8_local_60sessions.jsonl.gz": Known(3_464, 60, 423_744_236, 1_463_028, 0.9620),
    "weka_cc_v6_global.jsonl.xz": Known(26_752, 454, 2_427_154_886, 10_851_479, 0.9586),
    "weka_cc_v6_global_57sessions.jsonl.gz": Known(3_130, 57, 257_715_836, 1_570_386, 0.9458),
    # Input tokens: the sum of the chunks, whose lengths are known.
    "ragpulse_0_trace.jsonl.gz": Known(7_106, 3_990, 20_851_449, 2_012_676, 0.3153),
    "dynamo_pi_request_trace.jsonl.gz": Known(17, 5, 66_520, 8_094, 0.7168),
}


def found(trace: Trace) -> Known:
    return Known(
        len(trace),
        None if trace.sessions is None else int(trace.sessions.max()) + 1,
        int(trace.input_tokens.sum()),
        int(trace.output_tokens.sum()),
        trace.ideal_hit_rate(trace.block_size),
    )


@pytest.mark.parametrize("name", KNOWN)
def test_sizes_and_ideal_rate(traces_dir: Path, name: str) -> None:
    known, mine = KNOWN[name], found(load_trace(traces_dir / name))
    assert mine[:-1] == known[:-1]
    assert mine.ideal == pytest.approx(known.ideal, abs=0.001)


def test_weka_as_stored_counts_turns_twice(traces_dir: Path) -> None:
    with open_source(traces_dir / "weka_cc_v6_global_57sessions.jsonl.gz") as source:
        mine = found(read_weka(source, duplicates=True))
    assert mine[:-1] == (5_675, 57, 488_783_181, 2_469_129)
    assert mine.ideal == pytest.approx(0.9712, abs=0.001)


def test_weka_sessions_continue_by_their_clock(traces_dir: Path) -> None:
    # Think times are whole seconds, and so is the clock. The rest came side by side with the last one.
    with open_source(traces_dir / "weka_cc_v6_global_57sessions.jsonl.gz") as source:
        clock = read_weka(source)
    before = clock.predecessors()
    waited = before >= 0
    assert clock.service_seconds is not None
    assert clock.think_seconds is not None
    ended = clock.timestamps[before[waited]] + clock.service_seconds[before[waited]]
    late = clock.timestamps[waited] - ended - clock.think_seconds[waited]
    assert (np.abs(late) <= 1.5).mean() > 0.85
    assert late.max() < 5.0


def test_sharegpt_with_outputs_cached(traces_dir: Path) -> None:
    trace = load_trace(traces_dir / "sharegpt_turn_lengths.jsonl.gz")
    mine = found(trace)
    assert mine[:-1] == (61_243, 17_396, 49_469_352, 17_333_116)
    assert trace.sessions is not None
    assert trace.output_ids is not None
    assert trace.output_offsets is not None
    # By tokens: all that the turn before has read and written.
    order = np.argsort(trace.sessions, kind="stable")
    same = trace.sessions[order][1:] == trace.sessions[order][:-1]
    left = (trace.input_tokens + trace.output_tokens)[order][:-1][same]
    asked = trace.input_tokens[order][1:][same]
    assert (left <= asked).all()
    assert left.sum() / mine.input_tokens == pytest.approx(0.8355, abs=0.001)
    # By pages: the ids say the same.
    expected = (left // 16 * 16).sum() / mine.input_tokens
    assert summarize(trace, 16).ideal_with_outputs == pytest.approx(expected)


def test_azure_arrivals(traces_dir: Path) -> None:
    for name, count, seconds in (("conv", 19_366, 3_501.7), ("code", 8_819, 3_435.9)):
        times = read_arrivals(traces_dir / f"azure2023_{name}.csv.gz")
        assert len(times) == count
        assert times[-1] == pytest.approx(seconds, abs=0.06)
    trace = load_trace(
        traces_dir / "mooncake_conversation.jsonl.gz", retime=traces_dir / "azure2023_code.csv.gz"
    )
    assert trace.timestamps[-1] > times[-1]  # more requests than arrivals: they come again
    assert bool((np.diff(trace.timestamps) >= 0).all())
    assert trace.ideal_hit_rate(512) == pytest.approx(0.3736, abs=0.001)


TEXTS = {
    "lmcache_miniswe.jsonl.gz": Known(402, 20, 2_539_551, 44_251, 0.9342),
    "bbh_original.tar.gz": Known(6_511, None, 5_922_552, 0, 0.9105),
    "gsm8k_original.tar.gz": Known(1_319, None, 1_754_311, 163_663, 0.9496),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_by_the_built_in_tokenizer(traces_dir: Path, name: str) -> None:
    known, trace = TEXTS[name], load_trace(traces_dir / name, tokenizer="words")
    mine = found(trace)
    assert mine[:2] == known[:2]
    # Its counts are its own; what prompts share differs little.
    assert mine.input_tokens == pytest.approx(known.input_tokens, rel=0.1)
    assert trace.ideal_hit_rate(16) == pytest.approx(known.ideal, abs=0.01)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_by_the_tokenizer_of_the_published_counts(traces_dir: Path, name: str) -> None:
    tokenizer = os.environ.get("COSTCACHE_QWEN_TOKENIZER")
    if tokenizer is None:
        pytest.skip("no tokenizer: set COSTCACHE_QWEN_TOKENIZER to a tokenizer.json of Qwen (v1)")
    pytest.importorskip("tokenizers")
    known, trace = TEXTS[name], load_trace(traces_dir / name, tokenizer=tokenizer)
    mine = found(trace)
    assert mine[:2] == known[:2]
    assert mine.input_tokens == pytest.approx(known.input_tokens, rel=1e-5)
    assert mine.output_tokens == known.output_tokens
    assert trace.ideal_hit_rate(16) == pytest.approx(known.ideal, abs=0.001)
