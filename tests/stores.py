"""The built-in storage backends as small stores, which need not survive a loss of power."""

from __future__ import annotations

from pathlib import Path

from costcache.plugins import PluginManager
from costcache.storage import StorageBackend

BUILT_IN = ("file", "lmdb")
FAST = {"durable": False}
"""Settings of both."""


def need(name: str) -> None:
    """Skip the test if the package of a backend is not installed."""
    if name == "lmdb":
        import pytest  # random schedules are run without it, too

        pytest.importorskip("lmdb")


def opened(name: str, path: Path, capacity: int = 1 << 20) -> StorageBackend:
    """A store of so many bytes, without the seal that a server puts around it."""
    need(name)
    spec = PluginManager().storage_backends()[name]
    return spec.open(path, capacity, spec.settings(**FAST))
