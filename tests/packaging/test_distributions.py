"""The four distributions, built from this checkout and installed in a new environment."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from costcache._version import __version__

# Distribution -> its folder, its package.
PROJECTS = {
    "costcache": (".", "costcache"),
    "costcache-mla": ("plugins/mla", "costcache_mla"),
    "costcache-mha": ("plugins/mha", "costcache_mha"),
    "costcache-mamba-seglen": ("plugins/mamba_seglen", "costcache_mamba_seglen"),
}
COMMANDS = {
    "plan": ("plan", "--model", "deepseek-v3", "--memory", "80GiB", "--weights", "40GiB"),
    "models": ("models", "--json"),
    "plugins": ("plugins", "--json"),
}
START_SECONDS = 0.5


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command that cannot see this checkout through Python's variables; gives its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["COSTCACHE_COMPILE"] = "0"
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        line = " ".join(map(str, command))
        pytest.fail(f"{line}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(project: Path, out: Path) -> None:
    """Builds the sdist of a project, and its wheel from that sdist, in plain Python."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project)


@dataclass(frozen=True)
class Environment:
    """A virtual environment, filled by the pip of the environment that runs the tests."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    def pip(self, *arguments: str | Path) -> str:
        return run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.root)

    def installed(self) -> dict[str, str]:
        listing = json.loads(self.pip("list", "--format", "json"))
        return {entry["name"]: entry["version"] for entry in listing}

    def evaluate(self, code: str) -> Any:
        return json.loads(run(self.python, "-c", f"import json\n{code}", cwd=self.root))

    def costcache(self, *arguments: str) -> str:
        return run(self.root / "bin" / "costcache", *arguments, cwd=self.root)


@pytest.fixture(scope="module")
def dist(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of each."""
    out = tmp_path_factory.mktemp("dist")
    for folder, _ in PROJECTS.values():
        build(repo_root / folder, out)
    return out


