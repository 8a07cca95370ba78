"""Builds everything that a release consists of and tries it, and publishes nothing: ``make release-check``.

For the core and each plugin: the sdist, and the plain wheel that is built from it. For each Python: the
compiled wheel of the core, built from the same sdist; then a new environment with the core, all plugins and
the example, in which ``pip check`` and the command of ``make demo`` run. On the oldest Python the plain wheel
is tried in the same way. A Python that is not on this machine is skipped, and named at the end; ``--all``
makes that an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PLUGINS = sorted(path.parent for path in (REPO / "plugins").glob("*/pyproject.toml"))
EXAMPLE = REPO / "examples" / "costcache-example"
TOOLS = ("build>=1.2", "hatchling>=1.27", "twine>=6")


class CheckError(Exception):
    """A step that did not do what a release must do."""


def pythons() -> list[str]:
    """The Pythons that wheels are made for, oldest first, as cibuildwheel is told them."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    tags: list[str] = project["tool"]["cibuildwheel"]["build"]
    return [f"3.{tag.removeprefix('cp3').removesuffix('-*')}" for tag in tags]


def find(version: str) -> Path | None:
    """Find an interpreter of a version: on the path, or among pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [*sorted(root.glob(f"{version}.*/bin/python"), reverse=True)]
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        candidates.append(Path(on_path))
    for candidate in candidates:
        says = "import sys, venv, ensurepip; print('{}.{}'.format(*sys.version_info))"
        done = subprocess.run([candidate, "-c", says], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def run(*command: str | Path, **variables: str) -> str:
    """Run a command that cannot see the checkout through Python's variables; returns what it printed.

    Raises:
        CheckError: If it fails; with what it said.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=REPO, env={**env, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckError(
            f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def say(text: str) -> None:
    """Say what has been seen."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def environment(python: Path, folder: Path, *packages: str | Path) -> Path:
    """Make a new environment with packages; returns its folder of programs."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    programs = folder / "bin"
    if packages:
        run(programs / "python", "-m", "pip", "install", "--quiet", *packages)
    return programs


def build_plain(programs: Path, out: Path) -> None:
    """Build the sdist of each distribution, and from it a wheel for every Python."""
    for project in (REPO, *PLUGINS):
        options = ("--no-isolation", "--outdir", out, project)
        run(programs / "python", "-m", "build", *options, COSTCACHE_COMPILE="0")
    say(f"built {', '.join(sorted(path.name for path in out.iterdir()))}")
    run(programs / "python", "-m", "twine", "check", "--strict", *sorted(out.iterdir()))
    say("twine finds no fault in their metadata")


def build_compiled(programs: Path, sdist: Path, folder: Path) -> Path:
    """Build the compiled wheel of the core from its sdist; returns it."""
    source, out = folder / "source", folder / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    (project,) = source.iterdir()
    run(programs / "python", "-m", "build", "--wheel", "--outdir", out, project, COSTCACHE_COMPILE="1")
    (wheel,) = out.iterdir()
    return wheel


def attempt(python: Path, wheel: Path, dist: Path, folder: Path, kind: str) -> None:
    """Install a wheel of the core and all that belongs to it in a new environment, and run the demo."""
    siblings = sorted(dist.glob("costcache_*-py3-none-any.whl"))
    programs = environment(python, folder, wheel, *siblings, EXAMPLE)
    run(programs / "python", "-m", "pip", "check")
    version = run(programs / "costcache", "--version").strip()
    if f"({kind})" not in version:
        raise CheckError(f"{wheel.name} should be {kind}, and says {version}")
    listed = run(programs / "costcache", "plugins")
    missing = [name for name in ("mla", "mha", "mamba_seglen", "example") if name not in listed]
    if missing:
        raise CheckError(f"{wheel.name}: costcache plugins does not list {', '.join(missing)}:\n{listed}")
    demo = run("make", "-o", ".venv/.program", "demo", f"BIN={programs}")
    (hit,) = re.findall(r"^ +5% .* costcache +([\d.]+%)", demo, re.MULTILINE)
    say(f"{version} on {folder.name}: installed, pip check and the demo pass ({hit} at 5 %)")


def check(versions: Sequence[str], out: Path) -> Iterator[str]:
    """Build and try everything; gives the Pythons that are not here."""
    work = REPO / "build" / "release"
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    plain_done = False
    for version in versions:
        python = find(version)
        if python is None:
            yield version
            continue
        tools = environment(python, work / f"tools-{version}", *TOOLS)
        if not plain_done:
            build_plain(tools, out)
            (plain,) = out.glob("costcache-*-py3-none-any.whl")
            (sdist,) = out.glob("costcache-*.tar.gz")
            attempt(python, plain, out, work / f"python{version}-plain", "plain Python")
            plain_done = True
        wheel = build_compiled(tools, sdist, work / version)
        attempt(python, wheel, out, work / f"python{version}", "compiled")
        shutil.copy(wheel, out)
    if not plain_done:
        raise CheckError(
            f"none of Python {', '.join(versions)} is on this machine: install one, such as with pyenv"
        )


def main() -> None:
    """Check, and end with status 1 and one step's output if it fails."""
    parser = argparse.ArgumentParser(description="Build and try what a release consists of; publish nothing.")
    parser.add_argument("--python", action="append", help="a version, such as 3.12; by default all")
    parser.add_argument("--all", action="store_true", help="fail if a Python is not on this machine")
    parser.add_argument(
        "--out", type=Path, default=REPO / "dist", help="folder of the results; emptied first"
    )
    options = parser.parse_args()
    try:
        absent = list(check(options.python or pythons(), options.out))
    except CheckError as error:
        sys.exit(f"release-check: {error}")
    for version in absent:
        say(f"skipped: Python {version} is not on this machine")
    if absent and options.all:
        sys.exit("release-check: --all was given, and a Python is missing")
    say(f"{len(list(options.out.iterdir()))} files in {options.out}; nothing was published")


if __name__ == "__main__":
    main()
