"""Bounds on what a trace file may ask of the machine, so that a small file cannot take it."""

from __future__ import annotations

from dataclasses import dataclass

from costcache.errors import TraceError

__all__ = ["Limits"]

_FREE = 1 << 24
"""Bytes, and tokens, that any file may unfold into: too few to harm a machine."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a trace file.

    Args:
        line: Bytes of the longest line. A file that is one JSON array counts as one line.
        expansion: Most decompressed bytes per byte of a compressed file, and most prompt tokens per
            decompressed byte. The first 16 MiB, and 16 Mi tokens, are not counted.
        stream: Most decompressed bytes of a pipe or device, which need not have an end.

    Raises:
        TraceError: If a bound is under 1.
    """

    line: int = 64 << 20
    expansion: int = 1000
    stream: int = 4 << 30

    def __post_init__(self) -> None:
        for name, value in (("line", self.line), ("expansion", self.expansion), ("stream", self.stream)):
            if value < 1:
                raise TraceError(f"limit {name} is {value}; give 1 or more")

    def check_bytes(self, label: str, stored: int, unpacked: int) -> None:
        """Check the size of what was decompressed so far.

        Raises:
            TraceError: If a file of ``stored`` bytes does not justify it.
        """
        if unpacked > _FREE and unpacked > self.expansion * stored:
            raise TraceError(
                f"{label}: {stored:,} compressed bytes unpack to more than {unpacked:,}; if the file is "
                f"sound, allow more than {self.expansion:,} times with --max-expansion"
            )

    def check_stream(self, label: str, unpacked: int) -> None:
        """Check the decompressed bytes read so far of what is no regular file.

        Raises:
            TraceError: If there are too many.
        """
        if unpacked > self.stream:
            raise TraceError(
                f"{label}: has more than {self.stream:,} bytes, and as a pipe or device need not end; give a "
                "file, or allow more with --max-stream"
            )

    def check_tokens(self, label: str, size: int, tokens: int) -> None:
        """Check the prompt tokens read so far.

        Raises:
            TraceError: If ``size`` decompressed bytes do not justify them.
        """
        if tokens > _FREE and tokens > self.expansion * size:
            raise TraceError(
                f"{label}: {size:,} bytes stand for more than {tokens:,} prompt tokens; if the file is "
                f"sound, allow more than {self.expansion:,} tokens a byte with --max-expansion"
            )
