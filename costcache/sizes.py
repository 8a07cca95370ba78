"""Parses sizes: ``5%``, ``14054pages``, ``7195648tok``, ``50GB``, ``unlimited``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from costcache.errors import SettingsError

__all__ = ["Capacity", "parse_bytes", "parse_capacity", "parse_rate"]

BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)
}
"""Bytes in each unit; GB is 10**9 and GiB is 2**30."""

_UNITS = {unit.lower(): unit for unit in BYTES} | {
    "%": "%",
    "page": "pages",
    "pages": "pages",
    "tok": "tok",
    "token": "tok",
    "tokens": "tok",
}
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]+)", re.IGNORECASE | re.ASCII)
_MOST = 2**63
"""More than any pool; keeps every product of sizes in range."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool size, before the cost of a token is known.

    Attributes:
        text: The size as written.
        amount: The number, exact, so that 29 % of 100 pages is 29; None when unlimited.
        unit: ``%`` (of the trace's distinct whole pages), ``pages``, ``tok`` or a unit of bytes.
    """

    text: str
    amount: Fraction | None
    unit: str = ""

    def tokens(self, *, distinct_pages: int, page_size: int, token_bytes: int | Fraction) -> int | None:
        """Return the size in tokens, in whole pages; None when unlimited.

        Args:
            distinct_pages: Distinct whole pages of the trace at this page size.
            page_size: Tokens per page.
            token_bytes: Bytes per cached token, on one rank, with its share of other pools.

        Raises:
            SettingsError: If it is under one page, or in bytes and a token takes none.
        """
        if self.amount is None:
            return None
        if self.unit == "%":
            pages = int(self.amount / 100 * distinct_pages)
        elif self.unit == "pages":
            pages = int(self.amount)
        elif self.unit == "tok":
            pages = int(self.amount) // page_size
        elif token_bytes > 0:
            pages = int(int(self.amount * BYTES[self.unit]) // token_bytes) // page_size
        else:
            raise SettingsError(
                f"capacity {self.text!r} is in bytes, but a token of this model takes none: "
                "give it in tokens or pages"
            )
        if pages < 1:
            of = f" of the trace's {distinct_pages:,} distinct whole pages" if self.unit == "%" else ""
            raise SettingsError(
                f"capacity {self.text!r}{of} is less than one page of {page_size} tokens: give more, "
                "or use smaller pages"
            )
        return pages * page_size


def parse_capacity(text: str) -> Capacity:
    """Parse a pool size. ``80GiB-16GiB`` is a GPU's memory minus its weights and all else.

    Raises:
        SettingsError: If the text is not a valid size.
    """
    text = text.strip()
    if text.lower() == "unlimited":
        return Capacity(text, None)
    memory, minus, weights = text.partition("-")
    if minus and memory:
        left = parse_bytes(memory, "capacity") - parse_bytes(weights, "capacity")
        if left <= 0:
            raise SettingsError(f"capacity {_short(text)} leaves nothing: the weights take all the memory")
        return Capacity(text, Fraction(left), "B")
    amount, unit = _read(text, "capacity")
    if amount <= 0 or unit not in _UNITS.values():
        raise SettingsError(
            f"capacity {_short(text)} is not a size: "
            "give 5%, 14054pages, 7195648tok, 50GB, 50GiB, 80GiB-16GiB or unlimited"
        )
    return Capacity(text, amount, unit)


def parse_bytes(text: str, what: str) -> int:
    """Parse a size in bytes, such as ``80GiB``.

    Args:
        text: The size.
        what: Name of the option, for the error.

    Raises:
        SettingsError: If the text is not a valid size in bytes.
    """
    amount, unit = _read(text.strip(), what)
    if unit not in BYTES:
        raise SettingsError(f"{what} {_short(text)} is not a size in bytes: give 80GiB, 80GB or 512MiB")
    return int(amount * BYTES[unit])


def parse_rate(text: str, what: str) -> int:
    """Parse bytes per second, such as ``55GB/s``.

    Args:
        text: The rate.
        what: Name of the option, for the error.

    Raises:
        SettingsError: If the text is not a valid rate above 0.
    """
    size, slash, unit = text.strip().partition("/")
    amount, of = _read(size.strip(), what)
    if not slash or unit.strip() != "s" or of not in BYTES or not amount:
        raise SettingsError(f"{what} {_short(text)} is not a rate above 0: give 55GB/s or 500MB/s")
    return int(amount * BYTES[of])


def _read(text: str, what: str) -> tuple[Fraction, str]:
    """Return the number and the unit, which is empty if the text is not a size."""
    match = _NUMBER.fullmatch(text)
    unit = _UNITS.get(match[2].lower(), "") if match else ""
    if match is None or not unit:
        return Fraction(0), ""
    # A number with too many digits is refused before it is converted.
    amount = Fraction(match[1]) if len(match[1]) <= 40 else None
    if amount is None or amount * BYTES.get(unit, 1) >= _MOST:
        raise SettingsError(f"{what} {_short(text)} is larger than any memory: give less than 2**63")
    return amount, unit


def _short(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:57] + "...")
