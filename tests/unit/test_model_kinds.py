"""Kinds of attention and states beyond the plain ones: what they cache, and what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costcache.cost import CostModel, attention_flops, layer_bytes, state_bytes, token_cost
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import CompressedAttention, FullAttention, LatentAttention, ModelSpec, StateSpace
from costcache.model.presets import PRESETS
from costcache.plugins import get_plugins
from tests.unit.small import LLAMA, letters, read, refusal, without

V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "vocab_size": 129_280,
}
M3_INDEXER: dict[str, Any] = {
    "use_sparse_attention": True,
    "sparse_index_dim": 16,
    "sparse_num_index_heads": 2,
    "sparse_topk_blocks": 4,
    "sparse_block_size": 8,
    "sparse_attention_freq": [0, 0, 1, 1],
}


@pytest.mark.parametrize(
    "name",
    [
        "num_key_value_heads", "num_kv_heads", "num_attention_groups", "multi_query_group_num",
        "num_query_groups", "n_head_kv", "n_kv_heads",
    ],
)  # fmt: skip
def test_every_name_of_the_number_of_kv_heads(name: str) -> None:
    config = {**without(LLAMA, "num_key_value_heads"), name: 2}
    assert set(ModelSpec.from_config(config).layers) == {FullAttention(heads=4, kv_heads=2, head_dim=16)}


def test_names_of_kv_heads_that_nobody_knows_are_refused() -> None:
    config = without(LLAMA, "num_key_value_heads")
    for name in ("num_heads_kv", "kv_head_count", "num_key_value_groups", "n_kv_group"):
        assert f"{name} is 2: its name speaks of KV heads" in refusal(config, **{name: 2})
    assert "num_key_value_heads and num_kv_heads disagree" in refusal(num_kv_heads=4)
    assert read(num_kv_heads=2).layers == read().layers


def test_kv_heads_and_widths_that_differ_by_layer() -> None:
    spec = read(num_key_value_heads=None, num_key_value_heads_per_layer=[4, 2, 2, 1])
    assert [layer.kv_heads for layer in spec.layers if isinstance(layer, FullAttention)] == [4, 2, 2, 1]
    heads = read(num_attention_heads_per_layer=[4, 8, 4, 4], head_dim=16)
    assert [layer.heads for layer in heads.layers if isinstance(layer, FullAttention)] == [4, 8, 4, 4]
    assert heads.active_params - read(head_dim=16).active_params == 2 * 64 * 4 * 16
    wide = read(intermediate_size=[128, 128, 256, 128])
    assert wide.active_params - read().active_params == 3 * 64 * 128
    assert "num_key_value_heads_per_layer has 3 entries for 4 layers" in refusal(
        num_key_value_heads_per_layer=[2, 2, 2]
    )


def test_per_layer_config_overrides_the_rest() -> None:
    spec = read(per_layer_config={"1": {"num_key_value_heads": 1, "head_dim": 32}, 3: {"head_dim": 32}})
    dims = [(x.kv_heads, x.head_dim) for x in spec.layers if isinstance(x, FullAttention)]
    assert dims == [(2, 16), (1, 32), (2, 16), (2, 32)]
    assert read(per_layer_config=[{}, {}, {"num_key_value_heads": 4}, {}]).layers[2] == FullAttention(
        heads=4, kv_heads=4, head_dim=16
    )
    assert "per_layer_config has a layer '4'" in refusal(per_layer_config={"4": {"head_dim": 32}})
    assert "per_layer_config[1].skip is ['attention']" in refusal(
        per_layer_config={"1": {"skip": ["attention"]}}
    )
    assert "per_layer_config is 3" in refusal(per_layer_config=3)


def test_attention_types_are_read_by_their_meaning() -> None:
    assert read(attn_type_list=[1, 1, 1, 1]).layers == read().layers
    lightning = read(attn_type_list=[0, 1, 0, 1])
    state = StateSpace(variant="lightning", conv_dim=0, conv_kernel=1, heads=4, head_dim=16, state_size=16)
    assert [isinstance(layer, StateSpace) for layer in lightning.layers] == [True, False, True, False]
    assert lightning.layers[0] == state
    assert state_bytes(state, Deployment()) == 4 * 16 * 16 * 4
    assert "attn_type_list contains [2]" in refusal(attn_type_list=[1, 1, 2, 1])


def test_chunks_are_windows_of_the_layers_with_positions() -> None:
    llama4 = {"model_type": "llama4_text", "attention_chunk_size": 32}

    assert letters(read(**llama4)) == letters(read(**llama4, no_rope_layers=[])) == "sssf"
    assert letters(read(**llama4, no_rope_layers=[1, 0, 1, 0])) == "sfsf"
    assert letters(read(**llama4, no_rope_layer_interval=2)) == "sfsf"
    assert "attention_chunk_size says that layers attend to chunks" in refusal(attention_chunk_size=32)


def test_sparse_attention_with_keys_and_values() -> None:
    spec = read(sparse_attention_config=M3_INDEXER)
    sparse = FullAttention(heads=4, kv_heads=2, head_dim=16, index_head_dim=16, index_heads=2, index_topk=32)
    assert spec.layers[1:3] == (FullAttention(heads=4, kv_heads=2, head_dim=16), sparse)
    assert layer_bytes(sparse, Deployment()).bytes == 2 * 32 * 2 + 16 * 2
    assert layer_bytes(sparse, Deployment(index_dtype="fp8")).bytes == 2 * 32 * 2 + 16
    assert layer_bytes(sparse, Deployment(kv_dtype="fp8_e4m3", index_dtype="bf16")).bytes == 2 * 32 + 16 * 2
    assert attention_flops(sparse) == (2 * 2 * 16, 2 * 4 * 32, 32)
    # transformers writes the same model with flat fields and a list of the layers.
    flat = read(
        layer_types=["full_attention"] * 2 + ["minimax_m3_sparse"] * 2,
        index_head_dim=16,
        index_n_heads=2,
        index_topk_blocks=4,
        index_block_size=8,
    )
    assert flat.layers == spec.layers
    values = {**M3_INDEXER, "sparse_disable_index_value": [0, 0, 1, 0]}
    assert "sparse_disable_index_value leaves index values" in refusal(sparse_attention_config=values)


def test_pooled_index_keys_are_stored_once_per_pool() -> None:
    latent = LatentAttention(
        heads=4, kv_lora_rank=128, qk_rope_head_dim=0, qk_nope_head_dim=32, v_head_dim=32,
        index_head_dim=128, index_heads=2, index_topk=64, index_pool=16,
    )  # fmt: skip
    assert layer_bytes(latent, Deployment()).bytes == 128 * 2 + 9  # 132 / 16, rounded up
    assert layer_bytes(latent, Deployment()).exact == 128 * 2 + 8.25  # several layers are rounded up once
    assert attention_flops(latent).per_context_token == 2 * 2 * 128 / 16


def test_the_two_parts_of_a_compressed_layer() -> None:
    spec = ModelSpec.from_config(V4)
    assert spec.layer_ids == (0, 1, 1, 2, 2, 3, 3)
    window, four, many = spec.layers[0], spec.layers[2], spec.layers[4]
    assert window == CompressedAttention(heads=64, head_dim=512, rope_head_dim=64, ratio=1, window=128)
    assert isinstance(four, CompressedAttention)
    assert (four.ratio, four.index_topk, four.index_pool) == (4, 512, 4)
    assert many == CompressedAttention(heads=64, head_dim=512, rope_head_dim=64, ratio=128)
    assert spec.is_latent
    assert spec.has_sliding_window
    assert get_plugins().match(spec).name == "mla"


@pytest.mark.parametrize(
    ("served", "kv", "swa"),
    [
        # 1,024 bytes a latent, an index key of 132, both per 4 tokens; and 1,024 per 128.
        ({}, 2 * (256 + 33) + 8, 4 * 1024),
        # SGLang's packed row: 448 values, 7 scales padded to 8, 64 rotary values in bf16: 584 bytes. Pages of
        # 256 tokens are padded to 576: 64 rows to 37,440, 2 rows to 1,728, 256 rows of the window to 149,760.
        ({"kv_dtype": "fp8_e4m3"}, 366, 4 * 585),
        ({"index_dtype": "fp4"}, 2 * (256 + 17) + 8, 4 * 1024),
        ({"tp": 8}, 2 * (256 + 33) + 8, 4 * 1024),
    ],
)
def test_bytes_of_compressed_attention(served: dict[str, Any], kv: int, swa: int) -> None:
    cost = token_cost(ModelSpec.from_config(V4), Deployment(**served))
    assert (cost.kv_bytes, cost.swa_bytes, cost.state_bytes) == (kv, swa, 0)


def test_flops_of_compressed_attention_bend_twice() -> None:
    cost = CostModel.of(ModelSpec.from_config(V4))
    per_token = 2 * 2 * 64 * 512  # scores and values of all heads, per latent
    indexer = 2 * 64 * 128 / 4

    def attention(depth: int) -> float:
        """FLOPs of attention at a depth, from the difference of two sums."""
        return cost.recompute_flops(depth, depth + 1) - cost.linear_params_flops

    deep = 4 * 128 * per_token + 2 * (indexer * 1e6 + 512 * per_token) + 1e6 * per_token / 128
    assert attention(1_000_000) == pytest.approx(deep, rel=1e-3)
    assert attention(100) < attention(128 * 8) < attention(10_000)


def test_transformers_writes_compressed_layers_by_name() -> None:
    four, many = "compressed_sparse_attention", "heavily_compressed_attention"
    names = ["sliding_attention", four, many, four]
    config = {**without(V4, "compress_ratios"), "layer_types": names, "compress_rates": None}
    assert ModelSpec.from_config(config).layers == ModelSpec.from_config(V4).layers
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    assert (
        ModelSpec.from_config({**config, "compress_rates": rates}).layers == ModelSpec.from_config(V4).layers
    )
    assert "compress_ratios contains 8" in refusal(V4, compress_ratios=[0, 8, 4, 4])
    assert "compress_ratios has 2 entries for 4 layers" in refusal(V4, compress_ratios=[0, 4])
    assert "index_topk is missing" in refusal(without(V4, "index_topk"))


def test_zamba_passes_its_shared_blocks_several_times() -> None:
    spec = read(
        model_type="zamba2",
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        attention_head_dim=32,
        n_mamba_heads=8,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_ngroups=1,
    )
    assert letters(spec) == "sfssfs"
    assert spec.attention_layers == (FullAttention(heads=4, kv_heads=2, head_dim=32),) * 2
    block = 2 * 64 * (4 + 2 * 2) * 32 + 4 * 32 * 64 + 64 * 64 + 3 * 64 * 128 + 128 * (64 + 2 * 128)
    mamba = 64 * (2 * 128 + 2 * 16 + 8) + 128 * 64
    assert spec.active_params == 512 * 64 + 2 * block + 4 * mamba


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moba_chunk": 64}, "moba_chunk is 64: its name speaks of sparse attention"),
        ({"nsa_config": {"block": 4}}, "nsa_config is {'block': 4}: its name speaks of sparse attention"),
        ({"use_lightning": True}, "use_lightning is True: its name speaks of sparse attention"),
        ({"cross_layer_kv": 2}, "cross_layer_kv is 2: its name speaks of"),
        ({"local_attention_size": 9}, "local_attention_size is 9: its name speaks of attention windows"),
        ({"layer_overrides": {"1": {}}}, "its name speaks of per-layer settings"),
        ({"sizes": [16, 32, 16, 16]}, "sizes is [16, 32, 16, 16]: its name speaks of per-layer settings"),
        ({"head_size": 32}, "head_size is 32: its name speaks of widths of heads"),
        ({"num_expert": 8}, "num_expert is 8: its name speaks of experts"),
        ({"my_attention": {"kind": "new"}}, "my_attention is {'kind': 'new'}: its name speaks of attention"),
        ({"loop_count": 3}, "loop_count is 3: its name speaks of latent or repeated layers"),
        ({"attn_type": "hashed"}, "attn_type is 'hashed': its name speaks of kinds of attention layers"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


def test_fields_of_published_configs_that_change_nothing_are_no_reason_to_refuse() -> None:
    # Of transformers 4's base class, MiniMax-M2, ERNIE, Falcon-H1, Zamba-2 and Cohere-2.
    noise = {
        "top_k": 50, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "chunk_size_feed_forward": 0,
        "add_cross_attention": False, "is_decoder": False, "shared_moe_mode": "sigmoid",
        "moe_capacity": [64] * 3,
        "mamba_use_mlp": True, "lora_rank": 128, "use_gated_activation": True, "attention_dropout": 0.1,
        "order_of_interleaved_layers": "local_attn_first", "use_mamba_kernels": True, "seq_length": 4096,
        "moe_router_dtype": "fp32", "expert_dtype": "fp4", "attention_multiplier": 0.1,
        "qk_norm_type": "per_layer",
        "use_bidirectional_attention": "vision", "rope_scaling": {"type": "yarn"}, "max_window_layers": 20,
    }  # fmt: skip
    plain = read()
    noisy = read(**noise)
    assert (noisy.layers, noisy.active_params) == (plain.layers, plain.active_params)


def test_dimensions_of_states_are_moot_where_no_layer_has_one() -> None:
    spec = read(layer_types=["attention"] * 4, mamba_n_heads=8, mamba_d_state=16, mamba_expand=2)
    assert spec.layers == read().layers


def test_queries_of_one_low_rank() -> None:
    full, low = read(), read(share_q_dim=8)
    assert full.active_params - low.active_params == 4 * (64 * 64 - 8 * (64 + 64))


def test_features_that_are_off_and_plain_fields_are_no_reason_to_refuse() -> None:
    plain = read()
    off = read(
        moba_chunk=None, nsa_config={}, use_lightning=False, layer_overrides={}, loop_count=0,
        attn_type="softmax", swa_head_dim=16, router_scales=[1, 2, 3, 4], rope_theta=[1, 2, 3, 4],
        max_window_layers=4,
    )  # fmt: skip
    assert off.layers == plain.layers
    assert off.extra["router_scales"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "model_type is 'bert', an encoder"),
        ({"architectures": ["BertModel"], "model_type": None, "type_vocab_size": 2}, "type_vocab_size says"),
        ({"architectures": ["NewForTokenClassification"]}, "architectures names 'NewForTokenClassification'"),
        ({"is_causal": False}, "is_causal is False: the model is an encoder"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv6"}, "model_type is 'rwkv6'"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "a draft model that reads the K/V of its target"),
    ],
)
def test_models_that_are_no_decoders(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(**changes)


def test_families_that_are_not_plain_attention_must_say_how() -> None:
    assert "index_topk is missing, which every deepseek_v32 model has" in refusal(model_type="deepseek_v32")
    assert "linear_attn_config is missing" in refusal(model_type="kimi_linear")
    assert "sparse_attention_config is missing" in refusal(model_type="minimax_m3_vl_text")


def test_fields_that_belong_together() -> None:
    mla: dict[str, Any] = {"q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    assert "kv_lora_rank is missing, though qk_nope_head_dim is 8" in refusal(**mla)
    assert "kv_lora_rank is missing, though index_topk is 8" in refusal(index_topk=8)
    experts: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2}
    assert "moe_intermediate_size is missing" in refusal(**experts)
    assert "num_experts_per_tok is 9 of 8 experts" in refusal(
        n_routed_experts=8, num_experts_per_tok=9, moe_intermediate_size=32
    )
    assert "layers_block_type has 2 entries for 4 layers" in refusal(layers_block_type=["attention"] * 2)
    assert "num_kv_shared_layers is 4 for 4 layers" in refusal(num_kv_shared_layers=4)


@pytest.mark.parametrize(
    ("changes", "matrices"),
    [
        ({"hidden_act": "silu"}, 3),
        ({"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}, 3),
        ({"hidden_act": "relu2", "rms_norm_eps": 1e-6}, 2),
        ({"hidden_act": "xielu"}, 2),
        ({"hidden_act": "gelu", "layer_norm_eps": 1e-5}, 2),
        ({"hidden_act": "silu", "layer_norm_eps": 1e-5}, 3),
        ({"activation_function": "gelu_new"}, 2),
        ({"activation_function": "swiglu"}, 3),
        ({"hidden_act": "relu2", "model_type": "bitnet"}, 3),
        ({"model_type": "nemotron"}, 2),
        ({}, 3),
    ],
)
def test_the_activation_says_whether_a_feed_forward_part_is_gated(
    changes: dict[str, Any], matrices: int
) -> None:
    attention = 4 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
    assert read(**changes).active_params == 512 * 64 + attention + 4 * matrices * 64 * 128


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({"attn_output_gate": True}, 64),
        ({"use_output_gate": True}, 64),
        ({"gating": True}, 4),
        ({"gating": "per-element"}, 64),
        ({"use_head_wise_attn_gate": True}, 4),
        ({"attn_output_gate": False}, 0),
        ({"model_type": "afmoe"}, 64),
    ],
)
def test_output_gates_are_counted(changes: dict[str, Any], width: int) -> None:
    assert read(**changes).active_params - read().active_params == 4 * 64 * width


def test_a_gate_of_another_kind_is_refused_where_it_is_counted() -> None:
    assert "new_attn_gate is True: it names a gate" in refusal(new_attn_gate=True)
    assert ModelSpec.from_config({**LLAMA, "new_attn_gate": True}, active_params=9).active_params == 9


def test_qwen_1_counts_gate_and_up_together() -> None:
    assert read(model_type="qwen").active_params == read(intermediate_size=64).active_params


@pytest.mark.parametrize(
    ("quantised", "dtype"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "fp4_e2m1"),
        ({"kv_cache_scheme": None}, None),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "fp8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": "NVFP4"}, "fp4_e2m1"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"quant_method": "fp8"}, None),
    ],
)
def test_the_kv_dtype_of_a_quantised_checkpoint(quantised: dict[str, Any], dtype: str | None) -> None:
    spec = read(quantization_config=quantised)
    assert spec.kv_dtype == dtype
    assert Deployment().serving(spec).kv_dtype == (dtype or "bf16")
    assert Deployment(kv_dtype="bf16").serving(spec).kv_dtype == "bf16", "what is asked for wins"
    each = {"fp8_e4m3": 64, "fp4_e2m1": 32 + 4}.get(dtype or "", 128)
    assert token_cost(spec, Deployment()).kv_bytes == 4 * each
    assert get_plugins().match(spec).cost(Deployment()).token.kv_bytes == 4 * each


def test_kv_dtypes_that_are_not_known_are_refused() -> None:
    scheme = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    assert "kv_cache_scheme asks for 8 bits of type 'int'" in refusal(quantization_config=scheme)
    algorithm = {"kv_cache_quant_algo": "INT8"}
    assert "kv_cache_quant_algo is 'INT8'; known are FP4, FP8" in refusal(quantization_config=algorithm)


def test_the_outer_config_and_modelopts_own_file_may_name_the_kv_dtype(tmp_path: Path) -> None:
    outer = {
        "model_type": "seeing",
        "text_config": LLAMA,
        "quantization_config": {"kv_cache_quant_algo": "FP8"},
    }
    assert ModelSpec.from_config(outer).kv_dtype == "fp8_e4m3"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    assert ModelSpec.from_config(tmp_path).kv_dtype == "fp8_e4m3"


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("\ufeff" + json.dumps(LLAMA), encoding="utf-8")
    assert ModelSpec.from_config(file).layers == read().layers


def test_draft_layers_are_counted_if_they_are_served() -> None:
    spec = read(num_nextn_predict_layers=1)
    assert (spec.draft_layers, len(spec.layers)) == (1, 4)
    assert read(num_mtp_modules=3, mtp_transformer_layers=2).draft_layers == 6
    plain = token_cost(spec, Deployment())
    assert token_cost(read(), Deployment()) == plain
    served = token_cost(spec, Deployment(draft_layers=2))
    assert served.kv_bytes * 4 == plain.kv_bytes * 6
    states = ModelSpec.from_config(
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    )
    with pytest.raises(SettingsError, match="draft_layers is 1, and 'mamba' has no attention"):
        token_cost(states, Deployment(draft_layers=1))


def test_lists_may_describe_the_draft_layers_too() -> None:
    names = ["full_attention"] * 4 + ["sliding_attention"]
    assert len(read(layer_types=names, num_nextn_predict_layers=1).layers) == 4
    assert "layer_types has 5 entries for 4 layers" in refusal(layer_types=names)


def test_decode_context_parallelism_shares_out_the_tokens() -> None:
    latent = ModelSpec.preset("deepseek-v3")
    assert token_cost(latent, Deployment(tp=8, decode_context_parallel=8)).kv_bytes == 61 * 144
    sparse = ModelSpec.preset("deepseek-v3.2")  # each rank has all index keys
    assert token_cost(sparse, Deployment(tp=8, decode_context_parallel=8)).kv_bytes == 61 * (144 + 132)
    grouped = read(num_attention_heads=8)  # 2 KV heads: on 8 ranks each is there four times
    whole = token_cost(grouped, Deployment(tp=8)).kv_bytes
    assert token_cost(grouped, Deployment(tp=8, decode_context_parallel=4)).kv_bytes * 4 == whole
    # Beyond that, a rank has more heads of fewer tokens (SGLang 0.5.23): each is still there four times.
    assert token_cost(grouped, Deployment(tp=8, decode_context_parallel=8)).kv_bytes * 4 == whole
    with pytest.raises(
        SettingsError, match="decode_context_parallel is 3, which does not divide the 8 ranks"
    ):
        Deployment(tp=8, decode_context_parallel=3)


LATENT: dict[str, Any] = {
    **LLAMA,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_group_size": 2}, "slsl"),
        ({"layer_group_size": 4}, "sssl"),
        ({"layer_group_size": [1, 0, 1, 0]}, "slsl"),
        ({"layer_group_size": 1}, "llll"),
        ({"layer_group_size": 2, "short_conv_kernel_size": 4, "use_mla_nope": True}, "slsl"),
        (
            {"layer_group_size": 3, "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": None},
            "ssff",
        ),
    ],
)
def test_ling_and_ring_hybrids(changes: dict[str, Any], expected: str) -> None:
    spec = ModelSpec.from_config({**LATENT, "model_type": "bailing_hybrid", **changes})
    assert letters(spec) == expected
    delta = "short_conv_kernel_size" in changes
    assert {layer.variant for layer in spec.state_layers} <= {"kda" if delta else "lightning"}
    latent = [layer for layer in spec.layers if isinstance(layer, LatentAttention)]
    assert {layer.qk_rope_head_dim for layer in latent} <= {0 if delta else 8}
    assert "layer_group_size has 3 entries for 4 layers" in refusal(LATENT, layer_group_size=[1, 1, 0])


def test_longcat_has_attention_twice_in_a_layer_and_experts_that_do_nothing() -> None:
    config = {
        "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "vocab_size": 131_072,
        "hidden_size": 6144, "num_layers": 28, "ffn_hidden_size": 12_288, "expert_ffn_hidden_size": 2048,
        "num_attention_heads": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 512, "zero_expert_num": 256,
        "moe_topk": 12,
    }  # fmt: skip
    spec = ModelSpec.from_config(config)
    assert (spec.num_layers, len(spec.layers)) == (56, 56)
    assert spec.active_params == pytest.approx(27e9, rel=0.02)  # published as an average of 27 B
    assert token_cost(spec, Deployment()).kv_bytes == 56 * 576 * 2


def test_windows_of_latents_have_dimensions_of_their_own() -> None:
    dots = {
        "model_type": "dots3_note", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window_size": 32, "swa_kv_lora_rank": 48, "swa_qk_rope_head_dim": 4, "swa_q_lora_rank": 8,
        "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 8, "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2, "swa_attention_gate_type": "headwise",
        "attention_gate_type": "headwise",
    }  # fmt: skip
    spec = ModelSpec.from_config({**LATENT, **dots})
    slid, full = spec.layers[0], spec.layers[3]
    assert isinstance(slid, LatentAttention)
    assert isinstance(full, LatentAttention)
    assert (slid.latent_dim, slid.heads, slid.window) == (52, 2, 32)
    assert (full.latent_dim, full.heads, full.window) == (40, 4, None)
    cost = token_cost(spec, Deployment())
    assert (cost.kv_bytes, cost.swa_bytes) == (40 * 2, 3 * 52 * 2)
    element = ModelSpec.from_config({**LATENT, **dots, "attention_gate_type": "elementwise"})
    assert element.active_params - spec.active_params == 64 * 4 * 15
    assert "attention_gate_type is 'new'" in refusal({**LATENT, **dots}, attention_gate_type="new")


def test_latents_without_rotation_keep_the_part_that_others_rotate() -> None:
    config = PRESETS["deepseek-v3"]
    assert (
        ModelSpec.from_config({**config, "mla_use_nope": True}).layers == ModelSpec.from_config(config).layers
    )


def test_n_gram_embeddings_have_states_of_their_own() -> None:
    gated = {
        "model_type": "qwen4_exp_text", "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "hc_count": 2, "hc_lowrank": 8, "ple_conv_kernel_size": 4,
        "ngram_size": 3,
    }  # fmt: skip
    plain = read(**gated)
    spec = read(**gated, ple_layer_ids=[1, 3])
    assert spec.layer_ids == (0, 0, 1, 2, 2, 3)
    added = 2 * 64 * 2 * 9 * 2  # two layers, two streams of 64 channels, 3 taps of 3 tokens, two bytes

    def states(model: ModelSpec, tp: int) -> int:
        return token_cost(model, Deployment(tp=tp)).state_bytes

    assert states(spec, 1) - states(plain, 1) == added
    assert states(spec, 2) - states(plain, 2) == added  # every rank has them in full
    assert spec.active_params - plain.active_params == 2 * 64 * (2 * 64 + 64)
    for wrong in ([5], [0], [3, 3]):
        message = f"ple_layer_ids is {wrong}; layers are numbered 1 to 4: list each once"
        assert message in refusal({**LLAMA, **gated}, ple_layer_ids=wrong)


def test_lists_of_layers_in_other_words() -> None:
    assert letters(read(sliding_window=32, global_attn_every_n_layers=2)) == "sfsf"
    block: dict[str, Any] = {
        "num_hybrid_layers_block": 1,
        "last_layers_types": ["full_attention"],
        "sliding_window": 32,
    }
    assert letters(read(**block, num_hidden_layers=6)) == "ffsssf"
    assert "hybrid_layers_types_block and its neighbours list 6 layers of 4" in refusal(**block)
    assert letters(read(**block, num_hidden_layers=6, use_sliding_window=False)) == "ffffff"
    assert len(read(model_type="nanbeige", num_loops=3).layers) == 12
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert (
        read(**moe, moe_layers_enum=[2, 3]).active_params == read(**moe, moe_layers_enum="2,3").active_params
    )


def test_fields_that_servers_classes_add_change_nothing() -> None:
    """SGLang hands over the objects of its own classes, which write what they worked out beside the rest."""
    for name, added in {
        "granite-4-small": {"mamba_intermediate_size": 8192},
        "falcon-h1-34b": {"mamba_intermediate": 4096},
        "qwen3.5-9b": {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
        "deepseek-v4flash": {"v_head_dim": 128, "kv_lora_rank": 512, "first_k_dense_replace": 3},
    }.items():
        config = PRESETS[name]
        part = config.get("text_config", config)
        changed = ModelSpec.from_config({**part, **added, "architectures": config["architectures"]})
        whole = ModelSpec.from_config(config)
        assert (changed.layers, changed.active_params) == (whole.layers, whole.active_params), name


def test_the_first_of_two_modalities_is_the_texts() -> None:
    moe = {"num_experts_per_tok": 2, "moe_layer_start_index": 1, "model_type": "ernie4_5_vl_moe"}
    pair = read(**moe, moe_num_experts=[4, 2], moe_intermediate_size=[16, 8])
    assert pair.active_params == read(**moe, moe_num_experts=4, moe_intermediate_size=16).active_params


def test_dtypes_of_states_are_priced() -> None:
    """Three gated delta nets: 14,592 bytes a state in the usual dtypes, 10,752 in these."""
    spec = read(
        full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    assert token_cost(spec, Deployment()).state_bytes == 14_592
    told = Deployment(state_dtype="bf16", conv_dtype="fp32")
    assert token_cost(spec, told).state_bytes == 10_752
