"""Tables: what ``hazard`` has learned, as a file that another run starts from.

A table holds, for each class, the tokens that were used again and those that were censored, by bin of age.
Classes are described by their features, not numbered, so that a file survives changes of their limits.
"""

from __future__ import annotations

import json
import logging
import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costcache.errors import SettingsError
from costcache.files import read_whole
from costcache.policies.hazard.bins import BINS, age_bin
from costcache.policies.hazard.classes import Classes, Kind
from costcache.policies.hazard.life_table import LifeTable
from costcache.records import RequestInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costcache.policies.hazard.snapshot import Snapshot

__all__ = ["ClassTable", "Ended", "Tables", "load_tables", "read_tables", "tables_of"]

logger = logging.getLogger("costcache")

# Bounds far from any run's, within which every sum and product of a table stays finite.
Amount = Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)]
Square = Annotated[float, Field(ge=0.0, le=1e36, allow_inf_nan=False)]
Interval = Annotated[float, Field(ge=1e-9, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**40)]
Bins = Annotated[list[Amount], Field(max_length=BINS)]

_MOST_CLASSES = 10_000
"""More than any run makes: classes are few, each the product of a few steps."""


class Ended(BaseModel):
    """The ending of the last request that used a class.

    Attributes:
        output_tokens: Least output length of the class.
        finish_reason: Its finish reason, None where unknown.
        priority: Its priority.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    output_tokens: Count
    finish_reason: Annotated[str, Field(max_length=1000)] | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31)


class ClassTable(BaseModel):
    """One class.

    Attributes:
        name: The class in words, for people.
        uses: Least number of uses of its members.
        interval: Mean time between their uses, of those used more than once.
        new_tokens: Of those used once, least tokens that their request brought.
        ended: How the last request ended; None where that did not count.
        used: Tokens that were used again, by bin of age; further bins are 0.
        lost: Tokens that were last seen unused at an age (censored), likewise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = ""
    uses: int = Field(ge=1, le=2**40)
    interval: Interval | None = None
    new_tokens: Count | None = None
    ended: Ended | None = None
    used: Bins
    lost: Bins

    def kind(self, factor: float) -> Kind:
        """Features of the class, its interval times a factor."""
        ended = self.ended
        return Kind(
            uses=self.uses,
            interval=None if self.interval is None else self.interval * factor,
            new_tokens=self.new_tokens,
            ended=None
            if ended is None
            else RequestInfo(
                output_tokens=ended.output_tokens, finish_reason=ended.finish_reason, priority=ended.priority
            ),
        )


class Tables(BaseModel):
    """A file of tables.

    Bins of age are those of :mod:`costcache.policies.hazard.bins`: the first ends at 1/64 of the clock's
    unit, each further one is √2 times as wide as the one before it.

    Attributes:
        format: Kind of file.
        version: Version of the format.
        clock: Unit of ages and intervals.
        watched: Time over which it was learned.
        seconds_per_request: Mean time between requests; None where the clock did not tell.
        tokens: Tokens of all intervals that began.
        squares: Sum of the squares of their sizes.
        classes: The classes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["costcache-hazard-tables"] = "costcache-hazard-tables"
    version: Literal[1] = 1
    clock: Literal["seconds", "requests"]
    watched: Amount
    seconds_per_request: Interval | None = None
    tokens: Amount
    squares: Square
    classes: list[ClassTable] = Field(max_length=_MOST_CLASSES)

    def start(self, table: LifeTable, classes: Classes, clock: Literal["seconds", "requests"]) -> float:
        """Add the counts to a life table.

        Args:
            table: The life table.
            classes: Its classes; missing ones are added, in the order of the file.
            clock: The clock of the run that begins. Where it is another one, ages are converted by the mean
                time between requests; where that is not known, nothing is added.

        Returns:
            The time over which it was learned, in units of that clock.
        """
        factor = 1.0
        if clock != self.clock:
            if self.seconds_per_request is None:
                logger.warning(
                    "hazard: tables in %s are of no use to a clock that counts %s: it starts from nothing",
                    self.clock,
                    clock,
                )
                return 0.0
            factor = self.seconds_per_request if clock == "seconds" else 1.0 / self.seconds_per_request
        shift = age_bin(factor) - age_bin(1.0)
        for each in self.classes:
            row = classes.number_of(each.kind(factor)) * BINS
            for target, amounts in ((table.used, each.used), (table.censored, each.lost)):
                for at, amount in enumerate(amounts):
                    target[row + min(max(at + shift, 0), BINS - 1)] += amount
        table.tokens += self.tokens
        table.squares += self.squares
        return self.watched * factor

    def text(self) -> str:
        """The file's text, a line to a class."""
        head = self.model_dump(mode="json", exclude={"classes"})
        classes = ",\n  ".join(json.dumps(each.model_dump(mode="json")) for each in self.classes)
        return f'{json.dumps(head)[:-1]}, "classes": [\n  {classes}\n]}}\n'


