"""Session arrivals, closed loops, and the arrival times of another trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costcache.errors import TraceError
from costcache.sim.trace import Trace
from costcache.sim.traces import load_trace
from costcache.sim.traces.arrivals import Arrivals, at_times
from costcache.sim.traces.azure import read_arrivals

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805901,396,109
2023-11-17 18:15:46.6805900,1,0
"""


def sessions(think: list[float], service: list[float], numbers: list[int], times: list[float]) -> Trace:
    n = len(numbers)
    return Trace(
        name="made",
        block_size=1,
        timestamps=np.array(times),
        input_tokens=np.ones(n, np.int64),
        output_tokens=np.arange(n),
        ids=np.zeros(n, np.int64),
        offsets=np.arange(n + 1),
        sessions=np.array(numbers),
        think_seconds=np.array(think),
        service_seconds=np.array(service),
    )


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("uniform:6h", Arrivals("uniform", 21_600.0)),
        ("uniform:90s", Arrivals("uniform", 90.0)),
        ("uniform:1.5d", Arrivals("uniform", 129_600.0)),
        ("uniform:2m", Arrivals("uniform", 120.0)),
        ("poisson:0.05", Arrivals("poisson", 0.05)),
        ("even:4", Arrivals("even", 4.0)),
        ("together", Arrivals("together")),
    ],
)
def test_processes_are_read(text: str, arrivals: Arrivals) -> None:
    assert Arrivals.parse(text) == arrivals


@pytest.mark.parametrize(
    "text",
    [
        "",
        "uniform",
        "uniform:6",
        "uniform:0h",
        "poisson:",
        "poisson:-1",
        "poisson:nan",
        "even:inf",
        "together:1",
    ],
)
def test_an_unknown_process_is_named(text: str) -> None:
    with pytest.raises(TraceError, match=r"arrivals are '.*'; give uniform:6h"):
        Arrivals.parse(text)


def test_starts_are_of_their_process() -> None:
    uniform = Arrivals.parse("uniform:1h").starts(4000, 0)
    assert uniform.min() >= 0.0
    assert uniform.max() <= 3600.0
    assert uniform.mean() == pytest.approx(1800.0, rel=0.05)
    poisson = Arrivals.parse("poisson:0.5").starts(4000, 0)
    gaps = np.diff(poisson)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(2.0, rel=0.05)
    assert gaps.std() == pytest.approx(2.0, rel=0.1)
    assert Arrivals.parse("even:0.5").starts(3, 0).tolist() == [0.0, 2.0, 4.0]
    assert Arrivals.parse("together").starts(3, 0).tolist() == [0.0, 0.0, 0.0]
    assert np.array_equal(uniform, Arrivals.parse("uniform:1h").starts(4000, 0))
    assert not np.array_equal(uniform, Arrivals.parse("uniform:1h").starts(4000, 1))


def test_the_next_request_arrives_after_answer_and_think_time() -> None:
    trace = sessions(
        think=[9, 9, 3, 1, 4], service=[1, 2, 5, np.nan, 1], numbers=[0, 1, 0, 1, 0], times=[0, 0, 1, 1, 2]
    )
    spread = Arrivals.parse("even:0.1").spread(trace, 0, clock=False)
    # Session 0 at 0, 0+1+3, 4+5+4; session 1 at 10, 10+2+1.
    assert spread.timestamps.tolist() == [0.0, 4.0, 10.0, 13.0, 13.0]
    assert spread.output_tokens.tolist() == [0, 2, 1, 3, 4]
    assert spread.sessions is not None
    assert spread.sessions.tolist() == [0, 0, 1, 1, 0]


def test_a_clock_without_think_times_keeps_its_gaps() -> None:
    trace = sessions([0] * 4, [0] * 4, [0, 1, 0, 1], [100.0, 101.0, 107.5, 111.0])
    trace = replace(trace, think_seconds=None)
    spread = Arrivals.parse("together").spread(trace, 0, clock=True)
    assert spread.timestamps.tolist() == [0.0, 0.0, 7.5, 10.0]


