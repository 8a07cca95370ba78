"""A small Llama, and ways to change and refuse it: the base of the tests that read configs."""

from __future__ import annotations

from typing import Any

import pytest

from costcache.errors import ConfigError
from costcache.model import ModelSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


def read(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, **changes})


def refusal(base: dict[str, Any] = LLAMA, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelSpec.from_config({**base, **changes})
    return str(caught.value)


def without(base: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name not in names}


def kinds(spec: ModelSpec) -> list[str]:
    """The first word of each layer's kind, in order."""
    return [layer.kind.split("_")[0] for layer in spec.layers]


def letters(spec: ModelSpec) -> str:
    """The first letter of each layer's kind."""
    return "".join(kind[0] for kind in kinds(spec))
