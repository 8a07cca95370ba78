"""Compiles the core with mypyc when the environment asks for it: the same code, up to twice as fast.

    COSTCACHE_COMPILE=1 pip install .

It needs a C compiler and Python's headers. Without the variable, the package is pure Python. The plugin
``hatch-mypyc`` would do as much, but it leaves what it built among the sources, where it would hide every
later change of them, and moves ``pyproject.toml`` away while it works.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "COSTCACHE_COMPILE"
SETUP = """\
import os

from setuptools import setup

from mypyc.build import mypycify

MODULES = {modules!r}
ARGUMENTS = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]

extensions = mypycify([*ARGUMENTS, *MODULES], group_name="costcache", opt_level="3", debug_level="0")
if os.name == "posix":
    for extension in extensions:
        # Plain Python fuses no operations either: what is computed must not depend on the processor.
        extension.extra_compile_args.append("-ffp-contract=off")
setup(name="costcache-compiled", packages=[], ext_modules=extensions)
"""


class CompileHook(BuildHookInterface[Any]):
    """Adds the compiled modules to a wheel, each next to its source, and the library that all of them use."""

    def dependencies(self) -> list[str]:
        """What is needed to compile, if that is asked for."""
        tools: list[str] = self.config["tools"]
        return tools if _is_asked_for() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile in a copy, and add what comes of it."""
        if not _is_asked_for():
            return
        if version == "editable":
            raise ValueError(
                f"{VARIABLE} is 1: an editable install is not compiled, since it would not see changes; "
                "leave out -e, or the variable"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="costcache-")
        copy = Path(self._folder.name)
        package = copy / "costcache"
        shutil.copytree(Path(self.root, "costcache"), package, ignore=shutil.ignore_patterns("__pycache__"))
        copy.joinpath("setup.py").write_text(SETUP.format(modules=self.config["modules"]), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=copy,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        built = [
            path for found in (copy.glob("*"), package.rglob("*")) for path in found if _is_extension(path)
        ]
        if done.returncode or len(built) != len(self.config["modules"]) + 1:
            raise RuntimeError(
                "costcache was not compiled. That needs a C compiler and Python's headers; without "
                f"{VARIABLE}=1 it is installed as plain Python. What the tools said:\n{done.stdout}"
            )
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(path): str(path.relative_to(copy)) for path in built})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 # fixed by hatchling
        """Drop the copy."""
        if _is_asked_for():
            self._folder.cleanup()


def _is_asked_for() -> bool:
    value = os.environ.get(VARIABLE, "0")
    if value not in {"", "0", "1"}:
        raise ValueError(f"{VARIABLE} is {value!r}: give 1 to compile, or 0")
    return value == "1"


def _is_extension(path: Path) -> bool:
    return path.name.endswith(tuple(EXTENSION_SUFFIXES))