@pytest.fixture(scope="module")
def mla_env(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A new environment after ``pip install --find-links dist 'costcache[mla]'``."""
    env = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(env.root, with_pip=False)
    env.pip("install", "--find-links", dist, "costcache[mla]")
    return env


@pytest.fixture(scope="module")
def all_env(dist: Path, mla_env: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A copy of that environment after ``costcache[all]``, which needs nothing more from an index."""
    env = Environment(tmp_path_factory.mktemp("environment") / "all")
    shutil.copytree(mla_env.root, env.root, symlinks=True)
    env.pip("install", "--no-index", "--find-links", dist, "costcache[all]")
    return env


def wheel_of(dist: Path, name: str) -> ZipFile:
    return ZipFile(dist / f"{name.replace('-', '_')}-{__version__}-py3-none-any.whl")


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_contains_only_the_typed_package(repo_root: Path, dist: Path, name: str) -> None:
    folder, package = PROJECTS[name]
    with wheel_of(dist, name) as wheel:
        packed = {Path(entry) for entry in wheel.namelist() if ".dist-info/" not in entry}
    source = repo_root / folder
    modules = {path.relative_to(source) for path in (source / package).rglob("*.py")}
    assert Path(package, "py.typed") in packed
    assert {path for path in packed if path.suffix == ".py"} == modules
    assert {path.parts[0] for path in packed} == {package}


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_says_its_version_license_and_pins(dist: Path, name: str) -> None:
    info = f"{name.replace('-', '_')}-{__version__}.dist-info"
    with wheel_of(dist, name) as wheel:
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        license_text = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in license_text
    requires = metadata.get_all("Requires-Dist", [])
    if name != "costcache":
        assert requires == [f"costcache=={__version__}"]
        return
    pins = {line for line in requires if line.startswith("costcache")}
    assert pins == {
        f"{sibling}=={__version__}; extra == '{extra}'"
        for sibling in set(PROJECTS) - {"costcache"}
        for extra in ("all", sibling.removeprefix("costcache-"))
    }
    always = [line for line in requires if "extra ==" not in line]
    assert always
    assert not [line for line in always if line.startswith("torch")]


@pytest.mark.parametrize("name", PROJECTS)
def test_an_sdist_contains_only_its_project(dist: Path, name: str) -> None:
    _, package = PROJECTS[name]
    top = f"{name.replace('-', '_')}-{__version__}"
    with tarfile.open(dist / f"{top}.tar.gz") as sdist:
        entries = {Path(entry).relative_to(top).parts[0] for entry in sdist.getnames()}
    assert {package, "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"} <= entries
    assert entries - {package, "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"} <= {
        ".gitignore",
        "CHANGELOG.md",
        "hatch_build.py",
        "tests",
    }


def test_building_twice_gives_the_same_bytes(repo_root: Path, dist: Path, tmp_path: Path) -> None:
    build(repo_root / PROJECTS["costcache-mla"][0], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    for archive in tmp_path.iterdir():
        assert archive.read_bytes() == (dist / archive.name).read_bytes(), archive.name


def test_extra_mla_installs_one_sibling_and_no_torch(mla_env: Environment) -> None:
    installed = mla_env.installed()
    ours = {name: version for name, version in installed.items() if name.startswith("costcache")}
    assert ours == {"costcache": __version__, "costcache-mla": __version__}
    assert "torch" not in installed
    assert not mla_env.evaluate(
        "from importlib.util import find_spec; print(json.dumps(find_spec('torch') is not None))"
    )
    # The installed package is what runs, and not this checkout.
    origin = mla_env.evaluate("import costcache; print(json.dumps(costcache.__file__))")
    assert Path(origin).is_relative_to(mla_env.root)


def test_extra_all_adds_the_other_siblings_and_nothing_else(
    mla_env: Environment, all_env: Environment
) -> None:
    added = set(all_env.installed()) - set(mla_env.installed())
    assert added == {"costcache-mha", "costcache-mamba-seglen"}


def test_entry_points_of_all_siblings_load(all_env: Environment) -> None:
    loaded = all_env.evaluate(
        "from importlib.metadata import entry_points\n"
        "found = entry_points(group='costcache')\n"
        "print(json.dumps({ep.name: ep.load().__name__ for ep in found}))"
    )
    assert loaded == {
        "mla": "costcache_mla.plugin",
        "mha": "costcache_mha.plugin",
        "mamba_seglen": "costcache_mamba_seglen.plugin",
        "seglen": "costcache_mamba_seglen.seglen",
    }


@pytest.mark.parametrize("package", [package for _, package in PROJECTS.values()])
def test_packages_say_their_version(all_env: Environment, package: str) -> None:
    assert all_env.evaluate(f"import {package}; print(json.dumps({package}.__version__))") == __version__


def test_plan_prints_the_capacity_of_an_mla_model(mla_env: Environment) -> None:
    # 40 GiB of pool at 70,272 bytes a token.
    assert "611,191" in mla_env.costcache(*COMMANDS["plan"])


def test_models_and_plugins_print_json(mla_env: Environment) -> None:
    assert "deepseek-v3" in json.dumps(json.loads(mla_env.costcache(*COMMANDS["models"])))
    assert "mla" in json.dumps(json.loads(mla_env.costcache(*COMMANDS["plugins"])))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_starts_fast(mla_env: Environment, command: str) -> None:
    """Best of a few, next to what Python and the two libraries that every command needs take.

    Processor time, since other work on the machine is not ours. The limit is the half second that is
    promised; on a slower machine, where those imports alone take more than a ninth of a second, it is 4.5
    times as long as they take. (The slowest commands take three to three and a half times as long.)
    """

    def seconds(*line: str | Path) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*line, cwd=mla_env.root)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    program = mla_env.root / "bin" / "costcache"
    floor, ours = [], []
    for _ in range(5):
        floor.append(seconds(mla_env.python, "-c", "import click, pydantic; pydantic.BaseModel"))
        ours.append(seconds(program, *COMMANDS[command]))
    assert min(ours) < max(START_SECONDS, 4.5 * min(floor))
