"""Stand-ins that the Engine needs on CPU beyond SGLang's own support, for tests only.

Loaded in every process of an Engine through the entry-point group ``sglang.srt.plugins`` (the test
makes the entry point). It replaces Triton kernels by plain torch and opens two paths that SGLang
keeps for GPUs: latent attention under the ``torch_native`` backend, and extra state buffers.
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> torch.Tensor:
    """RMS norm over the last dimension, times SiLU of the gate."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float() * torch.nn.functional.silu(g.float())).to(x.dtype)


def gate_sigmoid_mul(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    do_add: bool,
    *_: Any,
    **__: Any,
) -> None:
    """The shared expert's output times its gate; added to ``output`` or written there."""
    gate = torch.sigmoid((hidden_states.float() * gate_weight.float().reshape(1, -1)).sum(-1, keepdim=True))
    gated = gate * shared_output.float()
    output.copy_((output.float() + gated if do_add else gated).to(output.dtype))


def track_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mask: torch.Tensor,
    track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of the marked rows to their tracking slots; one layer."""
    for row in torch.nonzero(mask[:batch_size]).flatten().tolist():
        source, target = int(cache_indices[row]), int(track_indices[row])
        conv_states[target] = conv_states[source]
        ssm_states[target] = ssm_states[source]


def track_states_of_all_layers(
    conv_states: torch.Tensor, ssm_states: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """The same for pools of shape [layers, slots, ...]."""
    for layer in range(conv_states.shape[0]):
        track_states(conv_states[layer], ssm_states[layer], *args, **kwargs)


def install() -> None:
    """The entry point."""
    import sglang.kernels.ops.attention.fla.fused_norm_gate as norm
    import sglang.kernels.ops.mamba.mamba_state_scatter_triton as scatter
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    # Without an accelerator there is nothing to pin memory for, and torch raises.
    torch.Tensor.pin_memory = lambda self, device=None: self
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    norm.rms_norm_gated = rms_norm_gated
    elementwise._launch_fused_gate_sigmoid_mul = gate_sigmoid_mul
    scatter.track_mamba_states_if_needed = track_states
    scatter.track_mamba_states_all_layers = track_states_of_all_layers
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
