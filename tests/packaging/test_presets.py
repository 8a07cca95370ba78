"""The presets are those of the table in tools/presets.py, and pass as many parameters as published."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from costcache.model import ModelSpec
from costcache.model.presets import ALIASES, PRESETS
from tests.scripts import load_script

# Published counts that include what the language model lacks, or round more than the others.
ROUGH = {
    "glm-4.5": 0.05,
    "glm-4.5-air": 0.08,
    "minimax-m2": 0.05,
    "qwen3.5-9b": 0.08,  # its vision part
    "zamba2-7b": 0.55,  # counts its shared blocks once, and a token passes them 13 times
}


@pytest.fixture(scope="module")
def table(repo_root: Path) -> ModuleType:
    return load_script(repo_root / "tools" / "presets.py")


def test_the_generated_file_is_that_of_the_table(table: ModuleType) -> None:
    assert table.configs() == PRESETS, "run tools/presets.py"
    assert table.ALIASES == ALIASES, "run tools/presets.py"


def test_every_preset_names_its_source(table: ModuleType) -> None:
    for name, row in table.MODELS.items():
        owner, _, repository = row.source.partition("/")
        assert owner, name
        assert repository, name


def test_parameters_are_those_that_are_published(table: ModuleType) -> None:
    for name, row in table.MODELS.items():
        if row.billions is None:
            continue
        spec = ModelSpec.preset(name)
        embedding = spec.vocab_size * spec.hidden_size
        counts = [spec.active_params / 1e9, (spec.active_params + embedding) / 1e9]
        off = min(abs(count / row.billions - 1) for count in counts)
        assert off < ROUGH.get(name, 0.04), f"{name}: {counts} for {row.billions}"
