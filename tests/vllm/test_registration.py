"""What vLLM's configuration asks for: settings, versions, the scheduler's choice, the log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.structured_output import StructuredOutputManager

import costcache.vllm
from costcache.errors import CostcacheError, PluginError, SettingsError
from costcache.vllm import build, registration
from tests.vllm.engine import MODEL

BLOCK = 16


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Makes vLLM's configuration of a tiny Llama."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def make(costcache: Any = None, **more: Any) -> VllmConfig:
        model = ModelConfig(
            model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024
        )
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=more.pop("caching", True)),
            scheduler_config=SchedulerConfig.default_factory(
                max_model_len=1024, is_encoder_decoder=False, **more
            ),
            device_config=DeviceConfig(device="cpu"),
            additional_config={} if costcache is None else {"costcache": costcache},
        )

    return make


def spec(window: int | None = None) -> Any:
    shape: Any = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)


def scheduler(config: VllmConfig, *specs: Any) -> Any:
    """The scheduler that vLLM's engine core would make."""
    costcache.vllm.register()
    config.cache_config.num_gpu_blocks = 101
    groups = [KVCacheGroupSpec([f"layer {n}"], each) for n, each in enumerate(specs or (spec(),))]
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=101, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=True,
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def test_without_the_setting_nothing_of_vllm_changes(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = scheduler(config())
    assert isinstance(made, Scheduler)
    assert type(made.kv_cache_manager) is KVCacheManager
    assert not hasattr(made.kv_cache_manager.block_pool, "costcache")
    assert made.make_stats().num_kv_fetch_reqs_by_stage.keys().isdisjoint({"costcache:evictions_total"})
    assert [record for record in caplog.records if record.name == "costcache"] == []


def test_the_policy_is_in_force_and_one_line_says_so(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "costcache")
    made = scheduler(config({"policy": "slru", "policy_settings": {"protected_threshold": 3}}))
    pool = made.kv_cache_manager.block_pool
    assert pool.costcache.runs.pool.policy == "slru"
    assert isinstance(made.kv_cache_manager, KVCacheManager)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "costcache"]
    assert f"vLLM {vllm.__version__}, plugin 'mha'" in line
    assert (
        "for LlamaForCausalLM, policy 'slru', pool 'kv' of 100 blocks of 16 tokens (512 B per token" in line
    )
    assert "costcache:kv:lru_in_force" not in made.make_stats().num_kv_fetch_reqs_by_stage


@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_schedulers_can_be_chosen(config: Any, asynchronous: bool) -> None:
    given = config("hazard")
    given.scheduler_config.async_scheduling = asynchronous  # a CPU platform has switched it off by now
    made = scheduler(given)
    assert isinstance(made, AsyncScheduler) == asynchronous
    assert made.kv_cache_manager.block_pool.costcache.runs.pool.policy == "hazard"
    assert made.make_stats().num_kv_fetch_reqs_by_stage["costcache:kv:lru_in_force"] == 0


def test_registering_twice_changes_nothing() -> None:
    costcache.vllm.register()
    before = SchedulerConfig.get_scheduler_cls
    costcache.vllm.register()
    assert SchedulerConfig.get_scheduler_cls is before


@pytest.mark.parametrize(
    "given", ["lfu", '{"policy": "lfu"}', ' {"policy": "lfu", "headroom": 0.1}'], ids=["name", "JSON", "more"]
)
def test_the_environment_asks_as_well(config: Any, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.ENVIRONMENT, given)
    read = build.read_config(config())
    assert read is not None
    assert read.policy == "lfu"
    asked = build.read_config(config({"policy": "lru"}))  # the entry comes first
    assert asked is not None
    assert asked.policy == "lru"


def test_wrong_settings_stop_the_server(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, words in (
        ({"polcy": "lru"}, "unknown setting 'costcache.polcy'"),
        ({"headroom": 2}, "setting 'costcache.headroom' is 2"),
        (["lru"], "give a JSON object of settings, or the name of a policy"),
        ({"untested": "maybe"}, "setting 'costcache.untested' is 'maybe'"),
    ):
        with pytest.raises(SettingsError, match=words):
            scheduler(config(given))
    with pytest.raises(PluginError, match="nonesuch"):
        scheduler(config("nonesuch"))
    with pytest.raises(PluginError, match="seglen"):  # which needs states
        scheduler(config("seglen"))
    monkeypatch.setenv(build.ENVIRONMENT, "{policy: lru}")
    with pytest.raises(SettingsError, match="which is not JSON"):
        scheduler(config())


def test_an_untested_version_is_refused_by_name(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1+cu130")
    with pytest.raises(
        CostcacheError, match=r"vllm 0.99.1\+cu130 is installed .* tested with 0.32.0, 0.33.0"
    ):
        scheduler(config("hazard"))
    made = scheduler(config({"policy": "hazard", "untested": "lru"}))
    assert not hasattr(made.kv_cache_manager.block_pool, "costcache")
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "costcache"]
    assert "vLLM's own LRU stays in force" in warning
    scheduler(config())  # nobody asked


def test_where_no_policy_can_choose_the_log_says_why(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    for specs, more, words in (
        ((spec(64), spec(32)), {}, "no group has full attention"),
        ((spec(64),), {}, "of the kind SlidingWindowSpec, not full attention"),
        ((spec(),), {"caching": False}, "prefix caching is off"),
    ):
        caplog.clear()
        made = scheduler(config("hazard", **more), *specs)
        assert not hasattr(made.kv_cache_manager.block_pool, "costcache")
        (warning,) = [record.getMessage() for record in caplog.records if record.name == "costcache"]
        assert "vLLM's own LRU stays in force" in warning
        assert words in warning


def test_several_groups_share_a_pool_and_the_line_says_so(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "costcache")
    made = scheduler(config("hazard"), spec(64), spec(), spec(64))
    assert made.kv_cache_manager.block_pool.costcache.runs.pool.policy == "hazard"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "costcache"]
    assert "pool 'memory' of 100 blocks of 16 tokens" in line
    assert line.endswith("shared by 3 KV cache groups")


def test_the_configuration_is_known_while_a_scheduler_is_made(config: Any) -> None:
    given = config("hazard")
    assert build.current() is None
    with build.serving(given):
        assert build.current() is given
    assert build.current() is None


def test_the_command_line_is_checked_early_and_prepares_the_metrics(config: Any) -> None:
    class Arguments:
        def create_engine_config(self, asked: Any) -> Any:
            return config(asked)

    registration.check_early(Arguments)
    assert Arguments().create_engine_config(None).additional_config == {}
    with pytest.raises(SettingsError, match=r"costcache\.polcy"):
        Arguments().create_engine_config({"polcy": "lru"})
    Arguments().create_engine_config("hazard")
    from vllm.v1.metrics.loggers import StatLoggerManager

    assert hasattr(StatLoggerManager.record, "_costcache")
