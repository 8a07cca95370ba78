"""The version of costcache and of the three plugin distributions beside it."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
