"""The forecast that a slower tier shares with the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costcache.orders import VictimOrder
    from costcache.pool import Pool
    from costcache.records import PoolState

__all__ = ["SharedForecast"]


class SharedForecast:
    """Makes the order of a slower tier by what the device's order has learned, where that one can be shared.

    Attributes:
        made_by: The device's order that the tier's order was made by; None if the tier's learns by itself.
    """

    def __init__(self, device: Pool) -> None:
        """Share what the order of the device's pool learns."""
        self.made_by: VictimOrder | None = None
        self._device = device

    def make(self, pool: PoolState) -> tuple[str, VictimOrder] | None:
        """The policy's name and an order; None if the tier needs an order that learns by itself."""
        made = self._device.order_below(pool)
        self.made_by = None if made is None else self._device.order
        return made

    def follow(self, tier: Pool) -> None:
        """Rank the tier by the order in force on the device, if its own was made by another one.

        One that has taken over since: after a reset, or because that one failed.
        """
        if self.made_by is not None and self.made_by is not self._device.order:
            tier.rank_anew()
