"""The simulator's tiers against SGLang's own classes: what each finds on the device, and on the host.

    python benchmarks/sglang_tiers.py [--requests 1100] > benchmarks/results/sglang_tiers.md
    python benchmarks/sglang_tiers.py --by-cost --workloads chat --requests 250

The simulator replays a load of requests that overlap, over a device and a host twice as large, in pages of
64. The order in which its requests start and end is then that of SGLang's real cache on the CPU, which
matches, loads back, allocates, evicts and writes through for each of them as its scheduler has it do. So what
differs is the cache alone, not the time that anything takes. ``lru`` is SGLang's own cache, and hazard ours.

``--by-cost`` compares SGLang's write policies with and without the rule ``by_cost`` over them, under hazard.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from _report import table

sys.path.append(str(Path(__file__).resolve().parent / "gpu"))

from workload import Workload, build

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.model import ModelSpec
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.settings import ServingSettings, TiersBelow
from costcache.sim.trace import Trace

MODEL, PAGE, HOST = "llama-3-8b", 64, 2.0
POLICIES = ("lru", "hazard")
LOADS = {"chat": (32_704, 18.0), "few-shot": (91_968, 11.5)}
"""Of each workload: tokens of the device, and requests a second."""
WRITES = ("write_through", "write_through_selective", "write_back")
SPEEDS = {"flops_per_second": 4e14, "host_link_bytes_per_second": 4.5e10}
"""Settings that ``by_cost`` needs: about those of an H100 with PCIe 5."""
OUTPUTS, DECODE, VOCABULARY = 0.125, 0.017, 128_256


class Logged:
    """Starts and ends of a replay's requests, in order: ``(request, whether it starts)``."""

    def __init__(self, simulator: Simulator, policy: str, tokens: int) -> None:
        """Replay over tiers, and log."""
        from costcache.sim.tiers import TieredServer

        self.events: list[tuple[int, bool]] = []
        start, finish = TieredServer.start, TieredServer.finish

        def started(server: Any, index: int, now: float) -> float | None:
            first_token: float | None = start(server, index, now)
            if first_token is not None:
                self.events.append((index, True))
            return first_token

        def finished(server: Any, ended: Any) -> None:
            self.events.append((ended.number, False))
            finish(server, ended)

        TieredServer.start, TieredServer.finish = started, finished  # type: ignore[method-assign]  # for one replay
        try:
            below = TiersBelow(host=int(HOST * tokens * simulator.token_bytes), write="write_through")
            serving = ServingSettings(decode_seconds=DECODE, load="open", spread_bursts=False)
            outcome = simulator.tiered(Settings(policy=policy), tokens, below, serving=serving)
        finally:
            TieredServer.start, TieredServer.finish = start, finish  # type: ignore[method-assign]  # as above
        self.device, self.host = outcome.device, outcome.loaded


def real(
    trace: Trace,
    events: list[tuple[int, bool]],
    policy: str,
    tokens: int,
    write: str = "write_through",
    rule: str = "stock",
) -> tuple[Any, Any, int]:
    """Run the requests through SGLang's classes.

    Returns:
        The tokens that each found on the device, and on the host; and the tokens that were copied down.
    """
    from costcache.settings import read_settings
    from costcache.sglang.build import SglangSettings, speeds
    from tests.sglang.pools import Shape, cost_cache, stock_cache
    from tests.sglang.serving import Server

    shape = Shape("mha", PAGE, tokens=tokens, hicache=write, host_ratio=HOST, requests=64)
    if policy == "lru":
        cache = stock_cache(shape)
    else:
        chosen = read_settings(
            SglangSettings, {"policy": policy, "host_tier": rule, **(SPEEDS if rule != "stock" else {})}
        )
        deployment = Deployment(page_size=PAGE, **speeds(chosen))
        cache = cost_cache(shape, binding=Binding.of(ModelSpec.preset(MODEL), deployment, chosen))
    copied, controller = 0, cache.cache_controller
    write_down = controller.write

    def counted(indices: Any, *args: Any, **more: Any) -> Any:
        nonlocal copied
        slots = write_down(indices, *args, **more)
        copied += 0 if slots is None else len(indices)
        return slots

    controller.write = counted
    found = {"device": np.zeros(len(trace), np.int64), "host": np.zeros(len(trace), np.int64)}

    class Split(Server):
        def _load_back(self, req: Any) -> None:
            before = req.prefix_len
            super()._load_back(req)
            number = int(req.rid[1:]) - 1
            found["device"][number], found["host"][number] = before, req.prefix_len - before

    server, running = Split(cache, shape), {}
    for number, starts in events:
        if starts:
            begin, end = trace.offsets[number : number + 2].tolist()
            server._numbers = number
            running[number] = server.request(trace.ids[begin:end].tolist())
            server.start(running[number])
        else:
            output = range(int(trace.output_tokens[number]))
            req = running.pop(number)
            server.decode(req, [(number * 31 + each * 7) % VOCABULARY for each in output])
            server.finish(req)
    server.check()
    return found["device"], found["host"], copied


