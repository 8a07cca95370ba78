"""Hashes prompts for a recording, for a profiler that counts instructions.

    valgrind --tool=callgrind python benchmarks/_hashing.py KIND NEW COUNT

Prompts have 10,000 tokens, of which NEW are no other's, and 256 generated ones. KIND is ``tokens``, as SGLang
has them, or ``hashes``, as vLLM has. Ten are made and COUNT of them hashed: the difference of two counts is
that of hashing.
"""

from __future__ import annotations

import random
import sys
from array import array

from costcache.recording.hashes import Content, Hashed, Hasher, Tokens

LENGTH, OUTPUT, BLOCK, MADE = 10_000, 256, 16, 10


def main() -> None:
    """Hash some of the prompts."""
    kind, new, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(1)
    head = array("q", (rng.getrandbits(16) for _ in range(LENGTH - new)))
    shared = [rng.randbytes(32) for _ in range((LENGTH - new) // BLOCK)]
    prompts: list[Content] = []
    for _ in range(MADE):
        if kind == "tokens":
            tokens = head + array("q", (rng.getrandbits(16) for _ in range(new + OUTPUT)))
            prompts.append(Tokens(b"", tokens[:LENGTH].tobytes(), tokens[LENGTH:].tobytes()))
        else:
            hashes = shared + [rng.randbytes(32) for _ in range((new + OUTPUT) // BLOCK)]
            prompts.append(Hashed(hashes, LENGTH, OUTPUT, BLOCK, b"r"))
    hasher = Hasher(b"salt")
    for prompt in prompts[:count]:
        prompt.numbers(hasher, BLOCK)


if __name__ == "__main__":
    main()
