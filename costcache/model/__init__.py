"""Model architecture as the cache sees it: layers by kind, read from a ``config.json``.

Names are imported when they are first used: help texts need the layers' types and no presets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costcache.model.layers import (
        AttentionLayer,
        CompressedAttention,
        FullAttention,
        KVDtype,
        LatentAttention,
        LayerSpec,
        SlidingWindow,
        StateDtype,
        StateSpace,
    )
    from costcache.model.spec import ModelSpec

__all__ = [
    "AttentionLayer",
    "CompressedAttention",
    "FullAttention",
    "KVDtype",
    "LatentAttention",
    "LayerSpec",
    "ModelSpec",
    "SlidingWindow",
    "StateDtype",
    "StateSpace",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{'spec' if name == 'ModelSpec' else 'layers'}")
    value = globals()[name] = getattr(module, name)  # the next access finds it without this function
    return value
