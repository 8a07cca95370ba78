"""Recorded requests of Mooncake's, and a replay of them on vLLM's real KV cache managers side by side."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.vllm.serving import Server

PAGE = 512
"""Tokens of a hash of the traces."""


def recorded_prompts(trace: Path) -> Iterator[list[int]]:
    """The whole pages of each prompt of a trace, as the trace numbers them."""
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            request = json.loads(line)
            yield request["hash_ids"][: request["input_length"] // PAGE]


def chained(pages: Iterable[int], parts: int = 1) -> list[bytes]:
    """Hashes of the blocks of a prompt, each of all that comes before; a page has so many blocks."""
    hashes, last = [], b""
    for page in pages:
        last = hashlib.sha256(last + page.to_bytes(8, "little")).digest()
        if parts == 1:
            hashes.append(last)
        else:
            hashes += [hashlib.sha256(last + part.to_bytes(2, "little")).digest() for part in range(parts)]
    return hashes


def replay(requests: Iterable[list[int]], servers: list[Server], most: int) -> Iterator[int]:
    """Serve prompts, one at a time and cut to ``most`` pages, on servers that must hand out the same blocks.

    Yields:
        The blocks of each request.

    Raises:
        AssertionError: The servers handed out different ones.
    """
    for number, prompt in enumerate(requests):
        pages = prompt[:most]
        handed_out = []
        for server in servers:
            request = server.request(str(number), [0] * (len(pages) * PAGE + 1))
            request.block_hashes = chained(pages)
            handed_out.append(server.start(request))
            server.finish(request)
        blocks = handed_out[0]
        if blocks is None or any(each != blocks for each in handed_out):
            raise AssertionError(f"request {number}: {handed_out}")
        yield len(blocks)
