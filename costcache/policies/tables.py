"""What ``hazard`` has learned, as a file that another run starts from.

A table holds, for each class, how much was used again and how much was lost from sight at each range of age.
Classes are described by what makes them, not numbered, so that a file survives changes of their limits.
"""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costcache.errors import SettingsError
from costcache.policies.outcomes import Kind
from costcache.policies.survival import BINS, age_bin
from costcache.records import RequestInfo

if TYPE_CHECKING:
    from costcache.policies.hazard_order import Hazard
    from costcache.policies.outcomes import Classes
    from costcache.policies.survival import LifeTable

__all__ = ["ClassTable", "Ended", "Tables", "load_tables", "read_tables", "tables_of"]

logger = logging.getLogger("costcache")

Amount = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Bins = Annotated[list[Amount], Field(max_length=BINS)]


class Ended(BaseModel):
    """How the last request ended that used a class.

    Attributes:
        output_tokens: Least output length of the class.
        finish_reason: Its finish reason, None where unknown.
        priority: Its priority.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    output_tokens: int = Field(ge=0)
    finish_reason: str | None = None
    priority: int = 0


class ClassTable(BaseModel):
    """One class.

    Attributes:
        name: The class in words, for people.
        uses: How often its members were used, at least.
        interval: Mean time between their uses, of those used more than once.
        new_tokens: Of those used once, least tokens that their request brought.
        ended: How the last request ended; None where that did not count.
        used: Tokens that were used again, by bin of age; bins behind the last one are 0.
        lost: Tokens that were seen unused up to an age, and no longer; likewise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    uses: int = Field(ge=1)
    interval: float | None = Field(None, gt=0.0, allow_inf_nan=False)
    new_tokens: int | None = Field(None, ge=0)
    ended: Ended | None = None
    used: Bins
    lost: Bins

    def kind(self, factor: float) -> Kind:
        """What makes the class, its interval times a factor."""
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

    Bins of age are those of :mod:`costcache.policies.survival`: the first ends at 1/64 of the clock's unit,
    each further one is √2 times as wide as the one before it.

    Attributes:
        format: What kind of file it is.
        version: Version of the format.
        clock: Unit of ages and intervals.
        watched: Time over which it was learned.
        seconds_per_request: Mean time between requests; None where the clock did not tell.
        tokens: Tokens of all intervals that began.
        squares: Sum of the squares of their sizes.
        classes: The classes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["costcache-hazard-tables"] = "costcache-hazard-tables"
    version: Literal[1] = 1
    clock: Literal["seconds", "requests"]
    watched: Amount
    seconds_per_request: float | None = Field(None, gt=0.0, allow_inf_nan=False)
    tokens: Amount
    squares: Amount
    classes: list[ClassTable]

    def start(self, table: LifeTable, classes: Classes, clock: Literal["seconds", "requests"]) -> float:
        """Add what is known to a life table.

        Args:
            table: The life table.
            classes: Its classes; those that it does not have are made, in the order of the file.
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
            for target, amounts in ((table.used, each.used), (table.lost, each.lost)):
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
        SettingsError: It cannot be read, is no JSON, or a field is wrong: names the file, the field and its
            value.
    """
    remedy = "write it anew with 'costcache explain TRACE --save-tables FILE'"
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"tables {path}: cannot be read: {error.strerror}; {remedy}") from None
    except ValueError as error:  # of JSON, or of the text's encoding
        raise SettingsError(f"tables {path}: is no JSON: {error}; {remedy}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"tables {path}: is {type(values).__name__}, not a JSON object; {remedy}")
    if values.get("version", 1) != 1:
        raise SettingsError(
            f"tables {path}: version is {values['version']!r}, this release reads 1; {remedy}"
        )
    try:
        return Tables.model_validate(values)
    except ValidationError as error:
        raise SettingsError(f"tables {path}: {_problem(error.errors()[0])}; {remedy}") from None


def load_tables(path: Path) -> Tables:
    """Read a file of tables to start from, and log its checksum: all ranks must log the same.

    Raises:
        SettingsError: As :func:`read_tables`.
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


def tables_of(order: Hazard) -> Tables:
    """What an order has learned up to now. What waits for its next use is in it as not used yet."""
    table, now = order._table, order._now
    used, lost = list(table.used), list(table.lost)
    queues = order._queues
    for run in queues.runs():
        at = age_bin(now - (queues.first[run.slot] + queues.last[run.slot]) / 2)
        lost[run.group // order._depths * BINS + at] += queues.risk[run.slot]
    classes = []
    for number, kind in enumerate(order._classes.kinds()):
        row = slice(number * BINS, (number + 1) * BINS)
        if not any(used[row]) and not any(lost[row]):
            continue
        ended = kind.ended
        classes.append(
            ClassTable(
                name=order._classes.label(number),
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
                used=_short(used[row]),
                lost=_short(lost[row]),
            )
        )
    watched, clock = max(0.0, order.time_watched), order._clock or "requests"
    return Tables(
        clock=clock,
        watched=watched,
        seconds_per_request=(order.gap or None) if clock == "seconds" else None,
        tokens=table.tokens,
        squares=table.squares,
        classes=classes,
    )


def _short(amounts: list[float]) -> list[float]:
    """Without the zeros at the end; a fraction of a token tells nothing."""
    last = max((at for at, amount in enumerate(amounts) if amount), default=-1)
    return [round(amount, 1) for amount in amounts[: last + 1]]
