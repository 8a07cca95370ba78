"""Settings of a recording, given with a server's other settings or in the environment."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from costcache.errors import SettingsError
from costcache.recording.files import make_folder
from costcache.settings import Settings, read_settings
from costcache.sizes import parse_bytes

__all__ = ["ENVIRONMENT", "SALT", "RecordSettings", "ServerSettings", "read_salt", "recording_asked"]

ENVIRONMENT = "COSTCACHE_RECORD"
"""Variable that switches a recording on: a folder, or a JSON object of settings. A setting comes first."""
SALT = "COSTCACHE_RECORD_SALT"
"""Variable with the salt: on a command line, or in a server's log of its arguments, it would be no secret."""

_SHORTEST_SALT = 16
_LEAST_BYTES = 1 << 16


class RecordSettings(BaseModel):
    """Where a server records its requests, and how much. The salt is in ``COSTCACHE_RECORD_SALT``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str = Field(
        min_length=1,
        description="Folder of the files; made if it is missing. Each process writes files of its own.",
    )
    most_bytes: int = Field(
        1 << 30,
        ge=_LEAST_BYTES,
        description="Bytes that the files of one process may take, as a number or as a size such as '1GiB'.",
    )
    when_full: Literal["stop", "rotate"] = Field(
        "stop",
        description="Once they are full: 'stop' keeps what there is, 'rotate' keeps the latest requests, in "
        "four files of which the oldest is deleted.",
    )
    block_size: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="Tokens per hash, a multiple of the page size; by default the page size, or its least "
        "multiple from 16 on.",
    )

    @field_validator("most_bytes", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_bytes(value, "most_bytes")
        except SettingsError as error:
            raise ValueError(str(error)) from None

    def tokens_per_hash(self, page_size: int) -> int:
        """Tokens that a hash stands for, in a server with pages of ``page_size`` tokens.

        Raises:
            SettingsError: ``block_size`` is no multiple of the page size.
        """
        if self.block_size is None:
            return page_size * -(-16 // page_size)
        if self.block_size % page_size:
            raise SettingsError(
                f"setting 'record.block_size' is {self.block_size}: give a multiple of the page size, "
                f"{page_size}"
            )
        return self.block_size


class ServerSettings(Settings):
    """Settings of costcache inside a server: those of every cache, and a recording."""

    record: RecordSettings | None = Field(
        None,
        description="Records the requests as a trace, without their tokens; an object, or the folder alone. "
        "Off by default.",
    )

    @field_validator("record", mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        return {"folder": value} if isinstance(value, str) else value


def recording_asked(settings: RecordSettings | None) -> RecordSettings | None:
    """The recording that the settings ask for, or else the environment; None if neither does.

    Raises:
        SettingsError: The variable or the salt is wrong, or the folder cannot be written to; says what is
            allowed.
    """
    asked = settings if settings is not None else _of_environment()
    if asked is not None:
        read_salt()
        make_folder(asked.folder)
    return asked


def _of_environment() -> RecordSettings | None:
    given = os.environ.get(ENVIRONMENT)
    if not given:
        return None
    values: Any = {"folder": given}
    if given.lstrip().startswith("{"):
        try:
            values = json.loads(given)
        except ValueError as error:
            raise SettingsError(
                f"the variable {ENVIRONMENT} is {given!r}, which is not JSON: {error}"
            ) from None
    return read_settings(RecordSettings, values, f"{ENVIRONMENT}.")


def read_salt() -> bytes:
    """The salt of the environment, or a random one, which nobody learns.

    Raises:
        SettingsError: It is too short to be a secret.
    """
    given = os.environ.get(SALT, "")
    if not given:
        return os.urandom(32)
    if len(given) < _SHORTEST_SALT:
        raise SettingsError(
            f"the variable {SALT} has {len(given)} characters: give {_SHORTEST_SALT} or more that nobody can "
            "guess, or none for a random salt"
        )
    return given.encode("utf-8", "surrogateescape")
