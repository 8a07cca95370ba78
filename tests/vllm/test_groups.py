"""Several KV cache groups in vLLM's one pool: victims across groups, on vLLM's real KV cache manager."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.errors import PluginError
from costcache.model import ModelSpec
from costcache.plugins import get_plugins
from costcache.policies.hazard import HazardStates
from costcache.settings import Settings
from costcache.vllm.ends import EndRuns, WideRuns
from costcache.vllm.groups import Groups
from costcache.vllm.registration import why_not
from tests.vllm.ends import SIZE, chunked, full, mixed, states, window
from tests.vllm.fuzz import run
from tests.vllm.serving import Server, bind
from tests.vllm.test_guard import EVENTS, HARMLESS, LIES, fail, hostile, is_taken_over, raising

MODELS: dict[str, Callable[..., Any]] = {
    "one window": lambda **more: mixed(300, window(40), full(), **more),
    "five windows": lambda **more: mixed(600, full(), *[window(64)] * 5, **more),
    "states": lambda **more: mixed(300, full(), states(), states(), states(), **more),
    "windows and states": lambda **more: mixed(500, full(), window(64), states(), **more),
    "two of full attention": lambda **more: mixed(300, full(), full(32), **more),
    "three sizes": lambda **more: mixed(500, full(16), full(32), window(64, 32), window(48, 16), **more),
    "chunks": lambda **more: mixed(400, full(), chunked(96), **more),
    "long chunks": lambda **more: mixed(500, full(), chunked(256), **more),
    "a drafter": lambda **more: mixed(400, full(), window(64), use_eagle=True, **more),
}
STEPS = int(os.environ.get("FUZZ_STEPS", "400"))


def of(preset: str, policy: str) -> Binding:
    """A policy for a preset, as Server wants it."""
    return Binding.of(ModelSpec.preset(preset), Deployment(page_size=SIZE), Settings(policy=policy))


def served(preset: str) -> list[str]:
    return get_plugins().serving(ModelSpec.preset(preset))


# -- random operations ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "hazard", "s3fifo"])
@pytest.mark.parametrize("retention", [0, None], ids=["sparse", "dense"])
@pytest.mark.parametrize("model", MODELS)
def test_random_operations_lose_no_block(model: str, retention: int | None, policy: str) -> None:
    """With blocks that lose their contents, connectors that hold blocks, and resets; more with FUZZ_STEPS."""
    server = Server(MODELS[model](retention=retention), policy, defer=policy == "hazard")
    run(server, STEPS, evictions=True)
    runs = server.pool.costcache.runs
    assert isinstance(runs, WideRuns)  # nothing of ours failed
    assert isinstance(runs, EndRuns) == (model != "two of full attention")
    assert runs.pool.fallbacks == 0
    assert runs.pool.counters.evictions > 10
    assert server.hits > 1000


@pytest.mark.parametrize("interval", [64, 128])
def test_windows_that_are_kept_at_intervals_are_ends(interval: int) -> None:
    server = Server(mixed(400, full(), window(64), retention=interval), "lru")
    server.serve("one", list(range(1000)))
    ends = [run.end for run in server.pool.costcache.runs.pool.live.values() if run.state is not None]
    assert set(range(interval, 993, interval)) <= set(ends)
    run(server, 200, evictions=True)
    assert server.pool.costcache.runs.pool.fallbacks == 0


@pytest.mark.parametrize("policy", served("gemma-3-27b"))
def test_every_policy_serves_a_model_with_windows(policy: str) -> None:
    server = Server(mixed(400, full(), window(64), window(64)), of("gemma-3-27b", policy))
    run(server, 300, seed=3, evictions=True)
    pool = server.pool.costcache.runs.pool
    assert (pool.policy, pool.fallbacks) == (policy, 0)
    assert pool.counters.evictions > 10


@pytest.mark.parametrize("policy", served("qwen3-next"))
def test_every_policy_serves_a_model_with_states(policy: str) -> None:
    server = Server(mixed(300, full(), states(), states(), states()), of("qwen3-next", policy))
    run(server, 300, seed=3, evictions=True)
    pool = server.pool.costcache.runs.pool
    assert (pool.policy, pool.fallbacks) == (policy, 0)
    assert pool.counters.evictions > 10


@pytest.mark.parametrize("policy", served("llama-4-scout"))
@pytest.mark.parametrize("tokens", [8, 256, 8192])
def test_every_policy_serves_a_model_with_chunks(tokens: int, policy: str) -> None:
    """Of any length: shorter than a block, so that ends have no blocks; of powers of two, as Llama-4's."""
    server = Server(mixed(200, full(), chunked(tokens)), of("llama-4-scout", policy))
    run(server, 200, seed=3, evictions=True)
    pool = server.pool.costcache.runs.pool
    assert (pool.policy, pool.fallbacks) == (policy, 0)
    assert pool.counters.evictions > 10


