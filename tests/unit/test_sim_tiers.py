"""Replay over tiers of memory: against a naive model, and what must hold of every policy of writing."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.plugins import get_plugins
from costcache.policies.hazard import Hazard
from costcache.policies.hazard.below import BelowHazard
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.settings import ServingSettings, TiersBelow
from costcache.sim.tiered import make_tiered_run, tiered_bound
from costcache.sim.tiers import Below, TieredOutcome, TieredServer
from costcache.sim.tiers.doubles import Doubles
from costcache.sim.tiers.extents import ROOT, extents
from costcache.sim.tiers.server import Running
from costcache.sim.trace import Trace
from costcache.sim.workloads import generate, workload_settings
from costcache.tiers import WRITINGS, make_writing

PAGE = 16
KV = 70_272  # bytes of a token of DeepSeek-V3


def trace_of(prompts: list[list[int]], gap: float = 100.0, outputs: int = 1) -> Trace:
    """One prompt after another; each number stands for a page, and one more token follows, and the output."""
    ids, offsets = [], [0]
    for number, prompt in enumerate(prompts):
        ids += [*prompt, 10_000 + number]
        offsets.append(len(ids))
    tokens = np.array([len(prompt) * PAGE + 1 for prompt in prompts], np.int64)
    return Trace(
        name="test",
        block_size=PAGE,
        timestamps=np.arange(len(prompts), dtype=np.float64) * gap,
        input_tokens=tokens,
        output_tokens=np.full_like(tokens, outputs),
        ids=np.array(ids, np.int64),
        offsets=np.array(offsets, np.int64),
    )


def server_of(
    trace: Trace,
    pages: int,
    below: list[Below],
    write: str,
    *,
    policy: str = "lru",
    model: str = "deepseek-v3",
    extent: int = PAGE,
    running: Literal["in_pool", "beside"] = "in_pool",
) -> TieredServer:
    plugins = get_plugins()
    spec, deployment = plugins.resolve(model), Deployment(page_size=PAGE)
    simulator = Simulator(trace, spec, deployment)
    binding = Binding.of(spec, deployment, Settings(policy=policy), drops_slow=False)
    return TieredServer(
        trace,
        extents(simulator.runs, PAGE, extent),
        binding,
        pages * PAGE * KV,
        below,
        make_writing(write),
        simulator.prefill,
        ServingSettings(load="open", concurrency=10_000, running=running),
    )


def host(pages: int, speed: float = 55e9) -> Below:
    return Below("host", pages * PAGE * KV, speed)


def disk(pages: int) -> Below:
    return Below("disk", pages * PAGE * KV, 6e9)


class Naive:
    """Two tiers of pages under LRU and write-back, by scanning all of them: what is found in each.

    Requests run in the device's pool, or beside it; then what the pool has no room for is written below.
    """

    def __init__(self, device: int, below: int, *, beside: bool = False) -> None:
        self.sizes = device, below
        self.beside = beside
        self.device: dict[tuple[int, ...], int] = {}
        self.host: dict[tuple[int, ...], int] = {}
        self.uses: dict[tuple[int, ...], int] = {}

    def _victim(self, tier: dict[tuple[int, ...], int], kept: set[tuple[int, ...]]) -> tuple[int, ...] | None:
        free = [page for page in tier if page not in kept and not any(other[:-1] == page for other in tier)]
        return min(free, key=lambda page: (self.uses[page], tier[page]), default=None)

    def ask(self, now: int, prompt: list[int]) -> tuple[int, int]:
        path = [tuple(prompt[: at + 1]) for at in range(len(prompt))]
        here = 0
        while here < len(path) and path[here] in self.device:
            here += 1
        end = here
        while end < len(path) and path[end] in self.host:
            end += 1
        for page in path:
            if page in self.device or page in self.host:
                self.uses[page] = now
        for at in range(here, len(path)):
            while len(self.device) >= self.sizes[0]:
                victim = self._victim(self.device, set(path[:at]))
                if victim is None:
                    if self.beside:
                        self._write(path, at, now)
                    return here, end - here
                self._demote(victim)
            self.uses[path[at]] = now
            self.device[path[at]] = len(self.uses) + now * 1000 + at
        while (
            not self.beside and len(self.device) >= self.sizes[0]
        ):  # the page of the last token and of the output
            victim = self._victim(self.device, set(path))
            if victim is None:
                break
            self._demote(victim)
        return here, end - here

    def _write(self, path: list[tuple[int, ...]], kept: int, now: int) -> None:
        """Write what is beyond the device's pool, the last page first."""
        for at in range(len(path) - 1, kept - 1, -1):
            self.uses[path[at]] = now
            self.device[path[at]] = now * 1000 + at
            self._demote(path[at], set(path[:at]))

    def _demote(self, page: tuple[int, ...], running: set[tuple[int, ...]] | None = None) -> None:
        order = self.device.pop(page)
        if page in self.host:
            return
        pinned = set(self.device) | (running or set())
        while len(self.host) >= self.sizes[1]:
            victim = self._victim(self.host, pinned)
            if victim is None:
                return
            del self.host[victim]
        self.host[page] = order


