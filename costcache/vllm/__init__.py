"""costcache inside vLLM: found through the entry point ``vllm.general_plugins``.

Nothing here imports vLLM until :func:`register` is called, by vLLM.
"""

from __future__ import annotations

import logging

__all__ = ["SUPPORTED", "register"]

SUPPORTED = ("0.32.0", "0.33.0")
"""Versions of vLLM that the tests have run on."""

logger = logging.getLogger("costcache")


def register() -> None:
    """Let vLLM make schedulers that read the setting ``costcache``; without that setting they are vLLM's own.

    vLLM calls it in each of its processes, once or more. A failure is logged: an installed but unused plugin
    must not stop the server.
    """
    try:
        from costcache.vllm import registration

        registration.register()
    except Exception as error:
        logger.exception("costcache is not available in vLLM: %s", error)
