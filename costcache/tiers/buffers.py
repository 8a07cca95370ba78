"""Memory of a tier: tensors with a row for each slot, on the device or on the host.

What travels between tiers are whole rows, all parts of a slot one after the other. A device's memory has a
tensor per part, as its kernels want it; that of a slower tier is one tensor, so that neighbouring slots are
one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from costcache.errors import SettingsError
from costcache.tiers.layout import Layout, Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Buffers", "Rows"]

_CHUNK = 64 << 20
"""Bytes that are gathered at once between a device and the host: enough to hide a launch per part."""
_RUN = 32 << 10
"""Bytes of a run of neighbouring slots that are worth a copy of their own, on average."""


class Rows:
    """Tensors with one row per slot, read and written by slot numbers.

    A row is copied as bytes, so it comes back bit-equal whatever its dtype, NaNs included.

    Attributes:
        sizes: Bytes of one slot in each tensor.
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
        self.sizes = tuple(int(view.shape[1]) for view in views)
        self.row_bytes = sum(self.sizes)
        self.slots = min((int(view.shape[0]) for view in views), default=0)
        self.device = views[0].device if views else torch.device("cpu")
        # Kernels copy an element at a time, so these are as wide as every row and its place in memory allow.
        widths = ((torch.int64, 8), (torch.int32, 4), (torch.int16, 2), (torch.uint8, 1))
        self._dtype, width = next(
            (dtype, width)
            for dtype, width in widths
            if all(size % width == 0 for size in self.sizes)
            and all(view.storage_offset() % width == view.data_ptr() % width == 0 for view in views)
        )
        self._views = [view.view(self._dtype) for view in views]
        ends = [int(end) // width for end in np.cumsum(self.sizes)]
        self._columns = list(zip([0, *ends], ends, strict=False))

    def gather(self, slots: NDArray[np.int64]) -> Any:
        """Copy the rows of some slots: a tensor of bytes on the same device, of shape [slots, row_bytes]."""
        return self._gather(_index(slots, self.device))

    def scatter(self, slots: NDArray[np.int64], rows: Any) -> None:
        """Write rows, one for each slot, and wait until they are there; they may be on another device."""
        here, there = self.device, rows.device
        if not slots.size or (here.type == "cpu" != there.type and self._received(slots, rows)):
            _wait(there)
            return
        self._scatter(slots, _index(slots, here), rows.to(here))
        _wait(here)

    def copy(self, slots: NDArray[np.int64], target: Rows, target_slots: NDArray[np.int64]) -> None:
        """Copy rows to other slots of another memory, and wait until they are there."""
        ours, theirs = _index(slots, self.device), _index(target_slots, target.device)
        crosses = self.device.type != target.device.type
        step = max(1, _CHUNK // max(1, self.row_bytes))
        for at in range(0, slots.size, step):
            here = slice(at, at + step)
            if not crosses:
                rows = self._gather(ours[here])
            elif self.device.type == "cpu":
                rows = self._sent(slots[here], ours[here], target.device)
            else:
                rows = self._gather(ours[here])
                if target._received(target_slots[here], rows):
                    continue
                rows = _pinned(rows)
            target._scatter(target_slots[here], theirs[here], rows)
        if crosses:
            _wait(target.device if self.device.type == "cpu" else self.device)

    def pack(self, slots: NDArray[np.int64]) -> list[memoryview]:
        """The rows of some slots as buffers of bytes; views of the memory where it has them in one piece."""
        if len(self._views) == 1 and self.device.type == "cpu":
            view = self._views[0]
            return [memoryview(view[a : a + n].numpy()).cast("B") for a, _, n in _runs(slots)]
        return [memoryview(self.gather(slots).cpu().numpy()).cast("B")]

    def unpack(self, slots: NDArray[np.int64], value: memoryview) -> bool:
        """Write what :meth:`pack` gave; False, and nothing is written, if it has another size."""
        import torch

        if len(value) != slots.size * self.row_bytes:
            return False
        rows = np.frombuffer(bytearray(value), np.uint8).reshape(slots.size, self.row_bytes)
        self.scatter(slots, torch.from_numpy(rows))
        return True

    def _gather(self, index: Any) -> Any:
        import torch

        rows = torch.empty((len(index), self.row_bytes), dtype=torch.uint8, device=self.device)
        wide = rows.view(self._dtype)
        for view, (first, last) in zip(self._views, self._columns, strict=True):
            torch.index_select(view, 0, index, out=wide[:, first:last])
        return rows

    def _scatter(self, slots: NDArray[np.int64], index: Any, rows: Any) -> None:
        wide = rows.view(self._dtype)
        for view, (first, last) in zip(self._views, self._columns, strict=True):
            part = wide[:, first:last]
            if self.device.type == "cpu":
                view.numpy()[slots] = part.numpy()  # whole rows at once, which torch copies by element
            else:
                view.index_copy_(0, index, part)

    def _sent(self, slots: NDArray[np.int64], index: Any, device: Any) -> Any:
        """The rows of some slots of the host, on a device, once its stream gets there."""
        import torch

        runs = self._worth_runs(slots)
        if runs is None:
            return _pinned(self._gather(index)).to(device, non_blocking=True)
        rows = torch.empty((slots.size, self.row_bytes), dtype=torch.uint8, device=device)
        wide = rows.view(self._dtype)
        for first, at, count in runs:
            wide[at : at + count].copy_(self._views[0][first : first + count], non_blocking=True)
        return rows

    def _received(self, slots: NDArray[np.int64], rows: Any) -> bool:
        """Copy rows of a device to slots of the host, if they are in few enough pieces; queues the copies."""
        runs = self._worth_runs(slots)
        if runs is None:
            return False
        wide = rows.view(self._dtype)
        for first, at, count in runs:
            self._views[0][first : first + count].copy_(wide[at : at + count], non_blocking=True)
        return True

    def _worth_runs(self, slots: NDArray[np.int64]) -> list[tuple[int, int, int]] | None:
        """The runs of neighbouring slots, if to copy each beats a detour over one piece of memory."""
        if len(self._views) != 1:
            return None
        runs = _runs(slots)
        return runs if len(runs) == 1 or len(runs) * _RUN <= slots.size * self.row_bytes else None


class Buffers:
    """The memory of one tier: rows for tokens, and rows for what a request resumes from besides them.

    Attributes:
        tokens: Rows of tokens, by slot.
        states: Rows of states, by state slot; None for a model without any.
        windows: Rows of window KV, where sliding windows are evicted apart; None elsewhere.
        pinned: Whether it is host memory that a device can copy to and from at full speed.
    """

    def __init__(
        self,
        tokens: Sequence[Any],
        states: Sequence[Any] = (),
        windows: Sequence[Any] = (),
        *,
        pinned: bool = False,
    ) -> None:
        """Take tensors whose first dimension is the slot, such as the KV pool of a server.

        Args:
            tokens: Tensors with a row for each slot of a token.
            states: Tensors with a row for each state slot.
            windows: Tensors with a row for each token that the pool of windows has room for.
            pinned: Whether they are pinned host memory.

        Raises:
            SettingsError: A tensor is not contiguous, or there are states and windows.
        """
        if states and windows:
            raise SettingsError("the buffers have rows of states and of windows: tiers keep one or the other")
        self.tokens = Rows(tokens)
        self.states = Rows(states) if states else None
        self.windows = Rows(windows) if windows else None
        self.pinned = pinned

    @property
    def endings(self) -> Rows | None:
        """The rows of states or of windows; None without either."""
        return self.windows if self.states is None else self.states

    def bytes_of(self, tokens: int, rows: int) -> int:
        """Bytes of the rows of so many tokens, and of so many rows of endings."""
        return tokens * self.tokens.row_bytes + (0 if self.endings is None else rows * self.endings.row_bytes)

    @classmethod
    def allocate(
        cls,
        layout: Layout,
        slots: int,
        state_slots: int = 0,
        window_slots: int = 0,
        *,
        device: Any = "cpu",
        joined: bool = False,
    ) -> Buffers:
        """Allocate the memory of a layout.

        Host memory is pinned where there is a CUDA device to copy to.

        Args:
            layout: The layout.
            slots: Rows of tokens.
            state_slots: Rows of states.
            window_slots: Rows of window KV.
            device: Where.
            joined: One tensor with all parts of a slot in a row, as a slower tier wants it.

        Raises:
            MemoryError: The memory was refused.
        """
        import torch

        where = torch.device(device)
        pinned = where.type == "cpu" and torch.cuda.is_available()

        def make(parts: tuple[Part, ...], rows: int) -> list[Any]:
            sizes = [part.bytes for part in parts]
            if joined and sizes:
                sizes = [sum(sizes)]
            return [
                torch.empty((rows, size), dtype=torch.uint8, device=where, pin_memory=pinned)
                for size in sizes
            ]

        try:
            return cls(
                make(layout.tokens, slots),
                make(layout.states, state_slots),
                make(layout.windows, window_slots),
                pinned=pinned,
            )
        except (RuntimeError, MemoryError) as error:  # torch raises RuntimeError where memory is refused
            size = slots * layout.token_bytes + state_slots * layout.state_bytes
            size += window_slots * layout.window_bytes
            raise MemoryError(f"{size:,} bytes of {where.type} memory were refused: {error}") from error

    def layout(self) -> Layout:
        """The layout of these tensors, part by part without names."""

        def parts(rows: Rows | None) -> tuple[Part, ...]:
            sizes = () if rows is None else rows.sizes
            return tuple(Part(str(number), size) for number, size in enumerate(sizes))

        return Layout(parts(self.tokens), parts(self.states), parts(self.windows))


def _runs(slots: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring slots: the first slot, where it is among the slots, and how many."""
    if not slots.size:
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1))
    counts = np.diff(np.append(starts, slots.size))
    return list(zip(slots[starts].tolist(), starts.tolist(), counts.tolist(), strict=True))


def _index(slots: NDArray[np.int64], device: Any) -> Any:
    """Slots as an index on a device; the caller's stream goes on meanwhile."""
    import torch

    if not slots.size:
        return torch.empty((0,), dtype=torch.int64, device=device)
    index = torch.from_numpy(np.ascontiguousarray(slots).copy() if not slots.flags.writeable else slots)
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


def _pinned(rows: Any) -> Any:
    """Rows on their way between a device and the host, in pinned memory, where copies are fast."""
    import torch

    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