distinct_prompts = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=40
)  # conversations by number, and how far they have come


@given(distinct_prompts, st.integers(6, 10), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_two_tiers_find_what_a_naive_model_finds(
    asked: list[tuple[int, int]], device: int, below: int
) -> None:
    prompts = [[100 * talk + turn for turn in range(turns)] for talk, turns in asked]
    found = server_of(trace_of(prompts), device, [host(below)], "write_back").run()
    naive = Naive(device, below)
    expected = [naive.ask(now, prompt) for now, prompt in enumerate(prompts, 1)]
    assert [*zip(found.device // PAGE, found.loaded // PAGE, strict=True)] == expected


@given(distinct_prompts, st.integers(1, 10), st.integers(6, 12))
@settings(max_examples=60, deadline=None)
def test_what_a_prompt_has_beyond_the_device_is_found_below(
    asked: list[tuple[int, int]], device: int, below: int
) -> None:
    prompts = [[100 * talk + turn for turn in range(turns)] for talk, turns in asked]
    found = server_of(trace_of(prompts), device, [host(below)], "write_back", running="beside").run()
    naive = Naive(device, below, beside=True)
    expected = [naive.ask(now, prompt) for now, prompt in enumerate(prompts, 1)]
    assert [*zip(found.device // PAGE, found.loaded // PAGE, strict=True)] == expected


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-next"])
@pytest.mark.parametrize(
    ("write", "kept"),
    [("write_through", True), ("write_back", True), ("by_cost", True), ("write_through_selective", False)],
)
def test_a_prompt_larger_than_the_device_is_kept_by_whoever_writes_at_once(
    write: str, kept: bool, model: str
) -> None:
    """Its end was never on the device, where selective writing counts uses."""
    prompt = [*range(600)]
    policy = "hazard" if write == "by_cost" else "lru"
    trace = trace_of([prompt, prompt])
    found = server_of(trace, 300, [host(700)], write, policy=policy, model=model, running="beside").run()
    assert found.device[1] + found.loaded[1] == (600 * PAGE if kept else found.device[1])


@pytest.mark.parametrize(("outputs", "waits"), [(1, False), (3 * PAGE, True)])
def test_a_request_that_does_not_fit_beside_a_running_one_waits(outputs: int, waits: bool) -> None:
    """Of eight pages each takes three for its prompt and one, or four, for its last token and its output."""
    trace = trace_of([[1, 2, 3], [4, 5, 6]], gap=1e-6, outputs=outputs)
    server = server_of(trace, 8, [host(8)], "write_back")
    ttft, prefill = server.run().ttft, server.prefill.one(3 * PAGE + 1, 0)
    decode = (outputs - 1) * server.settings.decode_seconds
    assert ttft.tolist() == pytest.approx([prefill, 2 * prefill + waits * decode], abs=1e-3)


def test_a_running_request_is_not_evicted() -> None:
    """The prompt of a request that has ended is evicted, not the less recent one of a request that runs."""
    trace = trace_of([[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3]], gap=1.0)
    trace.output_tokens[:] = [200, 1, 1, 1]
    found = server_of(trace, 21, [host(8)], "write_back").run()
    assert found.device.tolist() == [0, 0, 0, 3 * PAGE]


def check_tiers(server: TieredServer) -> None:
    """No tier holds more than it can, each byte is accounted for, and what is pinned is what is above."""
    device = server.device.tier
    for level, tier in enumerate(server.tiers):
        held = [record for record in tier.records.values() if record.held]
        assert tier.used == sum(tier.size(record.extent, record.has_state) for record in held)
        assert tier.used + tier.reserved <= tier.capacity
        states = [record.state for record in tier.records.values() if record.state is not None]
        assert tier.pool.states == len(states)
        assert tier.pool.pinned_states == sum(bool(each.locks) for each in states)
        for record in tier.records.values():
            assert record.held or not record.has_state
            assert record.state is not None or not record.has_state
            # What a tier only tracks is locked, and is above it.
            assert record.has_state or record.state is None or (level and record.state.locks)
        assert set(tier.pool.live.values()) == set(tier.records.values())
        running = [each for each in server.running if each.last is not None]
        assert tier.reserved == (0 if level else sum(each.reserved for each in server.running))
        assert level or all(each.last.locks for each in running if each.last is not None)
        if level:
            upper = server.tiers[1:level]
            for record in tier.records.values():
                above = record.extent in device.records or any(up.held(record.extent) for up in upper)
                assert record.held or above
                assert bool(record.pins) == above
            moved = server.lower.moved[level - 1]
            assert moved.peak <= tier.capacity
            left = moved.evicted + moved.given_up
            assert moved.down - left == tier.used  # all that came has left, or is here
    for extent in device.records:
        parent = device.of.parents[extent]
        assert parent == ROOT or parent in device.records


class Checked(TieredServer):
    """Checks after every request."""

    def finish(self, ended: Running) -> None:
        super().finish(ended)
        check_tiers(self)


@pytest.mark.parametrize("write", WRITINGS)
@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-next"])
@given(
    asked=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), min_size=1, max_size=40),
    device=st.integers(30, 60),
    sizes=st.tuples(st.integers(5, 60), st.integers(0, 100)),
    gap=st.sampled_from([100.0, 0.05]),
    running=st.sampled_from(["in_pool", "beside"]),
)
@settings(max_examples=8, deadline=None)
def test_bytes_are_conserved_and_no_tier_holds_too_much(
    write: str,
    policy: str,
    model: str,
    asked: list[tuple[int, int]],
    device: int,
    sizes: tuple[int, int],
    gap: float,
    running: Literal["in_pool", "beside"],
) -> None:
    prompts = [[100 * talk + turn for turn in range(turns)] for talk, turns in asked]
    below = [host(sizes[0]), *([disk(sizes[1])] if sizes[1] else [])]
    trace = trace_of(prompts, gap, outputs=1 if gap > 1 else 30)
    server = server_of(
        trace, device, below, write, policy=policy, model=model, extent=4 * PAGE, running=running
    )
    server.__class__ = Checked
    outcome = server.run()
    assert outcome.policy == policy
    assert not server.running
    assert not server.device.tier.reserved
    assert not server.device.tier.pool.pinned
    assert not outcome.fallbacks
    assert ((outcome.device + outcome.loaded) < trace.input_tokens).all()
    assert sum(moved.hits for moved in outcome.tiers.values()) >= outcome.loaded.sum() - len(trace)


def outcome_of(write: str, *below: Below, prompts: list[list[int]], pages: int = 4) -> TieredOutcome:
    return server_of(trace_of(prompts), pages, [*below], write).run()


def hybrid(prompts: list[list[int]], states: int, pages: int, below: list[Below], write: str) -> TieredServer:
    """A server of a hybrid with room for so many states, and for so many pages besides."""
    server = server_of(trace_of(prompts), 1, below, write, model="qwen3-next")
    device = server.device.tier
    device.capacity = states * device.state_bytes + pages * PAGE * device.token_bytes
    server.__class__ = Checked
    return server


def test_a_state_is_loaded_alone_for_kv_that_the_device_has() -> None:
    """Two prompts share a beginning, whose state is evicted when others need room, but not its KV."""
    first, longer = [1, 2], [1, 2, 3, 4, 5, 6]
    server = hybrid([first, longer, first], 1, 10, [host(60_000)], "write_back")
    server.device._supersede = lambda records: None  # type: ignore[method-assign] # the first prompt's state is wanted
    outcome = server.run()
    moved = outcome.tiers["host"]
    assert outcome.device.tolist()[2] == 2 * PAGE
    assert moved.hits == 0
    assert moved.up == server.device.tier.state_bytes


def test_kv_after_the_last_state_goes_first() -> None:
    """Of two conversations the longer one has lost its state: all of its KV goes before the other's."""
    server = hybrid([[1, 2, 3, 4, 5, 6], [11, 12], [21, 22], [11, 12]], 2, 8, [], "write_back")
    outcome = server.run()
    assert outcome.device.tolist() == [0, 0, 0, 2 * PAGE]


def test_room_is_made_ahead_only_of_what_must_be_written() -> None:
    """By cost evicts ahead what is not below yet, and leaves the rest for as long as there is room."""
    prompts = [[100 * talk + page for page in range(10)] for talk in (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6)]
    server = server_of(trace_of(prompts), 40, [host(1000)], "by_cost")
    outcome = server.run()
    half = len(prompts) // 2
    assert outcome.loaded[half:].sum() > 0
    # The room that was made ahead of the first six is not made again: all their KV is below by now.
    free = server.device.tier.capacity - server.device.tier.used
    assert free < server.device.tier.capacity // 10
    assert server.lower.moved[0].down == 60 * PAGE * KV


def test_room_for_a_request_that_waits_is_made_while_others_are_computed() -> None:
    def waits(write: str, prompts: int) -> float:
        trace = trace_of([[10 * talk + at for at in range(6)] for talk in range(prompts)])
        trace.timestamps[2:] = trace.timestamps[1] + 1e-6
        server = server_of(trace, 8, [host(50, 10e9)], write, running="beside")
        server.run()
        assert server.lower.moved[0].down
        return server.outcome.write_wait_seconds

    # The second one comes to an idle server, and waits for what is written; the third one comes with it.
    assert waits("write_back", 3) > 1.5 * waits("write_back", 2) > 0.0
    assert waits("by_cost", 3) == waits("by_cost", 2) > 0.0


@pytest.mark.parametrize("objective", ["tokens", "flops"])
def test_a_device_above_a_tier_weighs_all_tokens_alike(objective: str) -> None:
    plugins = get_plugins()
    spec, deployment = plugins.resolve("llama-3-70b"), Deployment(page_size=PAGE)
    trace = trace_of(TWICE)
    simulator = Simulator(trace, spec, deployment)
    chosen = Settings(policy="hazard", policy_settings={"objective": objective})
    binding = Binding.of(spec, deployment, chosen, drops_slow=False)
    parts = extents(simulator.runs, PAGE, PAGE)
    for below in ([], [host(8)]):
        server = TieredServer(
            trace, parts, binding, 10**9, below, make_writing("by_cost"), simulator.prefill, ServingSettings()
        )
        tells = objective == "flops"
        device = server.device.tier.pool.order
        assert isinstance(device, Hazard)
        assert (device.learner.depths.count > 1) == (tells and not below)
        for tier in server.lower.tiers:  # what is evicted from there is computed again
            order = tier.pool.order
            assert isinstance(order, BelowHazard)
            assert order.upper is device
            assert (order.upper.depths.count > 1) == tells


def test_a_tier_ranks_by_the_order_that_is_in_force_on_the_device() -> None:
    server = server_of(trace_of([*TWICE, *TWICE]), 6, [host(8)], "by_cost", policy="hazard")
    assert isinstance(server.lower.tiers[0].pool.order, BelowHazard)
    pool = server.device.tier.pool
    pool._failed("insert", RuntimeError("broken"))  # as an order of a plugin may
    outcome = server.run()
    assert outcome.policy == server.lower.tiers[0].pool.policy == "lru"
    assert outcome.loaded.any()


TWICE = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4]]


def test_what_was_evicted_is_loaded() -> None:
    alone = outcome_of("write_back", prompts=TWICE)
    assert alone.loaded.tolist() == [0, 0, 0]
    found = outcome_of("write_back", host(8), prompts=TWICE)
    assert found.loaded.tolist() == [0, 0, 4 * PAGE]
    assert found.tiers["host"].up == 4 * PAGE * KV
    assert (
        found.tiers["host"].down == 8 * PAGE * KV
    )  # what made room for the second prompt, and for the third


def test_selective_writing_waits_for_the_second_use() -> None:
    assert outcome_of("write_through_selective", host(8), prompts=TWICE).tiers["host"].down == 0
    again = [TWICE[0], TWICE[0], TWICE[1], TWICE[0]]
    found = outcome_of("write_through_selective", host(8), prompts=again)
    assert found.loaded.tolist() == [0, 0, 0, 4 * PAGE]


def test_a_slow_link_is_not_used_by_cost() -> None:
    """Loading takes longer than to compute: the classic policies load all the same."""
    slow = host(8, speed=1e6)
    assert outcome_of("by_cost", slow, prompts=TWICE).tiers["host"].down == 0
    assert outcome_of("write_back", slow, prompts=TWICE).loaded.sum() > 0


def test_a_disk_takes_what_the_host_evicts() -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16], [1, 2, 3, 4]]
    found = outcome_of("write_back", host(4), disk(8), prompts=prompts)
    assert found.tiers["disk"].hits == 4 * PAGE
    assert found.tiers["host"].hits == 0


