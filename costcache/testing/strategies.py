"""Hypothesis strategies: requests, streams of steps, and models, for tests of plugins."""

from __future__ import annotations

from hypothesis import strategies as st

from costcache.model import ModelSpec
from costcache.model.presets import PRESETS
from costcache.records import MOST_ENDING, RequestInfo
from costcache.testing.steps import Evict, Finish, Request, Reset, Serve, Start, Step, Wait

__all__ = ["infos", "models", "prompts", "requests", "steps", "streams"]

_LONGEST = 24


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts of up to 24 tokens, out of so few that they share prefixes."""
    return st.lists(st.integers(0, 2), min_size=1, max_size=_LONGEST).map(tuple)


def infos() -> st.SearchStrategy[RequestInfo]:
    """Whatever can be known of a request when it ends, hints included."""
    reasons = st.sampled_from(["stop", "length", "tool_call", "abort"])
    return st.builds(
        RequestInfo,
        output_tokens=st.integers(0, 100_000),
        new_tokens=st.none() | st.integers(0, 100_000),
        finish_reason=st.none() | reasons | st.text(max_size=5),
        priority=st.integers(-3, 3),
        session=st.none() | st.text(max_size=5),
        ending=st.lists(st.integers(0, 5), max_size=MOST_ENDING).map(tuple),
        tenant=st.none() | st.text(max_size=5),
        session_ends=st.booleans(),
        returns_after=st.none() | st.floats(0, 1e6) | st.text(max_size=5),
        keep_seconds=st.none() | st.floats(0, 1e6),
        user=st.none() | st.text(max_size=5),
    )


def requests() -> st.SearchStrategy[Request]:
    """Requests with a short output, and whatever can be known of them."""
    output = st.lists(st.integers(0, 2), max_size=6).map(tuple)
    return st.builds(Request, prompts(), output, infos(), st.integers(-2, 2))


def steps() -> st.SearchStrategy[Step]:
    """Things that may happen to a cache."""
    return st.one_of(
        st.builds(Serve, requests()),
        st.builds(Serve, requests()),
        st.builds(Start, requests()),
        st.builds(Finish, st.integers(0, 5)),
        st.builds(Evict, st.integers(0, 2 * _LONGEST)),
        st.builds(Wait, prompts()),
        st.just(Reset()),
    )


def streams() -> st.SearchStrategy[list[Step]]:
    """Streams of up to 40 steps."""
    return st.lists(steps(), max_size=40)


def models() -> st.SearchStrategy[ModelSpec]:
    """The models of all presets."""
    return st.sampled_from(sorted(PRESETS)).map(ModelSpec.preset)
