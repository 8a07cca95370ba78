"""Options and output of ``costcache simulate --host``: tiers of memory below the device."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from costcache.cli.from_models import Options
from costcache.cli.output import console, new_table, say, show
from costcache.cli.tables import print_heading
from costcache.errors import SettingsError
from costcache.sim.settings import TiersBelow
from costcache.sizes import parse_bytes, parse_rate

if TYPE_CHECKING:
    from costcache.sim.engine import Simulator
    from costcache.sim.tiered import TieredBound, TieredRun

__all__ = ["TierOptions", "print_tiered", "tiered_json"]

_OFTEN = 0.1
"""Share of the requests from which on their waiting for memory is mentioned: it makes the times then."""


class TierOptions(Options):
    """Options of the tiers."""

    host: str | None = Field(
        None,
        description="Replay with so much host memory of one rank below the device's pool, on a server with a "
        "queue.",
    )
    disk: str | None = Field(None, description="With --host, a disk of so many bytes for one rank.")
    link: str | None = Field(
        None, description="With --host, speed of the link to the device, each way.  [default: 55GB/s]"
    )
    disk_bandwidth: str | None = Field(None, description="With --disk, its speed, each way.")
    write: Literal["by_cost", "write_back", "write_through", "write_through_selective"] | None = Field(
        None, description="With --host, what is copied down, and what is loaded.  [default: by_cost]"
    )
    host_price: float | None = Field(
        None, gt=0.0, description="With --host and --report, price of a GB of host memory, in any currency."
    )
    gpu_price: float | None = Field(None, gt=0.0, description="The same of a GB of GPU memory.")

    def settings(self, **refused: bool) -> TiersBelow | None:
        """Return the tiers; None without any.

        Args:
            refused: Other options that do not go with tiers, and whether they were given.

        Raises:
            SettingsError: If options contradict each other, or a size or rate is not one.
        """
        if self.host is None:
            for name in TierOptions.model_fields:
                if getattr(self, name) is not None:
                    raise SettingsError(
                        f"--{name.replace('_', '-')} is for tiers: give --host too, or leave it out"
                    )
            return None
        for name, given in refused.items():
            if given:
                raise SettingsError(
                    f"--{name.replace('_', '-')} does not go with --host: leave one of them out"
                )
        if self.disk is not None and self.disk_bandwidth is None:
            raise SettingsError("--disk needs its speed: give --disk-bandwidth, such as 6GB/s")
        if self.disk is None and self.disk_bandwidth is not None:
            raise SettingsError("--disk-bandwidth is for a disk: give --disk too, or leave it out")
        if (self.host_price is None) != (self.gpu_price is None):
            raise SettingsError("--host-price and --gpu-price go together: give both, or neither")
        fields: dict[str, Any] = {"host": _positive(self.host, "--host")}
        if self.disk is not None and self.disk_bandwidth is not None:
            fields["disk"] = _positive(self.disk, "--disk")
            fields["disk_bandwidth"] = parse_rate(self.disk_bandwidth, "--disk-bandwidth")
        if self.link is not None:
            fields["link"] = parse_rate(self.link, "--link")
        if self.write is not None:
            fields["write"] = self.write
        return TiersBelow(**fields)


def _positive(text: str, option: str) -> int:
    size = parse_bytes(text, option)
    if not size:
        raise SettingsError(f"{option} {text!r} is no memory: give more, or leave it out")
    return size


def tiered_json(runs: list[TieredRun], bounds: dict[str, TieredBound | None]) -> dict[str, Any]:
    """Return the figures for JSON."""
    return {
        "runs": [asdict(run) for run in runs],
        "bounds": {name: None if bound is None else asdict(bound) for name, bound in bounds.items()},
    }


def print_tiered(
    simulator: Simulator, tiers: TiersBelow, runs: list[TieredRun], bounds: dict[str, TieredBound | None]
) -> None:
    """Print the figures, tier by tier."""
    out = console()
    print_heading(out, simulator)
    disk = "" if tiers.disk is None else f", {_gb(tiers.disk)} of disk at {_gb(tiers.disk_bandwidth or 0)}/s"
    say(out, f"{_gb(tiers.host)} of host memory at {_gb(tiers.link)}/s{disk}; writing: {tiers.write}")
    say(out)
    table = new_table(
        ">capacity",
        "policy",
        ">device\nhits",
        ">host\nhits",
        ">disk\nhits",
        ">TTFT\nmean",
        ">TTFT\np50",
        ">TTFT\np99",
        ">written\ndown",
        ">loaded\nup",
        ">reload",
        ">recompute",
        ">write\nwaits",
    )
    asked = max(1, int(simulator.trace.input_tokens.sum()))
    for run in runs:
        hits = {tier.name: f"{tier.hit_tokens / asked:.2%}" for tier in run.tiers}
        table.add_row(
            run.capacity,
            f"{run.policy} (failed, then lru)" if run.fallbacks else run.policy,
            f"{run.device_hit_rate:.2%}",
            hits.get("host", "-"),
            hits.get("disk", "-"),
            *(
                f"{t * 1e3:.0f} ms" if t < 10 else f"{t:.1f} s"
                for t in (run.ttft_mean, run.ttft_p50, run.ttft_p99)
            ),
            _gb(sum(tier.down_bytes for tier in run.tiers)),
            _gb(sum(tier.up_bytes for tier in run.tiers)),
            *(f"{t:,.1f} s" for t in (run.reload_seconds, run.recompute_seconds, run.write_wait_seconds)),
        )
    show(out, table)
    say(out)
    for capacity, bound in bounds.items():
        if bound is None:
            say(out, f"No offline bound at {capacity}: the model has states.")
        else:
            say(
                out,
                f"Offline bound at {capacity}, of hits, not of times: {bound.device_hit_rate:.2%} on the "
                f"device, {bound.hit_rate:.2%} on all tiers together.",
            )
    say(out, f"TTFT model: {simulator.prefill.name}, with queueing on the server and on each link")
    fullest = max(runs, key=lambda run: run.memory_waits, default=None)
    if fullest is not None and fullest.memory_waits > _OFTEN * fullest.requests:
        say(
            out,
            f"{fullest.memory_waits:,} of {fullest.requests:,} requests ({fullest.policy} at "
            f"{fullest.capacity}) waited until running ones left room on the device: give more --capacity "
            "or a lower --rate, or --running beside if --capacity is what they leave for the cache.",
        )


def _gb(size: float) -> str:
    return f"{size / 1e12:.3g} TB" if size >= 1e12 else f"{size / 1e9:.3g} GB"
