"""The contract of a storage backend: bytes by key, on anything that outlives the process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["DurableSettings", "NoStorageSettings", "StorageBackend", "StorageSpec"]


class StorageBackend(ABC):
    """Values by key, for the disk tier of a cache.

    A key is 1 to 64 bytes and stands for one value for ever: the hash of a prefix and the KV of its last
    page. The tier calls a backend from one thread at a time, which need not be the one that made it.

    Any method may raise ``OSError``: the tier counts a miss, logs it once and asks again next time. Any other
    exception, or an answer of a wrong type, is a fault of the backend: the tier reports it by name and stops
    using the backend. What :meth:`get` returns need not be trusted: the tier checks its length and checksum.
    """

    @abstractmethod
    def get(self, key: bytes) -> Any:
        """Return the value of ``key`` as bytes or any other buffer of bytes; None if there is none."""

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> bool:
        """Keep a value.

        Returns:
            True once the value outlives the process, killed at any moment from then on. False if there is no
            room for it. A put that is cut off leaves the old value, the new one, or none: never a part.
        """

    @abstractmethod
    def delete(self, key: bytes) -> None:
        """Forget a key; nothing happens if there is none."""

    @abstractmethod
    def keys(self) -> Iterator[tuple[bytes, int]]:
        """Every key with the bytes of its value, those to evict first first; called once, after opening."""

    @abstractmethod
    def close(self) -> None:
        """Release files and locks; no call follows."""


class NoStorageSettings(BaseModel):
    """Settings of a backend that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DurableSettings(BaseModel):
    """Settings of a backend that can wait for the disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    durable: bool = Field(
        True,
        description="Whether a value survives a crash of the machine, and not only of the process: each put "
        "then waits for the disk.",
    )


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """A storage backend: how to open it, and its settings.

    Attributes:
        open: ``open(path, capacity, settings)`` returns a :class:`StorageBackend` that keeps its files in the
            folder ``path``, which need not exist, and in at most ``capacity`` bytes; ``settings`` is an
            instance of the model below. It raises :class:`costcache.errors.SettingsError` if the folder
            cannot be used: it belongs to something else, or to a newer version.
        summary: One line for users who choose a backend.
        settings: Pydantic model of the backend's settings; it can be made without arguments.
    """

    open: Callable[[Path, int, Any], StorageBackend]
    summary: str
    settings: type[BaseModel] = NoStorageSettings
