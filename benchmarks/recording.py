"""What recording a request costs: in the server's thread, and in the recorder's.

    python benchmarks/recording.py

Each request has a prompt of which nine tenths are those of the request before it, and 256 generated tokens.
"Server" is the processor time of the call that hands the request over, its tokens copied. "Recorder" is that
of hashing, encoding and writing it, of tokens as in SGLang and of hashes that the server has as in vLLM;
"new" is that of a prompt that was never seen. Python lets the server's threads run in between, so both count.
The last columns are the sum as a share of the request's modelled time on an H100: the prefill of the tenth of
the prompt that is not cached, and 256 decoding steps of 10 ms that 64 requests share.

``benchmarks/_hashing.py`` is for counting instructions.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from array import array
from time import thread_time_ns

import msgspec
from _report import table

from costcache import CostModel, ModelSpec
from costcache.recording.files import Files
from costcache.recording.hashes import Content, Hashed, Hasher, Tokens
from costcache.recording.lines import Line
from costcache.recording.recorder import Ended, Recorder, request_of
from costcache.recording.settings import RecordSettings
from costcache.records import RequestInfo
from costcache.sim.ttft import prefill_model

KINDS = ("tokens", "hashes")
LENGTHS = (1_000, 10_000, 100_000)
OUTPUT = 256
BLOCK = 16
TURNS = 15
STEP_SECONDS = 0.010
BATCH = 64


def content(kind: str, length: int, turn: int, new: int) -> Content:
    """A request as a server has it, of which ``new`` prompt tokens are no other's."""
    shared, own = random.Random(length), random.Random(turn)
    head, tail = (length - new) // BLOCK, -(-(new + OUTPUT) // BLOCK)
    if kind == "hashes":
        hashes = [shared.randbytes(32) for _ in range(head)] + [own.randbytes(32) for _ in range(tail)]
        return Hashed(hashes, length, OUTPUT, BLOCK, b"r")
    tokens = array("q", (shared.randrange(100_000) for _ in range(head * BLOCK)))
    tokens.extend(own.randrange(100_000) for _ in range(length + OUTPUT - len(tokens)))
    return Tokens(b"", tokens[:length].tobytes(), tokens[length:].tobytes())


def contents(kind: str, length: int, new: int, count: int = TURNS) -> list[Content]:
    """Requests, one after another."""
    return [content(kind, length, turn, new) for turn in range(count)]


def recorded(requests: list[Content], length: int, folder: str) -> float:
    """Median microseconds of the recorder's thread."""
    hasher, encode = Hasher(b"salt"), msgspec.json.Encoder().encode
    files = Files(folder, b"{}\n", 1 << 30, rotate=True)
    times = []
    for request in requests:
        ended = Ended(request, length, 0, 1.0, 2.0, RequestInfo(output_tokens=OUTPUT))
        start = thread_time_ns()
        files.append(encode(Line(request=request_of(ended, hasher, BLOCK, 0.0))) + b"\n")
        times.append(thread_time_ns() - start)
    files.close()
    return statistics.median(times) / 1000


def handed_over(length: int, folder: str) -> float:
    """Median microseconds of the server's thread."""
    recorder = Recorder(RecordSettings(folder=folder), BLOCK)
    tokens = array("q", range(length + OUTPUT))
    prompt, output = tokens[:length], tokens[length:]
    times = []
    for _ in range(TURNS):
        start = thread_time_ns()
        content = Tokens(b"", prompt.tobytes(), output.tobytes())
        recorder.add(Ended(content, length, 0, 1.0, 2.0, RequestInfo(output_tokens=OUTPUT)))
        times.append(thread_time_ns() - start)
    recorder.close()
    return statistics.median(times) / 1000


def main() -> None:
    """Print a table."""
    cost = CostModel.of(ModelSpec.preset("llama-3-8b"))
    prefill = prefill_model("auto", cost)
    rows = []
    for length in LENGTHS:
        new = length // 10
        seconds = prefill.one(new, length - new) + OUTPUT * STEP_SECONDS / BATCH
        with tempfile.TemporaryDirectory() as folder:
            server = handed_over(length, folder)
            thread, unseen = (
                [recorded(contents(kind, length, own), length, folder) for kind in KINDS]
                for own in (new, length)
            )
        rows.append(
            [
                f"{length:,}",
                f"{server:,.0f}",
                *(f"{each:,.0f}" for each in (*thread, *unseen)),
                f"{seconds * 1000:,.1f}",
                *(f"{(server + each) / seconds / 10_000:.2f} %" for each in thread),
            ]
        )
    headings = (
        "Prompt tokens",
        "Server, µs",
        "Recorder, tokens, µs",
        "Recorder, hashes, µs",
        "New, tokens, µs",
        "New, hashes, µs",
        "Request, ms",
        "Share, tokens",
        "Share, hashes",
    )
    table(headings, rows, texts=0)


if __name__ == "__main__":
    main()