def by_cost(workloads: list[str], requests: int) -> None:
    """Print what the rule ``by_cost`` does to SGLang's write policies."""
    rows = []
    for workload in workloads:
        tokens, rate = LOADS[workload]
        trace = build(Workload(workload, requests, 1, OUTPUTS, rate, VOCABULARY))
        simulator = Simulator(trace, ModelSpec.preset(MODEL), Deployment(page_size=PAGE))
        events = Logged(simulator, "hazard", tokens).events
        asked = int(trace.input_tokens.sum())
        for write in WRITES:
            for rule in ("stock", "by_cost"):
                device, host, copied = real(trace, events, "hazard", tokens, write, rule)
                shares = [device.sum(), host.sum(), device.sum() + host.sum(), copied]
                rows.append([workload, write, rule, *(f"{100 * int(each) / asked:.1f}" for each in shares)])
    command = " ".join(["python benchmarks/sglang_tiers.py", *sys.argv[1:]])
    print(f"\n## The rule by_cost over SGLang's write policies\n\n    {command}\n")
    print(
        f"Hazard, the costs of {MODEL}, and the speeds `{SPEEDS}`. Shares of prompt tokens, in %: what was "
        "found on the device and on the host, and what was copied down.\n"
    )
    table(["workload", "write policy", "rule", "device", "host", "found", "copied"], rows, texts=3)


def main() -> None:
    """Replay all loads, and print a page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", default=list(LOADS), choices=LOADS)
    parser.add_argument("--requests", type=int, default=1100)
    parser.add_argument("--by-cost", action="store_true", help="compare write policies with the rule by_cost")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from sglang_hicache import prepare

    prepare()
    if options.by_cost:
        by_cost(options.workloads, options.requests)
        return
    rows = []
    for workload in options.workloads:
        tokens, rate = LOADS[workload]
        trace = build(Workload(workload, options.requests, 1, OUTPUTS, rate, VOCABULARY))
        simulator = Simulator(trace, ModelSpec.preset(MODEL), Deployment(page_size=PAGE))
        asked = int(trace.input_tokens.sum())
        for policy in POLICIES:
            replay = Logged(simulator, policy, tokens)
            device, host, _ = real(trace, replay.events, policy, tokens)
            off = np.abs(device + host - replay.device - replay.host) > PAGE
            row = [workload, policy]
            for said, is_so in ((replay.device, device), (replay.host, host)):
                row += [f"{100 * said.sum() / asked:.1f}", f"{100 * is_so.sum() / asked:.1f}"]
            rows.append([*row, f"{int(off.sum())}"])
    print("# The simulator's tiers against SGLang's classes\n")
    print(f"    {' '.join(['python benchmarks/sglang_tiers.py', *sys.argv[1:]])}\n")
    print("\n".join((__doc__ or "").strip().split("\n")[4:]) + "\n")
    heads = ["device, %", "SGLang's", "host, %", "SGLang's", "requests off by over a page"]
    table(["workload", "policy", *heads], rows, texts=2)


if __name__ == "__main__":
    main()
