"""Deployment of a model: parallelism, KV dtype, page size and accelerator speed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from costcache.errors import SettingsError, reason
from costcache.model import KVDtype, ModelSpec, StateDtype

__all__ = ["SWA_RATIO", "Deployment", "IndexDtype", "KVDtype", "WindowLayout"]

IndexDtype = Literal["bf16", "fp8", "fp4"]

WindowLayout = Literal["own-pool", "shared-pages", "one-pool"]
"""Where a server keeps sliding-window KV: in a pool of its own (SGLang); in pages of one pool that it shares
with the rest (vLLM); or with the rest, every token of it."""

SWA_RATIO = 0.8
"""SGLang 0.5.23's own ``--swa-full-tokens-ratio``."""

_MOST_RANKS = 1 << 20  # more than anybody has, and few enough to multiply

# An fp4 cache keeps a byte of scale per 16 values (SGLang 0.5.23's fp4 pools, NVFP4).
_FP4_BLOCK = 16


class Deployment(BaseModel):
    """Parallelism, dtypes and page size of a server, and the speed of its accelerators.

    Raises `SettingsError` naming each wrong field and its value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: PositiveInt = Field(1, le=_MOST_RANKS, description="Tensor-parallel ranks.")
    dp_attention: bool | PositiveInt = Field(
        False,
        description="Data-parallel attention groups: each holds a full copy of attention and serves its own "
        "requests, and attention's tensor parallel size is tp divided by their number. True for tp groups, "
        "False or 1 for none.",
    )
    pp: PositiveInt = Field(1, le=_MOST_RANKS, description="Pipeline-parallel stages.")
    kv_dtype: KVDtype | None = Field(
        None,
        description="Dtype of cached keys, values and latents; by default the one that the checkpoint's "
        "quantisation names, or bf16.",
    )
    index_dtype: IndexDtype | None = Field(
        None,
        description="Dtype of a sparse layer's index keys; None for the servers' own choice: fp8 with scales "
        "beside latents (DeepSeek, GLM), the KV dtype beside keys and values (MiniMax-M3), and bf16 if those "
        "are pooled (Qwen4).",
    )
    draft_layers: NonNegativeInt = Field(
        0,
        description="Draft layers that are served (multi-token prediction, EAGLE): each caches as much as "
        "the model's last full attention layer.",
    )
    decode_context_parallel: PositiveInt = Field(
        1,
        description="Decode context parallelism: ranks that hold the same KV heads and share out the tokens "
        "of the context.",
    )
    window_layout: WindowLayout = Field(
        "own-pool",
        description="Sliding windows: a pool of their own, as in SGLang; pages of one pool that they share "
        "with the rest, as in vLLM; or one pool in which every layer caches every token.",
    )
    swa_full_tokens_ratio: PositiveFloat | None = Field(
        None,
        le=1.0,
        description="Sliding windows in a pool of their own: its tokens per token of the full pool, like "
        f"SGLang's option of the same name. By default SGLang's {SWA_RATIO} where requests are replayed; "
        "where a capacity is planned, the ratio that sequences of the given length need.",
    )
    window_chunk: NonNegativeInt = Field(
        0,
        description="Sliding windows: tokens of a prompt that are computed at once (SGLang's "
        "--chunked-prefill-size, vLLM's --max-num-batched-tokens). A running sequence needs room for the "
        "window KV of so many tokens beyond its window; 0 leaves that out.",
    )
    page_overhead: NonNegativeInt = Field(
        0,
        description="Sliding windows: pages of a sequence beyond its window, which may begin and end inside "
        "pages; vLLM counts 1.",
    )
    state_dtype: StateDtype | None = Field(
        None,
        description="Dtype of recurrent states (SGLang's --mamba-ssm-dtype); None for the model's own, fp32 "
        "if it names none.",
    )
    conv_dtype: StateDtype | None = Field(
        None,
        description="Dtype of convolution states (SGLang's SGLANG_MAMBA_CONV_DTYPE); None for bf16.",
    )
    page_size: PositiveInt = Field(1, description="Tokens per page of the KV pool.")
    flops_per_second: PositiveFloat = Field(
        989.4e12,
        allow_inf_nan=False,
        description="Dense FLOP/s of one accelerator at the compute dtype. The default is the peak of an "
        "H100 SXM in bf16: 989.4 TFLOP/s (NVIDIA's H100 architecture white paper; the data sheet's 1,979 is "
        "with sparsity). Give a measured rate where you have one.",
    )
    host_link_bytes_per_second: PositiveFloat = Field(
        64e9,
        allow_inf_nan=False,
        description="Bytes per second from host memory to one accelerator. The default is the peak of PCIe "
        "5.0 x16 in one direction (64 GB/s; the H100 data sheet states 128 for both).",
    )
    disk_bytes_per_second: PositiveFloat | None = Field(
        None,
        allow_inf_nan=False,
        description="Bytes per second from disk to one accelerator; None without a disk tier.",
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise SettingsError("; ".join(_problem(item) for item in error.errors())) from None

    @model_validator(mode="after")
    def _check_dp(self) -> Self:
        if self.attention_tp % self.decode_context_parallel and not self.tp % self.attention_dp:
            raise ValueError(
                f"decode_context_parallel is {self.decode_context_parallel}, which does not divide the "
                f"{self.attention_tp} ranks that share attention; use a divisor"
            )
        if self.tp % self.attention_dp:
            raise ValueError(
                f"dp_attention is {self.dp_attention}, which does not divide tp {self.tp}; "
                "use a divisor of tp, or True for tp itself"
            )
        return self

    @property
    def attention_dp(self) -> int:
        """Data-parallel attention groups; 1 without DP attention."""
        if isinstance(self.dp_attention, bool):
            return self.tp if self.dp_attention else 1
        return self.dp_attention

    @property
    def attention_tp(self) -> int:
        """Ranks that share one copy of the attention heads and states."""
        return self.tp // self.attention_dp

    @property
    def kv_bytes(self) -> int:
        """Bytes of one stored key or value element, rounded up for fp4; `stored` is exact."""
        return 2 if self.kv_dtype in (None, "bf16", "fp16") else 1

    def stored(self, values: int) -> int:
        """Bytes of a row of ``values`` in the KV dtype, with the scales that fp4 needs."""
        if self.kv_dtype == "fp4_e2m1":
            return -(-values // 2) + -(-values // _FP4_BLOCK)
        return values * self.kv_bytes

    def serving(self, model: ModelSpec) -> Deployment:
        """Return this deployment of ``model``, with the KV dtype of its checkpoint unless one is set."""
        if self.kv_dtype is not None:
            return self
        return self.model_copy(update={"kv_dtype": model.kv_dtype or "bf16"})

    def window_tokens(self, window: int, sequence: int) -> int:
        """Tokens of window KV, whole pages, that a running sequence of ``sequence`` tokens takes in a layer.

        The window, or all of a shorter sequence; while a prompt is computed in chunks, vLLM counts
        ``window - 1 + chunk`` (0.33, ``SlidingWindowSpec.max_admission_blocks_per_request``).
        """
        most = window - 1 + self.window_chunk if self.window_chunk else window
        pages = -(-min(most, sequence) // self.page_size) + self.page_overhead
        return pages * self.page_size

    def stages(self, num_layers: int) -> tuple[range, ...]:
        """Layers of each pipeline stage, split as SGLang and vLLM do.

        Stages are equal where ``pp`` divides ``num_layers``; otherwise the last ones get one layer
        more (SGLang 0.5.23, ``get_pp_indices``). Raises `SettingsError` if there are more stages
        than layers.
        """
        if self.pp > num_layers:
            raise SettingsError(f"pp is {self.pp} for {num_layers} layers; use at most {num_layers}")
        base, extra = divmod(num_layers, self.pp)
        bounds = [base * n + max(0, n - (self.pp - extra)) for n in range(self.pp + 1)]
        return tuple(range(a, b) for a, b in pairwise(bounds))


def _problem(item: Any) -> str:
    """Word one of pydantic's errors; those of the whole model are already worded."""
    if not item["loc"]:
        return reason(item)
    field = item["loc"][0]
    if item["type"] == "extra_forbidden":
        return f"{field} is not a field of a deployment; use {', '.join(Deployment.model_fields)}"
    return f"{field} is {item['input']!r}; {reason(item)}"
