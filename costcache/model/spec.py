"""`ModelSpec`: the architecture facts that determine what a cached token costs."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from costcache.errors import ConfigError
from costcache.files import read_whole
from costcache.model.checkpoint import checkpoint_kv_dtype, draft_layer
from costcache.model.fields import text_fields
from costcache.model.layers import (
    AttentionLayer,
    CompressedAttention,
    KVDtype,
    LatentAttention,
    LayerSpec,
    StateSpace,
)
from costcache.model.params import active_params as count_active_params
from costcache.model.presets import ALIASES, PRESETS
from costcache.model.reading import read_model

__all__ = ["ModelSpec", "load_config"]


def _layer_count(data: dict[str, Any]) -> int:
    return len(data["layers"])


def _layer_range(data: dict[str, Any]) -> tuple[int, ...]:
    return tuple(range(len(data["layers"])))


def _is_attention(layer: LayerSpec) -> TypeGuard[AttentionLayer]:
    return not isinstance(layer, StateSpace)


def _is_latent(layer: LayerSpec) -> TypeGuard[LatentAttention | CompressedAttention]:
    return isinstance(layer, LatentAttention | CompressedAttention)


class ModelSpec(BaseModel):
    """A model's architecture: its layers in order, and its active parameters per token.

    ``layers`` lists the layers that cache something per token or per sequence. ``layer_ids`` gives
    the numbered layer of the model that each belongs to (from 0). In Falcon-H1 two share a number;
    in Nemotron-H some numbers are missing, since its feed-forward parts are layers of their own.
    ``num_layers`` counts the numbered layers, which pipeline parallelism divides into stages.

    ``kv_dtype`` is what the checkpoint's quantisation asks for, if anything. ``draft_layers`` counts the
    multi-token-prediction layers in the checkpoint, and ``draft_layer`` is what one of them caches; they
    are not among ``layers``, since a server may leave them out.

    ``extra`` has the fields of the language model's config that costcache did not read: a plugin may know
    them. They count for equality, and not for the hash.

    ``active_params`` counts the parameters that one token passes through, including chosen and
    shared experts and the output head, but not the input embedding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    architecture: str
    layers: tuple[LayerSpec, ...] = Field(min_length=1)
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    active_params: PositiveInt
    kv_dtype: KVDtype | None = None
    draft_layers: NonNegativeInt = 0
    draft_layer: LayerSpec | None = None
    extra: dict[str, Any] = Field(default_factory=dict, repr=False)
    num_layers: PositiveInt = Field(default_factory=_layer_count)
    layer_ids: tuple[int, ...] = Field(default_factory=_layer_range)

    def __hash__(self) -> int:
        return hash((self.name, self.architecture, self.layers, self.active_params, self.layer_ids))

    @model_validator(mode="after")
    def _check_layer_ids(self) -> Self:
        if len(self.layer_ids) != len(self.layers):
            raise ValueError(
                f"layer_ids has {len(self.layer_ids)} entries for {len(self.layers)} layers; "
                "give one per layer"
            )
        if any(not 0 <= index < self.num_layers for index in self.layer_ids):
            raise ValueError(
                f"layer_ids must lie in 0..{self.num_layers - 1} (num_layers is {self.num_layers})"
            )
        return self

    @classmethod
    def from_config(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | object,
        name: str | None = None,
        *,
        active_params: int | None = None,
    ) -> ModelSpec:
        """Read a Hugging Face config: a file, a folder with config.json, a dict or an object.

        An object is anything with ``to_dict()``, such as a transformers config. ``active_params``
        overrides the count from the config's dimensions. Raises `ConfigError` if the config cannot
        be read; it names the file, the architecture, the field, its value and the fix.
        """
        data, source, found = load_config(config)
        fields = text_fields(data, source)
        if active_params is not None and (type(active_params) is not int or active_params < 1):
            raise fields.error("active_params", f"is {active_params!r}", "it must be a positive integer")
        model = read_model(fields)
        count = active_params or count_active_params(fields, model)
        return cls(
            name=name or found or fields.architecture,
            architecture=fields.architecture,
            layers=tuple(model.layers),
            hidden_size=fields.integer("hidden_size", "n_embd", "d_model"),
            vocab_size=fields.integer("vocab_size", "padded_vocab_size"),
            active_params=count,
            kv_dtype=checkpoint_kv_dtype(data, fields),
            draft_layers=fields.draft_layers(),
            draft_layer=draft_layer(model.layers),
            num_layers=len(model.blocks),
            layer_ids=tuple(model.layer_ids),
            extra={name: value for name, value in fields.data.items() if name not in fields.seen},
        )

    @classmethod
    def preset(cls, name: str) -> ModelSpec:
        """Return a well-known model by name or alias; case and an owner's prefix do not matter.

        ``deepseek-v3``, ``deepseek-ai/DeepSeek-V3`` and ``DeepSeek-V3`` are the same. Raises
        `ConfigError` with close matches if the name is not a preset.
        """
        key = _preset_key(name)
        if key is None:
            raise ConfigError(f"{name!r} is not a preset; {_suggestion(name)}")
        return cls.from_config(PRESETS[key], name=key)

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """Names of all presets, sorted, without aliases."""
        return tuple(sorted(PRESETS))

    @classmethod
    def resolve(cls, name_or_path: str | os.PathLike[str]) -> ModelSpec:
        """Return a preset by name, or read a config by path. Raises `ConfigError` if it is neither."""
        text = os.fspath(name_or_path)
        if not text.strip():
            raise ConfigError("the model is empty; give a preset's name, or the path of a config.json")
        if Path(text).exists() or text.endswith(".json"):
            return cls.from_config(text)
        if _preset_key(text) is not None:
            return cls.preset(text)
        raise ConfigError(
            f"{text!r} is neither a preset nor a file; {_suggestion(text)} Or give the path of a config.json"
        )

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Attention layers of any kind, in order."""
        return tuple(layer for layer in self.layers if _is_attention(layer))

    @property
    def state_layers(self) -> tuple[StateSpace, ...]:
        """Recurrent layers, in order."""
        return tuple(layer for layer in self.layers if isinstance(layer, StateSpace))

    @property
    def has_latent(self) -> bool:
        """Whether any attention layer caches latents."""
        return any(_is_latent(layer) for layer in self.layers)

    @property
    def is_latent(self) -> bool:
        """Whether there are attention layers and all of them cache latents."""
        attention = self.attention_layers
        return bool(attention) and all(_is_latent(x) for x in attention)

    @cached_property
    def compression_ratio(self) -> float:
        """Decompressed values per token over latent values, summed over latent layers; 1.0 without any."""
        latent = [
            layer
            for layer in self.layers
            if _is_latent(layer) and layer.window is None and not getattr(layer, "kv_shared", False)
        ]
        if not latent:
            return 1.0
        return sum(x.decompressed_dim for x in latent) / sum(x.latent_dim for x in latent)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps a state per sequence."""
        return any(isinstance(layer, StateSpace) for layer in self.layers)

    @property
    def has_sliding_window(self) -> bool:
        """Whether any attention layer has a sliding window."""
        return any(getattr(layer, "window", None) is not None for layer in self.layers)


