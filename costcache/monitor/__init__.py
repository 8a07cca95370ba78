"""A running server from its metrics: what its cache holds, finds and evicts, and why the hit rate is low."""

from __future__ import annotations
