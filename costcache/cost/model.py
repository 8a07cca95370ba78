"""`CostModel`: the cost of restoring tokens, by recomputing them or reloading them from a slower tier."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from costcache.cost.layers import attention_flops
from costcache.cost.token import TokenCost, token_cost
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec

__all__ = ["CostModel"]

N = TypeVar("N", bound=Any)
"""A number of tokens, or a numpy array of such numbers."""


class CostModel(BaseModel):
    """Bytes, FLOPs and seconds of one model's tokens, as it is deployed.

    ``token`` is the `TokenCost` from the matched plugin (or `token_cost`). ``absorbed`` counts MLA
    attention on latents instead of decompressed keys and values. FLOPs are those of the whole
    model, over all ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    spec: ModelSpec
    deployment: Deployment
    token: TokenCost
    absorbed: bool = False

    @classmethod
    def of(
        cls, spec: ModelSpec, deployment: Deployment | None = None, *, absorbed: bool = False
    ) -> CostModel:
        """Build a cost model on the generic `token_cost`.

        Raises `SettingsError` if the deployment does not fit the model.
        """
        deployment = (deployment or Deployment()).serving(spec)
        token = token_cost(spec, deployment)
        return cls(spec=spec, deployment=deployment, token=token, absorbed=absorbed)

    @property
    def linear_params_flops(self) -> float:
        """c0: FLOPs of one token outside attention, 2 x active parameters (Kaplan et al. 2020)."""
        return 2.0 * self.spec.active_params

    @cached_property
    def crossover_tokens(self) -> float:
        """L*: the depth in tokens at which attention costs a token as much as everything else.

        c0 over the FLOPs per token of context; infinite if no layer attends to the whole context.
        """
        return self.linear_params_flops / self._slope if self._slope else math.inf

    @cached_property
    def _slope(self) -> float:
        return sum(attention_flops(x, self.absorbed).per_context_token for x in self.spec.layers)

    @cached_property
    def _windows(self) -> tuple[tuple[int, float], ...]:
        """(window, FLOPs per token inside it), summed over layers of equal windows."""
        rates: Counter[int] = Counter()
        for layer in self.spec.layers:
            flops = attention_flops(layer, self.absorbed)
            if flops.per_window_token:
                rates[flops.window] += int(flops.per_window_token)
        return tuple((window, float(rate)) for window, rate in rates.items())

    @cached_property
    def _longest_window(self) -> int:
        return max((getattr(x, "window", None) or 0 for x in self.spec.layers), default=0)

    def recompute_flops(self, start: N, stop: N) -> N:
        """FLOPs to compute tokens [start, stop) of a sequence whose first ``start`` are cached.

        ``c0·[(b − a) + (b² − a²) / (2·L*)]``, plus the attention of each sliding or sparse layer, which
        grows up to its window and is flat beyond. Positions are numbers or numpy arrays (elementwise);
        0 <= start <= stop is not checked.
        """
        a, b = start * 1.0, stop * 1.0
        flops = self.linear_params_flops * (b - a) + self._slope * (b * b - a * a) / 2.0
        for window, rate in self._windows:
            flops = flops + rate * (_window_area(b, window) - _window_area(a, window))
        return flops  # type: ignore[no-any-return]  # the helpers take and return Any: floats or arrays

    def recompute_seconds(self, start: N, stop: N) -> N:
        """Seconds to compute tokens [start, stop) on all ranks, at the deployment's FLOP rate."""
        ranks = self.deployment.tp * self.deployment.pp
        return self.recompute_flops(start, stop) / (self.deployment.flops_per_second * ranks)  # type: ignore[no-any-return]  # as above

    def reload_bytes(self, tokens: N, states: int = 0) -> N:
        """Bytes that one rank copies to reload ``tokens`` tokens and ``states`` checkpoints.

        Sliding layers need at most the last window of the tokens.
        """
        slid = _smaller(tokens * 1.0, self._longest_window) * self.token.swa_bytes
        return tokens * self.token.kv_bytes + slid + states * self.token.state_bytes  # type: ignore[no-any-return]  # as above

    def reload_seconds(self, tokens: N, tier: str = "host", *, states: int = 0) -> N:
        """Seconds to reload ``tokens`` tokens (and ``states`` checkpoints) from "host" or "disk".

        Each rank copies its own share over its own link. Raises `SettingsError` for an
        unknown tier, or for "disk" if the deployment gives no bandwidth for it.
        """
        if tier == "host":
            rate: float | None = self.deployment.host_link_bytes_per_second
        elif tier == "disk":
            rate = self.deployment.disk_bytes_per_second
        else:
            raise SettingsError(f"tier is {tier!r}; use 'host' or 'disk'")
        if rate is None:
            raise SettingsError("disk_bytes_per_second is None; set it to price the disk tier")
        return self.reload_bytes(tokens, states) / rate  # type: ignore[no-any-return]  # as above


def _smaller(tokens: Any, limit: int) -> Any:
    """min(tokens, limit), elementwise for arrays, without importing numpy."""
    return (tokens + limit - abs(tokens - limit)) / 2.0


def _window_area(position: Any, window: int) -> Any:
    """Context seen by all tokens before ``position``: x²/2 up to the window, then one window per token."""
    inside = _smaller(position, window)
    return inside * (position - inside / 2.0)