def test_a_host_gives_up_first_what_has_been_on_the_device_for_longest() -> None:
    doubles = Doubles()
    doubles.add(1, 0.0)
    doubles.add(2, 5.0)
    assert doubles.first(100.0) is None  # nothing has left the device: nobody knows what long is
    doubles.evicted(7, 10.0)
    assert doubles.first(10.0) is None
    assert doubles.first(10.5) == 1
    doubles.evicted(1, 10.0)
    assert doubles.first(14.0) is None
    assert doubles.first(16.0) == 2
    doubles.add(2, 16.0)  # loaded again
    doubles.remove(2)
    assert doubles.first(100.0) is None


@pytest.fixture(scope="module")
def agents() -> Simulator:
    trace = generate("agentic", workload_settings("agentic", {"requests": 150}))
    return Simulator(trace, get_plugins().resolve("deepseek-v3"), Deployment(page_size=PAGE, tp=8))


def test_no_policy_exceeds_the_offline_bound(agents: Simulator) -> None:
    tokens = agents.trace.distinct_pages(PAGE) * PAGE // 20
    below = TiersBelow(host=tokens * KV * 4, write="by_cost")
    bound = tiered_bound(agents, Settings(policy="lru"), tokens, below)
    assert bound is not None
    for policy in ("lru", "hazard"):
        chosen = Settings(policy=policy)
        outcome = agents.tiered(chosen, tokens, below, serving=ServingSettings(load="open", rate=1e-3))
        run = make_tiered_run(outcome, agents, chosen, "5%", tokens, below)
        assert 0.0 < run.device_hit_rate <= bound.device_hit_rate
        assert run.device_hit_rate + run.tier_hit_rate <= bound.hit_rate
        assert run.tier_hit_rate > 0.0


