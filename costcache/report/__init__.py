"""Reports of a simulation: a self-contained HTML page, and a plot.

:mod:`~costcache.report.material` gathers the figures, :mod:`~costcache.report.advice` recommends a policy and
a pool size, :mod:`~costcache.report.charts` says what the charts show, and :mod:`~costcache.report.page`
assembles the page.
"""

from __future__ import annotations

from costcache.report.files import check_outputs
from costcache.report.material import Material, gather
from costcache.report.page import render, write_report
from costcache.report.plot import write_plot
from costcache.report.tiers import gather_tiers

__all__ = ["Material", "check_outputs", "gather", "gather_tiers", "render", "write_plot", "write_report"]
