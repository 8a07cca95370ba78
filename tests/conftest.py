"""Fixtures and Hypothesis profiles shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from costcache._version import described

REPO = Path(__file__).resolve().parent.parent

# No deadlines: what is slow on a busy machine is not wrong.
settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,  # the same examples in every run: a failure is the change's own
    max_examples=60,
    stateful_step_count=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # see deadline
)
settings.register_profile("thorough", deadline=None, max_examples=2000, stateful_step_count=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_report_header() -> str:
    """Say what is tested, and refuse anything else than what is asked for."""
    wanted = os.environ.get("COSTCACHE_TESTED")
    if wanted and f"({wanted})" not in described():
        raise pytest.UsageError(f"COSTCACHE_TESTED is {wanted!r}, and what is installed is {described()}")
    return f"costcache {described()}"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the checkout."""
    return REPO


@pytest.fixture(scope="session")
def traces_dir() -> Path:
    """The folder of recorded traces, which are not part of this repository."""
    named = os.environ.get("COSTCACHE_TRACES")
    folder = Path(named) if named else REPO.parent / "shared" / "traces"
    if named and not folder.is_dir():
        pytest.fail(f"COSTCACHE_TRACES is {named!r}, which is no folder")
    if not folder.is_dir():
        pytest.skip(
            "no recorded traces: set COSTCACHE_TRACES to their folder, or put them in "
            "../shared/traces next to the checkout"
        )
    return folder
