"""The layout of a cache's memory: the rows of bytes of a token in each layer, and those of a state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costcache.cost.layers import layer_bytes
from costcache.errors import SettingsError
from costcache.model import FullAttention, SlidingWindow, StateSpace

if TYPE_CHECKING:
    from costcache.deployment import Deployment
    from costcache.model import LayerSpec, ModelSpec

__all__ = ["Layout", "Part"]

_ROWS = 2
"""Version of what a value in storage holds: since 2, all parts of a token together."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a cache: a row for each slot.

    Attributes:
        name: Layer and content, as ``"3.k"``.
        bytes: Bytes of a row.
    """

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors that a token, or a state, has a row in.

    Attributes:
        tokens: Tensors with a row per token: keys and values of attention and of sliding windows, one latent
            of MLA, in each layer.
        states: Tensors with a row per state: one for each recurrent layer; empty without any.
        windows: Tensors with a row per token with window KV: those of sliding layers, where they are evicted
            apart; empty elsewhere.
    """

    tokens: tuple[Part, ...]
    states: tuple[Part, ...] = ()
    windows: tuple[Part, ...] = ()

    @classmethod
    def of(cls, model: ModelSpec, deployment: Deployment, *, windows_apart: bool = False) -> Layout:
        """The plain layout of a model on one rank.

        Args:
            model: The model.
            deployment: Parallelism and KV dtype.
            windows_apart: Whether sliding windows are in a pool of their own, as with ``window_pool_size``.

        Raises:
            SettingsError: A row of some layer stands for several tokens, or the deployment does not fit.
        """
        deployment = deployment.serving(model)
        tokens: list[Part] = []
        states: list[Part] = []
        windows: list[Part] = []
        for index, layer in zip(model.layer_ids, model.layers, strict=True):
            apart = windows_apart and isinstance(layer, SlidingWindow)
            into = states if isinstance(layer, StateSpace) else windows if apart else tokens
            into.extend(_parts(index, layer, deployment))
        return cls(tuple(tokens), tuple(states), tuple(windows))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all its tensors."""
        return sum(part.bytes for part in self.tokens)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in all its tensors."""
        return sum(part.bytes for part in self.states)

    @property
    def window_bytes(self) -> int:
        """Bytes of a token's window KV in all its tensors."""
        return sum(part.bytes for part in self.windows)

    def fingerprint(self, *facts: object) -> bytes:
        """16 bytes that differ for other layouts, and for other ``facts``, such as the model's name."""
        return hashlib.blake2b(repr((_ROWS, self, facts)).encode(), digest_size=16).digest()


def _parts(index: int, layer: LayerSpec, deployment: Deployment) -> list[Part]:
    size = layer_bytes(layer, deployment).exact
    if not size:
        return []  # reads what an earlier layer cached
    if size.denominator != 1:
        raise SettingsError(
            f"a row of layer {index} ({layer.kind}) stands for several tokens ({float(size)} bytes each): "
            "the "
            "tiers copy memory with a row per token"
        )
    if isinstance(layer, StateSpace):
        return [Part(f"{index}.state", int(size))]
    if isinstance(layer, FullAttention | SlidingWindow) and getattr(layer, "index_head_dim", None) is None:
        key, value = deployment.stored(layer.head_dim), deployment.stored(layer.v_head_dim)
        keys = int(size) * key // (key + value)
        return [Part(f"{index}.k", keys), Part(f"{index}.v", int(size) - keys)]
    return [Part(f"{index}.latent" if layer.kind == "latent_attention" else f"{index}.kv", int(size))]
