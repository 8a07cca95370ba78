"""Tenants of one server: each with its own system prompt, and now and then a scan of documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from costcache.sim.workloads.settings import LogNormal, PromptSet, Rate, Share, Uniform, WorkloadSettings

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.workloads.build import Blocks, Request

__all__ = ["TenantsSettings", "tenants"]


class TenantsSettings(WorkloadSettings):
    """Tenants: chat on system prompts of their own, and bursts of scans. ``tenant-0`` sends the most.

    In a scan, one tenant sends many documents in quick succession, each once, after its system prompt.
    """

    rate: Rate = 5.0
    """Chat requests and starts of scans per second, as a Poisson process."""
    system: PromptSet = PromptSet(count=60, tokens=Uniform(low=1000, high=8000), zipf=1.0)
    """System prompts, one a tenant; their popularity is that of the tenants."""
    user: LogNormal = LogNormal(median=200, shape=1.0)
    """Tokens of a chat message."""
    output: LogNormal = LogNormal(median=150, shape=0.8)
    """Tokens generated."""
    scan_share: Share = 0.003
    """Share of the arrivals that start a scan."""
    scan: Uniform = Uniform(low=50, high=250)
    """Documents of a scan."""
    scan_rate: Rate = 10.0
    """Documents per second of a scan, as a Poisson process."""
    document: LogNormal = LogNormal(median=3000, shape=0.8, high=60_000)
    """Tokens of a document."""


def tenants(
    settings: TenantsSettings, blocks: Blocks, rng: np.random.Generator
) -> Iterator[tuple[float, list[Request]]]:
    """An endless sequence of chat requests and scans, in order of their starts."""
    from costcache.sim.workloads.build import Prompts, arrivals

    systems = Prompts(settings.system, blocks, rng, owned=True)
    for start in arrivals(settings.rate, rng):
        context = systems.begin()
        if rng.random() >= settings.scan_share:
            context.extend(settings.user.tokens(rng))
            yield start, [context.request(start, settings.output.tokens(rng))]
            continue
        seconds = start
        scan = []
        for _ in range(settings.scan.tokens(rng)):
            document = context.fork()
            document.extend(settings.document.tokens(rng))
            scan.append(document.request(seconds, settings.output.tokens(rng)))
            seconds += float(rng.standard_exponential()) / settings.scan_rate
        yield start, scan
