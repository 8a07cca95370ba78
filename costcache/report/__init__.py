"""Reports of a simulation: one offline HTML page, and one picture.

Layers: :mod:`~costcache.report.material` gathers figures, :mod:`~costcache.report.advice` puts them in
words, :mod:`~costcache.report.charts` in charts, and :mod:`~costcache.report.page` makes the page.
"""

from __future__ import annotations

from costcache.report.files import check_outputs
from costcache.report.material import Material, gather
from costcache.report.page import render, write_report
from costcache.report.plot import write_plot

__all__ = ["Material", "check_outputs", "gather", "render", "write_plot", "write_report"]
