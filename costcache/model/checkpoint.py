"""A checkpoint's own word on its cache: the KV dtype of its quantisation, and its draft layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costcache.model.fields import Fields
from costcache.model.layers import KVDtype, LayerSpec, SlidingWindow, StateSpace

__all__ = ["checkpoint_kv_dtype", "draft_layer"]

# Where a config keeps its quantisation: transformers; compressed-tensors before; ModelOpt's own file.
_CONFIGS = ("quantization_config", "compression_config", "quantization")
# ModelOpt's names of KV dtypes.
_ALGORITHMS: dict[str, KVDtype | None] = {
    "FP8": "fp8_e4m3",
    "FP4": "fp4_e2m1",
    "NVFP4": "fp4_e2m1",
    "NONE": None,
}
_FLOATS: dict[int, KVDtype] = {8: "fp8_e4m3", 4: "fp4_e2m1"}


def checkpoint_kv_dtype(config: Mapping[str, Any], fields: Fields) -> KVDtype | None:
    """Return the KV dtype that the checkpoint's quantisation names, which servers then use by default.

    None if it names none. Raises `ConfigError` for one that costcache does not know.
    """
    for data in (config, fields.data):
        outer = Fields(data, fields.source, fields.architecture)
        for name in _CONFIGS:
            quantised = outer.nested(name)
            if quantised is not None:
                inner = quantised.nested("quantization") or quantised
                found = _scheme(inner) or _algorithm(inner)
                if found is not None:
                    return found
    return None


def _scheme(quantised: Fields) -> KVDtype | None:
    """compressed-tensors: an object of the number of bits and the kind of number.

    A word in its place ("static", as AutoFP8 writes) says that the checkpoint has scales. Servers use them
    only if they are asked for an fp8 cache.
    """
    if isinstance(quantised.get("kv_cache_scheme"), str):
        return None
    scheme = quantised.nested("kv_cache_scheme")
    if scheme is None or not scheme.data:
        return None
    bits, kind = scheme.integer("num_bits", default=8), scheme.text("type") or "float"
    if kind != "float" or bits not in _FLOATS:
        raise quantised.error(
            "kv_cache_scheme", f"asks for {bits} bits of type {kind!r}", "known are floats of 8 or 4 bits"
        )
    return _FLOATS[bits]


def _algorithm(quantised: Fields) -> KVDtype | None:
    """ModelOpt: the name of an algorithm."""
    name = quantised.text("kv_cache_quant_algo")
    if name is None:
        return None
    if name.upper() not in _ALGORITHMS:
        raise quantised.error(
            "kv_cache_quant_algo", f"is {name!r}", f"known are {', '.join(sorted(_ALGORITHMS))}"
        )
    return _ALGORITHMS[name.upper()]


def draft_layer(layers: list[LayerSpec]) -> LayerSpec | None:
    """Return the attention of a draft layer: that of the model's last layer which sees everything.

    Multi-token prediction repeats a whole layer, and EAGLE heads copy the target's attention. None for a
    model without attention.
    """
    attention = [layer for layer in layers if not isinstance(layer, StateSpace)]
    stored = [layer for layer in attention if not getattr(layer, "kv_shared", False)]
    everything = [layer for layer in stored if not isinstance(layer, SlidingWindow)]
    return (everything or stored or [None])[-1]
