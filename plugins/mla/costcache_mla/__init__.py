"""costcache for models with multi-head latent attention (DeepSeek, Kimi, GLM, MiniCPM3)."""

from __future__ import annotations

from costcache._version import __version__

__all__ = ["__version__"]
