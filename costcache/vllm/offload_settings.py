"""Settings of vLLM's CPU offload tier, from the connector's extra config and the server's own settings."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from costcache.errors import SettingsError
from costcache.settings import read_settings
from costcache.vllm import build

__all__ = ["OffloadSettings", "chunk_tokens", "read_offload_config"]


class OffloadSettings(build.VllmSettings):
    """Settings of the offload tier: those of costcache inside vLLM, and some of its own."""

    worth: bool = Field(
        False,
        description="Store a prompt only if computing it again takes longer than copying it back. Needs the "
        "spec CostCacheOffloadingSpec.",
    )
    flops_per_second: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="For 'worth': FLOP/s of one accelerator in a prefill, as measured; by default the peak "
        "of an H100.",
    )
    host_link_bytes_per_second: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=False,
        description="For 'worth': bytes per second from host memory to one accelerator, as measured; by "
        "default the peak of PCIe 5.0 x16.",
    )


def read_offload_config(vllm_config: Any, policy: str | None = None) -> OffloadSettings:
    """Read the settings of the tier.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        policy: The policy that ``eviction_policy`` names, if it names one.

    Returns:
        The settings of the object ``costcache`` in the connector's extra config, before those of the server
        (:func:`costcache.vllm.build.read_config`).

    Raises:
        SettingsError: Names the field, its value and what is allowed.
    """
    server = build.read_config(vllm_config)
    values: dict[str, Any] = {} if server is None else server.model_dump(exclude_unset=True)
    transfer = vllm_config.kv_transfer_config
    own = None if transfer is None else transfer.kv_connector_extra_config.get(build.KEY)
    where = f"entry {build.KEY!r} of kv_connector_extra_config"
    own = {} if own is None else build.as_object(own, where)
    if policy is not None:
        if own.get("policy", policy) != policy:
            raise SettingsError(
                f"eviction_policy is {policy!r} and {build.KEY}.policy {own['policy']!r}: name one policy"
            )
        own = {**own, "policy": policy}
    if "policy" in own and own["policy"] != values.get("policy"):
        values.pop("policy_settings", None)  # they are another policy's
    return read_settings(OffloadSettings, values | own, f"{build.KEY}.")


def chunk_tokens(vllm_config: Any) -> int:
    """Tokens per chunk of the tier, as the connector's extra config gives them."""
    transfer, block = vllm_config.kv_transfer_config, vllm_config.cache_config.block_size
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    chunk = extra.get("block_size")
    return int(chunk) if chunk is not None else block * int(extra.get("blocks_per_chunk") or 1)
