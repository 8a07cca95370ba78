"""Records the requests of a server as a trace: salted hashes of pages, lengths, times and ends; no tokens."""

from __future__ import annotations
