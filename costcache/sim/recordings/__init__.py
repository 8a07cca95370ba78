"""Recordings of servers: joins them, says why requests missed, and makes them from servers' logs."""

from __future__ import annotations
