"""costcache inside SGLang: found through the entry point ``sglang.srt.plugins``.

Nothing here imports SGLang until :func:`register` is called, by SGLang.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
from pathlib import Path

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
        from costcache.errors import CostcacheError

        said = f"costcache is not active in SGLang: {error}"
        logger.error("%s", said, exc_info=None if isinstance(error, CostcacheError) else error)
        if _is_asked_for(sys.argv[1:]):
            # SGLang will not know the name, and end with its whole usage and "invalid choice: 'costcache'".
            atexit.register(sys.stderr.write, f"{said}\n")


def _is_asked_for(arguments: list[str]) -> bool:
    """Whether a command line asks for costcache, itself or in the file of its ``--config``."""
    words = [word for argument in arguments for word in argument.split("=")]
    if any(word == "costcache" or word.startswith("costcache:") for word in words):
        return True
    for option, value in itertools.pairwise(words):
        if option == "--config" and Path(value).is_file():
            return "costcache" in Path(value).read_text(errors="replace")
    return False


def _check_version() -> None:
    from importlib.metadata import version

    found = version("sglang")
    if found not in SUPPORTED:
        from costcache.errors import CostcacheError

        raise CostcacheError(
            f"sglang {found} is installed and costcache has been tested with {', '.join(SUPPORTED)}: "
            "install one of these, or a version of costcache that names yours"
        )
