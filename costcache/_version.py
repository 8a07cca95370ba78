"""The version of costcache and of its three plugin distributions."""

from __future__ import annotations

from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

__all__ = ["__version__", "described"]

__version__ = "0.1.0"


@cache
def described() -> str:
    """Return the version, and whether the core of this installation is compiled."""
    spec = find_spec("costcache.records")
    compiled = spec is not None and (spec.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
    return f"{__version__} ({'compiled' if compiled else 'plain Python'})"
