"""Runs at the start of every Python process that has this folder on PYTHONPATH."""

from __future__ import annotations

import tests.sglang.shims.torchvision_ops  # noqa: F401  # for its effect
