"""Conformance kit for authors of plugins: subclass a contract, name the plugin, and run pytest.

    from costcache.testing import PolicyContract

    class TestCheapest(PolicyContract):
        policy = "cheapest"

:class:`PolicyContract` is for policies, :class:`ArchitectureContract` for architecture plugins, and
:class:`StorageContract` for storage backends.

Needs the extra ``costcache[testing]`` (pytest and Hypothesis), and no server. With it come pytest fixtures
(:mod:`costcache.testing.fixtures`) and Hypothesis strategies (:mod:`costcache.testing.strategies`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache._lazy import lazily

if TYPE_CHECKING:
    from costcache.testing.architecture import ArchitectureContract
    from costcache.testing.policy import PolicyContract
    from costcache.testing.server import SmallServer, Transcript, made_cache
    from costcache.testing.steps import Evict, Finish, Request, Reset, Serve, Start, Step, Wait, stream
    from costcache.testing.storage import StorageContract
    from costcache.testing.watched import BrokenContractError, Watched, watching

__all__ = [
    "ArchitectureContract",
    "BrokenContractError",
    "Evict",
    "Finish",
    "PolicyContract",
    "Request",
    "Reset",
    "Serve",
    "SmallServer",
    "Start",
    "Step",
    "StorageContract",
    "Transcript",
    "Wait",
    "Watched",
    "made_cache",
    "stream",
    "watching",
]

# Imported when they are asked for: pytest loads this package for its fixtures, wherever it runs.
_MODULES = {
    "architecture": ("ArchitectureContract",),
    "policy": ("PolicyContract",),
    "server": ("SmallServer", "Transcript", "made_cache"),
    "steps": ("Evict", "Finish", "Request", "Reset", "Serve", "Start", "Step", "Wait", "stream"),
    "storage": ("StorageContract",),
    "watched": ("BrokenContractError", "Watched", "watching"),
}

__getattr__ = lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
