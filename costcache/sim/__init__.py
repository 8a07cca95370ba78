"""Offline replay of request traces; import the submodule that you need."""

from __future__ import annotations

__all__: list[str] = []
