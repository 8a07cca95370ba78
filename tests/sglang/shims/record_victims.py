"""Writes down every victim of a process's evictions, one JSON line an eviction, a file a process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def install() -> None:
    """The entry point; does nothing unless the test asks for it."""
    folder = os.environ.get("RECORD_VICTIMS")
    if not folder:
        return
    from costcache.eviction import Eviction
    from costcache.pool import Pool

    evict = Pool.evict

    def recorded(self: Pool, shortfall: int, **named: Any) -> Eviction:
        eviction = evict(self, shortfall, **named)
        with Path(folder, f"{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps([eviction.pool, shortfall, eviction.freed, eviction.victims]) + "\n")
        return eviction

    setattr(Pool, "evict", recorded)  # noqa: B010  # no method of the class is of this form
