"""The hook: costcache loads this module, since an entry point in ``pyproject.toml`` names it."""

from __future__ import annotations

from costcache import PolicySpec, hookimpl
from costcache_example.retention import Retention, RetentionSettings

__all__: list[str] = []


@hookimpl
def policies() -> dict[str, PolicySpec]:
    """Offer ``retention``, for models without states: it looks at nodes, which is the default of ``sees``."""
    return {
        "retention": PolicySpec(
            lambda _cost, _pools, settings: Retention(settings),
            "Least recent, where a tenant's weight and a live session count as some recency.",
            RetentionSettings,
        )
    }