def load_config(config: object) -> tuple[Mapping[str, Any], str, str | None]:
    """Return a config as a mapping, its name for errors, and the model's name if it gives one.

    ``config`` is what `ModelSpec.from_config` takes. Raises `ConfigError` if it is no config.
    """
    if isinstance(config, str | os.PathLike):
        return _load_file(Path(config))
    source = "config dict"
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        source = f"{type(config).__name__} object"
        config = to_dict() if callable(to_dict) else None
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{source}: cannot be read as a config; give a path, a dict, or a transformers config"
        )
    name = config.get("_name_or_path")
    return config, source, name if isinstance(name, str) and name else None


def _load_file(path: Path) -> tuple[Mapping[str, Any], str, str | None]:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(read_whole(file).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file; give a config.json or its folder") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is not JSON ({error}); give a model's config.json") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: is not a JSON object; give a model's config.json")
    beside = file.parent / "hf_quant_config.json"  # ModelOpt's quantisation, in a file of its own
    if file.name == "config.json" and beside.is_file() and "quantization_config" not in data:
        try:
            data = {
                **data,
                "quantization": json.loads(read_whole(beside).decode("utf-8-sig")).get("quantization"),
            }
        except (ValueError, AttributeError, OSError) as error:
            raise ConfigError(f"{beside}: is not JSON ({error}); correct or remove it") from error
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return data, str(file), name or None


def _preset_key(name: str) -> str | None:
    key = name.strip().lower().rsplit("/", 1)[-1]
    key = ALIASES.get(key, key)
    return key if key in PRESETS else None


def _suggestion(name: str) -> str:
    key = name.lower().rsplit("/", 1)[-1]
    close = difflib.get_close_matches(key, [*PRESETS, *ALIASES], n=3, cutoff=0.75)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return "'costcache models' lists the presets."
