"""Resolves what vLLM's configuration asks for: settings, model and policy."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from costcache.binding import Binding
from costcache.deployment import Deployment, KVDtype
from costcache.errors import CostcacheError, SettingsError
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.recording.settings import ServerSettings
from costcache.settings import Settings, read_settings
from costcache.vllm import SUPPORTED
from costcache.vllm.clients import Clients

__all__ = [
    "ENVIRONMENT",
    "KEY",
    "VllmSettings",
    "as_object",
    "bind",
    "current",
    "current_clients",
    "is_tested",
    "read_config",
    "serving",
]

logger = logging.getLogger("costcache")

KEY = "costcache"
"""Entry of ``--additional-config`` that asks for a policy."""
ENVIRONMENT = "COSTCACHE_VLLM"
"""Variable that does the same; the entry comes first."""

KV_DTYPES: dict[str, KVDtype] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_inc": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}

_serving: list[tuple[Any, Clients]] = []


class VllmSettings(ServerSettings):
    """Settings of costcache inside vLLM: those of every server, and one of its own."""

    untested: Literal["refuse", "lru"] = Field(
        "refuse",
        description="In vLLM, on a version that costcache has not been tested with: 'refuse' stops the "
        "server at start, 'lru' keeps vLLM's own order, with a warning.",
    )


def read_config(vllm_config: Any) -> VllmSettings | None:
    """Read the settings that vLLM's configuration or the environment gives.

    Args:
        vllm_config: vLLM's ``VllmConfig``, whose ``additional_config`` may have the entry ``costcache``: a
            JSON object, or the name of a policy. Without it the variable ``COSTCACHE_VLLM`` is read likewise.

    Returns:
        The settings; None if neither is given, so that nothing of vLLM changes.

    Raises:
        SettingsError: Names the field, its value and what is allowed.
    """
    more = vllm_config.additional_config
    given = more.get(KEY) if isinstance(more, dict) else None
    where = f"--additional-config, entry {KEY!r}"
    if given is None:
        given, where = os.environ.get(ENVIRONMENT), f"the variable {ENVIRONMENT}"
        if not given:
            return None
        if given.lstrip().startswith("{"):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise SettingsError(f"{where} is {given!r}, which is not JSON: {error}") from None
    return read_settings(VllmSettings, as_object(given, where), f"{KEY}.")


def as_object(given: Any, where: str) -> dict[str, Any]:
    """An object of settings as it was given; the name of a policy stands for one that names it alone.

    Raises:
        SettingsError: It is neither; names where it was given.
    """
    if isinstance(given, str):
        return {"policy": given}
    if not isinstance(given, dict):
        raise SettingsError(f"{where} is {given!r}: give a JSON object of settings, or the name of a policy")
    return given


def is_tested(settings: VllmSettings) -> bool:
    """Whether this version of vLLM has been tested.

    Raises:
        CostcacheError: It has not, and the settings do not allow to go on without costcache.
    """
    from vllm import __version__ as found

    if found.partition("+")[0] in SUPPORTED:
        return True
    problem = f"vllm {found} is installed and costcache has been tested with {', '.join(SUPPORTED)}"
    if settings.untested == "refuse":
        raise CostcacheError(
            f"{problem}: install one of these, or a version of costcache that names yours, or set "
            f"'untested' to 'lru' to keep vLLM's own order until then"
        )
    logger.warning("costcache: %s, so vLLM's own LRU stays in force", problem)
    return False


def bind(
    vllm_config: Any, settings: Settings, page_size: int, *, plugins: PluginManager | None = None
) -> Binding:
    """Bind the served model to the policy that the settings name.

    Args:
        vllm_config: vLLM's configuration.
        settings: The settings.
        page_size: Tokens per block, of all ranks of decode context parallelism together.
        plugins: Where to look for plugins; the process's own by default.

    Raises:
        SettingsError: A setting is wrong.
        PluginError: No plugin or policy can serve the model.
        ConfigError: The model's config cannot be read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    dtype = str(cache.cache_dtype)
    if dtype == "auto":
        dtype = str(model.dtype).removeprefix("torch.")
    deployment = Deployment(
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        # Four-byte KV is for tests on CPU: priced as two bytes.
        kv_dtype=KV_DTYPES.get(dtype, "fp8_e4m3" if dtype.startswith("fp8") else "bf16"),
        page_size=page_size,
    )
    return Binding.of(ModelSpec.from_config(model.hf_config), deployment, settings, plugins=plugins)


@contextlib.contextmanager
def serving(vllm_config: Any, clients: Clients | None = None) -> Iterator[None]:
    """Note, while a scheduler is being made, for which configuration, and who will know its clients."""
    _serving.append((vllm_config, Clients() if clients is None else clients))
    try:
        yield
    finally:
        _serving.pop()


def current() -> Any:
    """The ``VllmConfig`` of the scheduler that is being made; None outside of that.

    vLLM makes KV connectors, and with them the policy of its CPU offload tier, inside of the scheduler.
    """
    return _serving[-1][0] if _serving else None


def current_clients() -> Clients:
    """The object that will know the clients of the scheduler that is being made; see :func:`current`."""
    return _serving[-1][1] if _serving else Clients()
