"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["open_whole"]


@contextlib.contextmanager
def open_whole(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a file for writing so that readers find the old content or the new, never a part.

    A symbolic link stays, and its target is written. A device or a pipe is written to directly.

    Raises:
        OSError: The file cannot be written; the old one is unchanged. May name a temporary file beside it.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("wb") as stream:
            yield stream
        return
    partial = target.with_name(f".{target.name}.{os.urandom(4).hex()}")
    try:
        with partial.open("xb") as stream:
            yield stream
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
