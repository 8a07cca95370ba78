"""Registration in SGLang, which finds and builds our cache: names, hooks, the backend, refusals, the log."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import RADIX_EVICTION_POLICY_CHOICES, ServerArgs, prepare_server_args

import costcache.sglang
from costcache.errors import CostcacheError, PluginError, SettingsError
from costcache.plugins import get_plugins
from costcache.sglang.arguments import check_arguments
from costcache.sglang.cache import CostCache
from tests.sglang.pools import CONFIG, CONFIGS, Shape, init_params, publish_args
from tests.sglang.serving import Server

TYPES = {"mha": "llama", "mla": "deepseek_v2", "mamba": "qwen3_next", "swa": "gpt_oss"}


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_plugins()


def context(
    shape: Shape, folder: Path, policy: str = "costcache", config: Any = None, **arguments: Any
) -> TreeCacheBuildContext:
    """The context that SGLang's scheduler hands to the registry, over real pools and a real model config."""
    data = CONFIGS[shape.kind] | CONFIG | {"model_type": TYPES[shape.kind]}
    (folder / "config.json").write_text(json.dumps(data))
    args = publish_args(shape, radix_eviction_policy=policy, radix_eviction_policy_config=config, **arguments)
    params = replace(init_params(shape), tree_components=None, tree_core_backend=None)
    params.eviction_policy, params.eviction_policy_config = policy, config
    return TreeCacheBuildContext(
        server_args=args,
        params=params,
        is_hybrid_swa=shape.kind == "swa",
        is_hybrid_ssm=shape.has_states,
        enable_hierarchical_cache=shape.hicache is not None,
        disable_radix_cache=params.disable,
        tp_worker=None,
        model_config=ModelConfig(str(folder)),
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )


def test_the_entry_point_gives_the_command_line_our_names() -> None:
    for name in ("costcache", *(f"costcache:{policy}" for policy in get_plugins().policies())):
        assert RADIX_EVICTION_POLICY_CHOICES.count(name) == 1
    assert {"costcache:lru", "costcache:slru", "costcache:tlru"} <= set(RADIX_EVICTION_POLICY_CHOICES)
    assert "costcache" in registry.registered_radix_cache_backends()
    costcache.sglang.register()  # a second time changes nothing
    assert RADIX_EVICTION_POLICY_CHOICES.count("costcache") == 1


def test_the_command_line_takes_our_policy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mha"] | CONFIG | {"model_type": "llama"}))
    words = ["--model-path", str(tmp_path), "--device", "cpu", "--radix-eviction-policy", "costcache:slru"]
    args: ServerArgs = prepare_server_args(
        [*words, "--radix-eviction-policy-config", '{"headroom": 0.1}', "--radix-cache-backend", "costcache"]
    )
    assert args.radix_eviction_policy == "costcache:slru"
    assert args.radix_eviction_policy_config == {"headroom": 0.1}


@pytest.mark.parametrize("kind", ["mha", "mla", "swa"])
def test_sglang_builds_our_cache(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "costcache")
    shape = Shape(kind, 64)
    cache = registry.create_tree_cache(
        context(
            shape,
            tmp_path,
            "costcache:slru",
            {"core": "python", "policy_settings": {"protected_threshold": 3}},
        )
    )
    assert isinstance(cache, CostCache)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "costcache"]
    plugin, size = {"mha": ("mha", 64), "mla": ("mla", 96), "swa": ("mha", 32)}[kind]
    assert f"plugin '{plugin}'" in line
    assert f"{size} B per token of pool 'kv' (cost model: {size})" in line
    assert "policy 'slru', python core (asked for)" in line
    assert "4,096 tokens in pages of 64, class CostCache" in line
    server = Server(cache, shape)
    assert server.serve(range(300)) == 0
    assert server.serve(range(300)) == 256
    server.drain()


def test_states_and_their_bytes_are_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "costcache")
    cache = registry.create_tree_cache(context(Shape("mamba", 64), tmp_path))
    assert set(cache.pools.by_name) == {"kv", "state"}
    found = cache.req_to_token_pool.mamba_pool.mamba_cache.mem_usage_bytes() / 25
    (line,) = [r.getMessage() for r in caplog.records if ": plugin " in r.getMessage()]
    assert f"{found:,.0f} B per state of pool 'state'" in line
    assert "the model needs FULL+MAMBA" in line


def test_a_pool_that_differs_from_the_cost_model_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ctx = context(Shape("mha"), tmp_path)
    ctx.model_config.hf_config.num_key_value_heads = 2  # the pool has one
    registry.create_tree_cache(ctx)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "holds 64.0 bytes per token and the cost model of plugin 'mha' says 128" in warning


def test_costcache_is_the_policy_that_the_plugin_prefers(tmp_path: Path) -> None:
    cache = registry.create_tree_cache(context(Shape("mla"), tmp_path))
    assert cache.binding.settings.policy == "costcache"
    assert cache.pools.kv.policy == "hazard"


def test_other_policies_use_the_stock_cache(tmp_path: Path) -> None:
    cache = registry.create_tree_cache(context(Shape("mha"), tmp_path, "slru"))
    assert type(cache) is UnifiedRadixCache


