"""Reads a server's Prometheus metrics, from its endpoint or from a file."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException

from costcache.errors import CostcacheError
from costcache.files import read_whole

__all__ = ["NOTHING", "PREFIXES", "MetricsError", "Sample", "address", "fetch", "load", "parse", "saved"]

PREFIXES = ("costcache:", "sglang:", "vllm:")
"""Metrics that are read; all others are left out."""
_MOST_BYTES = 64 << 20
_SECONDS = 10.0


class MetricsError(CostcacheError):
    """Metrics cannot be had, or are none of ours."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of a server at one time.

    Attributes:
        time: Unix time, in seconds; 0 if unknown.
        text: The metrics as they were exposed, without those of other programs.
        values: Label sets and values by name.
    """

    time: float
    text: str
    values: dict[str, list[tuple[dict[str, str], float]]] = field(repr=False)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum of a metric over all label sets that have these labels; None if it is not exposed."""
        found = [value for have, value in self.values.get(name, ()) if labels.items() <= have.items()]
        return sum(found) if found else None

    def label(self, name: str, wanted: str) -> list[str]:
        """Values of a label where a metric is 1, each once."""
        given = (have.get(wanted, "") for have, value in self.values.get(name, ()) if value == 1)
        return list(dict.fromkeys(each for each in given if each))


NOTHING = Sample(0.0, "", {})
"""Of a server whose metrics are not read."""


def address(url: str) -> str:
    """The address of the metrics: ``http://host:port`` stands for its ``/metrics``.

    Raises:
        MetricsError: It is no address of a server.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urllib.parse.urlsplit(whole)
        good = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        good = False
    if not good:
        raise MetricsError(f"--url is {url!r}: give the server's address, such as http://127.0.0.1:30000")
    return whole if parts.path.strip("/") else f"{whole.rstrip('/')}/metrics"


def fetch(url: str) -> Sample:
    """Read the metrics of a running server.

    Args:
        url: Address of the metrics.

    Raises:
        MetricsError: No server answers, or it has no such metrics; says what to do.
    """
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            data = answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise MetricsError(
            f"{url} answers {error.code}: SGLang has metrics with --enable-metrics, vLLM unless "
            "--disable-log-stats; check --url"
        ) from None
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        raise MetricsError(f"{url}: no server answers ({why}); start it, or correct --url") from None
    return parse(data.decode("utf-8", "replace"), time.time(), url)


def parse(text: str, at: float, label: str) -> Sample:
    """Parse metrics in Prometheus' text format.

    Args:
        text: The metrics.
        at: Unix time, in seconds.
        label: Where they are from, for errors.

    Raises:
        MetricsError: They are no metrics, or none of a server.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise MetricsError(
            "reading metrics needs the package prometheus-client: pip install 'costcache[watch]'"
        ) from None
    ours = [line for line in text.splitlines() if line.removeprefix("# TYPE ").startswith(PREFIXES)]
    short = "\n".join(ours) + "\n"
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(short):
            for sample in family.samples:
                values.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"{label}: is not in Prometheus' text format ({error}); check --url") from None
    if not values:
        raise MetricsError(
            f"{label}: has no metrics of SGLang, vLLM or costcache; give the address of a server's /metrics"
        )
    return Sample(at, short, values)


def saved(sample: Sample) -> str:
    """A sample as a line of a file."""
    return json.dumps({"time": round(sample.time, 3), "metrics": sample.text}) + "\n"


def load(path: str | os.PathLike[str]) -> Iterator[Sample]:
    """The samples of a file: lines that :func:`saved` gave, or one page of metrics as a server exposes it.

    Raises:
        MetricsError: It cannot be read, or holds none.
    """
    try:
        text = read_whole(path).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise MetricsError(f"{path}: cannot be read ({why}); check --file") from None
    if not text.startswith("{"):
        yield parse(text, 0.0, str(path))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at, metrics = float(row["time"]), str(row["metrics"])
        except (ValueError, TypeError, KeyError):
            raise MetricsError(
                f"{path}, line {number}: is no sample; give a file of --save, or a page of metrics"
            ) from None
        yield parse(metrics, at, f"{path}, line {number}")
