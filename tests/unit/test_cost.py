"""Bytes, FLOPs and seconds: the figures of every preset, and how deployments change them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from costcache.cost import (
    CostModel,
    TokenCost,
    attention_flops,
    attention_kv_bytes,
    decompressed_latent_bytes,
    latent_kv_bytes,
    layer_bytes,
    state_bytes,
    token_cost,
)
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import FullAttention, LatentAttention, ModelSpec, SlidingWindow, StateSpace

BF16 = Deployment()

# KV bytes per token, bytes of one state, and bytes per token of the windows: bf16, one rank.
FIGURES = {
    "deepseek-r1": (70_272, 0, 0),
    "deepseek-v2": (69_120, 0, 0),
    "deepseek-v2-lite": (31_104, 0, 0),
    "deepseek-v3": (70_272, 0, 0),
    "deepseek-v3.2": (78_324, 0, 0),
    "deepseek-v4flash": (6_229, 0, 44_032),
    "falcon-h1-34b": (147_456, 304_201_728, 0),
    "gemma-2-27b": (188_416, 0, 188_416),
    "gemma-2-9b": (172_032, 0, 172_032),
    "gemma-3-12b": (65_536, 0, 327_680),
    "gemma-3-27b": (81_920, 0, 425_984),
    "gemma-3-4b": (20_480, 0, 118_784),
    "gemma-4-31b": (81_920, 0, 819_200),
    "glm-4-9b-chat": (40_960, 0, 0),
    "glm-4.5": (376_832, 0, 0),
    "glm-4.5-air": (188_416, 0, 0),
    "glm-4.7-flash": (54_144, 0, 0),
    "glm-5": (100_152, 0, 0),
    "gpt-oss-120b": (36_864, 0, 36_864),
    "gpt-oss-20b": (24_576, 0, 24_576),
    "granite-3.3-8b": (163_840, 0, 0),
    "granite-4-small": (16_384, 152_819_712, 0),
    "jamba-v0.1": (16_384, 16_056_320, 0),
    "kimi-k2": (70_272, 0, 0),
    "kimi-k3": (27_648, 449_372_160, 0),
    "kimi-linear": (8_064, 43_417_600, 0),
    "lfm2-1.2b": (12_288, 81_920, 0),
    "llama-2-70b": (327_680, 0, 0),
    "llama-2-7b": (524_288, 0, 0),
    "llama-3-70b": (327_680, 0, 0),
    "llama-3-8b": (131_072, 0, 0),
    "llama-3.1-405b": (516_096, 0, 0),
    "llama-3.2-1b": (32_768, 0, 0),
    "llama-3.2-3b": (114_688, 0, 0),
    "llama-4-maverick": (49_152, 0, 147_456),
    "llama-4-scout": (49_152, 0, 147_456),
    "mimo-v2-flash": (23_040, 0, 199_680),
    "minicpm3-4b": (35_712, 0, 0),
    "minimax-m2": (253_952, 0, 0),
    "minimax-m3": (137_472, 0, 0),
    "mistral-7b": (131_072, 0, 0),
    "mistral-large": (360_448, 0, 0),
    "mistral-nemo-12b": (163_840, 0, 0),
    "mistral-small": (163_840, 0, 0),
    "mixtral-8x22b": (229_376, 0, 0),
    "mixtral-8x7b": (131_072, 0, 0),
    "nemotron-3-nano": (6_144, 49_082_368, 0),
    "nemotron-h-8b": (16_384, 102_137_856, 0),
    "olmo-2-7b": (524_288, 0, 0),
    "olmo-3-7b": (131_072, 0, 393_216),
    "phi-3.5-mini": (393_216, 0, 0),
    "phi-4": (204_800, 0, 0),
    "qwen2.5-0.5b": (12_288, 0, 0),
    "qwen2.5-1.5b": (28_672, 0, 0),
    "qwen2.5-14b": (196_608, 0, 0),
    "qwen2.5-32b": (262_144, 0, 0),
    "qwen2.5-3b": (36_864, 0, 0),
    "qwen2.5-72b": (327_680, 0, 0),
    "qwen2.5-7b": (57_344, 0, 0),
    "qwen3-0.6b": (114_688, 0, 0),
    "qwen3-1.7b": (114_688, 0, 0),
    "qwen3-14b": (163_840, 0, 0),
    "qwen3-235b-a22b": (192_512, 0, 0),
    "qwen3-30b-a3b": (98_304, 0, 0),
    "qwen3-32b": (262_144, 0, 0),
    "qwen3-4b": (147_456, 0, 0),
    "qwen3-8b": (147_456, 0, 0),
    "qwen3-coder-480b": (253_952, 0, 0),
    "qwen3-next": (24_576, 77_266_944, 0),
    "qwen3.5-397b": (30_720, 192_061_440, 0),
    "qwen3.5-9b": (32_768, 51_511_296, 0),
    "smollm3-3b": (73_728, 0, 0),
    "zamba2-7b": (372_736, 152_243_712, 0),
}


def cost(name: str, **deployment: Any) -> TokenCost:
    return token_cost(ModelSpec.preset(name), Deployment(**deployment))


def test_every_preset_has_a_figure() -> None:
    assert set(FIGURES) == set(ModelSpec.presets())


@pytest.mark.parametrize(("name", "figures"), FIGURES.items())
def test_bytes_of_presets(name: str, figures: tuple[int, int, int]) -> None:
    token = cost(name)
    assert (token.kv_bytes, token.state_bytes, token.swa_bytes) == figures
    assert token.kv_bytes == sum(term.bytes for term in token.terms if term.pool == "kv")
    assert token.state_bytes == sum(term.bytes for term in token.terms if term.pool == "state")


@pytest.mark.parametrize(("name", "expected"), [("deepseek-v3.2", 48_068), ("glm-5", 61_464)])
def test_dsa_in_fp8_uses_the_scaled_layout(name: str, expected: int) -> None:
    assert cost(name, kv_dtype="fp8_e4m3").kv_bytes == expected
    # e5m2 has no scaled layout: 576 values of one byte, and the same index key.
    layers = ModelSpec.preset(name).num_layers
    assert cost(name, kv_dtype="fp8_e5m2").kv_bytes == layers * (576 + 132)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_plain_layers_halve_in_fp8(dtype: str) -> None:
    for name in ("deepseek-v3", "llama-3-8b", "qwen3-next"):
        full, half = cost(name), cost(name, kv_dtype=dtype)
        assert half.kv_bytes * 2 == full.kv_bytes
        assert half.state_bytes == full.state_bytes
    assert cost("llama-3-8b", kv_dtype="fp16") == cost("llama-3-8b")


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("deepseek-v3", 71.1),
        ("deepseek-v2-lite", 8.9),
        ("kimi-linear", 17.8),
        ("llama-3-8b", 1.0),
        ("jamba-v0.1", 1.0),
    ],
)
def test_compression_ratios(name: str, ratio: float) -> None:
    assert round(ModelSpec.preset(name).compression_ratio, 1) == ratio
    assert round(cost(name).compression_ratio, 1) == ratio


def test_cacheable_tokens_of_deepseek_v3_in_40_gib() -> None:
    token = cost("deepseek-v3")
    assert 40 * 2**30 // token.decompressed_kv_bytes == 8_594
    assert 40 * 2**30 // token.kv_bytes == 611_191


def test_decompressed_bytes_equal_kv_bytes_without_latents() -> None:
    assert cost("llama-3-8b").decompressed_kv_bytes == cost("llama-3-8b").kv_bytes
    assert TokenCost(kv_bytes=7).decompressed_kv_bytes == 7
    # Heads are divided over ranks, latents are not.
    assert cost("deepseek-v3", tp=8).decompressed_kv_bytes * 8 == cost("deepseek-v3").decompressed_kv_bytes


def test_tp_divides_kv_heads_down_to_one_and_never_latents() -> None:
    assert [cost("llama-3-8b", tp=tp).kv_bytes for tp in (2, 8, 16)] == [65_536, 16_384, 16_384]
    assert cost("deepseek-v3", tp=16).kv_bytes == 70_272
    with pytest.raises(
        SettingsError, match=r"tp is 64 .* for 32 attention heads, which .* use a divisor of 32"
    ):
        cost("llama-3-8b", tp=64)
    with pytest.raises(SettingsError, match=r"tp is 32 .* for 16 attention heads"):
        cost("deepseek-v2-lite", tp=32)  # nothing is divided but the heads
    with pytest.raises(SettingsError, match=r"tp is 3 .* for 8 KV heads; use a divisor or a multiple of 8"):
        cost("llama-3-8b", tp=3)


def test_dp_attention_leaves_attention_whole() -> None:
    assert cost("llama-3-8b", tp=8, dp_attention=True) == cost("llama-3-8b")
    assert cost("llama-3-8b", tp=8, dp_attention=4) == cost("llama-3-8b", tp=2)
    assert cost("qwen3-next", tp=8, dp_attention=2) == cost("qwen3-next", tp=4)


def test_tp_divides_states() -> None:
    for name in ("qwen3-next", "kimi-linear", "nemotron-h-8b", "jamba-v0.1"):
        assert cost(name, tp=4).state_bytes * 4 == cost(name).state_bytes
    # Nemotron-H has 8 groups: on 16 ranks each keeps one of its own, as SGLang extends them.
    per_rank = 3 * (8192 // 16 + 2 * 128) * 2 + 128 // 16 * 64 * 128 * 4
    assert cost("nemotron-h-8b", tp=16).state_bytes == 24 * per_rank
    with pytest.raises(SettingsError, match=r"tp is 3 .* use a divisor of 32"):
        cost("kimi-linear", tp=3)


def test_state_dtype_of_the_deployment_wins() -> None:
    conv = 36 * 8192 * 3 * 2
    assert cost("qwen3-next", state_dtype="bf16").state_bytes - conv == (77_266_944 - conv) // 2


@pytest.mark.parametrize(("pp", "layers"), [(1, 61), (2, 31), (4, 16), (61, 1)])
def test_pp_counts_the_largest_stage(pp: int, layers: int) -> None:
    assert cost("deepseek-v3", pp=pp).kv_bytes == layers * 1152


def test_pp_splits_numbered_layers_not_mixers() -> None:
    # Nemotron-H: attention in layers 7, 18, 29, 40; stages of 13 layers hold one each.
    token = cost("nemotron-h-8b", pp=4)
    assert token.kv_bytes == 4096
    assert token.state_bytes == 6 * 102_137_856 // 24
    with pytest.raises(SettingsError, match="pp is 62 for 61 layers"):
        cost("deepseek-v3", pp=62)


@given(num_layers=st.integers(1, 200), pp=st.integers(1, 16))
def test_stages_cover_the_layers_in_order(num_layers: int, pp: int) -> None:
    assume(pp <= num_layers)
    stages = Deployment(pp=pp).stages(num_layers)
    assert [i for stage in stages for i in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[0] <= 1


def test_layer_formulas() -> None:
    full = FullAttention(heads=8, kv_heads=2, head_dim=64, v_head_dim=32)
    slid = SlidingWindow(heads=8, kv_heads=2, head_dim=64, window=16)
    latent = LatentAttention(
        heads=4, kv_lora_rank=96, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32
    )
    state = StateSpace(variant="gdn", conv_dim=48, conv_kernel=4, heads=2, head_dim=8, state_size=8, groups=2)
    assert attention_kv_bytes(full, BF16) == 2 * 96 * 2
    assert attention_kv_bytes(full.model_copy(update={"kv_shared": True}), BF16) == 0
    assert attention_kv_bytes(slid, BF16) == 2 * 128 * 2
    assert latent_kv_bytes(latent, BF16) == 112 * 2
    assert decompressed_latent_bytes(latent, BF16) == 4 * 80 * 2
    assert state_bytes(state, BF16) == 3 * 48 * 2 + 2 * 8 * 8 * 4
    assert [layer_bytes(x, BF16).pool for x in (full, slid, latent, state)] == ["kv", "swa", "kv", "state"]
    assert layer_bytes(full, BF16).formula == "2·(64 + 32)·2 B"
    sparse = latent.model_copy(update={"index_topk": 8, "index_head_dim": 128, "index_heads": 2})
    with pytest.raises(SettingsError, match="kv_dtype is 'fp8_e4m3' for a DSA latent of 96"):
        latent_kv_bytes(sparse, Deployment(kv_dtype="fp8_e4m3"))


def test_sliding_layers_have_a_separate_pool() -> None:
    spec = ModelSpec.from_config(
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "vocab_size": 201_088,
        }
    )
    token = token_cost(spec, BF16)
    assert (token.kv_bytes, token.swa_bytes) == (18 * 2048, 18 * 2048)
    model = CostModel.of(spec)
    assert model.reload_bytes(1000) == 1000 * token.kv_bytes + 128 * token.swa_bytes
    assert model.reload_bytes(100) == 100 * (token.kv_bytes + token.swa_bytes)


# The design's 14.8 k for DeepSeek-V3 is 37 B nominal parameters; its config's own dimensions give
# 36.62 B without the input embedding.
@pytest.mark.parametrize(
    ("name", "expected"), [("deepseek-v3", 14_658), ("llama-3-8b", 28_628), ("llama-3-70b", 53_026)]
)
def test_crossover(name: str, expected: int) -> None:
    assert CostModel.of(ModelSpec.preset(name)).crossover_tokens == pytest.approx(expected, abs=1)


def test_crossover_of_absorbed_attention_and_without_attention() -> None:
    v3 = CostModel.of(ModelSpec.preset("deepseek-v3"), absorbed=True)
    assert v3.crossover_tokens == pytest.approx(4_311, abs=1)
    assert v3.linear_params_flops == 2 * v3.spec.active_params
    mamba = ModelSpec.from_config(
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    )
    assert math.isinf(CostModel.of(mamba).crossover_tokens)
    assert CostModel.of(mamba).recompute_flops(10, 30) == 20 * 2 * mamba.active_params


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-3-8b", "qwen3-next", "kimi-linear"])
def test_recompute_is_the_formula(name: str) -> None:
    model = CostModel.of(ModelSpec.preset(name))
    c0, crossover = model.linear_params_flops, model.crossover_tokens
    for a, b in [(0, 1), (0, 32_768), (1_000, 60_000), (5, 5)]:
        expected = c0 * ((b - a) + (b**2 - a**2) / (2 * crossover))
        assert model.recompute_flops(a, b) == pytest.approx(expected)


def test_only_attention_layers_of_a_hybrid_add_to_the_slope() -> None:
    model = CostModel.of(ModelSpec.preset("qwen3-next"))
    per_token = 12 * 2 * 16 * (256 + 256)
    assert model.crossover_tokens == model.linear_params_flops / per_token


def test_attention_saturates_at_the_window() -> None:
    layer = SlidingWindow(heads=2, kv_heads=1, head_dim=8, window=4)
    spec = ModelSpec(
        name="s", architecture="S", layers=(layer,) * 3, hidden_size=8, vocab_size=8, active_params=1
    )
    model = CostModel.of(spec)
    rate = 3 * 2 * 2 * 16
    assert model.recompute_flops(0, 4) == 2 * 4 + rate * 8
    assert model.recompute_flops(4, 10) == 2 * 6 + rate * 4 * 6
    assert model.recompute_flops(2, 10) == 2 * 8 + rate * (6 + 24)


def test_sparse_attention_saturates_at_its_selection() -> None:
    layer = ModelSpec.preset("deepseek-v3.2").layers[0]
    assert attention_flops(layer) == (2 * 64 * 128, 2 * 128 * (576 + 512), 2048)
    dense = ModelSpec.preset("deepseek-v3").layers[0]
    assert attention_flops(dense).per_context_token == 2 * 40_960
    assert attention_flops(dense, absorbed=True).per_context_token == 2 * 128 * (576 + 512)


POSITIONS = st.integers(0, 2**20)
NAMES = st.sampled_from(["deepseek-v3", "deepseek-v3.2", "qwen3-next"])


@given(name=NAMES, a=POSITIONS, b=POSITIONS, c=POSITIONS)
def test_recompute_adds_up_and_grows_with_depth(name: str, a: int, b: int, c: int) -> None:
    model = CostModel.of(ModelSpec.preset(name))
    a, b, c = sorted((a, b, c))
    whole = model.recompute_flops(a, c)
    assert model.recompute_flops(a, b) + model.recompute_flops(b, c) == pytest.approx(whole, rel=1e-9)
    assert model.recompute_flops(b, b + 64) >= model.recompute_flops(a, a + 64) * (1 - 1e-9)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint64", "float64"])
def test_arrays_are_elementwise(dtype: str) -> None:
    starts, stops = np.array([0, 100, 4_000], dtype=dtype), np.array([50, 9_000, 4_000], dtype=dtype)
    for name in ("deepseek-v3.2", "llama-3-8b"):
        model = CostModel.of(ModelSpec.preset(name))
        got = model.recompute_flops(starts, stops)
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        assert got.tolist() == pytest.approx([model.recompute_flops(a, b) for a, b in pairs])
        seconds = model.reload_seconds(stops - starts)
        assert seconds.shape == (3,)


def test_seconds() -> None:
    deployment = Deployment(tp=8, flops_per_second=1e15, host_link_bytes_per_second=50e9)
    model = CostModel.of(ModelSpec.preset("qwen3-next"), deployment)
    token = model.token
    assert model.recompute_seconds(0, 1000) == pytest.approx(model.recompute_flops(0, 1000) / 8e15)
    assert model.reload_seconds(1000) == 1000 * token.kv_bytes / 50e9
    assert model.reload_seconds(1000, "host", states=2) == pytest.approx(
        (1000 * token.kv_bytes + 2 * token.state_bytes) / 50e9
    )
    with pytest.raises(SettingsError, match="disk_bytes_per_second is None"):
        model.reload_seconds(1000, "disk")
    with pytest.raises(SettingsError, match="tier is 'tape'; use 'host' or 'disk'"):
        model.reload_seconds(1000, "tape")
    disk = CostModel.of(model.spec, Deployment(disk_bytes_per_second=7e9))
    assert disk.reload_seconds(1000, "disk") == 1000 * disk.token.kv_bytes / 7e9


def test_a_plugins_token_cost_is_kept() -> None:
    token = TokenCost(kv_bytes=10, state_bytes=5)
    model = CostModel(spec=ModelSpec.preset("llama-3-8b"), deployment=BF16, token=token)
    assert model.reload_bytes(3, 2) == 40
