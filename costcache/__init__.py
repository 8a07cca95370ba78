"""Cost-aware eviction for the prefix (KV) caches of LLM servers.

Everything named here is public. Names are imported on first use, so that the command line starts quickly and
nothing heavy is loaded unless needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costcache._lazy import lazily
from costcache._version import __version__

if TYPE_CHECKING:
    from costcache.cost import CostModel, TokenCost
    from costcache.deployment import Deployment
    from costcache.errors import (
        ConfigError,
        CostcacheError,
        PluginError,
        SettingsError,
        TraceError,
    )
    from costcache.formats import TraceFormat
    from costcache.hookspecs import hookimpl
    from costcache.model import ModelSpec
    from costcache.orders import KeyedOrder, VictimOrder
    from costcache.policies.spec import PolicySpec
    from costcache.policies.states import StateOrder
    from costcache.radix import RadixCache
    from costcache.records import (
        Action,
        Asker,
        NodeRecord,
        PoolState,
        RequestInfo,
        RequestRecord,
        State,
        Victim,
    )
    from costcache.settings import Settings

__all__ = [
    "Action",
    "Asker",
    "ConfigError",
    "CostModel",
    "CostcacheError",
    "Deployment",
    "KeyedOrder",
    "ModelSpec",
    "NodeRecord",
    "PluginError",
    "PolicySpec",
    "PoolState",
    "RadixCache",
    "RequestInfo",
    "RequestRecord",
    "Settings",
    "SettingsError",
    "State",
    "StateOrder",
    "TokenCost",
    "TraceError",
    "TraceFormat",
    "Victim",
    "VictimOrder",
    "__version__",
    "hookimpl",
]

_MODULES = {
    "Action": "records",
    "Asker": "records",
    "ConfigError": "errors",
    "CostModel": "cost",
    "CostcacheError": "errors",
    "Deployment": "deployment",
    "KeyedOrder": "orders",
    "ModelSpec": "model",
    "NodeRecord": "records",
    "PluginError": "errors",
    "PolicySpec": "policies.spec",
    "PoolState": "records",
    "RadixCache": "radix",
    "RequestInfo": "records",
    "RequestRecord": "records",
    "Settings": "settings",
    "SettingsError": "errors",
    "State": "records",
    "StateOrder": "policies.states",
    "TokenCost": "cost",
    "TraceError": "errors",
    "TraceFormat": "formats",
    "Victim": "records",
    "VictimOrder": "orders",
    "hookimpl": "hookspecs",
}

__getattr__ = lazily(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