def read_tables(path: Path) -> Tables:
    """Read a file of tables.

    Raises:
        SettingsError: If the file cannot be read, is not JSON, or a field is wrong: names the file, the field
            and its value.
    """
    try:
        return _parsed(read_whole(path))
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except SettingsError as error:
        problem = str(error)
    raise SettingsError(
        f"tables {path}: {problem}; write it anew with 'costcache explain TRACE --save-tables FILE'"
    )


@lru_cache(maxsize=4)  # settings are validated for each order that is made
def _parsed(content: bytes) -> Tables:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:  # of JSON, or of the text's encoding
        raise SettingsError(f"is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"is {type(values).__name__}, not a JSON object")
    for field in ("format", "version"):  # a file says what it is
        if field not in values:
            raise SettingsError(f"field {field!r} is missing")
    if values["version"] != 1 or values["version"] is True:
        raise SettingsError(f"version is {values['version']!r}, this release reads 1")
    try:
        return Tables.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_problem(error.errors()[0])) from None


def load_tables(path: Path) -> Tables:
    """Read a file of tables to start from, and log its checksum: all ranks must log the same.

    Raises:
        SettingsError: As for :func:`read_tables`.
    """
    tables = read_tables(path)
    checksum = zlib.crc32(tables.text().encode())
    logger.info("hazard: starts from %s, %d classes, checksum %08x", path, len(tables.classes), checksum)
    return tables


def _problem(item: Any) -> str:
    field = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        return f"field {field!r} is missing"
    if item["type"] == "extra_forbidden":
        return f"field {field!r} is unknown"
    return f"field {field!r} is {item['input']!r}: {item['msg'][:1].lower()}{item['msg'][1:]}"


def tables_of(snapshot: Snapshot) -> Tables:
    """Tables of what an order has learned up to now, open intervals censored at their age."""
    classes = []
    for each in snapshot.classes:
        kind = each.kind
        lost = [censored + open_ for censored, open_ in zip(each.censored, each.at_risk, strict=True)]
        if kind is None or not (any(each.used) or any(lost)):
            continue
        ended = kind.ended
        classes.append(
            ClassTable(
                name=each.name,
                uses=kind.uses,
                interval=kind.interval,
                new_tokens=kind.new_tokens,
                ended=None
                if ended is None
                else Ended(
                    output_tokens=ended.output_tokens,
                    finish_reason=ended.finish_reason,
                    priority=ended.priority,
                ),
                used=_short(each.used),
                lost=_short(lost),
            )
        )
    clock = snapshot.clock or "requests"
    return Tables(
        clock=clock,
        watched=max(0.0, snapshot.watched),
        seconds_per_request=(snapshot.gap or None) if clock == "seconds" else None,
        tokens=snapshot.tokens,
        squares=snapshot.squares,
        classes=classes,
    )


def _short(amounts: Sequence[float]) -> list[float]:
    """Amounts without the zeros at the end, rounded: a fraction of a token tells nothing."""
    last = max((at for at, amount in enumerate(amounts) if amount), default=-1)
    return [round(amount, 1) for amount in amounts[: last + 1]]
