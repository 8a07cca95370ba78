"""How much host memory pays, against memory of the GPU: the figures, and their section of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

from costcache.report.words import seconds, share
from costcache.sim.tiered import TieredRun, make_tiered_run

if TYPE_CHECKING:
    from costcache.settings import Settings
    from costcache.sim.engine import Simulator
    from costcache.sim.settings import ServingSettings, TiersBelow

__all__ = ["HostMemory", "gather_tiers", "host_section"]

_HOSTS = (0.25, 0.5, 1.0, 2.0)
"""Host memory that is replayed, as multiples of what was given."""
_DEVICES = (1.0, 1.5, 2.0, 4.0)
"""Device pools that are replayed without a host, as multiples of what was given."""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Replays with more and more host memory, and with larger device pools instead.

    Attributes:
        policy: The policy of every tier.
        write: The policy of writing.
        device: Bytes of the device's pool as given, of one rank.
        hosts: Bytes of host memory, and the figures with it, smallest first; the first has none.
        devices: Bytes of the device's pool, and the figures of it without a host, smallest first.
        hours: Hours of the trace.
        host_price: Price of a GB of host memory; None if not given.
        gpu_price: Price of a GB of GPU memory; None if not given.
    """

    policy: str
    write: str
    device: int
    hosts: tuple[tuple[int, TieredRun], ...]
    devices: tuple[tuple[int, TieredRun], ...]
    hours: float
    host_price: float | None = None
    gpu_price: float | None = None

    def same_as(self, run: TieredRun) -> float | None:
        """Bytes by which the device's pool would have to grow to leave as few seconds of prefill as a run.

        Interpolated between the pools that were replayed; None if the largest of them leaves more.
        """
        wanted = run.recompute_seconds
        best = [(size, each.recompute_seconds) for size, each in self.devices]
        if wanted >= best[0][1]:
            return 0.0
        for (small, before), (large, after) in pairwise(best):
            if after <= wanted < before:
                return small + (large - small) * (before - wanted) / (before - after) - self.device
        return None


def gather_tiers(
    simulator: Simulator,
    settings: Settings,
    capacity: str,
    capacity_tokens: int,
    tiers: TiersBelow,
    *,
    serving: ServingSettings | None = None,
    host_price: float | None = None,
    gpu_price: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> HostMemory:
    """Replay with several sizes of host memory, and of the device's pool without any.

    Args:
        simulator: The trace, prepared.
        settings: Policy of every tier.
        capacity: The device's capacity as it was written.
        capacity_tokens: Tokens that fit on the device.
        tiers: The tiers; a disk stays as it is.
        serving: The server.
        host_price: Price of a GB of host memory.
        gpu_price: Price of a GB of GPU memory.
        progress: Called now and then with the number of requests done since the last call.
    """

    def run(tokens: int, below: TiersBelow | None) -> TieredRun:
        outcome = simulator.tiered(settings, tokens, below, serving=serving, progress=progress)
        return make_tiered_run(outcome, simulator, settings, capacity, tokens, below)

    page, token_bytes = simulator.keys.page_size, simulator.token_bytes
    sizes = [int(capacity_tokens * factor) // page * page for factor in _DEVICES]
    devices = [(int(tokens * token_bytes), run(tokens, None)) for tokens in sizes]
    hosts = [(0, devices[0][1])]
    for factor in _HOSTS:
        size = max(1, int(tiers.host * factor))
        hosts.append((size, run(capacity_tokens, tiers.model_copy(update={"host": size}))))
    times = simulator.trace.timestamps
    return HostMemory(
        policy=settings.policy,
        write=tiers.write,
        device=devices[0][0],
        hosts=tuple(hosts),
        devices=tuple(devices),
        hours=float(times.max() - times.min()) / 3600 if len(times) else 0.0,
        host_price=host_price,
        gpu_price=gpu_price,
    )


def host_section(found: HostMemory) -> str:
    """The section of a page, without its frame: the answer, and a table of each kind of memory."""
    parts = [f"<p>{escape(line)}</p>" for line in _answer(found)]
    parts.append(_table("With host memory", "Host memory", found.hosts, found))
    parts.append(_table("With a larger device pool instead", "Device pool", found.devices, found))
    return "".join(parts)


def _answer(found: HostMemory) -> list[str]:
    """Say what host memory of the size given saves, and up to which price it is the better buy."""
    size, run = found.hosts[_HOSTS.index(1.0) + 1]
    none = found.hosts[0][1]
    saved = none.recompute_seconds - run.recompute_seconds
    of = saved / none.recompute_seconds if none.recompute_seconds else 0.0
    first = (
        f"{size / _GB:,.4g} GB of host memory below a device pool of {found.device / _GB:,.4g} GB save "
        f"{share(of)} of the prefill time ({saved:,.0f} s), and take the mean TTFT from "
        f"{seconds(none.ttft_mean)} to {seconds(run.ttft_mean)}."
    )
    lines = [first]
    same = found.same_as(run)
    if saved <= 0.0:
        return [*lines, "Host memory does not pay here: it saves nothing."]
    if same is None:
        largest = found.devices[-1][0]
        least = (largest - found.device) / size
        lines.append(
            f"No device pool up to {largest / _GB:,.4g} GB saves as much. So host memory pays if a GB of it "
            f"costs less than {least:.2g} of a GB of GPU memory, and likely above that."
        )
    else:
        least = same / size
        lines.append(
            f"As much would take {same / _GB:,.3g} GB more of GPU memory. So host memory pays if a GB of it "
            f"costs less than {least:.2g} of a GB of GPU memory."
        )
    if found.host_price is not None and found.gpu_price is not None:
        host, gpu = found.host_price * size / _GB, found.gpu_price * least * size / _GB
        verdict = "pays" if host < gpu else "does not pay against GPU memory"
        at_least = "at least " if same is None else ""
        lines.append(
            f"At {found.host_price:g} and {found.gpu_price:g} per GB, it costs {host:,.0f}, and as much GPU "
            f"memory {at_least}{gpu:,.0f}: host memory {verdict}."
        )
    return lines


def _table(caption: str, first: str, rows: Sequence[tuple[int, TieredRun]], found: HostMemory) -> str:
    base = found.hosts[0][1].recompute_seconds
    heads = (
        first,
        "Device hits",
        "Hits below",
        "TTFT, mean",
        "TTFT, p99",
        "Prefill",
        "Saved per GB and hour",
    )
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in heads)
    body = ""
    for size, run in rows:
        added = size if first == "Host memory" else size - found.device
        rate = (base - run.recompute_seconds) / (added / _GB) / found.hours if added and found.hours else None
        cells = (
            share(run.device_hit_rate),
            share(run.tier_hit_rate),
            seconds(run.ttft_mean),
            seconds(run.ttft_p99),
            f"{run.recompute_seconds:,.0f} s",
            "–" if rate is None else f"{rate:.3g} s",
        )
        body += f'<tr><th scope="row">{size / _GB:,.4g} GB</th>'
        body += "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f'<table class="figures"><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
