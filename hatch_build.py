"""Compiles the core with mypyc if possible: the same code, up to twice as fast.

The variable ``COSTCACHE_COMPILE`` decides: 0 never compiles, 1 fails if compiling is not possible, and
without it the package falls back to plain Python. The plugin ``hatch-mypyc`` is not used: it leaves its
output among the sources, where it would shadow every later change of them, and moves ``pyproject.toml`` away
while it works.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
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
        # Plain Python fuses no operations either: results must not depend on the processor.
        extension.extra_compile_args.append("-ffp-contract=off")
setup(name="costcache-compiled", packages=[], ext_modules=extensions)
"""


class CompileHook(BuildHookInterface[Any]):
    """Adds the compiled modules to a wheel, each next to its source, and the library that they share."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return the build tools. The kind of build is not known here: editable ones get them too."""
        tools: list[str] = self.config["tools"]
        return [] if _value() == "0" else tools

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile a copy of the package, and add the result to the wheel."""
        value = _value()
        if value == "0":
            return
        if version == "editable":
            if value == "1":
                raise ValueError(
                    f"{VARIABLE} is 1: an editable install is not compiled, since it would not see "
                    "your changes; leave out -e, or the variable"
                )
            return
        try:
            built = self._compiled()
        except CompileError as error:
            if value == "1":
                raise
            self.app.display_warning(f"{error}\nIt is installed as plain Python, which decides the same.")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(built)

    def _compiled(self) -> dict[str, str]:
        """Compile; returns the compiled modules' paths, and their places in the wheel."""
        missing = _missing()
        if missing:
            raise CompileError(f"costcache was not compiled: {missing}.")
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
            raise CompileError(f"costcache was not compiled. What the tools said:\n{done.stdout}")
        return {str(path): str(path.relative_to(copy)) for path in built}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 # fixed by hatchling
        """Delete the copy."""
        if self._folder is not None:
            self._folder.cleanup()


class CompileError(RuntimeError):
    """The core cannot be compiled here."""


def _value() -> str:
    value = os.environ.get(VARIABLE, "")
    if value not in {"", "0", "1"}:
        raise ValueError(
            f"{VARIABLE} is {value!r}: give 1 to compile, 0 not to, or leave it out to compile if possible"
        )
    return value


def _missing() -> str | None:
    """Say what this machine lacks for compiling, as far as is known without trying."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "compiled modules need CPython with its global interpreter lock"
    if os.name == "posix":
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
        if shutil.which(compiler) is None:
            return f"there is no C compiler {compiler!r} (set the variable CC to use another)"
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            return f"there is no Python.h in {sysconfig.get_path('include')} (Debian has it in python3-dev)"
    return None


def _is_extension(path: Path) -> bool:
    return path.name.endswith(tuple(EXTENSION_SUFFIXES))
