"""Salted hashes that stand for pages, sessions and tenants: they say which are equal, and nothing else."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Protocol

__all__ = ["Content", "Hashed", "Hasher", "Tokens"]

_TOKEN_BYTES = 8
_PER_TURN = 64
"""Hashes after which the thread lets others run: the server's must not wait for it."""
_STRIDE = 64
"""Blocks whose numbers are remembered together."""
_MOST_STRIDES = 8192
"""Strides that are remembered, in about 20 MB."""


class Hasher:
    """Hashes with one salt.

    A prompt that the cache has was hashed before, by the request that computed it. So what a stride of blocks
    gave is remembered, and found by its tokens and those before it, which costs less than to hash them.

    Attributes:
        fingerprint: The same for two recordings with the same salt.
    """

    def __init__(self, salt: bytes) -> None:
        self._key = blake2b(salt, digest_size=32).digest()
        self._strides: dict[Hashable, tuple[list[int], blake2b | None]] = {}  # least recently used first
        self.fingerprint = self.name("salt", "fingerprint")

    def name(self, kind: str, text: str) -> str:
        """Stands for a session, tenant or label."""
        return blake2b(
            text.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key, person=kind.encode()
        ).hexdigest()

    def prefix(self, namespace: bytes) -> blake2b:
        """Begin a prefix; prompts of different namespaces share none."""
        return blake2b(namespace + len(namespace).to_bytes(8, "little"), digest_size=8, key=self._key)

    def recall(self, stride: Hashable) -> tuple[list[int], blake2b | None] | None:
        """The numbers of a stride of blocks and the prefix up to its end, if they are remembered."""
        known = self._strides.pop(stride, None)
        if known is not None:
            self._strides[stride] = known
        return known

    def remember(self, stride: Hashable, numbers: list[int], prefix: blake2b | None = None) -> None:
        """Remember what a stride gave, in place of the one that was recalled last."""
        if len(self._strides) >= _MOST_STRIDES:
            del self._strides[next(iter(self._strides))]
        self._strides[stride] = numbers, prefix

    def numbers(self, digests: Iterable[bytes]) -> list[int]:
        """Stand for prefixes that have hashes already."""
        key, hashed = self._key, []
        for turn, digest in enumerate(digests, 1):
            # In one block with the key: half the time of a keyed hash, and as good with BLAKE2.
            hashed.append(blake2b(key + digest, digest_size=8).digest())
            if not turn % _PER_TURN:
                time.sleep(0)
        return _numbers(hashed)


def _numbers(hashed: list[bytes]) -> list[int]:
    """53 bits of each, which every reader of JSON keeps."""
    return [number >> 11 for number in array("Q", b"".join(hashed))]


class Content(Protocol):
    """The facts from which a prompt and its output are hashed."""

    @property
    def size(self) -> int:
        """Bytes that it keeps in memory, about."""

    def numbers(self, hasher: Hasher, block_size: int) -> tuple[list[int], list[int] | None]:
        """Numbers of the blocks of a prompt, and of those of its output, None if that is unknown.

        Each stands for a block and all before it. The prompt's partial last block has one; the output's begin
        with that block, which the output completes.
        """


class Tokens:
    """Tokens as raw int64, which nobody has hashed yet.

    Args:
        namespace: What else the server tells prompts apart by.
        prompt: The prompt.
        output: The generated tokens; None if they are unknown.
    """

    __slots__ = ("_namespace", "_output", "_prompt", "size")

    def __init__(self, namespace: bytes, prompt: bytes, output: bytes | None) -> None:
        self._namespace = namespace
        self._prompt = prompt
        self._output = output
        self.size = len(prompt) + len(output or b"")

    def numbers(self, hasher: Hasher, block_size: int) -> tuple[list[int], list[int] | None]:
        """As in :class:`Content`."""
        step = block_size * _TOKEN_BYTES
        whole = len(self._prompt) // step * step
        prefix, view = hasher.prefix(self._namespace), memoryview(self._prompt)
        prompt: list[int] = []
        length, start = step * _STRIDE, 0
        # Python's hash is much faster than BLAKE2. It names strides in this process alone.
        name = hash((self._namespace, step))
        while whole - start >= length:
            part = view[start : start + length]
            name = hash((name, hash(part)))
            known = hasher.recall(name)
            if known is None:
                prefix = prefix.copy()
                numbers = _blocks(prefix, part, step)
                hasher.remember(name, numbers, prefix)
            else:
                numbers = known[0]
                prefix = known[1] or prefix
                time.sleep(0)
            prompt += numbers
            start += length
        prefix = prefix.copy()
        prompt += _blocks(prefix, view[start:whole], step)
        rest = self._prompt[whole:]
        output = None
        if self._output is not None:
            output = _blocks(prefix.copy(), memoryview(rest + self._output), step)
        if rest:
            prompt += _blocks(prefix, memoryview(rest), step)
        return prompt, output


def _blocks(prefix: blake2b, data: memoryview, step: int) -> list[int]:
    hashed = []
    update, digest = prefix.update, prefix.digest
    for turn, start in enumerate(range(0, len(data), step), 1):
        update(data[start : start + step])
        hashed.append(digest())
        if not turn % _PER_TURN:
            time.sleep(0)
    return _numbers(hashed)


class Hashed:
    """Hashes that the server has made, of blocks and all before them; those of the output follow.

    Args:
        hashes: One per whole block of prompt and output.
        prompt: Tokens of the prompt.
        output: Tokens generated.
        hashed: Tokens of a block.
        unique: Tells the request from all others: partial blocks have no hash, and nobody shares theirs.
    """

    __slots__ = ("_hashed", "_hashes", "_output", "_prompt", "_unique", "size")

    def __init__(self, hashes: Sequence[bytes], prompt: int, output: int, hashed: int, unique: bytes) -> None:
        self._hashes = hashes
        self._prompt = prompt
        self._output = output
        self._hashed = hashed
        self._unique = unique
        self.size = 64 * len(hashes)

    def numbers(self, hasher: Hasher, block_size: int) -> tuple[list[int], list[int]]:
        """As in :class:`Content`; ``block_size`` is a multiple of that of the hashes."""
        per = block_size // self._hashed
        whole = self._prompt // block_size
        hashes = self._hashes[per - 1 :: per]
        numbers: list[int] = []
        start = 0
        while whole - start >= _STRIDE and len(hashes) - start >= _STRIDE:
            part = hashes[start : start + _STRIDE]
            name = (block_size, part[-1])  # each hash is one of all before it
            known = hasher.recall(name)
            if known is None:
                known = hasher.numbers(part), None
                hasher.remember(name, *known)
            numbers += known[0]
            start += _STRIDE
        numbers += hasher.numbers(hashes[start:])
        blocks = -(-(self._prompt + self._output) // block_size)
        # Hashes may be missing at the end: a server need not hash what it does not cache.
        missing = range(len(numbers), blocks)
        numbers += hasher.numbers(self._unique + at.to_bytes(8, "little") for at in missing)
        prompt, output = numbers[:whole], numbers[whole:blocks]
        if self._prompt % block_size:
            prompt += hasher.numbers((self._unique,))
        return prompt, output
