"""Counts of one lower tier."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TierCounters"]


@dataclass(slots=True)
class TierCounters:
    """Counts of one lower tier since the cache was made, in tokens unless said otherwise.

    Attributes:
        hits: Tokens that matches found here and not in a faster tier.
        written: Tokens that were copied here.
        loaded: Tokens that were copied from here to the next faster tier.
        demoted: Those of ``written`` that were about to be evicted.
        refused: Tokens that the policy of writing found worth no copy when they were evicted.
        skipped: Tokens that were not copied, since too many bytes were under way or there was no room.
        lost: Tokens whose copy failed, or that came back damaged or not at all.
        bytes_in: Bytes copied here.
        bytes_out: Bytes copied from here.
    """

    hits: int = 0
    written: int = 0
    loaded: int = 0
    demoted: int = 0
    refused: int = 0
    skipped: int = 0
    lost: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
