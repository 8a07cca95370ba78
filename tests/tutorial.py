"""The plugin that the tutorial ends with, for tests that run it in a server."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import REPO, Page

PAGE = Page(REPO / "docs" / "tutorial" / "beat-lru.md")
MODULE = "costcache_loyal"


def install(folder: Path) -> None:
    """Put the plugin into a folder of the module path, as pip does."""
    (source,) = [
        block.body for block in PAGE.blocks() if block.mark("file") == f"costcache-loyal/{MODULE}.py"
    ]
    (folder / f"{MODULE}.py").write_text(source, encoding="utf-8")
    info = folder / f"{MODULE}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: costcache-loyal\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[costcache]\n{MODULE} = {MODULE}\n")
