"""Reads the hints of a client: what it says that it will do with a prompt."""

from __future__ import annotations

import json
import logging
from typing import Any

from costcache.radix.keys import as_info
from costcache.records import RequestInfo

__all__ = ["HINTS", "KEY", "NO_HINTS", "read_hints"]

logger = logging.getLogger("costcache")

KEY = "costcache"
"""Entry of a request that holds the hints, in servers that have entries of any name."""
HINTS = frozenset({"session", "tenant", "user", "session_ends", "returns_after", "keep_seconds"})
"""Hints that it may have, fields of :class:`~costcache.records.RequestInfo`."""
NO_HINTS = RequestInfo()

_warned: list[bool] = []


def read_hints(given: Any) -> RequestInfo:
    """Read hints from what a client sent.

    What cannot be read is left out, with a warning for the first one: a client must not stop the server, nor
    fill its log.

    Args:
        given: An object with any of :data:`HINTS`, or its JSON; None for no hints.
    """
    if given is None:
        return NO_HINTS
    try:
        if isinstance(given, str):
            given = json.loads(given)
        if not isinstance(given, dict) or not given.keys() <= HINTS:
            raise TypeError(f"{KEY} is {given!r}: give an object with any of {', '.join(sorted(HINTS))}")
        return as_info(RequestInfo(**given))
    except (TypeError, ValueError, OverflowError) as error:
        if not _warned:
            _warned.append(True)
            logger.warning("a client's hints are ignored (said once): %s", error)
        return NO_HINTS