def test_a_faster_link_is_never_slower(agents: Simulator) -> None:
    tokens = agents.trace.distinct_pages(PAGE) * PAGE // 20
    means = [
        agents.tiered(
            Settings(policy="lru"),
            tokens,
            TiersBelow(host=tokens * KV * 4, link=link, write="write_through"),
            serving=ServingSettings(load="open"),
        ).ttft.mean()
        for link in (1e9, 10e9, 100e9)
    ]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1]


def test_equal_replays_are_equal(agents: Simulator) -> None:
    tokens = agents.trace.distinct_pages(PAGE) * PAGE // 20
    first, second = (
        agents.tiered(Settings(policy="hazard"), tokens, TiersBelow(host=10**9)) for _ in range(2)
    )
    assert (first.ttft == second.ttft).all()
    assert first.tiers == second.tiers


def test_impossible_tiers_are_refused(agents: Simulator) -> None:
    with pytest.raises(SettingsError, match="policy 'optimum' has no tiers"):
        agents.tiered(Settings(policy="optimum"), 1000, TiersBelow(host=10**9))
    with pytest.raises(ValueError, match="disk and disk_bandwidth go together"):
        TiersBelow(host=10**9, disk=10**9)
    windows = Simulator(agents.trace, get_plugins().resolve("gpt-oss-20b"), Deployment(page_size=PAGE))
    with pytest.raises(SettingsError, match="set window_layout to one-pool"):
        windows.tiered(Settings(policy="lru"), 1000, TiersBelow(host=10**9))


