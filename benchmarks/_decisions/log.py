"""A log of decisions, what is kept of it, and a comparison of two records."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from costcache.errors import CostcacheError

__all__ = ["Case", "Entry", "Log", "differences", "run"]

Entry = dict[str, Any]
"""What is kept of one run: digests, and figures that say roughly what happened."""

BLOCK = 100
"""Lines of a log that share a digest, so that a comparison can say where two logs part."""

SHORT = 12
"""Numbers of an array that a line spells out."""


class Log:
    """What one run decided, a line at a time."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, what: str, *values: object) -> None:
        """Add a line."""
        self.lines.append(" ".join((what, *map(text, values))))

    def entry(self) -> Entry:
        """Digests of all lines, and of each block of them."""
        blocks = [self.lines[at : at + BLOCK] for at in range(0, len(self.lines), BLOCK)]
        return {
            "lines": len(self.lines),
            "digest": digest("\n".join(self.lines).encode(), 16),
            "blocks": " ".join(digest("\n".join(block).encode(), 3) for block in blocks),
        }


Case = Callable[[Log], Mapping[str, Any]]
"""Runs one stream; returns figures to keep beside the digests."""


def digest(data: bytes, size: int = 8) -> str:
    """BLAKE2b of ``size`` bytes, in hex."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()


def text(value: object) -> str:
    """A value as text: numbers exactly, long arrays by their size, first number and digest."""
    if isinstance(value, np.ndarray):
        if value.size <= SHORT:
            return text(value.tolist())
        return f"[{value.size}: {value[0]!s} ... {digest(np.ascontiguousarray(value).tobytes())}]"
    if isinstance(value, np.generic):
        return text(value.item())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ",".join(map(text, value)) + "]"
    return repr(value)


class _Heard(logging.Handler):
    """Keeps what the package logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def notes(self) -> list[str]:
        """Each message once, with the exception that it tells of."""
        found: dict[str, None] = {}
        for record in self.records:
            error = record.exc_info[1] if record.exc_info else None
            found[record.getMessage() + (f" [{error!r}]" if error is not None else "")] = None
        return list(found)


@contextlib.contextmanager
def _heard() -> Iterator[_Heard]:
    logger, handler = logging.getLogger("costcache"), _Heard()
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def run(case: Case) -> tuple[Entry, list[str], list[str]]:
    """Run one case.

    A policy that refuses and a run that raises are recorded as such.

    Returns:
        What to keep, remarks for people (log messages, errors), and all lines.
    """
    log = Log()
    with _heard() as heard:
        try:
            entry = {**case(log), **log.entry()}
            notes = []
        except CostcacheError as error:
            entry, notes = {"refused": type(error).__name__}, [str(error)]
        except Exception as error:
            entry = {"raised": type(error).__name__, **log.entry()}
            notes = [traceback.format_exc()]
    errors = sum(record.levelno >= logging.ERROR for record in heard.records)
    if errors:
        entry["errors"] = errors
    return entry, [*heard.notes(), *notes], log.lines


# -- comparison ------------------------------------------------------------------------------


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Each difference between two records as a line; remarks are not compared."""
    for section in sorted({*first["sections"], *second["sections"]}):
        ours, theirs = (record["sections"].get(section) for record in (first, second))
        if ours is None or theirs is None:
            yield f"{section}: only in the {'second' if ours is None else 'first'} record"
            continue
        for key in dict.fromkeys((*ours, *theirs)):
            if key not in ours or key not in theirs:
                yield f"{section}/{key}: only in the {'first' if key in ours else 'second'} record"
            elif ours[key] != theirs[key]:
                yield f"{section}/{key}: {_difference(ours[key], theirs[key])}"


def _difference(ours: Entry, theirs: Entry) -> str:
    parts = [
        f"{name} {ours.get(name)} != {theirs.get(name)}"
        for name in dict.fromkeys((*ours, *theirs))
        if name not in ("blocks", "digest") and ours.get(name) != theirs.get(name)
    ]
    if ours.get("digest") != theirs.get("digest"):
        blocks = (str(ours.get("blocks", "")).split(), str(theirs.get("blocks", "")).split())
        parted = next(
            (at for at, (a, b) in enumerate(zip(*blocks, strict=False)) if a != b), min(map(len, blocks))
        )
        parts.append(f"the logs part in lines {parted * BLOCK + 1} to {(parted + 1) * BLOCK}")
    return "; ".join(parts)
