"""Time to first token: the duration of a prefill, given the cached part of its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from costcache.deployment import Deployment
from costcache.errors import SettingsError

if TYPE_CHECKING:
    from costcache.cost import CostModel

__all__ = ["CALIBRATED", "PrefillModel", "prefill_model", "roofline"]

Float64 = NDArray[np.float64]

# Share of the dense bf16 peak that the prefill of a large model reaches on a current accelerator.
_UTILISATION = 0.5
_FLOOR_SECONDS = 0.015


class PrefillModel(BaseModel):
    """``max(floor, a + b·n + c·n·(d + n/2))`` seconds for n new tokens after d cached ones.

    Attributes:
        name: Its source.
        floor: Seconds of the shortest prefill.
        fixed: a, in seconds.
        per_token: b, in seconds per new token: everything but attention.
        per_pair: c, in seconds per new token and token of context: attention.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    floor: NonNegativeFloat
    fixed: NonNegativeFloat
    per_token: NonNegativeFloat
    per_pair: NonNegativeFloat

    def seconds(self, new: NDArray[np.int64], depth: NDArray[np.int64]) -> Float64:
        """Seconds of each prefill.

        Args:
            new: Tokens to compute, int64 of any shape.
            depth: Cached tokens before them, int64 of the same shape.
        """
        n, d = new.astype(np.float64), depth.astype(np.float64)
        time = self.fixed + self.per_token * n + self.per_pair * n * (d + n / 2)
        return np.maximum(self.floor, time)

    def one(self, new: int, depth: int) -> float:
        """Seconds of one prefill; as :meth:`seconds`."""
        return max(self.floor, self.fixed + self.more(new, depth))

    def more(self, new: int, depth: int) -> float:
        """Seconds that so many more tokens add to a prefill: ``b·n + c·n·(d + n/2)``."""
        return self.per_token * new + self.per_pair * new * (depth + new / 2)


# Fitted to SGLang 0.5.23 on one H100 (bf16, dummy weights, prefill graphs on), from 2,048 new tokens
# up: within 3 % there and 18 % below; the hybrid's floor varied from 28 to 43 ms within one run.
CALIBRATED = {
    "deepseek-v2-lite": PrefillModel(
        name="deepseek-v2-lite on one H100", floor=25e-3, fixed=13.3e-3, per_token=15.4e-6, per_pair=1.52e-9
    ),
    "llama-3-8b": PrefillModel(
        name="llama-3-8b on one H100", floor=17e-3, fixed=5.7e-3, per_token=22.2e-6, per_pair=0.89e-9
    ),
    "qwen3-next-24l": PrefillModel(
        name="qwen3-next, 24 layers and 64 experts, on one H100",
        floor=41e-3,
        fixed=14.5e-3,
        per_token=13.4e-6,
        per_pair=0.14e-9,
    ),
}
"""Measured prefill models, by the preset that was measured."""


def roofline(cost: CostModel) -> PrefillModel:
    """Derive a prefill model from FLOPs, at half of the accelerators' dense peak.

    Attention costs what it does in the cost model.
    """
    served = cost.deployment
    rate = served.flops_per_second * served.tp * served.pp * _UTILISATION
    per_token = cost.linear_params_flops / rate
    slope = per_token / cost.crossover_tokens
    return PrefillModel(
        name=f"FLOPs of {cost.spec.name} at {_UTILISATION:.0%} of {served.tp * served.pp} accelerator(s)",
        floor=_FLOOR_SECONDS,
        fixed=0.0,
        per_token=per_token,
        per_pair=slope,
    )


def prefill_model(name: str, cost: CostModel) -> PrefillModel:
    """A prefill model by name: ``auto``, ``roofline`` or a measured one.

    ``auto`` is the measured one if this very model is deployed as it was measured (one accelerator of
    an H100's speed, KV in 16 bits), else ``roofline``.

    Raises:
        SettingsError: If there is no such prefill model.
    """
    if name == "auto":
        measured = CALIBRATED.get(cost.spec.name) if _as_measured(cost.deployment) else None
        return measured or roofline(cost)
    if name == "roofline":
        return roofline(cost)
    if name in CALIBRATED:
        return CALIBRATED[name]
    raise SettingsError(
        f"there is no prefill model {name!r}: choose auto, roofline or {', '.join(CALIBRATED)}"
    )


def _as_measured(served: Deployment) -> bool:
    one_h100 = Deployment()
    return (
        served.tp * served.pp == 1
        and served.kv_bytes == one_h100.kv_bytes
        and served.flops_per_second == one_h100.flops_per_second
    )
