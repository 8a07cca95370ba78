"""Readers of trace files, one module per format, and the writer."""

from __future__ import annotations

from costcache.sim.traces.mooncake import write_trace
from costcache.sim.traces.reading import load_trace

__all__ = ["load_trace", "write_trace"]
