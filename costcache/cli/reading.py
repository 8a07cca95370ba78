"""Options for reading a trace file, shared by the commands that read one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from costcache.cli import completing
from costcache.cli.from_models import Options, model_options
from costcache.cli.progress import Task, progress_display

if TYPE_CHECKING:
    from costcache.sim.trace import Trace

__all__ = ["TraceOptions", "trace_options"]


class TraceOptions(Options):
    """Options of :func:`costcache.sim.traces.load_trace`."""

    block_size: int | None = Field(
        None, ge=1, description="Tokens per block id, for traces that do not state it."
    )
    arrivals: str | None = Field(
        None,
        description="When sessions start: uniform:6h, poisson:RATE or even:RATE (per second), or together.  "
        "[default: the trace's own clock, else uniform:6h]",
    )
    seed: int | None = Field(None, description="Seed of --arrivals uniform and poisson.  [default: 0]")
    gaps: Literal["answers", "recorded"] = Field(
        "answers",
        description="With --arrivals, when a session sends its next request: after the recorded answer and "
        "think time, or at the times of its own clock.",
    )
    retime: str | None = Field(
        None, description="Replace the requests' times, in order, by the arrivals of an Azure 2023 CSV file."
    )
    tokenizer: str | None = Field(
        None,
        description="For traces of text: a tokenizer.json or its folder, or 'words' or 'bytes', which "
        "approximate one.",
    )

    think: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="Seconds from an answer to the session's next request, for traces that record neither "
        "times nor think times.",
    )
    format: str | None = Field(
        None, description="Format of the file, built in or a plugin's.  [default: detected]"
    )
    max_line: str = Field(
        "64MiB", description="Longest line of the file; of a file that is one JSON array, its size."
    )
    max_expansion: int = Field(
        1000,
        ge=1,
        description="Most bytes that a byte of a compressed file may unpack into, and most prompt tokens "
        "that a byte of the unpacked file may stand for.",
    )
    max_stream: str = Field(
        "4GiB", description="Most bytes, unpacked, of a pipe or device, which need not have an end."
    )

    def read(self, path: str) -> tuple[Trace, str]:
        """Read a trace with a progress bar; return it and the name of its format.

        Raises:
            TraceError: If it cannot be read.
        """
        from costcache.sim.traces.limits import Limits
        from costcache.sim.traces.reading import Reading, read_trace
        from costcache.sizes import parse_bytes

        limits = Limits(
            parse_bytes(self.max_line, "--max-line"),
            self.max_expansion,
            parse_bytes(self.max_stream, "--max-stream"),
        )

        with progress_display() as bar:
            task = Task(bar, f"reading {path}")
            trace, found = read_trace(
                path,
                Reading(self.block_size, self.tokenizer, limits, self.format),
                arrivals=self.arrivals,
                seed=self.seed,
                gaps=self.gaps,
                think=self.think,
                retime=self.retime,
                progress=task.to,
            )
            task.done()
        return trace, found.name


trace_options = model_options(
    TraceOptions,
    "reading",
    arrivals={"metavar": "PROCESS"},
    retime={"metavar": "FILE", "shell_complete": completing.files},
    format={"metavar": "NAME"},
    tokenizer={"metavar": "PATH", "shell_complete": completing.files},
    max_line={"metavar": "SIZE"},
    max_stream={"metavar": "SIZE"},
)
