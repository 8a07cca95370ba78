"""Text that every terminal and log can take: no control characters, nothing that its encoding lacks."""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import sys

import click

__all__ = ["Failure", "Formatter", "plain", "plain_lines", "prepare_streams"]

_ASCII = {
    "─": "-",
    "━": "-",
    "│": "|",
    "█": "#",
    "…": "...",
    "–": "-",
    "−": "-",
    "×": "x",
    "·": "*",
    "µ": "u",
    "√": "sqrt ",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "“": '"',
    "”": '"',
}
"""What our own output has beyond ASCII, and what stands for it where it cannot be printed."""

_HANDLER = "costcache"


def plain(text: str) -> str:
    """Return a text from a file, a name or a plugin with its control characters escaped.

    They include what moves the cursor, sets the title of a window or turns the direction of writing. Line
    breaks are escaped too: such a text is part of a line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain_lines(text: str) -> str:
    """Return a text of several lines with all other control characters escaped."""
    return "\n".join(map(plain, text.split("\n")))


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_encodable, error.object[error.start : error.end])), error.end


def _encodable(character: str) -> str:
    return _ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()


def prepare_streams() -> None:
    """Let standard output and standard error print any text in any encoding."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):  # detached, or closed
                stream.reconfigure(errors=_HANDLER)


class Formatter(logging.Formatter):
    """Formats a log record as one line of plain text."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; control characters of what it names are escaped."""
        return plain_lines(super().format(record))


class Failure(click.ClickException):
    """An error of one line, whatever the message holds."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))
