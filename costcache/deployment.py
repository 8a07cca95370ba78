"""How a model is served: parallelism, KV dtype, pages, and what the accelerator can do."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from costcache.errors import SettingsError
from costcache.model import StateDtype

__all__ = ["Deployment", "KVDtype"]

KVDtype = Literal["bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]


class Deployment(BaseModel):
    """How a model is served. Raises `SettingsError` naming each wrong field and its value.

    Attributes:
        tp: Tensor parallel size.
        dp_attention: Attention is replicated instead of divided, and requests are split
            among the replicas: True for ``tp`` replicas, or their number. The tensor
            parallel size of attention is ``tp`` divided by it.
        pp: Pipeline parallel size.
        kv_dtype: What keys, values and latents are stored as.
        state_dtype: What recurrent states are stored as; None for the model's own.
        page_size: Tokens per page of the KV pool.
        flops_per_second: Of one accelerator, dense, at the compute dtype. The default is the
            peak of an H100 SXM in bf16: 989.4 TFLOP/s (NVIDIA's H100 architecture white paper; the
            data sheet's 1,979 is with sparsity). Give a measured rate where you have one.
        host_link_bytes_per_second: From host memory to one accelerator. The default is the peak of
            PCIe 5.0 x16 in one direction (64 GB/s; the H100 data sheet states 128 for both).
        disk_bytes_per_second: From disk to one accelerator; None where there is no disk tier.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: PositiveInt = 1
    dp_attention: bool | PositiveInt = False
    pp: PositiveInt = 1
    kv_dtype: KVDtype = "bf16"
    state_dtype: StateDtype | None = None
    page_size: PositiveInt = 1
    flops_per_second: PositiveFloat = Field(989.4e12, allow_inf_nan=False)
    host_link_bytes_per_second: PositiveFloat = Field(64e9, allow_inf_nan=False)
    disk_bytes_per_second: PositiveFloat | None = Field(None, allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise SettingsError("; ".join(_problem(item) for item in error.errors())) from None

    @model_validator(mode="after")
    def _check_dp(self) -> Self:
        if self.tp % self.attention_dp:
            raise ValueError(
                f"dp_attention is {self.dp_attention}, which does not divide tp {self.tp}; "
                "use a divisor of tp, or True for tp itself"
            )
        return self

    @property
    def attention_dp(self) -> int:
        """Replicas of attention; 1 without DP attention."""
        if isinstance(self.dp_attention, bool):
            return self.tp if self.dp_attention else 1
        return self.dp_attention

    @property
    def attention_tp(self) -> int:
        """Ranks that attention heads and states are divided over."""
        return self.tp // self.attention_dp

    @property
    def kv_bytes(self) -> int:
        """Bytes of one stored key or value element."""
        return 1 if self.kv_dtype.startswith("fp8") else 2

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each pipeline stage, as SGLang and vLLM divide them.

        Stages are equal where ``pp`` divides ``num_layers``; else the last ones get one layer
        more (SGLang 0.5.23, ``get_pp_indices``). Raises `SettingsError` for more stages
        than layers.
        """
        if self.pp > num_layers:
            raise SettingsError(f"pp is {self.pp} for {num_layers} layers; use at most {num_layers}")
        base, extra = divmod(num_layers, self.pp)
        bounds = [base * n + max(0, n - (self.pp - extra)) for n in range(self.pp + 1)]
        return tuple(range(a, b) for a, b in pairwise(bounds))


def _problem(item: Any) -> str:
    """One error of pydantic in our words; an error of the whole model already has them."""
    if not item["loc"]:
        return str(item["ctx"]["error"]) if "ctx" in item else str(item["msg"])
    field = str(item["loc"][0])
    if item["type"] == "extra_forbidden":
        return f"{field} is no field of a deployment; use {', '.join(Deployment.model_fields)}"
    message = item["msg"]
    return f"{field} is {item['input']!r}; {message[0].lower()}{message[1:]}"
