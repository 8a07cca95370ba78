"""Capacity analysis: the arithmetic, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from costcache import hookimpl
from costcache.deployment import Deployment
from costcache.errors import PluginError, SettingsError
from costcache.model import ModelSpec
from costcache.planning import Plan, plan
from costcache.plugins import PluginManager, get_plugins
from costcache.policies import PolicySpec
from costcache.policies.keyed import LRU
from costcache.settings import PoolSettings, Settings

GIB = 2**30
STATES_ONLY = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "vocab_size": 50280,
    "state_size": 16,
    "intermediate_size": 1536,
    "conv_kernel": 4,
    "time_step_rank": 48,
}
SLIDING = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "sliding_window": 4096,
}


def analyse(
    model: str | dict[str, Any], memory: int = 80 * GIB, weights: int = 40 * GIB, **deployment: Any
) -> Plan:
    settings = Settings(**deployment.pop("settings", {}))
    spec = ModelSpec.preset(model) if isinstance(model, str) else ModelSpec.from_config(model)
    return plan(get_plugins().match(spec), Deployment(**deployment), settings, memory=memory, weights=weights)


def shares(result: Plan) -> dict[str, float]:
    return {target.label: target.share for target in result.free_targets}


def test_deepseek_v3_in_40_gib() -> None:
    result = analyse("deepseek-v3")
    # 61 layers of (512 + 64) values, and of 128 heads of 128 + 64 + 128, in two bytes each.
    assert result.tokens == 40 * GIB // (61 * 576 * 2) == 611_191
    assert result.decompressed_tokens == 40 * GIB // (61 * 40_960 * 2) == 8_594
    assert result.cost.compression_ratio == pytest.approx(40_960 / 576)
    assert (result.states, result.state_tokens) == (None, None)


def test_the_free_target_with_and_without_its_floor() -> None:
    found = shares(analyse("deepseek-v3"))
    assert found == {
        "as set": 0.0,
        "headroom 20 %, floor 0.05": 0.05,
        "headroom 20 %, floor 0.0": pytest.approx(0.2 / (40_960 / 576)),
    }
    as_set = analyse("deepseek-v3", settings={"headroom": 0.1, "architecture": {"floor": 0.02}})
    assert as_set.free_targets[0].share == 0.02
    assert as_set.free_targets[0].tokens == int(0.02 * 611_191)
    # The user's floor does not leak into the two examples.
    assert shares(as_set) | {"as set": 0.0} == found
    assert shares(analyse("llama-3-8b")) == {"as set": 0.0, "headroom 20 %": 0.2}


def test_free_targets_are_of_the_examples_that_a_settings_model_gives() -> None:
    class Own(BaseModel):
        least: float = Field(0.0, examples=[0.1, 0.2])
        scale: int = Field(1, examples=[2])
        other: float = 0.0

    class House:
        @hookimpl
        def match_model(self) -> int | None:
            return 99

        @hookimpl
        def free_target(self, settings: PoolSettings) -> float:
            own = settings.architecture
            assert isinstance(own, Own)
            return max(own.least, settings.headroom / own.scale) + own.other

        @hookimpl
        def settings_model(self) -> type[BaseModel]:
            return Own

    manager = PluginManager()
    manager.register(House(), "house")
    result = plan(
        manager.match(ModelSpec.preset("llama-3-8b")),
        Deployment(),
        Settings(architecture={"least": 0.4, "other": 0.5}),
        memory=GIB,
        weights=0,
    )
    assert shares(result) == {
        "as set": 0.9,
        "headroom 20 %, least 0.1, scale 1": 0.7,
        "headroom 20 %, least 0.2, scale 1": 0.7,
        "headroom 20 %, least 0.0, scale 2": 0.6,
        "headroom 20 %, least 0.0, scale 1": 0.7,
    }
    assert result.free_targets[0].architecture == {"least": 0.4, "scale": 1, "other": 0.5}
    assert analyse("llama-3-8b").free_targets[0].architecture == {}


def test_latents_are_not_divided_over_ranks_and_heads_are() -> None:
    alone, eight = analyse("deepseek-v3"), analyse("deepseek-v3", tp=8)
    assert eight.tokens == alone.tokens
    # Decompressed, each rank would keep its 16 heads only.
    assert eight.decompressed_tokens == 40 * GIB // (61 * 40_960 * 2 // 8)
    assert analyse("llama-3-70b", tp=8).token_bytes == analyse("llama-3-70b").token_bytes // 8
    # Never less than one head a rank; with DP attention each replica keeps all heads.
    assert analyse("llama-3-70b", tp=16).token_bytes == analyse("llama-3-70b", tp=8).token_bytes
    replicas = analyse("llama-3-70b", tp=8, dp_attention=8)
    assert replicas.token_bytes == analyse("llama-3-70b").token_bytes


def test_fp8_doubles_and_pipeline_stages_divide() -> None:
    bf16 = analyse("llama-3-8b")
    assert analyse("llama-3-8b", kv_dtype="fp8_e4m3").token_bytes * 2 == bf16.token_bytes
    # 61 layers over 2 stages: the one with 31 decides.
    assert analyse("deepseek-v3", pp=2).token_bytes == 31 * 576 * 2


@given(
    memory=st.integers(1, 200 * GIB),
    weights=st.integers(0, 200 * GIB),
    page=st.sampled_from([1, 16, 64, 512]),
    model=st.sampled_from(["deepseek-v3", "llama-3-8b", "qwen3-next", "kimi-linear"]),
)
def test_the_budget_is_never_passed_and_a_page_more_would_not_fit(
    memory: int, weights: int, page: int, model: str
) -> None:
    if memory <= weights:
        with pytest.raises(SettingsError, match=f"memory is {memory:,} bytes and weights {weights:,}"):
            analyse(model, memory, weights, page_size=page)
        return
    result = analyse(model, memory, weights, page_size=page)
    assert result.tokens is not None
    assert result.tokens % page == 0
    budget = memory - weights
    assert result.tokens * result.token_bytes <= budget < (result.tokens + page) * result.token_bytes
    if result.states is not None:
        assert result.states * result.cost.state_bytes <= budget
    for target in result.free_targets:
        assert 0 <= target.tokens <= result.tokens


def test_hybrids_have_states_and_tokens() -> None:
    result = analyse("qwen3-next")
    assert result.plugin == "mamba_seglen"
    assert (result.token_bytes, result.cost.state_bytes) == (24_576, 77_266_944)
    assert result.states == 40 * GIB // 77_266_944
    assert result.state_tokens == 77_266_944 // 24_576
    assert result.decompressed_tokens is None
    latent = analyse("kimi-linear")
    assert latent.tokens == 40 * GIB // 8_064
    assert latent.decompressed_tokens is not None
    assert latent.decompressed_tokens < latent.tokens


def test_a_model_of_states_alone_has_no_tokens_and_no_free_target() -> None:
    result = analyse(STATES_ONLY)
    assert result.tokens is None
    assert result.decompressed_tokens is None
    assert result.state_tokens is None
    assert result.states == 40 * GIB // result.cost.state_bytes
    assert result.free_targets == ()


def planned(config: dict[str, Any], **options: Any) -> Plan:
    spec = ModelSpec.from_config(config)
    given = {"memory": 40 * GIB, "weights": 0, **options}
    return plan(get_plugins().match(spec), Deployment(), Settings(), **given)


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
}


def test_sliding_windows_have_a_pool_of_their_own() -> None:
    result = planned(SLIDING, sequence=16_384)
    assert (result.cost.kv_bytes, result.cost.swa_bytes) == (0, 131_072)
    assert result.tokens == 40 * GIB * 4 // 131_072, "a sequence caches its last quarter"
    assert planned(SLIDING, sequence=1000).tokens == 40 * GIB // 131_072, "shorter than the window"
    one = planned(SLIDING, layout="one-pool")
    assert (one.layout, one.tokens) == ("one-pool", 40 * GIB // 131_072)
    assert [length.sequence for length in result.lengths] == [8_192, 32_768, 131_072]
    assert {length.one_pool_tokens for length in result.lengths} == {one.tokens}
    assert analyse("llama-3-8b").lengths == ()
    with pytest.raises(SettingsError, match="sequence is 0"):
        planned(SLIDING, sequence=0)


def test_gpt_oss_in_17_gib_at_8192() -> None:
    # vLLM serves about 488,000 tokens of such sequences; one pool of all layers would hold half.
    assert planned(GPT_OSS, memory=17 * GIB, sequence=8192).tokens == 487_543
    assert planned(GPT_OSS, memory=17 * GIB, layout="one-pool").tokens == 247_580


def test_windows_of_two_sizes_each_count_as_long_as_they_are() -> None:
    config = {**GPT_OSS, "sliding_window": [128, 64] * 18, "layer_types": ["sliding_attention"] * 36}
    result = planned(config, sequence=1024)
    layer = 8 * 128 * 2
    assert result.token_bytes == 18 * layer * (128 + 64) // 1024


def test_the_terms_add_up() -> None:
    for name in ModelSpec.presets():
        cost = analyse(name).cost
        for pool, total in (("kv", cost.kv_bytes), ("swa", cost.swa_bytes), ("state", cost.state_bytes)):
            assert sum(term.bytes for term in cost.terms if term.pool == pool) == total


def test_a_hook_that_raises_is_named() -> None:
    class Bad:
        @hookimpl
        def match_model(self, model: ModelSpec) -> int | None:
            return 99

        @hookimpl
        def free_target(self) -> float:
            raise ZeroDivisionError("no pool")

    manager = PluginManager()
    manager.register(Bad(), "bad")
    architecture = manager.match(ModelSpec.preset("llama-3-8b"))
    with pytest.raises(PluginError, match=r"plugin 'bad': free_target raised ZeroDivisionError\('no pool'\)"):
        plan(architecture, Deployment(), Settings(), memory=GIB, weights=0)


def test_settings_models_of_the_wrong_type_are_refused() -> None:
    class Raising:
        @hookimpl
        def match_model(self, model: ModelSpec) -> int | None:
            return 99

        @hookimpl
        def settings_model(self) -> Any:
            if self.answer is None:
                raise LookupError("where is it?")
            return self.answer

        def __init__(self, answer: Any) -> None:
            self.answer = answer

    class Offering:
        @hookimpl
        def policies(self) -> dict[str, PolicySpec]:
            return {"x": PolicySpec(lambda cost, pools, settings: LRU(), "LRU.", settings={"n": 1})}  # type: ignore[arg-type] # the mistake

    for answer, message in (
        (None, "settings_model raised LookupError"),
        ({"n": 1}, "returned {'n': 1}, not a"),
    ):
        manager = PluginManager()
        manager.register(Raising(answer), "bad")
        architecture = manager.match(ModelSpec.preset("llama-3-8b"))
        with pytest.raises(PluginError, match=f"plugin 'bad': .*{message}"):
            architecture.pool_settings(Settings())
    with pytest.raises(PluginError, match=r"'x': settings is {'n': 1}, not a pydantic model"):
        PluginManager().register(Offering(), "bad")


def test_a_deployment_that_does_not_fit_is_not_the_plugins_fault() -> None:
    with pytest.raises(SettingsError, match=r"^pp is 100 for 61 layers; use at most 61$"):
        analyse("deepseek-v3", pp=100)


OLMO = get_plugins().resolve("olmo-3-7b")


def served(memory: float, **deployment: Any) -> Plan:
    return plan(
        get_plugins().match(OLMO),
        Deployment(page_size=16, **deployment),
        Settings(),
        memory=int(memory * GIB),
        weights=0,
        sequence=34_048,
    )


def test_a_running_sequence_takes_what_is_computed_at_once_and_a_page() -> None:
    """Concurrencies of vLLM pull request 29796: 11.12 at 34,048 tokens and 23.73 at 6,144, of one pool."""
    running = {"window_chunk": 2048, "page_overhead": 1}
    result = served(71.32, **running)
    assert result.tokens is not None
    assert result.tokens / 34_048 == pytest.approx(11.12, abs=0.005)
    block = 16 * 8 * 16_384  # of 8 layers, as vLLM groups them
    at_6144 = Deployment(page_size=16, **running).window_tokens(4096, 6144) // 16
    assert 71.32 * GIB / block / (6144 // 16 + 3 * at_6144) == pytest.approx(23.73, abs=0.005)
    assert served(57.18).tokens == 344_192
    assert served(57.18, window_layout="one-pool").tokens == 117_104


def test_two_pools_hold_what_the_scarcer_one_has_room_for() -> None:
    scarce, ample = (served(57.18, swa_full_tokens_ratio=ratio) for ratio in (0.05, 0.5))
    assert (scarce.ratio, scarce.layout) == (0.05, "own-pool")
    size = 57.18 * GIB
    full = size / (131_072 + 0.5 * 393_216)
    assert ample.tokens == pytest.approx(full, rel=1e-3)
    windows = 0.05 * size / (131_072 + 0.05 * 393_216)
    assert scarce.tokens == pytest.approx(windows * 34_048 / 4096, rel=1e-3)
    right = served(57.18, swa_full_tokens_ratio=4096 / 34_048)
    assert right.tokens == pytest.approx(served(57.18).tokens or 0, rel=1e-3), "the ratio that `plan` shows"
    lengths = {length.sequence: length for length in served(57.18).lengths}
    assert lengths[32_768].ratio == 0.125
    assert lengths[32_768].split_tokens == pytest.approx(size / (131_072 + 0.8 * 393_216), rel=1e-3)
    with pytest.raises(SettingsError, match="swa_full_tokens_ratio is 0"):
        Deployment(swa_full_tokens_ratio=0)
    with pytest.raises(SettingsError, match="window_layout is 'two'"):
        Deployment(window_layout="two")
