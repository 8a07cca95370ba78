"""Plain-torch copies between host and device pools, in place of SGLang's CUDA ones.

They move the bytes for real, so that what comes back from the host tier can be compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest
import torch

POOLS = "sglang.srt.mem_cache.pool_host"


def copy_layers(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Both sides keep one tensor a layer, a row a token."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices.to(dst.device)] = src[src_indices.to(src.device)]


def copy_to_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Device to a host that keeps [page, layer, row of the page, ...]; sources: k layers, then v layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    rows = dst_indices.cpu()
    for number, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            src = src_ptrs[number * layers + layer][src_indices]
            dst[rows // page_size, layer, rows % page_size] = src.reshape(-1, *dst.shape[3:])


def copy_from_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """The way back, one layer at a time."""
    rows = src_indices.cpu()
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        values = src[rows // page_size, layer_id, rows % page_size]
        dst[dst_indices] = values.reshape(-1, *dst.shape[1:])


REPLACED = {
    "transfer_kv_direct": copy_layers,
    "transfer_kv_all_layer_direct_lf_pf": copy_to_pages,
    "transfer_kv_per_layer_direct_pf_lf": copy_from_pages,
}


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let host pools work in a torch without CUDA, for one test."""
    common = importlib.import_module(f"{POOLS}.common")
    monkeypatch.setattr(common, "_cuda_host_register", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cpu.Stream, "synchronize", lambda self: None, raising=False)
    for name in ("mha", "mla", "mamba"):
        pool = importlib.import_module(f"{POOLS}.{name}")
        for transfer, replacement in REPLACED.items():
            monkeypatch.setattr(pool, transfer, replacement, raising=False)
