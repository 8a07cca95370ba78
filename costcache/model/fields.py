"""Checked access to the fields of a Hugging Face ``config.json``.

Every wrong or missing field becomes one `ConfigError` that names the file, the architecture,
the field, its value and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from costcache.errors import ConfigError

__all__ = ["DRAFT_FIELDS", "MAX_LAYERS", "Fields", "text_fields"]

MAX_LAYERS = 4096
"""Upper bound on layers: more is a mistake in the file, and would only use up memory."""

_MAX_DIMENSION = 2**40

# Fields in which multimodal configs nest their language model (LLaVA and most others, InternVL,
# DeepSeek-VL, Qwen-Omni).
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

# Dimensions that a config may give as a list, one value per layer, under their own name or with
# "_per_layer" after it (DeciLM, Laguna, Gemma-3n, OpenELM).
_LISTED = frozenset(
    {
        "head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "moe_topk",
        "num_attention_heads",
        "num_experts_per_tok",
        "num_key_value_heads",
        "num_kv_heads",
        "num_shared_expert",
        "sliding_window",
        "v_head_dim",
    }
)
# Fields that ERNIE-VL gives once per modality, text first.
_TEXT_FIRST = frozenset(
    {"moe_intermediate_size", "moe_layer_end_index", "moe_layer_start_index", "moe_num_experts"}
)
# Fields that count the draft layers of a checkpoint (multi-token prediction). Lists of layers may
# describe these too, after the model's own.
DRAFT_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")

# Fields that published checkpoints of these families leave to the defaults of their
# transformers class; google/gemma-3-4b-it, for example, omits its head counts.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window_pattern": 4},
    "deepseek_v4": {"head_dim": 512, "hc_mult": 4, "o_groups": 8},
    "falcon": {"multi_query": True},
    "falcon_mamba": {"expand": 2, "conv_kernel": 4, "state_size": 16},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
    },
    "gpt_bigcode": {"multi_query": True},
    "gpt_oss": {"sliding_window_pattern": 2},
    "jamba": {"attn_layer_offset": 4},
    "lfm2": {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256},
    "mamba": {"expand": 2, "conv_kernel": 4, "state_size": 16},
    "mamba2": {"expand": 2, "conv_kernel": 4, "n_groups": 8, "state_size": 128},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen4_exp_text": {"hc_count": 4, "hc_lowrank": 320},
}
# Width of a head where the class does not divide the hidden size by the heads.
_HEAD_DIMS = {
    64: ("gpt_oss", "sarvam_moe"),
    128: (
        "beam", "cwm", "ernie4_5", "flint", "hy_v3", "kolibri1", "laguna", "lara_mini", "llama4_text",
        "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral3", "muse_glimmer_text", "nemotron_h",
        "qwen3", "qwen3_vl_text", "seed_oss", "solar_open", "step3p5",
    ),
    192: ("mimo_v2_flash",),
    256: (
        "gemma3n_text", "gemma4_text", "gemma4_unified_text", "qwen3_5_moe_text", "qwen3_5_text",
        "qwen3_next", "qwen4_exp_text", "vaultgemma",
    ),
}  # fmt: skip
# What the classes of these families fill in. A multimodal config of transformers states of its language model
# only what differs (LLaVA, Pixtral, Qwen2-Audio); a file of the model alone states all of it.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_INSIDE: dict[str, dict[str, Any]] = {
    "llama": {**dict(zip(_SIZES, (4096, 11008, 32, 32), strict=True)), "vocab_size": 32_000},
    "mistral": {
        **dict(zip(_SIZES, (4096, 14336, 32, 32), strict=True)),
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "vocab_size": 32_000,
    },
    "qwen2": {
        **dict(zip(_SIZES, (4096, 22016, 32, 32), strict=True)),
        "num_key_value_heads": 32,
        "vocab_size": 151_936,
    },
}
# Families by their class, for configs that name none, or another's: Grok-2's says "git".
_CLASSES = {"Grok1ForCausalLM": "grok", "Grok1ModelForCausalLM": "grok"}
# How the names of ERNIE-VL's family begin: transformers', and the published one.
_ERNIE_VL = ("ernie4_5_vl", "ernie4_5_moe_vl")
for _width, _families in _HEAD_DIMS.items():
    for _family in _families:
        _DEFAULTS.setdefault(_family, {})["head_dim"] = _width


class Fields:
    """The language model's part of a config, with typed getters.

    A field that is absent or null counts as missing. ``source`` and ``architecture`` open every
    error: the file's path (or "config dict"), and the config's own name for its architecture.

    ``seen`` collects the names of the fields that were asked for. What is left over at the end was
    not understood, and `costcache.model.unread` refuses the config if it matters.
    """

    def __init__(
        self, data: Mapping[str, Any], source: str, architecture: str, seen: set[str] | None = None
    ) -> None:
        self.data = data
        self.source = source
        self.architecture = architecture
        self.seen: set[str] = set() if seen is None else seen
        model_type = data.get("model_type")
        named = model_type if isinstance(model_type, str) and model_type else _snake(architecture)
        self.model_type = _CLASSES.get(architecture, named)
        self._defaults = _DEFAULTS.get(self.model_type, {})
        self._layers: dict[int, dict[str, Any]] | None = None
        self._views: dict[str, Fields] = {}

    def per_layer(self, count: int, known: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Read the settings that differ between the ``count`` layers, for `at`.

        ``known`` has some that follow from other fields. The rest are lists of one value per layer, or
        transformers' ``per_layer_config``, an object of overrides by layer index. Raises `ConfigError`
        if one of them does not fit the layers.
        """
        layers: dict[int, dict[str, Any]] = {
            index: dict((known or {}).get(index, {})) for index in range(count)
        }
        for name, value in self.data.items():
            plain = name.removesuffix("_per_layer")
            if plain not in _LISTED or not isinstance(value, list | tuple) or not value:
                continue
            self.seen.add(name)
            if name.endswith("_per_layer"):
                # It wins over a single value, which is then a default that no layer uses.
                self.seen.add(plain)
            for index, item in enumerate(self._fitting(name, value, count)):
                layers[index][plain] = item
        self.seen.add("per_layer_config")
        overrides = self.data.get("per_layer_config")
        if overrides is not None:
            for index, values in self._overrides(overrides, count).items():
                layers[index].update(values)
        self._layers = layers if any(layers.values()) else None

    def _overrides(self, overrides: Any, count: int) -> dict[int, Mapping[str, Any]]:
        name = "per_layer_config"
        if isinstance(overrides, list | tuple):
            overrides = dict(enumerate(overrides))
        if not isinstance(overrides, Mapping):
            raise self.error(name, f"is {overrides!r}", "it must be an object of layer indices: correct it")
        read: dict[int, Mapping[str, Any]] = {}
        for key, values in overrides.items():
            index = int(key) if isinstance(key, str) and key.isdecimal() else key
            if type(index) is not int or not 0 <= index < count:
                raise self.error(
                    name, f"has a layer {key!r}", f"layers are numbered 0 to {count - 1}: correct it"
                )
            if not isinstance(values, Mapping):
                raise self.error(
                    name, f"has {values!r} for layer {key}", "it must be an object of fields: correct it"
                )
            if values.get("skip"):
                raise self.error(
                    f"{name}[{key}].skip",
                    f"is {values['skip']!r}: the layer lacks a part, which costcache does not support",
                    "build ModelSpec(layers=...) yourself",
                )
            read[index] = {field: value for field, value in values.items() if field != "skip"}
        return read

    def at(self, index: int) -> Fields:
        """Return the fields of one layer: these, with what `per_layer` found for it.

        Layers of equal settings get the same object.
        """
        own = None if self._layers is None else self._layers.get(index)
        if not own:
            return self
        key = repr(sorted(own.items(), key=lambda item: item[0]))
        if key not in self._views:
            self._views[key] = Fields({**self.data, **own}, self.source, self.architecture, self.seen)
        return self._views[key]

    def settle(self, *names: str) -> None:
        """Mark fields as understood although their values do not matter here."""
        self.seen.update(names)

    def error(self, field: str, problem: str, fix: str) -> ConfigError:
        """Build the error for ``field`` from its problem and the fix."""
        return ConfigError(f"{self.source} ({self.architecture}): {field} {problem}; {fix}")

    def get(self, *names: str) -> Any:
        """Return the first of the named fields that is set, else the family's default, else None."""
        return self._find(names)[1]

    def has(self, *names: str) -> bool:
        """Whether one of the named fields is set, by the config or by the family's default."""
        return self.get(*names) is not None

    def integer(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer field under any of ``names``, else ``default``.

        Raises `ConfigError` if it is missing without a default, or not an integer of at least ``least``.
        """
        value = self.optional_integer(*names, least=least)
        if value is not None:
            return value
        if default is not None:
            return default
        also = f" (also read as {', '.join(names[1:])})" if len(names) > 1 else ""
        raise self.error(
            names[0],
            f"is missing{also}",
            "add it to the config, use a preset, or build ModelSpec(layers=...) yourself",
        )

    def optional_integer(self, *names: str, least: int = 1) -> int | None:
        """Return an integer field of at least ``least``, or None if it is missing."""
        name, value = self._find(names)
        if value is None:
            return None
        if type(value) is not int or not least <= value <= _MAX_DIMENSION:
            raise self.error(name, f"is {value!r}", f"it must be an integer of at least {least}: correct it")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field, or ``default`` if it is missing."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(name, f"is {value!r}", "it must be true or false: correct it")
        return value

    def text(self, name: str) -> str | None:
        """Return a string field, or None if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"is {value!r}", "it must be a string: correct it")
        return value

    def strings(self, name: str, length: int | None = None) -> list[str] | None:
        """Return a list of strings, of ``length`` entries if given; None if it is missing."""
        return self._list(name, str, "strings", length)

    def integers(self, name: str, length: int | None = None) -> list[int] | None:
        """Return a list of integers, of ``length`` entries if given; None if it is missing."""
        return self._list(name, int, "integers", length)

    def nested(self, name: str) -> Fields | None:
        """Return an object-valued field as separate `Fields`; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {value!r}", "it must be an object: correct it")
        return Fields(value, f"{self.source}: {name}", self.architecture)

    def ratio(self, name: str, default: float) -> float:
        """Return a positive number, or ``default`` if it is missing."""
        value = self.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < _MAX_DIMENSION:
            raise self.error(name, f"is {value!r}", "it must be a positive number: correct it")
        return float(value)

    def agree(self, *names: str) -> None:
        """Refuse a config that gives the same quantity twice with different values."""
        given = {name: self.data[name] for name in names if self.data.get(name) is not None}
        if len({repr(value) for value in given.values()}) > 1:
            listed = ", ".join(f"{name} {value!r}" for name, value in given.items())
            raise self.error(" and ".join(given), f"disagree ({listed})", "keep one of them")

    def draft_layers(self) -> int:
        """Number of draft (multi-token prediction) layers in the checkpoint; 0 without any."""
        count = self.integer(*DRAFT_FIELDS, default=0, least=0)
        return count * self.integer("mtp_transformer_layers", default=1, least=0)

    def _fitting(self, name: str, value: Any, count: int) -> list[Any]:
        """The first ``count`` entries of a list; any more must be those of the draft layers."""
        spare = len(value) - count
        if spare == 0 or 0 < spare <= self.draft_layers():
            return list(value[:count])
        raise self.error(
            name,
            f"has {len(value)} entries for {count} layers",
            "give one per layer, or correct the number of layers",
        )

    def _list(self, name: str, kind: type, noun: str, length: int | None) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(type(item) is not kind for item in value):
            raise self.error(name, f"is {value!r}", f"it must be a list of {noun}: correct it")
        if length is not None:
            return self._fitting(name, value, length)
        return list(value)

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        self.seen.update(names)
        for where in (self.data, self._defaults):
            for name in names:
                value = where.get(name)
                if value is not None:
                    return name, value
        return names[0], None


def text_fields(config: Mapping[str, Any], source: str) -> Fields:
    """Return the fields of the language model in ``config``, nested or not.

    Raises `ConfigError` if a nested part is not an object, or the architecture is not named.
    """
    architecture = _architecture(config, source)
    part: Mapping[str, Any] = config
    for _ in range(3):  # Qwen-Omni nests two levels; no known config nests deeper
        name = next((name for name in _NESTED if part.get(name) is not None), None)
        if name is None:
            break
        inner = part[name]
        if not isinstance(inner, Mapping):
            raise ConfigError(
                f"{source} ({architecture}): {name} is {inner!r}; it must be an object: correct it"
            )
        part = inner
    kind = part.get("model_type")
    if part is not config and isinstance(kind, str):
        part = {**_INSIDE.get(kind, {}), **part}
    fields = Fields(part, source, architecture)
    if fields.model_type.startswith(_ERNIE_VL):
        fields.data = {name: _text_value(name, value) for name, value in part.items()}
    return fields


def _text_value(name: str, value: Any) -> Any:
    return value[0] if name in _TEXT_FIRST and isinstance(value, list | tuple) and value else value


def _architecture(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures")
    if isinstance(names, list | tuple) and names and isinstance(names[0], str) and names[0]:
        return names[0]
    if names:
        raise ConfigError(f"{source}: architectures is {names!r}; it must be a list of names: correct it")
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type:
        return model_type
    if model_type is not None:
        raise ConfigError(f"{source}: model_type is {model_type!r}; it must be a name: correct it")
    raise ConfigError(
        f"{source}: architectures and model_type are both missing; add one of them, "
        "or check that this is a model's config.json"
    )


def _snake(architecture: str) -> str:
    """Turn ``Qwen3NextForCausalLM`` into ``qwen3_next``, for configs without a model_type."""
    stem = re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$", "", architecture)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", stem).lower()
