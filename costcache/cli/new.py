"""Writes the distribution of a new plugin from templates: behind ``new-policy`` and ``new-architecture``."""

from __future__ import annotations

import re
import shutil
from importlib import resources
from pathlib import Path
from string import Template

import click

from costcache._version import __version__
from costcache.cli.output import console, say
from costcache.errors import PluginError

__all__ = ["make_plugin", "out_option"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*\Z")
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "module.py.txt": "$module.py",
    "test_module.py.txt": "tests/test_$module.py",
    "README.md.txt": "README.md",
    "test.yml.txt": ".github/workflows/test.yml",
}


out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder to make; costcache-NAME by default.",
)


def make_plugin(kind: str, name: str, folder: Path | None) -> None:
    """Write a distribution, and say what was written and what is next; see :func:`_write`."""
    try:
        written = _write(kind, name, folder)
    except OSError as error:
        place = "the folder" if folder is None else repr(str(folder))
        raise PluginError(
            f"{place} cannot be written ({error.strerror or error}): name another one with --out"
        ) from error
    for path in written:
        say(console(), f"wrote {path}")
    made = written[0].parent
    say(console(), f"next: pip install -e '{made}[test]' && python -m pytest {made}")


def _write(kind: str, name: str, folder: Path | None) -> list[Path]:
    """Write a distribution that can be installed and tested as it is.

    Args:
        kind: ``policy`` or ``architecture``.
        name: The plugin's name: lower-case words, with hyphens between them.
        folder: The folder to make; ``costcache-NAME`` by default.

    Returns:
        The files written.

    Raises:
        PluginError: The name cannot be one, or is taken; or the folder exists.
    """
    _check(name)
    module = "costcache_" + name.replace("-", "_")
    major, minor, _ = __version__.split(".", 2)
    words = {
        "name": name,
        "distribution": f"costcache-{name}",
        "module": module,
        "class_": "".join(word.capitalize() for word in name.split("-")),
        "version": f"{major}.{minor}",
        "next": f"{major}.{int(minor) + 1}",
    }
    target = Path(words["distribution"]) if folder is None else folder
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PluginError(f"{str(target)!r} exists: name another folder with --out, or remove it")
    existed = target.exists()
    templates = resources.files("costcache.cli") / "templates" / kind
    written = []
    try:
        for template, file in _FILES.items():
            path = target / Template(file).substitute(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            path.write_text(Template(_closed(text)).substitute(words), encoding="utf-8")
            written.append(path)
    except BaseException:  # a full disk, a name too long, an interrupt: the whole distribution or nothing
        _empty(target, keep=existed)
        raise
    return written


def _empty(target: Path, keep: bool) -> None:
    """Remove what was written to a folder, all of which is ours, and the folder unless it is kept."""
    if not keep:
        shutil.rmtree(target, ignore_errors=True)
        return
    for path in target.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _closed(text: str) -> str:
    """Close the name of the class where a word follows it, as in ``$class_Settings``."""
    return text.replace("$class_", "${class_}")


def _check(name: str) -> None:
    if not _NAME.match(name):
        raise PluginError(
            f"{name!r} cannot be the name of a plugin: give lower-case words, with hyphens between them"
        )
    from costcache.plugins import RESERVED, get_plugins

    found = get_plugins().describe()
    taken = {policy["name"] for policy in found["policies"]} | {plugin["name"] for plugin in found["plugins"]}
    if name in RESERVED:
        raise PluginError(f"the name {name!r} means something else on the command line: give another one")
    if name in taken or name == "costcache":
        raise PluginError(f"the name {name!r} is taken: see 'costcache plugins'")