def test_an_end_has_the_bytes_of_its_blocks() -> None:
    for spec, blocks in (
        (window(64), 4),
        (states(), 1),
        (chunked(8), 0),
        (chunked(16), 0),
        (chunked(32), 0.5),
        (chunked(256), 7.5),
        (chunked(8192), 255.5),
    ):
        assert Groups(mixed(100, full(), spec)).end_blocks == blocks


def test_the_policy_that_is_named_for_windows_in_a_pool_of_their_own_is_not_used() -> None:
    binding = of("gemma-3-27b", "hazard")
    assert binding.spec.windows == "s3fifo"
    server = Server(mixed(400, full(), window(64)), binding)
    assert isinstance(server.pool.costcache.runs.pool.order, HazardStates)


def test_the_same_policies_are_refused_as_everywhere() -> None:
    for preset in ("qwen3-next", "gemma-3-27b"):
        for policy in set(get_plugins().policies()) - set(served(preset)):
            with pytest.raises(PluginError, match=policy):
                of(preset, policy)
    assert "s3fifo" not in served("qwen3-next")
    assert "marconi" not in served("gemma-3-27b")


# -- which blocks go -----------------------------------------------------------------------


class Oracle:
    """Says, by vLLM's own look-up, whether any prompt would find less without a block."""

    def __init__(self, server: Server, prompts: list[list[int]]) -> None:
        self.server = server
        self.requests = [server.request(f"ask {n}", [*prompt, 0]) for n, prompt in enumerate(prompts)]
        self.map = server.pool.cached_block_hash_to_block

    def found(self, *without: Any) -> list[int]:
        """What each prompt finds, without these blocks."""
        cache = self.map._cache
        self.map._cache = {key: dict(have) if isinstance(have, dict) else have for key, have in cache.items()}
        for block in without:
            self.map.pop(block.block_hash, block.block_id)
        tokens = [self.server.manager.get_computed_blocks(request)[1] for request in self.requests]
        self.map._cache = cache
        return tokens

    def worthless(self, block: Any, *without: Any) -> bool:
        return self.found(block, *without) == self.found(*without)

    def first(self) -> Any:
        """The first free block in vLLM's order that any prompt would miss; None if there is none."""
        free: Iterator[Any] = iter(self.server.pool.free_block_queue.get_all_free_blocks())
        return next((b for b in free if b.block_hash is not None and not self.worthless(b)), None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["one window", "five windows", "states", "windows and states", "chunks"])
def test_lru_evicts_what_vllm_would_but_worthless_blocks_first(model: str, seed: int) -> None:
    """A victim is worthless, or vLLM's next one that is not, or of no use without that one."""
    server = Server(MODELS[model](), "lru")
    rng = random.Random(seed)
    heads = [[rng.randrange(1000) for _ in range(16 * rng.randrange(2, 12))] for _ in range(3)]
    prompts: list[list[int]] = []
    for number in range(14):
        known = rng.choice(heads + prompts[-4:])
        prompts.append(known + [rng.randrange(1000) for _ in range(rng.randrange(1, 80))])
        server.serve(str(number), prompts[-1], [5] * rng.randrange(1, 40), chunk=rng.choice((None, 64)))
    oracle, useful = Oracle(server, prompts), 0
    while (first := oracle.first()) is not None:
        (victim,) = server.pool.get_new_blocks(0) or [
            next(server.pool.free_block_queue.iter_blocks_after(None))
        ]
        worthless = victim.block_hash is None or oracle.worthless(victim)
        if not worthless and victim is not first:
            assert oracle.worthless(victim, first) or oracle.worthless(first, victim)
        useful += not worthless
        (taken,) = server.pool.get_new_blocks(1)
        assert taken.block_hash is None
    assert useful > 3
    assert server.pool.costcache.runs.pool.fallbacks == 0


