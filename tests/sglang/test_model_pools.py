"""What SGLang itself allocates for a model, byte for byte what the cost model says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from costcache.binding import Binding
from costcache.cost import TokenCost, token_cost
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.model.presets import PRESETS
from costcache.plugins import get_plugins
from costcache.settings import Settings, read_settings
from costcache.sglang.readback import describe_pools, index_dtype, pool_bytes, state_dtypes
from tests.sglang.model_pools import ModelPools, model_pools
from tests.sglang.tiny_models import KINDS, SERVED

# SGLang has no classes for these: it runs transformers' own, and gives every layer K/V.
WITHOUT_CLASSES = ("jamba-v0.1", "zamba2-7b")
MODELS: dict[str, dict[str, Any]] = {
    **{name: config for name, config in PRESETS.items() if name not in WITHOUT_CLASSES},
    **KINDS,
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def built(name: str, folder: Path, **more: Any) -> ModelPools:
    return model_pools(MODELS[name], folder, **{**SERVED.get(name, {}), **more})


def priced(pools: ModelPools, **deployment: Any) -> TokenCost:
    """The cost of SGLang's own config object, which is what the adapter is given."""
    spec = get_plugins().read(pools.model_config.hf_config)
    served = {"index_dtype": index_dtype(pools), **state_dtypes(pools), **deployment}
    return token_cost(spec, Deployment(**served))


def check(pools: ModelPools, cost: TokenCost) -> None:
    found = pool_bytes(pools)
    windows = 0 if "swa" in found else cost.swa_bytes  # in one pool with the rest
    expected = {"kv": cost.kv_bytes + windows, "swa": cost.swa_bytes, "state": cost.state_bytes}
    for name, held in found.items():
        assert held == pytest.approx(expected[name], abs=1), name  # pools of several tokens: rounded up
    assert ("state" in found) == bool(cost.state_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_pools_equal_the_computed_bytes(name: str, tmp_path: Path) -> None:
    pools = built(name, tmp_path)
    check(pools, priced(pools, kv_dtype=SERVED.get(name, {}).get("kv_dtype")))
    # SGLang's classes add fields of their own to a config, and rewrite others: it reads as the file does.
    ours = ModelSpec.from_config(MODELS[name])
    theirs = get_plugins().read(pools.model_config.hf_config)
    for field in ("layers", "layer_ids", "active_params", "kv_dtype", "draft_layers"):
        assert getattr(theirs, field) == getattr(ours, field), field


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize(
    "name",
    [
        "falcon-h1-34b", "gemma-4-31b", "glm-4-9b-chat", "granite-4-small", "kimi-linear", "lfm2-1.2b",
        "mimo-v2-flash", "minimax-m3", "nemotron-3-nano", "qwen3-next",
    ],
)  # fmt: skip
def test_pools_of_one_of_several_ranks(name: str, tp: int, tmp_path: Path) -> None:
    pools = built(name, tmp_path, tp_size=tp)
    if (name, tp) == (
        "falcon-h1-34b",
        8,
    ):  # pools can be made, but SGLang's model refuses its 20 heads on 8 ranks
        with pytest.raises(SettingsError, match="for 20 attention heads"):
            priced(pools, tp=tp)
    else:
        check(pools, priced(pools, tp=tp))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2", "gpt-oss-20b", "minimax-m3", "qwen3-8b"])
def test_pools_in_fp8(name: str, tmp_path: Path) -> None:
    pools = built(name, tmp_path, kv_dtype="fp8_e4m3")
    check(pools, priced(pools, kv_dtype="fp8_e4m3"))


@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-3-nano", "kimi-linear", "lfm2-1.2b"])
def test_states_in_the_dtypes_that_the_server_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--mamba-ssm-dtype`` sets the first of these variables."""
    usual = pool_bytes(built(name, tmp_path))["state"]
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "bfloat16")
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "float32")
    pools = built(name, tmp_path)
    assert pool_bytes(pools)["state"] != usual
    check(pools, priced(pools))


SHARING: dict[str, Any] = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "hidden_size": 64,
    "intermediate_size": [128] * 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
}


def test_the_log_expects_what_sglang_allocates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Windows in one pool with the rest, and room for layers that read an earlier layer's K/V."""
    logging.disable(logging.NOTSET)
    pools = model_pools(SHARING, tmp_path)
    caplog.clear()
    binding = Binding.of(
        get_plugins().read(pools.model_config.hf_config),
        Deployment(page_size=64),
        read_settings(Settings, {"policy": "lru"}),
    )
    assert (binding.cost.token.kv_bytes, binding.cost.token.swa_bytes) == (128, 128)
    words = describe_pools(pools, binding)
    assert "512 B per token of pool 'kv' (cost model: 512), windows in the same pool" in words
    assert not caplog.records
