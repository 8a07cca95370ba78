"""Prefill times: the measured grid, units, the roofline, and which model is taken."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from costcache.cost import CostModel
from costcache.deployment import Deployment
from costcache.errors import SettingsError
from costcache.model import ModelSpec
from costcache.sim.ttft import CALIBRATED, PrefillModel, prefill_model, roofline

NEW = (128, 512, 2048, 4096, 8192)
# Milliseconds measured on one H100 with SGLang 0.5.23, by cached tokens in front and NEW.
GRID = {
    "deepseek-v2-lite": {
        0: (21.3, 25.7, 47.8, 89.0, 190.6),
        4096: (24.3, 29.9, 61.7, 115.6, 239.9),
        16384: (25.4, 37.7, 97.9, 192.6, 392.6),
        32768: (30.4, 51.0, 149.2, 293.6, 597.8),
    },
    "llama-3-8b": {
        0: (16.6, 17.7, 52.1, 104.0, 219.2),
        4096: (16.0, 19.4, 61.2, 119.1, 245.6),
        16384: (15.0, 24.2, 83.4, 164.3, 331.6),
        32768: (17.7, 32.9, 111.9, 225.5, 451.0),
    },
    "qwen3-next-24l": {
        0: (40.7, 43.0, 41.2, 70.7, 128.7),
        4096: (41.7, 41.3, 43.7, 73.5, 134.2),
        16384: (39.6, 41.1, 48.4, 80.7, 146.2),
        32768: (28.4, 29.6, 50.8, 88.1, 165.7),
    },
}


def test_every_measured_model_has_its_grid() -> None:
    assert set(GRID) == set(CALIBRATED)


@pytest.mark.parametrize("name", sorted(GRID))
@pytest.mark.parametrize("depth", [0, 4096, 16384, 32768])
def test_the_fit_is_within_its_stated_errors(name: str, depth: int) -> None:
    model = CALIBRATED[name]
    seconds = model.seconds(np.array(NEW), np.full(len(NEW), depth))
    for new, got, milliseconds in zip(NEW, seconds.tolist(), GRID[name][depth], strict=True):
        short = 0.46 if name == "qwen3-next-24l" else 0.18
        assert got * 1e3 == pytest.approx(milliseconds, rel=0.031 if new >= 2048 else short)  # 3 %, rounded
        assert model.one(new, depth) == pytest.approx(got)


def test_the_formula_and_its_units() -> None:
    model = PrefillModel(name="made", floor=0.5, fixed=0.1, per_token=1e-3, per_pair=1e-6)
    # 1,000 tokens after 2,000: 0.1 + 1 + 1e-6 * 1000 * 2500.
    assert model.one(1000, 2000) == pytest.approx(3.6)
    assert model.one(1, 0) == 0.5
    assert model.seconds(np.array([1000, 1]), np.array([2000, 0])).tolist() == pytest.approx([3.6, 0.5])
    with pytest.raises(ValidationError, match="per_pair"):
        PrefillModel(name="made", floor=0.5, fixed=0.1, per_token=1e-3, per_pair=-1e-6)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "qwen3-next"])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_roofline_is_the_flops_of_the_cost_model_at_half_the_peak(name: str, tp: int) -> None:
    cost = CostModel.of(ModelSpec.preset(name), Deployment(tp=tp))
    model = roofline(cost)
    for new, depth in ((20_000, 0), (8192, 32_768), (30_000, 4096)):
        expected = 2 * cost.recompute_seconds(depth, depth + new)
        assert expected > model.floor
        assert model.one(new, depth) == pytest.approx(expected)
    assert model.one(1, 0) == model.floor > 0


def test_auto_is_the_measured_model_only_as_it_was_measured() -> None:
    llama = ModelSpec.preset("llama-3-8b")

    def auto(spec: ModelSpec, **deployment: object) -> PrefillModel:
        return prefill_model("auto", CostModel.of(spec, Deployment(**deployment)))

    assert auto(llama) is CALIBRATED["llama-3-8b"]
    assert auto(llama, page_size=64) is CALIBRATED["llama-3-8b"]
    for other in ({"tp": 2}, {"pp": 2}, {"kv_dtype": "fp8_e4m3"}, {"flops_per_second": 2e15}):
        assert auto(llama, **other) == roofline(CostModel.of(llama, Deployment(**other)))
    v3 = ModelSpec.preset("deepseek-v3")
    assert auto(v3) == roofline(CostModel.of(v3, Deployment()))


def test_models_are_chosen_by_name() -> None:
    cost = CostModel.of(ModelSpec.preset("llama-3-8b"), Deployment())
    assert prefill_model("roofline", cost) == roofline(cost)
    assert prefill_model("qwen3-next-24l", cost) is CALIBRATED["qwen3-next-24l"]
    with pytest.raises(SettingsError, match=r"'fast'.*auto, roofline or deepseek-v2-lite"):
        prefill_model("fast", cost)
