"""Sizes as people write them: ``5%``, ``14054pages``, ``7195648tok``, ``50GB``, ``unlimited``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from costcache.errors import SettingsError

__all__ = ["Capacity", "parse_bytes", "parse_capacity"]

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
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool size, before it is known what a token costs.

    Attributes:
        text: As it was written.
        amount: The number; None when unlimited.
        unit: ``%`` (of the trace's distinct whole pages), ``pages``, ``tok`` or a unit of bytes.
    """

    text: str
    amount: float | None
    unit: str = ""

    def tokens(self, *, distinct_pages: int, page_size: int, token_bytes: float) -> int | None:
        """The size in tokens, whole pages; None when unlimited.

        Args:
            distinct_pages: Distinct whole pages of the trace at this page size.
            page_size: Tokens per page.
            token_bytes: KV bytes per token, on one rank.

        Raises:
            SettingsError: It is under one page.
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
            pages = int(self.amount * BYTES[self.unit] / token_bytes) // page_size
        else:
            raise SettingsError(
                f"capacity {self.text!r} is in bytes, but a token of this model holds none: "
                "give it in tokens or pages"
            )
        if pages < 1:
            raise SettingsError(
                f"capacity {self.text!r} is less than one page of {page_size} tokens: give more"
            )
        return pages * page_size


def parse_capacity(text: str) -> Capacity:
    """Read one pool size.

    Raises:
        SettingsError: It is none.
    """
    text = text.strip()
    if text.lower() == "unlimited":
        return Capacity(text, None)
    match = _NUMBER.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise SettingsError(
            f"capacity {text!r} is not a size: give 5%, 14054pages, 7195648tok, 50GB, 50GiB or unlimited"
        )
    return Capacity(text, float(match[1]), unit)


def parse_bytes(text: str, what: str) -> int:
    """Read a size in bytes, such as ``80GiB``.

    Args:
        text: The size.
        what: Name of the option, for the error.

    Raises:
        SettingsError: It is none.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit not in BYTES:
        raise SettingsError(f"{what} {text!r} is not a size in bytes: give 80GiB, 80GB or 512MiB")
    return int(float(match[1]) * BYTES[unit])
