"""Draw report.png: the top of the report of the README's demo, as a headless Chromium shows it.

    python docs/images/report.py

Needs playwright and Pillow (the extra ``dev``) and Chromium, such as Debian's chromium-headless-shell.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path

from click.testing import CliRunner
from PIL import Image
from playwright.sync_api import sync_playwright

from costcache.cli import cli

HERE = Path(__file__).resolve().parent
TRACE = "workload chat --out demo.jsonl --requests 4000"
REPLAY = (
    "simulate demo.jsonl --model deepseek-v3 --policy costcache,lru,lfu,slru,optimum --capacity 5%,10%,20% "
    "--report report.html"
)
CUT = "section:nth-of-type(3)"


def main() -> None:
    """Make the report in a folder of its own, and take a picture down to its first chart."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for line in (TRACE, REPLAY):
            CliRunner().invoke(cli, line.split(), catch_exceptions=False)
        found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1120, "height": 900}, color_scheme="light")
            page.goto(Path("report.html").resolve().as_uri())
            last = page.locator(CUT).bounding_box()
            clip = {"x": 0, "y": 0, "width": 1120, "height": last["y"] + last["height"] + 20}
            shown = page.screenshot(full_page=True, clip=clip)
            browser.close()
        os.chdir(HERE)
    # 64 colours are all that it has, but for the edges of letters.
    Image.open(io.BytesIO(shown)).convert("RGB").quantize(64).save("report.png", optimize=True)


if __name__ == "__main__":
    main()
