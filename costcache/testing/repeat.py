"""Replays a fixed stream and prints a digest of its victims, to compare processes.

python -m costcache.testing.repeat POLICY MODEL [PLUGIN] [SETTINGS-AS-JSON]
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
import sys

from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.testing.server import SmallServer, made_cache
from costcache.testing.steps import stream

__all__ = ["digest"]


def digest(policy: str, model: str, plugin: str = "", settings: str = "{}") -> str:
    """A digest of what the policy does over a fixed stream.

    Args:
        policy: The policy's name.
        model: A preset.
        plugin: The ``module`` or ``module:attribute`` that offers the policy; empty for installed plugins.
        settings: The policy's settings, a JSON object.
    """
    plugins = PluginManager()
    if plugin:
        plugins.register(pkgutil.resolve_name(plugin), "tested", plugin)
    else:
        plugins.load_entry_points()
    cache = made_cache(ModelSpec.preset(model), 400, 1, policy, plugins, policy_settings=json.loads(settings))
    transcript = SmallServer(cache).run(stream(seed=4))
    return hashlib.sha256(repr(transcript).encode()).hexdigest()


if __name__ == "__main__":
    sys.stdout.write(digest(*sys.argv[1:]) + "\n")
