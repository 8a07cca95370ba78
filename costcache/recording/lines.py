"""Lines of a recording: JSON objects, of which the first in each file describes the server.

A line has either ``recording`` or ``request``. Nothing in it is a token, a text, or a name that anybody gave.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["MOST_BLOCK", "VERSION", "Header", "Line", "Request"]

VERSION = 1
"""Version of the format."""
MOST_BLOCK = 2**20
"""Tokens of the largest block."""

Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Block = Annotated[int, msgspec.Meta(ge=1, le=MOST_BLOCK)]
Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Milliseconds = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class Header(msgspec.Struct, omit_defaults=True):
    """The server that was recorded.

    Attributes:
        version: :data:`VERSION`.
        started: Unix time, in seconds, from which the requests' times count.
        block_size: Tokens per hash.
        salt: The same in recordings whose hashes can be compared.
        server: Name and version of the server.
        costcache: Version of costcache.
        policy: Policy that chose the victims.
        architecture: Class of the model.
        page_size: Tokens per page of the server.
        capacity: Tokens that its pool holds, None if it has several kinds of memory.
        chunk: Prompt tokens that it computes at once, at most; 0 if it computes each prompt at once, None if
            unknown.
        trim: Tokens that it cuts victims at multiples of; 0 if it evicts them whole, None if unknown.
    """

    version: Annotated[int, msgspec.Meta(ge=1, le=VERSION)]
    started: Seconds
    block_size: Block
    salt: str
    server: str = ""
    costcache: str = ""
    policy: str = ""
    architecture: str = ""
    page_size: Block | None = None
    capacity: Tokens | None = None
    chunk: Tokens | None = None
    trim: Tokens | None = None


class Request(msgspec.Struct, gc=False, omit_defaults=True):
    """One request.

    Attributes:
        timestamp: Its arrival, in milliseconds since ``started``.
        input_length: Tokens of the prompt.
        output_length: Tokens generated.
        hash_ids: A number per block of the prompt, the partial last one included, which stands for the block
            and all before it.
        output_ids: The same of prompt and output, from the prompt's partial last block on; None if unknown.
        cached_tokens: Prompt tokens that the server found; None if unknown.
        service_ms: Milliseconds from its arrival to its end.
        finish_reason: How it ended.
        session: Stands for the session that the client named.
        tenant: Stands for the tenant that it named.
        priority: Its priority; higher is kept longer.
        session_ends: Whether the client said that its session ends.
        returns_after: Seconds after which the client said it would continue, or what stands for its label.
        keep_seconds: Seconds for which the client asked to keep the prompt.
        dropped: Requests before this one that were not recorded, because they came faster than they could be.
    """

    timestamp: Milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[Number]
    output_ids: list[Number] | None = None
    cached_tokens: Tokens | None = None
    service_ms: Annotated[float, msgspec.Meta(ge=0, le=1e15)] | None = None
    finish_reason: str | None = None
    session: str | None = None
    tenant: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31)] = 0
    session_ends: bool = False
    returns_after: Seconds | str | None = None
    keep_seconds: Seconds | None = None
    dropped: Tokens = 0


class Line(msgspec.Struct, omit_defaults=True):
    """A line of a file."""

    recording: Header | None = None
    request: Request | None = None
