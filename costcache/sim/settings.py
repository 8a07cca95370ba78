"""Settings of a serving replay, apart from the server so that reading them loads no numpy."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

__all__ = ["ServingSettings", "TiersBelow"]


class ServingSettings(BaseModel):
    """Settings of the server in a serving replay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: int = Field(64, ge=1, description="Requests running at once, at most.")
    decode_seconds: float = Field(
        0.025,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds per output token of a running request.",
    )
    service: Literal["modelled", "recorded"] = Field(
        "modelled",
        description="How long a request runs: 'modelled' adds up its prefill and its output tokens, "
        "'recorded' takes the trace's own service time where there is one.",
    )
    load: Literal["auto", "open", "sessions", "clients"] = Field(
        "auto",
        description="What triggers requests: 'open' follows the trace's clock, 'sessions' its session "
        "starts, answers and think times, 'clients' keeps as many clients busy as concurrency allows, each "
        "with one session after another; 'auto' is sessions where the trace has think times, else open.",
    )
    clock: Literal["auto", "seconds", "requests"] = Field(
        "auto",
        description="Time by which a policy learns: 'requests' counts them, as SGLang and vLLM do, 'seconds' "
        "is the replayed server's clock; 'auto' is requests for a recording of a server, else seconds.",
    )
    chunk: int | None = Field(
        None,
        ge=0,
        le=2**30,
        description="Prompt tokens that are computed at once (SGLang's --chunked-prefill-size, vLLM's "
        "--max-num-batched-tokens): room is made, and the prompt cached, chunk by chunk, then room for the "
        "answer page by page; 0 computes each prompt at once. Models with windows and --host make room at "
        "once in any case.  [default: that of the recorded server, else 0]",
    )
    outputs: bool = Field(True, description="Cache generated tokens where the trace names them.")
    spread_bursts: bool = Field(
        True,
        description="With load open, spread requests with equal timestamps evenly up to the next timestamp: "
        "traces round their clocks.",
    )
    running: Literal["in_pool", "beside"] = Field(
        "in_pool",
        description="Over tiers, where running requests are: 'in_pool' keeps their prompts, and room for "
        "their outputs, in the device's pool until they end, as servers do; 'beside' takes the pool for what "
        "is left for the cache.",
    )
    rate: float = Field(
        1.0,
        ge=1e-6,
        le=1e6,
        allow_inf_nan=False,
        description="Speed of the trace's clock: 0.5 is half as fast. Think times are not scaled.",
    )


class TiersBelow(BaseModel):
    """The tiers below the device, of one rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: PositiveInt = Field(description="Bytes of host memory.")
    link: PositiveFloat = Field(
        55e9, allow_inf_nan=False, description="Bytes per second between host and device, each way."
    )
    disk: PositiveInt | None = Field(None, description="Bytes of disk; None without a disk.")
    disk_bandwidth: PositiveFloat | None = Field(
        None, allow_inf_nan=False, description="Bytes per second between disk and host, each way."
    )
    write: Literal["by_cost", "write_back", "write_through", "write_through_selective"] = Field(
        "by_cost", description="What is copied down, and what is loaded."
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.disk is None) != (self.disk_bandwidth is None):
            raise ValueError("disk and disk_bandwidth go together: give both, or neither")
        return self
