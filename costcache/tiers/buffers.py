"""Memory of a tier: one tensor per layer part, a row for each slot, on the device or on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from costcache.errors import SettingsError
from costcache.tiers.layout import Layout, Part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Buffers", "Rows"]

_CHUNK = 8 << 20
"""Bytes that are gathered at once between a device and the host."""


class Rows:
    """Tensors with one row per slot, read and written by slot numbers.

    A row is copied as bytes, so it comes back bit-equal whatever its dtype, NaNs included.

    Attributes:
        row_bytes: Bytes of one slot in all tensors.
        slots: Slots that every tensor has at least.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        """Take tensors whose first dimension is the slot; their memory is used as it is.

        Raises:
            SettingsError: A tensor is not contiguous.
        """
        import torch

        views = []
        for number, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                raise SettingsError(f"tensor {number} is not contiguous: give one with a row per slot")
            views.append(tensor.view(tensor.shape[0], -1).view(torch.uint8))
        self._views = views
        self.sizes = tuple(int(view.shape[1]) for view in views)
        self.row_bytes = sum(self.sizes)
        self.slots = min((int(view.shape[0]) for view in views), default=0)

    @property
    def device(self) -> Any:
        """Device of the tensors; the CPU if there are none."""
        import torch

        return self._views[0].device if self._views else torch.device("cpu")

    def read(self, slots: NDArray[np.int64]) -> list[Any]:
        """Copy the rows of some slots: a tensor of bytes, of shape [slots, bytes], for each part."""
        import torch

        index = torch.tensor(slots, device=self.device)
        return [view.index_select(0, index) for view in self._views]

    def write(self, slots: NDArray[np.int64], rows: list[Any], start: int = 0) -> None:
        """Write the rows from ``start`` on, one for each slot; they may be on another device."""
        import torch

        if not slots.size:
            return
        index = torch.tensor(slots, device=self.device)
        for view, part in zip(self._views, rows, strict=True):
            view.index_copy_(0, index, part[start : start + slots.size].to(view.device))

    def copy(self, slots: NDArray[np.int64], target: Rows, target_slots: NDArray[np.int64]) -> None:
        """Copy rows to other slots of another memory, a few megabytes at a time."""
        crosses = self.device.type != target.device.type
        step = max(1, _CHUNK // max(1, self.row_bytes))
        for at in range(0, slots.size, step):
            rows = self.read(slots[at : at + step])
            target.write(target_slots[at : at + step], [_staged(row) for row in rows] if crosses else rows)

    def pack(self, slots: NDArray[np.int64]) -> list[memoryview]:
        """The rows of some slots as buffers of bytes, part by part; a copy."""
        return packed(self.read(slots))

    def unpack(self, slots: NDArray[np.int64], value: memoryview) -> bool:
        """Write what :meth:`pack` gave; False, and nothing is written, if it has another size."""
        import torch

        if len(value) != slots.size * self.row_bytes:
            return False
        flat = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        rows, at = [], 0
        for size in self.sizes:
            rows.append(flat[at : at + size * slots.size].view(slots.size, size))
            at += size * slots.size
        self.write(slots, rows)
        return True


class Buffers:
    """The memory of one tier: rows for tokens, and rows for states.

    Attributes:
        tokens: Rows of tokens, by slot.
        states: Rows of states, by state slot; None for a model without any.
        pinned: Whether it is host memory that a device can copy to and from at full speed.
    """

    def __init__(self, tokens: Sequence[Any], states: Sequence[Any] = (), *, pinned: bool = False) -> None:
        """Take tensors whose first dimension is the slot, such as the KV pool of a server.

        Raises:
            SettingsError: A tensor is not contiguous.
        """
        self.tokens = Rows(tokens)
        self.states = Rows(states) if states else None
        self.pinned = pinned

    @classmethod
    def allocate(cls, layout: Layout, slots: int, state_slots: int = 0, *, device: Any = "cpu") -> Buffers:
        """Allocate the memory of a layout.

        Host memory is pinned where there is a CUDA device to copy to.

        Raises:
            MemoryError: The memory was refused.
        """
        import torch

        where = torch.device(device)
        pinned = where.type == "cpu" and torch.cuda.is_available()

        def make(parts: tuple[Part, ...], rows: int) -> list[Any]:
            return [
                torch.empty((rows, part.bytes), dtype=torch.uint8, device=where, pin_memory=pinned)
                for part in parts
            ]

        try:
            return cls(make(layout.tokens, slots), make(layout.states, state_slots), pinned=pinned)
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # torch raises RuntimeError for memory that it cannot get
            size = slots * layout.token_bytes + state_slots * layout.state_bytes
            raise MemoryError(f"{size:,} bytes of {where.type} memory were refused: {error}") from error

    def layout(self) -> Layout:
        """The layout of these tensors, part by part without names."""
        states = () if self.states is None else self.states.sizes
        return Layout(
            tuple(Part(str(number), size) for number, size in enumerate(self.tokens.sizes)),
            tuple(Part(str(number), size) for number, size in enumerate(states)),
        )


def _staged(row: Any) -> Any:
    """A row on its way between a device and the host, in pinned memory, where copies are fast."""
    import torch

    staged = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
    return staged.copy_(row)


def packed(rows: list[Any]) -> list[memoryview]:
    """Rows as buffers of bytes, part by part."""
    return [memoryview(part.cpu().contiguous().numpy()).cast("B") for part in rows]