@pytest.mark.parametrize(
    ("name", "config", "policy"),
    [
        ("slru", {"protected_threshold": 5}, "slru"),
        ("tlru", {"threshold": 4096, "next_prompt_estimate": 512, "headroom": 0.1}, "tlru"),
        ("lfu", None, "lfu"),
        ("costcache:mru", None, "mru"),
        ("lru", None, "hazard"),  # the plugin's choice: see the next test
    ],
)
def test_the_backend_means_our_orders(name: str, config: Any, policy: str, tmp_path: Path) -> None:
    cache = registry.create_tree_cache(
        context(Shape("mha"), tmp_path, name, config, radix_cache_backend="costcache")
    )
    assert isinstance(cache, CostCache)
    assert cache.pools.kv.policy == policy
    if name == "slru":
        assert cache.binding.settings.policy_settings == {"protected_threshold": 5}
    if name == "tlru":
        assert cache.binding.settings.headroom == 0.1


def test_the_backend_without_a_policy_is_costcache(tmp_path: Path) -> None:
    ctx = context(Shape("mha"), tmp_path, "lru", radix_cache_backend="costcache")
    assert registry.create_tree_cache(ctx).binding.settings.policy == "costcache"
    ctx = context(
        Shape("mha"),
        tmp_path,
        "lru",
        radix_cache_backend="costcache",
        _radix_eviction_policy_explicitly_set=True,
    )
    assert registry.create_tree_cache(ctx).binding.settings.policy == "lru"


@pytest.mark.parametrize(
    ("policy", "config", "words"),
    [
        ("costcache", {"headrom": 0.1}, ["unknown setting 'headrom'", "headroom"]),
        ("costcache", {"headroom": 1.5}, ["setting 'headroom' is 1.5", "less than 1"]),
        ("costcache", {"policy": "lur"}, ["there is no policy 'lur'", "did you mean 'lru'"]),
        ("costcache:slru", {"policy": "lru"}, ["'costcache:slru'", "policy 'lru'", "give one of the two"]),
        (
            "costcache:slru",
            {"policy_settings": {"protected_threshold": 0}},
            ["'policy_settings.protected_threshold' is 0", "greater than or equal to 1"],
        ),
        ("costcache", {"core": "rust", "trim": "exact"}, ["'core' is 'rust'", "'trim' is 'exact'"]),
    ],
)
def test_a_wrong_config_fails_at_start(policy: str, config: Any, words: list[str], tmp_path: Path) -> None:
    with pytest.raises((SettingsError, PluginError)) as error:
        registry.create_tree_cache(context(Shape("mha"), tmp_path, policy, config))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("route", ["policy", "backend"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"enable_lmcache": True}, "--enable-lmcache has a prefix cache of its own"),
        ({"enable_flexkv": True}, "--enable-flexkv has a prefix cache of its own"),
        (
            {"enable_hierarchical_cache": True, "hicache_host_memory_mode": "buffer_only"},
            "buffer_only has not been tried",
        ),
    ],
)
def test_options_that_bypass_the_builder_are_refused(
    route: str, arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if route == "backend":
        arguments = {**arguments, "radix_cache_backend": "costcache"}
    policy = "costcache" if route == "policy" else "lru"
    with pytest.raises(CostcacheError, match=words):
        registry.create_tree_cache(context(Shape("mha"), tmp_path, policy, **arguments))


def test_a_model_of_sliding_windows_alone_is_refused(tmp_path: Path) -> None:
    ctx = replace(context(Shape("swa"), tmp_path), full_tokens_per_layer=0)
    with pytest.raises(CostcacheError, match="sliding-window layers alone"):
        registry.create_tree_cache(ctx)


def test_another_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostcacheError, match="--radix-cache-backend is 'flexkv'"):
        registry.create_tree_cache(context(Shape("mha"), tmp_path, radix_cache_backend="flexkv"))


def test_a_disabled_cache_is_stocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = Shape("mha", params={"disable": True})
    cache = registry.create_tree_cache(context(shape, tmp_path, "costcache", {"core": "python"}))
    assert type(cache) is UnifiedRadixCache
    assert "--disable-radix-cache" in caplog.text


def test_an_unsupported_version_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(costcache.sglang, "SUPPORTED", ("0.6.0",))
    costcache.sglang.register()
    assert "costcache is not active in SGLang" in caplog.text
    assert "sglang 0.5.23 is installed and costcache has been tested with 0.6.0" in caplog.text


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (("--radix-eviction-policy", "costcache"), True),
        (("--radix-eviction-policy=costcache:slru",), True),
        (("--radix-cache-backend", "costcache"), True),
        (("--config", "FILE"), True),
        (("--config=FILE",), True),
        (("--radix-eviction-policy", "slru", "--config", "nowhere"), False),
        ((), False),
    ],
)
def test_a_command_line_asks_for_us_or_does_not(words: tuple[str, ...], asks: bool, tmp_path: Path) -> None:
    settings = tmp_path / "server.yaml"
    settings.write_text("model-path: nowhere\nradix-eviction-policy: costcache\n")
    given = [word.replace("FILE", str(settings)) for word in words]
    assert costcache.sglang._is_asked_for(["--model-path", "nowhere", *given]) is asks


