"""The hooks of costcache. Each docstring is the contract.

An *architecture plugin* is found by matching a model (``match_model``); a *policy plugin* by the names that
it offers (``policies``), and so is a *storage plugin* (``storage_backend``). A plugin is a module, class or
object with functions marked ``@costcache.hookimpl``, named by an entry point of the group ``costcache``.
Every hook is optional, except that an architecture plugin needs ``match_model``. An implementation may leave
out arguments that it does not use; it may not rename them, give them defaults or make them keyword-only.

Hooks are bound once, when a cache is made, and called directly from then on. A plugin states only what
differs: a hook that it leaves out has the default described here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pydantic import BaseModel

    from costcache.cost import TokenCost
    from costcache.deployment import Deployment
    from costcache.formats import TraceFormat
    from costcache.model import ModelSpec
    from costcache.policies.spec import PolicySpec
    from costcache.records import PoolState
    from costcache.settings import PoolSettings
    from costcache.storage.backend import StorageSpec

__all__ = [
    "PROJECT",
    "adjust_eviction_count",
    "default_policy",
    "free_target",
    "hookimpl",
    "hookspec",
    "match_model",
    "policies",
    "read_config",
    "settings_model",
    "storage_backend",
    "token_cost",
    "trace_formats",
]

PROJECT = "costcache"
"""Name of the pluggy project and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def read_config(config: Mapping[str, Any]) -> ModelSpec | None:
    """Read a config that the core cannot read, or would read otherwise.

    Called of every plugin before the core reads a config: a file, a folder, or what a server has loaded; not
    a preset. If a plugin reads it, the core does not, and cannot refuse it.

    Args:
        config: The whole ``config.json``, as it is. Leave it unchanged.

    Returns:
        The model's architecture facts, built with ``ModelSpec(layers=...)``, or None for a config that is not
        this plugin's. Two plugins that read the same config are an error that names both.
    """


@hookspec
def match_model(model: ModelSpec) -> int | None:
    """Claim a model, with a specificity, or decline it.

    Called once per cache, of every architecture plugin, when the model is known.

    Args:
        model: The model's architecture facts.

    Returns:
        The specificity of the claim, an int of 1 or more (the built-in ``generic`` claims every
        readable model with 0), or None to decline. The highest claim wins; a tie is an error that
        names both plugins, since neither may win by chance.
    """


@hookspec
def token_cost(model: ModelSpec, deployment: Deployment) -> TokenCost:
    """Return the memory of one cached token and of one state.

    Called once per cache. The default is the core's formula of each layer, added up.

    Args:
        model: The model's architecture facts.
        deployment: Parallelism, KV dtype and page size.

    Returns:
        Bytes per token and per state, per rank, and the compression ratio.
    """


@hookspec
def free_target(model: ModelSpec, pool: PoolState, settings: PoolSettings) -> float:
    """Return the share of a pool that an eviction should leave free beyond its shortfall.

    Called at each eviction that has a shortfall. The default is ``settings.headroom``. Free space caches
    nothing: 0 is best unless something else needs the room.

    Args:
        model: The model's architecture facts.
        pool: The pool before the eviction; counts in the pool's unit.
        settings: The framework's headroom and the plugin's own settings.

    Returns:
        A share from 0.0 to below 1.0. Any other answer is replaced by 0.0, counted as clamped and
        logged once.
    """


@hookspec
def adjust_eviction_count(model: ModelSpec, pool: PoolState, requested: int, settings: PoolSettings) -> int:
    """Return the units to evict, given the units requested.

    Called at each eviction that has a shortfall, after ``free_target``. The default is ``requested``.

    Args:
        model: The model's architecture facts.
        pool: The pool before the eviction; counts in the pool's unit.
        requested: Shortfall plus headroom, in the pool's unit, 1 or more; in a pool of tokens, whole pages.
        settings: The framework's headroom and the plugin's own settings.

    Returns:
        Units to evict, from ``requested`` to ``pool.capacity``. Any other answer is replaced by
        ``requested``, counted as clamped and logged once. Tokens are rounded up to whole pages, and the
        count is cut to what is evictable.
    """


@hookspec
def default_policy(model: ModelSpec) -> str | None:
    """Name the policy that ``costcache`` stands for with this model.

    Called once per cache, when the policy is ``costcache``. The default is None.

    Args:
        model: The model's architecture facts.

    Returns:
        The name of a policy that serves the model, or None for the framework's default.
    """


@hookspec
def settings_model() -> type[BaseModel] | None:
    """Return the pydantic model of this architecture plugin's own settings.

    Called once per cache. The user's settings under ``architecture`` are validated against it and reach the
    other hooks as ``settings.architecture``. The default is None. ``costcache plan`` shows the free target
    under the ``examples`` of each field.

    Returns:
        A pydantic model class that can be made without arguments, or None for no settings.
    """


@hookspec
def policies() -> dict[str, PolicySpec]:
    """Offer eviction policies by name.

    Called once, when the plugin is loaded.

    Returns:
        Policy name to :class:`costcache.policies.PolicySpec`. A name that another plugin already offers is
        reported and skipped.
    """


@hookspec
def storage_backend() -> dict[str, StorageSpec]:
    """Offer storage backends by name: where the disk tier of a cache keeps KV.

    Called once, when the plugin is loaded. A backend is opened when a cache with a disk tier asks for its
    name, and is called by one thread at a time, apart from the scheduler's. It keeps bytes by key, within a
    bound, so that what it acknowledged outlives a process that is killed; ``StorageBackend`` says how each
    method answers. Every value is checked when it comes back. An ``OSError`` is a miss, logged once; any
    other exception or answer is reported under the backend's name, and the cache goes on without the backend.

    Returns:
        Name of the backend to :class:`costcache.storage.StorageSpec`. A name that another plugin already
        offers is reported and skipped.
    """


@hookspec
def trace_formats() -> dict[str, TraceFormat]:
    """Offer readers of trace files in formats of one's own.

    Called when a trace file is read. A plugin's formats are asked before the built-in ones; two that claim
    one file are an error that names both. With ``--format NAME`` nobody is asked, and that one reads. A
    format that is not valid, and one whose ``claims`` raises, is reported by name and passed over; one whose
    ``read`` fails is an error that names the plugin.

    Returns:
        Format name to :class:`costcache.TraceFormat`. The name has letters, digits, ``-`` and ``_``. One that
        costcache or another plugin already has is reported and skipped.
    """
