"""costcache for hybrid models that keep KV slots and state checkpoints."""

from __future__ import annotations

from costcache._version import __version__

__all__ = ["__version__"]