def test_a_refused_version_says_why_last() -> None:
    """SGLang does not know the name then, and prints some hundred lines of usage."""
    words = ("--model-path", "nowhere", "--radix-eviction-policy", "costcache")
    result = served(*words, before="costcache.sglang.SUPPORTED = ('0.0.1',)")
    assert result.returncode
    assert len(result.stderr.splitlines()) > 100
    assert result.stderr.splitlines()[-1] == (
        "costcache is not active in SGLang: sglang 0.5.23 is installed and costcache has been tested with "
        "0.0.1: install one of these, or a version of costcache that names yours"
    )


def served(*words: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """SGLang's own command, up to where it fails."""
    code = (
        "import tests.sglang.shims.torchvision_ops, costcache.sglang, runpy, sys\n"
        f"{before}\nsys.argv = ['sglang.launch_server', *{list(words)!r}]\n"
        "runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
    )
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=False, cwd=root, capture_output=True, text=True
    )


def test_wrong_settings_end_the_command_before_anything_is_loaded() -> None:
    config = '{"headroom": 2}'
    words = ("--radix-eviction-policy", "costcache", "--radix-eviction-policy-config", config)
    result = served("--model-path", "nowhere", *words)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "sglang serve: error: setting 'headroom' is 2: input should be less than 1"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"radix_eviction_policy_config": {"headrom": 0.1}}, "unknown setting 'headrom'"),
    ({"radix_eviction_policy_config": {"policy": "lur"}}, "there is no policy 'lur': did you mean 'lru'"),
    (
        {
            "radix_eviction_policy": "costcache:slru",
            "radix_eviction_policy_config": {"policy_settings": {"protected_threshold": 0}},
        },
        "'policy_settings.protected_threshold' is 0",
    ),
    ({"radix_cache_backend": "flexkv"}, "--radix-cache-backend is 'flexkv'"),
    ({"enable_lmcache": True}, "--enable-lmcache has a prefix cache of its own"),
    ({"use_ray": True}, "under --use-ray SGLang's scheduler loads no plugins"),
]


@pytest.mark.parametrize("local", [False, True], ids=["far", "local"])
@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_arguments_are_checked_when_they_are_parsed(
    wrong: dict[str, Any], said: str, local: bool, tmp_path: Path
) -> None:
    if local:
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mha"] | CONFIG | {"model_type": "llama"}))
    args = ServerArgs(
        **{
            "model_path": str(tmp_path) if local else "somebody/some-model",
            "device": "cpu",
            "radix_eviction_policy": "costcache",
            **wrong,
        }
    )
    with pytest.raises(CostcacheError, match=re.escape(said)):
        check_arguments(args)
    with pytest.raises(CostcacheError, match=re.escape(said)):
        args.resolve_once()  # what SGLang's launchers call first


def test_arguments_of_a_local_model_are_checked_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mha"] | CONFIG | {"model_type": "llama"}))
    args = ServerArgs(model_path=str(tmp_path), device="cpu", radix_eviction_policy="costcache:consumed-lru")
    with pytest.raises(PluginError, match="ranks only state checkpoints, and the model has none"):
        check_arguments(args)
    args = ServerArgs(
        model_path=str(tmp_path),
        device="cpu",
        radix_eviction_policy="costcache",
        radix_eviction_policy_config={"architecture": {"nonsense": 1}},
    )
    with pytest.raises(SettingsError, match="architecture"):
        check_arguments(args)


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_arguments_of_others_are_left_alone(policy: str) -> None:
    args = ServerArgs(
        model_path="x", device="cpu", radix_eviction_policy=policy, radix_eviction_policy_config={"a": 1}
    )
    check_arguments(args)
    assert (args.radix_eviction_policy, args.radix_eviction_policy_config) == (policy, {"a": 1})


def test_waiting_prefixes_are_refreshed(tmp_path: Path) -> None:
    cache = registry.create_tree_cache(context(Shape("mha"), tmp_path, "costcache", {"core": "python"}))
    server = Server(cache, Shape("mha"))
    server.serve(range(300))
    server.serve(range(1000, 1300))
    (old, *_) = cache.pools.kv.records()
    policy = SchedulePolicy("fcfs", cache, False, False, False)
    uses, recency = old.uses, old.recency
    policy.calc_priority([server.request(range(300))])
    assert old.recency > recency
    assert old.uses == uses


def test_without_sglang_nothing_imports_it() -> None:
    code = (
        "import sys; import costcache, costcache.sglang, costcache.cli; "
        "assert not [m for m in sys.modules if m.split('.')[0] in ('sglang', 'torch')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_only_those_that_the_plugins_offer() -> None:
    from costcache.sglang.build import policy_names

    fake = SimpleNamespace(policies=lambda: {"a": 1, "b": 2})
    assert policy_names(fake) == ["costcache", "costcache:a", "costcache:b"]  # type: ignore[arg-type]  # its one method
