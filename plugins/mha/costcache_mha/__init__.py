"""costcache for models with multi-head and grouped-query attention (Llama, Qwen, Mistral)."""

from __future__ import annotations

from costcache._version import __version__

__all__ = ["__version__"]
