"""Distributions of the workloads, and the base of their settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:  # numpy is loaded only to draw.
    import numpy as np

__all__ = ["MOST_REQUESTS", "LogNormal", "PromptSet", "Rate", "Share", "Steps", "Uniform", "WorkloadSettings"]

# Far beyond any use: a typo must not exhaust the memory, or end at infinity.
MOST_REQUESTS = 10**8
_MOST_TOKENS = 2**20
_MOST = 1e9

Rate = Annotated[float, Field(ge=1e-9, le=1e9)]
"""A number per second."""

Share = Annotated[float, Field(ge=0, le=1)]
"""A probability."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Uniform(_Settings):
    """Whole numbers of tokens, uniform from ``low`` to ``high``, both inclusive."""

    low: int = Field(ge=1, le=_MOST_TOKENS)
    high: int = Field(ge=1, le=_MOST_TOKENS)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low is {self.low}, over high, {self.high}")
        return self

    def tokens(self, rng: np.random.Generator) -> int:
        """Draw a number of tokens."""
        return int(rng.integers(self.low, self.high, endpoint=True))


class LogNormal(_Settings):
    """A log-normal by its median and shape (the standard deviation of the logarithm), clipped to a range."""

    median: float = Field(gt=0, le=_MOST)
    shape: float = Field(ge=0, le=10)
    low: float | None = Field(default=None, ge=0, le=_MOST)
    high: float | None = Field(default=None, ge=0, le=_MOST)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low is {self.low}, over high, {self.high}")
        return self

    def draw(self, rng: np.random.Generator) -> float:
        """Draw a number, clipped to the range."""
        value = self.median * math.exp(self.shape * rng.standard_normal())
        if self.low is not None:
            value = max(value, self.low)
        return min(value, _MOST if self.high is None else self.high)

    def tokens(self, rng: np.random.Generator) -> int:
        """Draw a number of tokens, from 1 to 2**20."""
        return min(max(1, round(self.draw(rng))), _MOST_TOKENS)


class Steps(_Settings):
    """``first`` steps plus an exponential number, rounded down; at most ``most`` in total."""

    first: int = Field(ge=1)
    mean: float = Field(ge=0, le=_MOST)
    most: int = Field(ge=1, le=10_000)

    def draw(self, rng: np.random.Generator) -> int:
        """Draw a number of steps, 1 or more."""
        return min(self.first + int(self.mean * rng.standard_exponential()), self.most)


class PromptSet(_Settings):
    """Shared prompts: their number, lengths and popularity."""

    count: int = Field(ge=1, le=1_000_000)
    tokens: Uniform
    zipf: float = Field(default=0.0, ge=0, le=10)
    """The k-th prompt is used in proportion to ``k ** -zipf``; 0 for uniform popularity."""


class WorkloadSettings(_Settings):
    """Settings of every workload."""

    requests: int = Field(default=20_000, ge=1, le=MOST_REQUESTS)
    """Requests to generate: the first ones by time."""

    seed: int = Field(default=0, ge=0)
    """Seed of numpy's PCG64 generator; equal settings and seed give equal requests."""
