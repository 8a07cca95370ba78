"""Copies between a CUDA device and host memory, beside a bare copy: ``python benchmarks/tier_copies.py``.

The memory of the tiers is laid out as for DeepSeek-V3 (one latent in each of 61 layers) and for one of eight
ranks of Llama-70B (keys and values of one head in each of 80 layers). A bare copy moves the same bytes
between one piece of pinned memory and one of the device. *Slots* are those of the host: in one run, in pages
of 64 in random order, or alone; those of the device are pages in random order. Overlap: matrix products on
one stream while a thread copies over and over on another, here of pages of 64; the slowdown is against the
products alone.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch  # noqa: TID253 # nothing here works without it
from numpy.typing import NDArray

from costcache.sizes import parse_bytes
from costcache.tiers import Buffers, Layout
from costcache.tiers.layout import Part

LAYOUTS = {
    "DeepSeek-V3": Layout(tuple(Part(f"{layer}.latent", 1152) for layer in range(61))),
    "Llama-70B, tp 8": Layout(tuple(Part(f"{layer}.{part}", 256) for layer in range(80) for part in "kv")),
}
TURNS = 3


def shuffled(slots: int, run: int) -> NDArray[np.int64]:
    """Slots in runs of so many, in random order."""
    runs = np.random.default_rng(run).permutation(slots // run).astype(np.int64)
    return (runs[:, None] * run + np.arange(run)).reshape(-1)


def seconds(copy: Callable[[], object]) -> float:
    """The time of a copy, the shortest of some turns after one to warm up."""
    taken = []
    for _ in range(TURNS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def products(side: int = 4096) -> Callable[[], float]:
    """Work for a device: gives the seconds of a batch of matrix products."""
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def run() -> float:
        began = time.perf_counter()
        for _ in range(60):
            a @ b
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began

    run()
    return run


def beside(copy: Callable[[], object] | None, work: Callable[[], float]) -> tuple[float, float]:
    """Mean seconds of the work while a thread copies, and the copies a second meanwhile."""
    ends, done = threading.Event(), [0]

    def over_and_over() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not ends.is_set():
                if copy is not None:
                    copy()
                    stream.synchronize()
                    done[0] += 1
                else:
                    ends.wait()

    thread = threading.Thread(target=over_and_over)
    thread.start()
    time.sleep(0.05)
    first, began, taken = done[0], time.perf_counter(), []
    while time.perf_counter() - began < 0.4:
        taken.append(work())
    rate = (done[0] - first) / (time.perf_counter() - began)
    ends.set()
    thread.join()
    return sum(taken) / len(taken), rate


def main() -> None:
    """Measure each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", default="512MiB", help="bytes of a copy")
    options = parser.parse_args()
    out = sys.stdout.write
    out(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {options.bytes} a copy\n\n")
    out("| layout | slots | down GB/s | of bare | up GB/s | of bare | bit-equal |\n")
    out("|---|---|---:|---:|---:|---:|---|\n")
    work = products()
    overlaps = [
        line for name in LAYOUTS for line in measured(name, parse_bytes(options.bytes, "bytes"), work)
    ]
    out("\n| layout | copies beside the products | slowdown of the products | GB/s meanwhile |\n")
    out("|---|---|---:|---:|\n")
    out("".join(overlaps))


def measured(name: str, size: int, work: Callable[[], float]) -> list[str]:
    """Measure a layout: writes the rows of the first table, and gives those of the second."""
    layout = LAYOUTS[name]
    slots = size // layout.token_bytes // 64 * 64
    size = slots * layout.token_bytes
    device = Buffers.allocate(layout, slots, device="cuda").tokens
    host = Buffers.allocate(layout, slots, joined=True).tokens
    for view in device._views:
        view.random_()
    whole = torch.empty(size, dtype=torch.uint8, device="cuda")
    piece = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    bare: dict[str, Callable[[], object]] = {
        "down": partial(piece.copy_, whole, non_blocking=True),
        "up": partial(whole.copy_, piece, non_blocking=True),
    }
    best = {way: seconds(copy) for way, copy in bare.items()}
    mine, ours = shuffled(slots, 64), dict(bare)
    for kind, theirs in (
        ("one run", np.arange(slots, dtype=np.int64)),
        ("alone", shuffled(slots, 1)),
        ("pages of 64", shuffled(slots, 64)[::-1].reshape(-1, 64)[:, ::-1].reshape(-1).copy()),
    ):
        wanted = device.gather(mine).cpu()
        ours = {
            "down": partial(device.copy, mine, host, theirs),
            "up": partial(host.copy, theirs, device, mine),
        }
        down = seconds(ours["down"])
        for view in device._views:
            view.zero_()
        up = seconds(ours["up"])
        equal = "yes" if torch.equal(device.gather(mine).cpu(), wanted) else "NO"
        facts = [
            name,
            kind,
            *(f"{size / down / 1e9:.1f}", f"{best['down'] / down:.2f}"),
            *(f"{size / up / 1e9:.1f}", f"{best['up'] / up:.2f}"),
            equal,
        ]
        sys.stdout.write(f"| {' | '.join(facts)} |\n")
    alone, _ = beside(None, work)
    overlaps = []
    for way in ("down", "up"):
        for what, copy in (("bare", bare[way]), ("tiers", ours[way])):
            taken, rate = beside(copy, work)
            overlaps.append(f"| {name} | {way}, {what} | {taken / alone:.2f} | {rate * size / 1e9:.1f} |\n")
    return overlaps


if __name__ == "__main__":
    main()