@pytest.mark.parametrize("write", WRITINGS)
def test_doubles_are_known_only_where_copies_are_given_up(write: str) -> None:
    assert (server_of(trace_of(TWICE), 6, [host(8)], write).lower.doubles is not None) == (write == "by_cost")
    assert server_of(trace_of(TWICE), 6, [], write).lower.doubles is None


def test_a_copy_of_what_stays_on_the_device_is_given_up_for_bytes_that_were_saved() -> None:
    hot, talks = [1, 2, 3], [[10 * talk, 10 * talk + 1] for talk in range(10, 14)]
    prompts = [hot, [50, 51, 52, 53], [60, 61, 62, 63]]  # evicts the first, which is then loaded
    for talk in talks * 5:
        prompts += [hot, talk]
    found = []
    for saved in (0, PAGE * KV, 100 * PAGE * KV):
        server = server_of(trace_of(prompts), 6, [host(8)], "by_cost")
        assert server.lower.doubles is not None
        server.lower.doubles.saved = saved
        outcome = server.run()
        check_tiers(server)
        assert outcome.tiers["host"].given_up <= saved / 2
        last = slice(-2 * len(talks), None)
        found.append(int((outcome.device + outcome.loaded)[last].sum()) // PAGE)
    # Of four talks in turns none is found: the last three fit, the copy of the hot prompt aside.
    assert found == [12, 12, 12 + 3 * 2]


def test_a_host_that_gives_up_copies_moves_fewer_bytes_than_write_back_with_lru() -> None:
    trace = generate("chat", workload_settings("chat", {"requests": 1200, "seed": 1}))
    simulator = Simulator(trace, get_plugins().resolve("deepseek-v3"), Deployment(page_size=PAGE, tp=8))
    tokens = trace.distinct_pages(PAGE) * PAGE
    given_up, moved = [], []
    for policy, write in (("hazard", "by_cost"), ("lru", "write_back")):
        below = TiersBelow(host=tokens * KV * 15 // 100, write=write)
        serving = ServingSettings(rate=0.8, running="beside")
        outcome = simulator.tiered(Settings(policy=policy), tokens * 3 // 100, below, serving=serving)
        given_up.append(outcome.tiers["host"].given_up)
        moved.append(outcome.tiers["host"].down + outcome.tiers["host"].up)
    assert given_up[0] > given_up[1] == 0
    assert moved[0] < moved[1]
