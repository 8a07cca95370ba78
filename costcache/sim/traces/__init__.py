"""Trace files: one module per format."""

from __future__ import annotations

from costcache.sim.traces.mooncake import load_trace, write_trace

__all__ = ["load_trace", "write_trace"]
