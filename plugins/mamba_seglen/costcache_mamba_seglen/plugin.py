"""The hooks for hybrid models. Unfinished: it claims no model, and ``generic`` serves hybrids.

What is there today is exact about memory (``generic`` counts KV bytes per token and bytes per state)
and blind to states when it evicts.
"""

from __future__ import annotations

from costcache import hookimpl
from costcache.model import ModelSpec

__all__ = ["FINISHED"]

FINISHED = False
"""False until this plugin orders states and KV under one budget."""


@hookimpl
def match_model(model: ModelSpec) -> int | None:
    """Decline every model while the plugin is unfinished."""
    return None
