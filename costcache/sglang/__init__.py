"""costcache inside SGLang: found through the entry point ``sglang.srt.plugins``.

Nothing here imports SGLang until :func:`register` is called, by SGLang.
"""

from __future__ import annotations

import logging

__all__ = ["SUPPORTED", "register"]

SUPPORTED = ("0.5.23",)
"""Versions of SGLang that the tests have run on: exactly these are served."""

logger = logging.getLogger("costcache")


def register() -> None:
    """Register the policy names and the cache backend ``costcache`` with SGLang.

    SGLang calls it in every process, before it reads the command line, and swallows exceptions. So a failure
    is logged here, and without the names SGLang refuses ``--radix-eviction-policy costcache``.
    """
    try:
        _check_version()
        from costcache.sglang import registration

        registration.register()
    except Exception as error:
        logger.exception("costcache is not active in SGLang: %s", error)


def _check_version() -> None:
    from importlib.metadata import version

    found = version("sglang")
    if found not in SUPPORTED:
        from costcache.errors import CostcacheError

        raise CostcacheError(
            f"sglang {found} is installed and costcache has been tested with {', '.join(SUPPORTED)}: "
            "install one of these, or a version of costcache that names yours"
        )
