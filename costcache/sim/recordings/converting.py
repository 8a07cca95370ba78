"""Makes recordings of what servers log themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from costcache._version import described
from costcache.errors import SettingsError
from costcache.recording.hashes import Hasher
from costcache.recording.lines import VERSION, Header, Request
from costcache.recording.recorder import request_of
from costcache.recording.settings import read_salt
from costcache.sim.recordings.events import events_block_size, read_events
from costcache.sim.recordings.sglang_logs import read_dump, read_log

if TYPE_CHECKING:
    from costcache.recording.recorder import Ended

__all__ = ["FORMS", "Form", "convert"]

Form = Literal["sglang-log", "sglang-dump", "vllm-kv-events"]
FORMS: dict[Form, str] = {
    "sglang-log": "what --log-requests wrote, at level 3",
    "sglang-dump": "a file of --crash-dump-folder, or of SGLang's request dump",
    "vllm-kv-events": "payloads of the KV events of vLLM or SGLang, one after another",
}
"""Kinds of logs that can be converted."""
_BLOCK = 16


def convert(
    form: Form,
    paths: Sequence[str | os.PathLike[str]],
    *,
    block_size: int | None = None,
    tokenizer: str | None = None,
) -> tuple[Header, list[tuple[float, Request]]]:
    """Convert logs of one server.

    Args:
        form: What the files are.
        paths: The files.
        block_size: Tokens per hash; 16 by default, and for KV events that of the blocks, or a multiple.
        tokenizer: Name or path of a tokenizer, for prompts that were sent as text.

    Returns:
        A header, and the requests with the Unix times of their arrivals, in order of these. Their tokens and
        names are hashed with the salt of the environment, or a random one.

    Raises:
        TraceError: A file cannot be read, or holds no request.
        SettingsError: The salt is too short, or the block size does not fit the events.
    """
    hasher = Hasher(read_salt())
    page: int | None = None
    if form == "vllm-kv-events":
        page = events_block_size(paths[0])
        if block_size is not None and block_size % page:
            raise SettingsError(f"--block-size is {block_size}: give a multiple of the events' own, {page}")
    size = block_size or page or _BLOCK

    def requests() -> Iterable[Ended]:
        for path in paths:
            if form == "vllm-kv-events":
                yield from read_events(path)
            else:
                yield from (read_log if form == "sglang-log" else read_dump)(path, tokenizer)

    rows = [(ended.arrived, request_of(ended, hasher, size, 0.0)) for ended in requests()]
    rows.sort(key=lambda row: row[0])
    header = Header(
        version=VERSION,
        started=max(0.0, rows[0][0]) if rows else 0.0,
        block_size=size,
        salt=hasher.fingerprint,
        server=form,
        costcache=described(),
        page_size=page,
    )
    return header, rows
