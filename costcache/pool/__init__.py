"""The pool: the records of one kind of memory, the order that ranks them, and the evictions from it."""

from __future__ import annotations

from costcache.pool.pool import Pool

__all__ = ["Pool"]
