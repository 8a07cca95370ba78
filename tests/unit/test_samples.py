"""The sample traces are what their generator writes, and every reader reads the same from them."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner

from costcache.cli import cli
from costcache.sim.traces import load_trace
from costcache.sim.traces.azure import read_arrivals
from costcache.sim.traces.files import open_source
from costcache.sim.traces.reading import FORMATS, detect
from tests.scripts import load_script

# The file of each format; prompts of the text formats have more tokens than words.
FILES = {
    "mooncake": "mooncake.jsonl",
    "bailian": "bailian.jsonl",
    "weka": "weka.jsonl",
    "ragpulse": "ragpulse_0_trace.jsonl",
    "sharegpt": "sharegpt.jsonl",
    "dynamo": "dynamo.jsonl",
    "messages": "messages.jsonl.gz",
    "conversations": "conversations.jsonl",
    "lmcache": "lmcache.jsonl.gz",
    "recording": "recording.jsonl",
    "few_shot": "few_shot.tar.gz",
}
EXACT = ("mooncake", "bailian", "weka", "ragpulse", "sharegpt", "dynamo", "recording")
PREFIXES = ("bailian", "dynamo", "recording")  # blocks of 16 words, from the first to the last


@pytest.fixture(scope="module")
def generator(repo_root: Path) -> ModuleType:
    return load_script(repo_root / "tools" / "samples.py")


def test_the_files_are_the_generators(generator: ModuleType) -> None:
    written = {
        path.name: gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in generator.FOLDER.iterdir()
        if path.name != "README.md"
    }
    assert written == generator.samples(), "run python tools/samples.py"


def test_every_format_has_a_sample(generator: ModuleType) -> None:
    assert set(FILES) == {one.name for one in FORMATS}
    for name, file in FILES.items():
        with open_source(generator.FOLDER / file) as source:
            assert detect(source).name == name


@pytest.mark.parametrize("name", EXACT)
def test_readers_agree_on_requests_sessions_and_tokens(generator: ModuleType, name: str) -> None:
    turns = generator.workload()
    trace = load_trace(generator.FOLDER / FILES[name])
    assert sorted(trace.input_tokens.tolist()) == sorted(len(turn.prompt) for turn in turns)
    assert sorted(trace.output_tokens.tolist()) == sorted(len(turn.answer) for turn in turns)
    if trace.sessions is not None:
        assert len(np.unique(trace.sessions)) == generator.SESSIONS


@pytest.mark.parametrize("name", PREFIXES)
def test_prefixes_are_shared_as_the_words_are(generator: ModuleType, name: str) -> None:
    seen: set[tuple[str, ...]] = set()
    hits = tokens = 0
    for turn in generator.workload():
        prefixes = [tuple(turn.prompt[:end]) for end in range(16, len(turn.prompt) + 1, 16)]
        hits += 16 * sum(prefix in seen for prefix in prefixes)
        tokens += len(turn.prompt)
        seen.update(prefixes)
    assert load_trace(generator.FOLDER / FILES[name]).ideal_hit_rate(16) == pytest.approx(hits / tokens)


@pytest.mark.parametrize("name", ["messages", "conversations", "lmcache"])
def test_texts_have_the_workloads_requests(generator: ModuleType, name: str) -> None:
    trace = load_trace(generator.FOLDER / FILES[name], tokenizer="words")
    turns = generator.workload()
    assert len(trace) == len(turns)
    assert int(trace.input_tokens.sum()) > sum(len(turn.prompt) for turn in turns)
    assert trace.ideal_hit_rate(16) > 0.5


def test_arrivals_are_the_workloads(generator: ModuleType) -> None:
    seconds = np.array([turn.seconds for turn in generator.workload()])
    assert read_arrivals(generator.FOLDER / "azure.csv") == pytest.approx(seconds - seconds[0])


@pytest.mark.parametrize("file", FILES.values())
def test_every_sample_is_replayed(generator: ModuleType, file: str) -> None:
    line = ["simulate", str(generator.FOLDER / file), "--tokenizer", "words", "--model", "llama-3-8b"]
    found = CliRunner().invoke(cli, [*line, "--policy", "lru,hazard", "--capacity", "50%"])
    assert found.exit_code == 0, found.output
