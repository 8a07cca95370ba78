"""The policies, each with its defaults and with other settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from costcache.plugins import get_plugins

__all__ = ["OTHER_SETTINGS", "policies"]

OTHER_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "hazard": {
        "flops": {"objective": "flops", "memory": 0.8, "ghosts": 1.5, "refresh": 20},
        "forgets": {"memory": 0.9, "ghosts": 0.0, "strength": 1.0, "refresh": 10},
    },
    "lhd": {"often": {"refresh": 64, "samples": 8, "explore": 0.1, "seed": 3}},
    "lru2": {"k3": {"k": 3, "correlated_period": 4.0, "history": 0.5}},
    "marconi": {"fixed": {"alpha": 0.5}, "tuned": {"window": 60, "refresh": 20}},
    "s3fifo": {"wide": {"small": 0.3, "promote": 1, "ghosts": 0.3}},
    "seglen": {"heavy": {"seglen_eff_weight": 0.85, "refresh": 10}},
    "slru": {"three": {"protected_threshold": 3}},
    "tlru": {"tail": {"threshold": 100, "next_prompt_estimate": 20}},
    "wild": {"often": {"turns": 4, "prior": 1000.0, "refresh": 32}},
    "wtinylfu": {"wide": {"window": 0.2, "protected": 0.5, "sample": 4}},
}
"""Settings under which policies do what their defaults do late or never, by policy and variant."""


def policies(*, variants: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, variant and settings of every policy; ``""`` is the variant of the defaults."""
    for name in get_plugins().policies():
        yield name, "", {}
        if variants:
            for variant, settings in OTHER_SETTINGS.get(name, {}).items():
                yield name, variant, settings
