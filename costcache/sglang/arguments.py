"""Checks what the server's arguments say of costcache when they are parsed, before weights are loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from costcache.errors import CostcacheError, PluginError, SettingsError
from costcache.hookspecs import PROJECT
from costcache.plugins import PluginManager, get_plugins
from costcache.recording.settings import ENVIRONMENT, ServerSettings, recording_asked
from costcache.settings import read_settings
from costcache.sglang.build import PREFIX, read_policy

__all__ = ["check_arguments", "parsed", "resolving", "settings_of"]

logger = logging.getLogger("costcache")

OWN_CACHES = ("enable_lmcache", "enable_flexkv")
"""Options that bring a prefix cache of their own."""


def settings_of(args: Any) -> ServerSettings | None:
    """The settings that SGLang's ``ServerArgs`` give; None if they do not ask for costcache.

    Raises:
        SettingsError: One of them is wrong.
    """
    name, backend = args.radix_eviction_policy, args.radix_cache_backend
    ours = name == PROJECT or name.startswith(PREFIX)
    if not ours and backend != PROJECT:
        return None
    if ours and backend not in {None, "", PROJECT}:
        raise SettingsError(
            f"--radix-eviction-policy is {name!r} and --radix-cache-backend is {backend!r}: costcache orders "
            "its own cache only; drop one of the two"
        )
    if not ours and name == "lru" and not args._radix_eviction_policy_explicitly_set:
        name = PROJECT  # the backend alone
    return read_policy(name, args.radix_eviction_policy_config)


def check_arguments(args: Any, plugins: PluginManager | None = None) -> None:
    """Check the arguments of a server, as far as that is possible without its model.

    A model that is a local folder with a ``config.json`` is read, and the settings are checked for it.

    Args:
        args: SGLang's ``ServerArgs``.
        plugins: Where to look for policies; the process's own by default.

    Raises:
        SettingsError: A setting or a combination of options is wrong.
        PluginError: There is no such policy, or it does not serve the model.
        ConfigError: The model's config cannot be read.
    """
    settings = settings_of(args)
    asked = recording_asked(None if settings is None else settings.record)
    if settings is None or args.disable_radix_cache:
        if asked is not None:
            logger.warning(
                "costcache: nothing is recorded without its cache, though %s is set: add "
                "--radix-eviction-policy costcache:lru, which evicts as SGLang does",
                ENVIRONMENT,
            )
        return
    for option in OWN_CACHES:
        if getattr(args, option, False):
            raise SettingsError(
                f"costcache cannot serve here: --{option.replace('_', '-')} has a prefix cache of its own. "
                "Drop that option, or --radix-eviction-policy costcache (and --radix-cache-backend costcache)"
            )
    if getattr(args, "use_ray", False):
        raise SettingsError(
            "costcache cannot serve here: under --use-ray SGLang's scheduler loads no plugins. Drop it"
        )
    plugins = get_plugins() if plugins is None else plugins
    config = Path(str(args.model_path)) / "config.json"
    if config.is_file():
        model = plugins.read(config)
        plugins.check_settings(settings, plugins.match(model))
    elif settings.policy != PROJECT:
        known = plugins.policies()
        if settings.policy not in known:
            raise PluginError(plugins.unknown(settings.policy))
        read_settings(known[settings.policy].settings, settings.policy_settings, "policy_settings.")


def parsed(result: Any, *args: Any, **named: Any) -> None:  # noqa: ARG001  # those of SGLang's function
    """End the program with the error as its last line, after SGLang has parsed its command line."""
    try:
        check_arguments(result)
    except CostcacheError as error:
        raise SystemExit(f"sglang serve: error: {error}") from None


def resolving(original: Any, self: Any) -> Any:
    """Wrap the step in which SGLang derives the arguments that it was not given: check them first."""
    if not getattr(self, "_resolution_finished", False):
        check_arguments(self)
    return original(self)
