"""Gated delta nets (Qwen3-Next) in plain torch: causal convolution and the delta rule, token by token.

Shapes: tokens of a batch are concatenated, L in all; H key heads, V value heads, K key and D value
dimensions; a recurrent state is [V, D, K], a convolution state [channels, width - 1].
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

CHUNK = 64
"""Tokens between the states that prefill reports, as SGLang's own kernels have it."""


def _spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise(starts.tolist()))


def _convolve(
    x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [channels, L], history [channels, width - 1]: the output and the new history."""
    whole = torch.cat([history.to(x.dtype), x], dim=1)
    out = functional.conv1d(
        whole[None].float(),
        weight[:, None].float(),
        None if bias is None else bias.float(),
        groups=x.shape[0],
    )[0]
    if activation in ("silu", "swish", True):
        out = functional.silu(out)
    return out.to(x.dtype), whole[:, -history.shape[1] :]


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: Any = None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Prefill; writes the last states to ``conv_states``."""
    out = torch.empty_like(x)
    for row, (start, stop) in enumerate(_spans(query_start_loc)):
        if stop > start:
            state = conv_states[int(cache_indices[row])]
            history = state if has_initial_state[row] else torch.zeros_like(state)
            out[:, start:stop], last = _convolve(x[:, start:stop], history, weight, bias, activation)
            state.copy_(last)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Any = None,
    conv_state_indices: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Decode: one token a row."""
    out = torch.empty_like(x)
    for row in range(x.shape[0]):
        state = conv_state[row if conv_state_indices is None else int(conv_state_indices[row])]
        step, last = _convolve(x[row, :, None], state, weight, bias, activation)
        out[row] = step[:, 0]
        state.copy_(last)
    return out


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,  # noqa: N803  # SGLang's name
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay and write strength, [1, L, V] each."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], torch.sigmoid(b.float()).to(b.dtype)[None]


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    strength: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence; changes ``state``. Returns the output and the state before each chunk."""
    repeats = v.shape[1] // q.shape[1]
    q, k = (functional.normalize(t.float(), dim=-1).repeat_interleave(repeats, dim=1) for t in (q, k))
    q, v, keep, strength = q * q.shape[-1] ** -0.5, v.float(), decay.float().exp(), strength.float()
    now, out, chunks = state.float(), [], []
    for step in range(v.shape[0]):
        if step % CHUNK == 0:
            chunks.append(now.clone())
        now = now * keep[step][:, None, None]
        error = (v[step] - torch.einsum("vdk,vk->vd", now, k[step])) * strength[step][:, None]
        now = now + torch.einsum("vd,vk->vdk", error, k[step])
        out.append(torch.einsum("vdk,vk->vd", now, q[step]))
    state.copy_(now)
    return torch.stack(out), chunks


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_state_indices: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """Prefill; writes the last states to ``initial_state``.

    Returns:
        The output, nothing, and [1, chunks, V, D, K]: the state before each chunk.
    """
    out = torch.empty_like(v)
    chunks: list[torch.Tensor] = []
    for row, (start, stop) in enumerate(_spans(cu_seqlens)):
        if stop > start:
            part = slice(start, stop)
            state = initial_state[int(initial_state_indices[row])]
            result, states = _delta_rule(q[0, part], k[0, part], v[0, part], g[0, part], beta[0, part], state)
            out[0, part] = result.to(v.dtype)
            chunks += states
    return out, None, torch.stack(chunks)[None] if chunks else None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: torch.Tensor,  # noqa: N803  # SGLang's name
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Decode: gating and one step of the delta rule a row."""
    heads = A_log.shape[0]
    decay, strength = fused_gdn_gating_cpu(A_log, a.reshape(-1, heads), b.reshape(-1, heads), dt_bias)
    return chunk_gated_delta_rule_cpu(
        q, k, v, decay, strength, initial_state_source, cu_seqlens, initial_state_indices
    )[0]


def register() -> None:
    """Put the operators where SGLang's CPU path looks for them."""
    imported: list[Any] = [causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu]
    for operator in imported:
        setattr(sys.modules["sgl_kernel.mamba"], operator.__name__, operator)
    looked_up: list[Any] = [fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu]
    for operator in looked_up:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)
