"""Sliding windows that are cached apart: in a pool of their own, or in pages that they share."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costcache import ModelSpec, PolicySpec, RadixCache, hookimpl
from costcache.binding import Binding
from costcache.cost import pool_sizes
from costcache.deployment import Deployment, WindowLayout
from costcache.errors import PluginError, SettingsError
from costcache.plugins import PluginManager, get_plugins
from costcache.policies import BUILTIN
from costcache.policies.keyed import LRU
from costcache.radix.windows import WindowTree
from costcache.settings import Settings
from costcache.sim.engine import Simulator
from costcache.sim.requests import RequestInfos
from costcache.sim.settings import ServingSettings
from costcache.sim.trace import Trace
from costcache.sim.workloads import generate, workload_settings
from tests.unit.commands import answer, costcache_

MODEL = ModelSpec.preset("gpt-oss-20b")
TOKEN = get_plugins().match(MODEL).cost(Deployment()).token
PAGE = 16
LAYOUTS: tuple[WindowLayout, ...] = ("own-pool", "shared-pages", "one-pool")


@pytest.fixture(scope="module")
def chat() -> Trace:
    return generate("chat", workload_settings("chat", {"requests": 250, "seed": 5}))


def simulator(trace: Trace, layout: WindowLayout = "own-pool", **deployment: Any) -> Simulator:
    return Simulator(trace, MODEL, Deployment(page_size=PAGE, window_layout=layout, **deployment))


# -- the cache -----------------------------------------------------------------------------------


def cache(tokens: int = 2000, windows: int = 1000, **settings: Any) -> RadixCache:
    return RadixCache(MODEL, tokens, 1, "lru", window_pool_size=windows, **settings)


def test_a_prefix_is_reused_up_to_the_last_whole_window() -> None:
    made = cache()
    first = list(range(500))
    made.insert(first)
    assert made.match_prefix(first).matched_len == 500
    assert made.match_prefix(first[:499]).matched_len == 499  # the page before it has its window too
    assert made.match_prefix(first[:498]).matched_len == 0
    assert made.match_prefix(first[:128]).matched_len == 0, "its KV is cached, but no window of it"
    branch = [*first[:300], *range(1000, 1100)]
    assert made.match_prefix(branch, "it").matched_len == 0
    done = made.insert(branch, request="it")
    assert (done.matched_len, done.inserted_len) == (300, 100)
    assert made.match_prefix(first[:300]).matched_len == 300, "where prompts branched a window was kept"
    assert made.match_prefix([*first[:300], 7]).matched_len == 300


def test_evicted_windows_leave_full_kv_and_a_leaf_goes_whole() -> None:
    made = cache()
    made.insert(range(300))
    made.insert(range(600))
    freed: list[int] = []
    made.on_windows_freed(lambda slots: freed.extend(slots.tolist()))
    eviction = made.evict_windows(100)  # the window before 300, less recent than the one before 600
    assert eviction.pool == "swa"
    assert eviction.freed == 129
    assert eviction.slots.size == 0
    assert len(freed) == 129
    assert made.cached == 600
    assert made.match_prefix(range(300)).matched_len == 0
    assert made.match_prefix(range(600)).matched_len == 600, "full KV of all of it is still there"
    eviction = made.evict_windows(1000)
    assert eviction.freed == 129
    assert eviction.slots.size == 128, "the leaf went, since nothing can resume from it"
    assert made.cached == 472
    assert made.evict(10**4).freed == 472
    assert sorted(freed) == sorted(set(freed))


def test_full_eviction_of_a_leaf_frees_its_window() -> None:
    made = cache(trim="off")
    made.insert(range(600))
    pool = made.window_pool
    assert pool is not None
    assert pool.evictable == 129
    assert made.evict(1).freed == 128
    pool = made.window_pool
    assert pool is not None
    assert pool.evictable == 1


def test_locks_protect_the_window_and_running_requests_reserve_room() -> None:
    made = cache(tokens=1000, windows=300)
    done = made.insert(range(400))
    made.lock(done.node)
    assert made.evict_windows(10**4).freed == 1, "all but the last window"
    assert not made.reserve_windows(173)
    assert made.reserve_windows(172)
    made.insert(range(1000, 1200))
    assert made.match_prefix(range(1000, 1200)).matched_len == 0, "no room for its window"
    made.release_windows(172)
    made.insert(range(1000, 1200))
    assert made.match_prefix(range(1000, 1200)).matched_len == 200
    made.unlock(done.node)
    with pytest.raises(ValueError, match="tokens is 1: 0 are reserved in the pool of windows"):
        made.release_windows(1)
    with pytest.raises(ValueError, match="the cache has one pool: give window_pool_size"):
        RadixCache(MODEL, 1000).evict_windows(1)
    assert RadixCache(MODEL, 1000).window_pool is None


def test_a_window_that_is_computed_again_is_taken_over() -> None:
    """Its full KV is a duplicate: the caller's slots name the window until the insert, then the cache's."""
    made = cache(trim="off")
    mine = np.arange(600)
    made.insert(range(600), mine)
    made.insert([*range(400), *range(1000, 1200)], np.arange(700, 1300), window_from=450)
    assert made.match_prefix(range(400)).matched_len == 0, "the request had no window KV of it any more"
    again = np.arange(1300, 1700)
    done = made.insert(range(400), again)
    assert done.matched_len == 400
    assert done.windows.tolist() == [again[271:].tolist(), mine[271:400].tolist()]
    assert made.match_prefix(range(400)).matched_len == 400


def test_sizes_that_have_no_room_for_a_window_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"window_pool_size is 100: give room for a window of 128 tokens"):
        cache(windows=100)
    with pytest.raises(SettingsError, match=r"'llama-3-8b' has no sliding windows to cache apart"):
        RadixCache("llama-3-8b", 100, window_pool_size=50)
    with pytest.raises(TypeError, match="window_pool_size is 'x'"):
        RadixCache(MODEL, 100, window_pool_size="x")  # type: ignore[arg-type] # what is tested


def test_a_policy_may_leave_windows_to_another_one() -> None:
    def named(policy: str, windows: int | None) -> list[str]:
        binding = Binding.of(MODEL, Deployment(page_size=PAGE), Settings(policy=policy))
        return [each.policy for each in WindowTree(binding, 10**4, window_capacity=windows).pools.values()]

    assert named("hazard", 10**4) == ["hazard", "s3fifo"]
    assert named("s3fifo", 10**4) == ["s3fifo", "s3fifo"]
    assert named("hazard", None) == ["hazard"], "one order ranks both where they share one pool"


def test_a_policy_for_windows_that_does_not_exist_is_an_error_that_names_it() -> None:
    class Mine:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            return {"mine": PolicySpec(lambda cost, pools, settings: LRU(), "for a test", windows="nosuch")}

    plugins = PluginManager()
    plugins.register(Mine(), "own", "tests:own")
    with pytest.raises(PluginError, match="'nosuch'"):
        RadixCache(MODEL, 1000, 1, "mine", window_pool_size=500, plugins=plugins)
    RadixCache(MODEL, 1000, 1, "mine", plugins=plugins).insert(range(100))


# -- the simulator -------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.1, 0.8])
@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "s3fifo", "hazard"])
def test_the_simulator_and_the_cache_agree_token_for_token(chat: Trace, policy: str, ratio: float) -> None:
    made = simulator(chat, swa_full_tokens_ratio=ratio)
    capacity = 30_000 // PAGE * PAGE
    outcome = made.outcome(Settings(policy=policy), capacity)
    windows = made.window_capacity(capacity)
    assert windows is not None
    served = RadixCache(
        MODEL,
        capacity,
        PAGE,
        policy,
        window_pool_size=windows,
        deployment=Deployment(page_size=PAGE),
    )
    infos = RequestInfos(chat, "server")
    for number, key in enumerate(made.keys):
        pages = np.frombuffer(bytes(key), np.int64)
        tokens = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        served.clock.advance(chat.timestamps[number])
        found = served.match_prefix(tokens, number)
        assert found.matched_len == outcome.matched[number]
        computed = tokens.size - found.matched_len
        if computed:
            served.lock(found.node)
            slots = served.allocate(computed)
            done = served.insert(tokens, np.concatenate((found.slots, slots)), number)
            served.unlock(found.node)
            served.release(done.duplicates[np.isin(done.duplicates, slots)])
        served.finish(number, infos.of(number, found.matched_len))
    assert outcome.evictions > 50
    assert 0 < outcome.matched.sum() < chat.input_tokens.sum()


def test_bytes_are_divided_as_the_layout_says(chat: Trace) -> None:
    kv, swa = TOKEN.kv_bytes, TOKEN.swa_bytes
    assert simulator(chat).token_bytes == kv + Fraction(8, 10) * swa
    assert simulator(chat, swa_full_tokens_ratio=0.1).token_bytes == kv + Fraction(1, 10) * swa
    assert simulator(chat, "shared-pages").token_bytes == kv + swa
    assert simulator(chat, "one-pool").token_bytes == kv + swa
    full, windows = pool_sizes(10**9, TOKEN, 0.8, PAGE)
    assert full * kv + windows * swa <= 10**9 < (full + 2 * PAGE) * kv + (windows + 2 * PAGE) * swa
    assert simulator(chat).window_capacity(full) == windows


def test_one_pool_is_what_a_model_without_windows_has(chat: Trace) -> None:
    llama = Simulator(chat, ModelSpec.preset("llama-3-8b"), Deployment(page_size=PAGE))
    windows = simulator(chat, "one-pool")
    assert llama.windows == ""
    for policy in ("lru", "hazard", "optimum"):
        one, other = (each.outcome(Settings(policy=policy), 20_000) for each in (windows, llama))
        assert one.matched.tolist() == other.matched.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bounds_hold_and_an_unlimited_pool_evicts_nothing(chat: Trace, layout: WindowLayout) -> None:
    made = simulator(chat, layout)
    bound = made.outcome(Settings(policy="infinite"), None).matched.sum()
    unlimited = made.outcome(Settings(policy="lru"), None)
    assert unlimited.evictions == 0
    assert 0 < unlimited.matched.sum() <= bound
    limit = made.outcome(Settings(policy="optimum"), 20_000).matched.sum()
    for policy in ("lru", "s3fifo", "hazard"):
        assert 0 < made.outcome(Settings(policy=policy), 20_000).matched.sum() <= limit


@pytest.mark.parametrize("layout", ["own-pool", "shared-pages"])
@pytest.mark.parametrize("policy", BUILTIN)
def test_every_policy_serves_both_layouts(chat: Trace, layout: WindowLayout, policy: str) -> None:
    made = simulator(chat, layout, window_chunk=512)
    settings = Settings(policy=policy)
    plain = made.outcome(settings, 12_000)
    assert plain.evictions > 0
    assert not plain.fallbacks
    served = made.outcome(settings, 12_000, serving=ServingSettings(concurrency=4))
    assert not served.fallbacks
    assert served.matched.sum() > 0


@pytest.mark.parametrize("layout", ["own-pool", "shared-pages"])
def test_a_server_gives_back_all_that_it_reserves(chat: Trace, layout: WindowLayout) -> None:
    from costcache.sim.windowed import WindowServer

    made = simulator(chat, layout, window_chunk=256)
    tree = made._empty_tree(Settings(policy="lru"), 15_000)
    assert isinstance(tree, WindowTree)
    server = WindowServer(chat, made.keys, tree, made.prefill, ServingSettings(concurrency=6), False, None)
    server.run()
    assert server.owned == server.owned_windows == 0
    assert not tree._locked
    assert not tree.pool.pinned
    assert not tree.windows.pinned
    for pool in tree.pools.values():
        assert pool.reserved == 0
        state = pool.state()
        assert pool.evict(state.evictable).freed == state.evictable
    assert tree.window_tokens == 0


@pytest.mark.parametrize("layout", ["own-pool", "shared-pages"])
def test_headroom_is_kept_in_every_pool(chat: Trace, layout: WindowLayout) -> None:
    made = simulator(chat, layout)
    outcome = made.outcome(Settings(policy="lru", headroom=0.2), 12_000, always_free=True)
    assert outcome.evictions > 0
    less = made.outcome(Settings(policy="lru"), 12_000)
    assert outcome.matched.sum() < less.matched.sum()


def test_models_that_have_no_two_pools_are_replayed_with_one(chat: Trace) -> None:
    slides = ModelSpec.from_config(
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "sliding_window": 256,
        }
    )
    made = Simulator(chat, slides, Deployment(page_size=PAGE))
    assert made.window_layout == "one-pool"
    assert made.windows == "windows of 256 tokens in one pool of all layers, since every layer slides"


# -- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    answer("workload", "chat", "--requests", "60", "--out", out)
    return out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            (),
            "assumed: windows of 128 tokens in a pool of their own, 0.8 tokens for each token of",
        ),
        (
            ("--swa-full-tokens-ratio", "0.1"),
            "assumed: windows of 128 tokens in a pool of their own, 0.1 tokens for each token of",
        ),
        (
            ("--window-layout", "shared-pages"),
            "assumed: windows of 128 tokens in pages that they share with full KV",
        ),
        (
            ("--window-layout", "one-pool"),
            "assumed: windows of 128 tokens in one pool of all layers, which cache every token",
        ),
    ],
)
def test_simulate_says_what_it_assumed(path: Path, options: tuple[str, ...], said: str) -> None:
    asked: tuple[str | Path, ...] = ("simulate", path, "--model", "gpt-oss-20b", "--capacity", "1GiB")
    asked += options
    text = answer(*asked)
    assert said in text
    assert "1GiB caches" in text
    facts = json.loads(answer(*asked, "--json"))["windows"]
    (pool,) = facts["pools"]
    assert [fit["sequence"] for fit in pool["fits"]] == [8192, 32768, 131072]
    run = json.loads(answer(*asked, "--json"))["runs"][0]
    if facts["layout"] == "own-pool":
        size = run["capacity_tokens"] * TOKEN.kv_bytes + pool["window_tokens"] * TOKEN.swa_bytes
        assert size <= 2**30 < size + 2 * PAGE * (TOKEN.kv_bytes + TOKEN.swa_bytes)
    if facts["layout"] == "shared-pages":
        assert pool["fits"][2]["tokens"] > 1.9 * pool["fits"][2]["one_pool_tokens"]
    if facts["layout"] == "one-pool":
        assert pool["fits"][0]["tokens"] == pool["fits"][0]["one_pool_tokens"] == run["capacity_tokens"]


def test_wrong_options_are_refused_by_name(path: Path) -> None:
    asked = ("simulate", path, "--model", "gpt-oss-20b")
    assert "swa_full_tokens_ratio is 1.5" in costcache_(*asked, "--swa-full-tokens-ratio", "1.5").output
    assert "shared-pages" in costcache_(*asked, "--window-layout", "two").output
    short = ("--capacity", "17tok", "--swa-full-tokens-ratio", "0.5")
    assert "less than a page of 16: give more memory" in costcache_(*asked, *short).output


def test_a_pool_without_room_for_one_window_is_replayed_with_a_warning(path: Path) -> None:
    text = answer("simulate", path, "--model", "gpt-oss-20b", "--capacity", "100tok", "--policy", "lru")
    assert (
        "the pool of windows of 100tok has room for 64 tokens, no more than a window of 128 and a page"
        in text
    )


def test_explain_counts_nodes_in_one_pool(path: Path) -> None:
    assert "hazard" in answer("explain", path, "--model", "gpt-oss-20b", "--policy", "hazard")


def test_the_report_says_it_and_gives_sglang_the_ratio(path: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    asked = ("simulate", path, "--model", "gpt-oss-20b", "--capacity", "1GiB", "--policy", "lru,hazard")
    answer(*asked, "--swa-full-tokens-ratio", "0.25", "--report", page)
    text = page.read_text()
    assert "windows of 128 tokens in a pool of their own, 0.25 tokens for each token of the full pool" in text
    assert "tokens of sequences of 131,072" in text
    assert "--swa-full-tokens-ratio 0.25" in text
    answer(*asked, "--report", page)
    assert "--swa-full-tokens-ratio" not in page.read_text()