def test_recorded_gaps_are_kept_where_they_are_asked_for() -> None:
    trace = sessions([5, 5, 5], [1, 1, 1], [0, 1, 0], [3.0, 0.0, 7.5])
    spread = Arrivals.parse("even:1").spread(trace, 0, clock=False, recorded=True)
    assert spread.timestamps.tolist() == [0.0, 1.0, 4.5]
    assert spread.think_seconds is not None  # a server may still wait for its own answers
    untimed = replace(trace, timestamps=np.zeros(3))
    with pytest.raises(TraceError, match="made: records no times, so its gaps cannot be kept"):
        Arrivals.parse("even:1").spread(untimed, 0, clock=False, recorded=True)


def test_requests_without_sessions_are_spread_one_by_one() -> None:
    trace = replace(sessions([0] * 3, [0] * 3, [0, 0, 0], [0.0] * 3), sessions=None, think_seconds=None)
    assert Arrivals.parse("even:2").spread(trace, 0, clock=False).timestamps.tolist() == [0.0, 0.5, 1.0]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=12),
    st.sampled_from(["uniform:1m", "poisson:0.1", "even:1", "together"]),
)
def test_closed_loops_equal_a_naive_one(rows: list[tuple[int, float, float]], process: str) -> None:
    names: dict[int, int] = {}
    numbers = [names.setdefault(row[0], len(names)) for row in rows]
    trace = sessions([r[1] for r in rows], [r[2] for r in rows], numbers, [0.0] * len(rows))
    starts = Arrivals.parse(process).starts(len(names), 3).tolist()
    ends: dict[int, float] = {}
    expected = []
    for number, (_, think, service) in zip(numbers, rows, strict=True):
        at = ends[number] + think if number in ends else starts[number]
        ends[number] = at + service
        expected.append(at)
    spread = Arrivals.parse(process).spread(trace, 3, clock=False)
    times = dict(zip(spread.output_tokens.tolist(), spread.timestamps.tolist(), strict=True))
    assert [times[i] for i in range(len(rows))] == pytest.approx(expected)
    assert (np.diff(spread.timestamps) >= 0).all()


def test_a_trace_gets_the_times_of_another(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    assert read_arrivals(path).tolist() == pytest.approx([0.0, 1.0000001, 86_400.0], abs=1e-6)
    trace = sessions([1] * 5, [1] * 5, [0] * 5, [5.0, 4.0, 6.0, 7.0, 8.0])
    retimed = at_times(trace, np.array([0.0, 1.0, 4.0]))
    assert retimed.timestamps.tolist() == [0.0, 1.0, 4.0, 6.0, 7.0]
    assert retimed.output_tokens.tolist() == [1, 0, 2, 3, 4]
    assert retimed.think_seconds is None
    assert at_times(trace, np.array([0.0])).timestamps.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:46,1", "line 3: the line is '2023.*'; expected 3 columns: TIMESTAMP, Con"),
        ("yesterday,1,2", "line 3: TIMESTAMP is 'yesterday'; expected a date and time"),
        ("2023-13-16 18:15:46.1,1,2", "line 3: TIMESTAMP is '2023-13-16 18:15:46.1'; expected a date"),
        ("2023-11-16 18:15:46.1,x,2", "line 3: ContextTokens is 'x'; expected tokens, a whole number"),
        ("2023-11-16 18:15:46.1,1,-2", "line 3: GeneratedTokens is '-2'; expected tokens"),
    ],
)
def test_a_wrong_arrival_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("\n".join([*AZURE.splitlines()[:2], line]))
    with pytest.raises(TraceError, match=rf"azure\.csv, {message}"):
        read_arrivals(path)


@given(st.binary(max_size=80))
def test_any_bytes_are_arrivals_or_one_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(AZURE.encode()[:80] + data)
    try:
        assert len(read_arrivals(path)) > 0
    except TraceError as error:
        assert "any.csv" in str(error)  # noqa: PT017 - either outcome is right


def test_only_one_way_to_re_time(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"arrivals 'together' and times from x\.csv: give one of them"):
        load_trace(tmp_path / "t", arrivals="together", retime="x.csv")
    (tmp_path / "empty.csv").write_text(AZURE.splitlines()[0])
    with pytest.raises(TraceError, match=r"empty\.csv: holds no arrival"):
        load_trace(tmp_path / "t", retime=tmp_path / "empty.csv")