def test_what_a_lost_partner_leaves_goes_first() -> None:
    """A state that is gone makes the KV before it worthless, and that goes before a prompt that is older."""
    server = Server(mixed(100, full(), states()), "lru")
    server.serve("older", [1] * 16 * 20 + [0])
    server.serve("newer", [2] * 16 * 20 + [0])
    runs = server.pool.costcache.runs
    (newer,) = (run for run in runs.pool.live.values() if run.state is not None and run.recency > 25)
    server.manager.evict_blocks({newer.state.blocks[0].block_id})
    server.check()
    server.serve("more", [3] * 16 * 70 + [0])
    server.check()
    assert server.serve("older again", [1] * 16 * 20 + [5]) == 16 * 20


def test_windows_within_a_prompt_go_first() -> None:
    """Where vLLM keeps windows all along, those at the ends of prompts are kept."""
    found = {}
    for policy in (None, "lru"):
        server = Server(mixed(200, full(), window(64), retention=None), policy)
        server.serve("first", [1] * 16 * 40 + [0])
        server.serve("second", [2] * 16 * 40 + [0], chunk=64)
        server.serve("third", [3] * 16 * 40 + [0], chunk=64)
        found[policy] = server.serve("first again", [1] * 16 * 40 + [5], chunk=64)
    assert found == {None: 0, "lru": 16 * 40}


def test_the_order_that_a_reader_sees_is_the_policys() -> None:
    server = Server(mixed(200, full(), window(64), states(), retention=None), "lru")
    for number in range(3):
        server.serve(str(number), [number] * 16 * 20 + [0], chunk=64)
    queue = server.pool.free_block_queue
    order = [block.block_id for block in queue.iter_blocks_after(None)]
    assert len(order) == len(set(order))
    for count in (1, 7, 30, 40):
        assert {block.block_id for block in queue.popleft_n(count)} == set(order[:count])
        order = order[count:]


def test_blocks_that_were_unpinned_go_last() -> None:
    server = Server(mixed(100, full(), window(64)), "mru")
    request = server.request("read", [1] * 16 * 10)
    server.start(request)
    read = list(server.manager.coordinator.single_type_managers[1].req_to_blocks["read"][6:9])
    server.pool.touch(read)
    server.finish(request)
    reused: list[int] = []
    server.pool.unpin_blocks(read, lambda block: reused.append(block.block_id))
    server.serve("more", [2] * 16 * 30)
    server.serve("too much", [3] * 16 * 45)
    assert reused == []
    server.check()
    server.pool.get_new_blocks(100)
    assert sorted(reused) == sorted(block.block_id for block in read)
    server.check()


# -- when a policy fails -------------------------------------------------------------------


@pytest.mark.parametrize("model", ["one window", "states"])
@pytest.mark.parametrize("event", EVENTS)
def test_an_order_that_raises(event: str, model: str) -> None:
    server = Server(MODELS[model](), bind("hostile", plugins=hostile(event, raising)))
    run(server, STEPS)
    pool = server.pool.costcache.runs.pool
    assert server.pool.costcache.runs is not None
    assert pool.fallbacks <= 1
    assert pool.counters.short == 0


@pytest.mark.parametrize("lie", [*LIES, *HARMLESS])
def test_an_order_that_lies(lie: str) -> None:
    server = Server(
        MODELS["windows and states"](),
        bind("hostile", plugins=hostile("next_victim", (LIES | HARMLESS)[lie])),
    )
    run(server, STEPS)
    assert server.pool.costcache.runs is not None
    assert server.pool.costcache.runs.pool.counters.short == 0


@pytest.mark.parametrize(
    "method", ["victims", "take", "advance", "release", "mark", "touched", "freed", "lose", "_attach"]
)
def test_vllms_own_list_takes_over_from_our_own_mistakes(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail(EndRuns, method, 3 if method == "lose" else 20, monkeypatch)
    server = Server(MODELS["windows and states"](), "hazard")
    is_taken_over(server, 700, caplog)
    for number in range(30):  # further victims are those at the head of vLLM's list
        order = server.free_list()
        (block,) = server.pool.get_new_blocks(1)
        assert block.block_id == order[0], number


# -- which models --------------------------------------------------------------------------


def test_why_a_model_is_not_served() -> None:
    for manager, reason in (
        (mixed(100, window(64), window(32)), "no group has full attention"),
        (mixed(100, window(64), states()), "no group has full attention"),
        (mixed(100, full(), states(), hash_block_size=8), "prefixes are found in parts of a block"),
        (mixed(100, full(), window(64)), None),
    ):
        said = why_not(manager)
        assert said is None if reason is None else said is not None and reason in said
