"""Entry points: each loads on its own, and errors name the plugin."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from costcache import (
    ModelSpec,
    PluginError,
    PolicySpec,
    RadixCache,
    Settings,
    SettingsError,
    VictimOrder,
    hookimpl,
)
from costcache._version import __version__
from costcache.hookspecs import PROJECT
from costcache.plugins import HOOKS, RESERVED, PluginManager
from costcache.policies.keyed import LRU
from costcache.policies.states import ConsumedLRU
from costcache.radix import StateCache
from costcache.records import NodeRecord
from costcache.sim.engine import OFFLINE
from tests.property.kit import MODEL, Plugin, manager, policy

GOOD = """
from costcache import PolicySpec, hookimpl
from costcache.policies.keyed import LRU

@hookimpl
def policies():
    return {NAME: PolicySpec(lambda cost, pools, settings: LRU(), "as lru")}
"""

Install = Callable[..., PluginManager]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install distributions of one entry point each, then load all entry points there are."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(**sources: str) -> PluginManager:
        for name, source in sources.items():
            module = f"plugin_module_{name}"
            (tmp_path / f"{module}.py").write_text(source.replace("NAME", repr(name)))
            info = tmp_path / f"dist_{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[{PROJECT}]\n{name} = {module}\n")
        made = PluginManager()
        made.load_entry_points()
        return made

    return load


def reasons(made: PluginManager) -> dict[str, str]:
    """Reasons reported for each of this test's plugins."""
    return {f.plugin: f.reason for f in made.failures if f.source.startswith(("plugin_module_", "tests:"))}


HOOK = "from costcache import hookimpl\n@hookimpl\n"
OFFER = HOOK + "def policies():\n from costcache import PolicySpec\n"

BROKEN = {
    "missing_package": ("import no_such_package_at_all", "No module named 'no_such_package_at_all'"),
    "raises": ("raise RuntimeError('at import')", "RuntimeError: at import"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "syntax": ("def (", "SyntaxError"),
    "no_hooks": ("x = 1", "no function in it is marked @costcache.hookimpl"),
    "unmarked": ("def match_model(model): return 3", "no function in it is marked"),
    "misspelt": (HOOK + "def match_modle(model): return 3", "did you mean 'match_model'?"),
    "far_off": (HOOK + "def zzz(model): return 3", "the hooks are adjust_eviction_count"),
    "unknown_argument": (HOOK + "def match_model(modle): return 3", "no argument 'modle'; it has (model)"),
    "defaulted": (HOOK + "def match_model(model=None): return 3", "'model' a default"),
    "keyword_only": (HOOK + "def match_model(*, model): return 3", "'model' by keyword"),
    "position_only": (HOOK + "def match_model(model, /): return 3", "position only"),
    "star": (HOOK + "def match_model(*models): return 3", "no argument 'models'"),
    "keywords": (HOOK + "def match_model(**model): return 3", "'model'"),
    "wrapper": (
        HOOK.strip() + "(wrapper=True)\ndef match_model(model):\n    return (yield)",
        "wrapper",
    ),
    "policies_raise": (HOOK + "def policies(): raise ValueError('nothing to offer')", "nothing to offer"),
    "policies_list": (HOOK + "def policies(): return ['lru']", "['lru']"),
    "policies_none": (HOOK + "def policies(): return None", "None"),
    "policies_of_what": (HOOK + "def policies(): return {'p': 3}", "'p': 3"),
    "panics": ("class Panic(BaseException): pass\nraise Panic('in Rust')", "import failed: Panic: in Rust"),
    "lines": ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
    "unclaimed": (
        HOOK + "def token_cost(model, deployment): return None",
        "'token_cost' and no 'match_model'",
    ),
    "policies_exit": (HOOK + "def policies(): raise SystemExit(3)", "policies failed: 3"),
    "summary_none": (OFFER + " return {'p': PolicySpec(lambda c, p, s: None, None)}", "summary is None"),
    "summary_two": (
        OFFER + " return {'p': PolicySpec(lambda c, p, s: None, 'a\\nb')}",
        "not one line of text",
    ),
    "made_by_none": (OFFER + " return {'p': PolicySpec(None, '')}", "make_order is None, not a function"),
    "misspelt_event": (
        "from costcache.policies.keyed import LRU\nclass Mine(LRU):\n def touchs(self, record): pass\n"
        + OFFER
        + " return {'p': PolicySpec(lambda c, p, s: Mine(), '')}",
        "Mine has a method 'touchs', which is no event and would never be called: did you mean 'touch'?",
    ),
    "policies_unnamed": (
        HOOK
        + "def policies():\n from costcache import PolicySpec\n"
        + " return {3: PolicySpec(lambda c, p, s: None, '')}",
        "3",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_reported_and_the_others_load(
    name: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    source, said = BROKEN[name]
    made = install(aaa=GOOD, **{name: source}, zzz=GOOD)
    assert list(reasons(made)) == [name]
    assert said in reasons(made)[name]
    assert "\n" not in reasons(made)[name]
    assert {"aaa", "zzz", "lru"} <= set(made.policies())
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum(f"{name!r}" in text and said in text for text in warnings) == 1
    # What is left serves.
    cache = RadixCache(MODEL, 10, policy="zzz", plugins=made)
    cache.insert([1, 2, 3])
    assert cache.evict(2).freed == 2


def test_all_broken_at_once(install: Install) -> None:
    made = install(aaa=GOOD, **{name: source for name, (source, _) in BROKEN.items()})
    found = reasons(made)
    assert set(found) == set(BROKEN)
    assert all(said in found[name] for name, (_, said) in BROKEN.items())
    assert "aaa" in made.policies()
    described = json.loads(json.dumps(made.describe()))
    assert {failure["plugin"] for failure in described["failures"]} >= set(BROKEN)


def test_an_entry_point_of_a_missing_attribute_or_module(tmp_path: Path, install: Install) -> None:
    info = tmp_path / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{PROJECT}]\nno_module = plugin_module_absent\nno_attribute = plugin_module_aaa:plugin\n"
    )
    made = install(aaa=GOOD)
    assert "plugin_module_absent" in reasons(made)["no_module"]
    assert "plugin" in reasons(made)["no_attribute"]


def test_two_entry_points_of_one_name(tmp_path: Path, install: Install) -> None:
    info = tmp_path / "second-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{PROJECT}]\naaa = plugin_module_bbb\nbuiltin = plugin_module_bbb\n"
    )
    made = install(aaa=GOOD, bbb=GOOD)
    found = reasons(made)
    assert "'aaa' is loaded already (plugin_module_aaa)" in found["aaa"]
    assert "'builtin' is loaded already (costcache.policies)" in found["builtin"]


def test_a_policy_name_that_is_taken() -> None:
    made = manager(
        one=policy("mine", LRU),
        two=policy("mine", LRU),
        three=policy("lru", LRU),
        four=policy("costcache", LRU),
    )
    found = reasons(made)
    assert "'mine' is taken by 'one'" in found["two"]
    assert "'lru' is taken by 'builtin'" in found["three"]
    assert "'costcache' is taken by 'the framework'" in found["four"]
    owners = {item["name"]: item["plugin"] for item in made.describe()["policies"]}
    assert (owners["mine"], owners["lru"]) == ("one", "builtin")


def test_one_taken_policy_does_not_take_the_others_with_it() -> None:
    spec = PolicySpec(lambda cost, pools, settings: LRU(), "")
    made = manager(own=Plugin(policies=lambda: {"lru": spec, "other": spec}))
    assert "other" in made.policies()
    assert "'lru' is taken" in reasons(made)["own"]


def test_a_failed_plugin_leaves_no_trace() -> None:
    made = PluginManager()
    with pytest.raises(PluginError, match="nothing to offer"):
        made.register(Plugin(match_model=lambda model: 9, policies=_no_offer), "own", "tests:own")
    assert made.match(ModelSpec.preset(MODEL)).name == "generic"
    assert "own" not in {plugin["name"] for plugin in made.describe()["plugins"]}
    made.register(policy("mine", LRU), "own", "tests:own")  # the name is free again
    assert "mine" in made.policies()


def _no_offer() -> Any:
    raise ValueError("nothing to offer")


def test_a_class_is_no_plugin_but_its_instance_is() -> None:
    class Own:
        @hookimpl
        def match_model(self, model: ModelSpec) -> int | None:
            return 5

    with pytest.raises(PluginError, match="'self'"):
        PluginManager().register(Own, "own")
    assert manager(own=Own()).match(ModelSpec.preset(MODEL)).name == "own"


# -- policies that are offered and cannot be used --------------------------------------------


class Unprintable(BaseModel):
    """Settings that have no JSON schema."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    order: LRU | None = None


def test_describe_survives_a_policy_without_a_schema() -> None:
    made = manager(
        own=policy("mine", LRU, settings=Unprintable),
        two=policy("other", LRU),
    )
    described = made.describe()
    assert {"mine", "other"} <= {item["name"] for item in described["policies"]}
    json.dumps(described)


def test_a_policy_whose_settings_are_not_a_model_is_reported() -> None:
    made = manager(two=policy("other", LRU))
    with pytest.raises(PluginError, match="settings"):
        made.register(policy("mine", LRU, settings=dict), "own", "tests:own")
    json.dumps(made.describe())


def test_supports_refuses_with_its_reason() -> None:
    made = manager(own=policy("picky", LRU, supports=lambda model: "it has no states"))
    with pytest.raises(PluginError, match=r"'picky' does not serve model 'llama-3-8b': it has no states"):
        RadixCache(MODEL, 10, policy="picky", plugins=made)


def test_supports_is_asked_of_the_model() -> None:
    def states_only(model: ModelSpec) -> str | None:
        return None if model.has_states else "it has no states"

    made = manager(own=policy("picky", LRU, supports=states_only, sees=frozenset({"leaves"})))
    assert RadixCache("qwen3-next", 10, policy="picky", plugins=made).policy == "picky"
    with pytest.raises(PluginError, match="it has no states"):
        RadixCache(MODEL, 10, policy="picky", plugins=made)


def _raises(*arguments: Any) -> Any:
    raise ZeroDivisionError("oh")


@pytest.mark.parametrize(
    "spec",
    [
        PolicySpec(_raises, ""),
        PolicySpec(lambda cost, pools, settings: LRU(), "", supports=_raises),
        PolicySpec(lambda cost, pools, settings: VictimOrder(), "", sees=frozenset({"leaves"})),
        PolicySpec(lambda cost, pools, settings: None, ""),  # type: ignore[arg-type, return-value] # the point
        PolicySpec(lambda cost, pools, settings: LRU, ""),  # type: ignore[arg-type, return-value] # the point
        PolicySpec(lambda cost: LRU(), ""),  # type: ignore[arg-type, misc] # the point
    ],
)
def test_a_policy_that_cannot_be_made_is_named(spec: PolicySpec) -> None:
    made = manager(own=Plugin(policies=lambda: {"mine": spec}))
    with pytest.raises(PluginError, match="'mine'"):
        RadixCache(MODEL, 10, policy="mine", plugins=made)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (
            {"sees": frozenset()},
            r"'mine': sees is frozenset\(\), not a frozenset of one or more of 'leaves'",
        ),
        (
            {"sees": frozenset({"nodes", "leafs"})},
            r"'mine': sees is frozenset\(.*'leafs'.*\), not a ",
        ),
        ({"sees": frozenset({1})}, r"'mine': sees is frozenset\(\{1\}\), not a frozenset"),
        (
            {"sees": "states"},
            r"'mine': sees is 'states', not a frozenset of one or more of 'leaves', '",
        ),
        ({"sees": {"states"}}, r"'mine': sees is {'states'}, not a frozenset"),
        ({"sees": None}, r"'mine': sees is None, not a frozenset"),
        ({"windows": 3}, r"'mine': windows is 3, not the name of a policy or None"),
        ({"explains": 1}, r"'mine': explains is 1, not True or False"),
        ({"explains": None}, r"'mine': explains is None, not True or False"),
    ],
)
def test_a_policy_that_declares_nonsense_is_reported(declared: dict[str, Any], said: str) -> None:
    made = manager()
    with pytest.raises(PluginError, match=said) as error:
        made.register(policy("mine", LRU, **declared), "own", "tests:own")
    assert "\n" not in str(error.value)
    assert "mine" not in made.policies()


@pytest.mark.parametrize("share", [None, 0.5])
def test_an_order_of_another_kind_than_declared_is_named(share: float | None) -> None:
    made = manager(
        own=policy("keyed", LRU, sees=frozenset({"nodes", "states"})),
        two=policy("queue", VictimOrder, sees=frozenset({"leaves"})),
        three=policy("both", ConsumedLRU, sees=frozenset({"leaves", "states"})),
    )
    with pytest.raises(
        PluginError,
        match=r"'keyed' of plugin 'own' declares that it sees 'nodes', 'states', but its make_order "
        r"returned a LRU, which is not a StateOrder",
    ):
        StateCache("qwen3-next", 10**9, policy="keyed", plugins=made, state_share=share)
    assert RadixCache(MODEL, 10, policy="keyed", plugins=made).policy == "keyed", "no states to rank here"
    for model in (MODEL, "qwen3-next"):
        with pytest.raises(
            PluginError,
            match=r"'queue' of plugin 'two' declares that it sees 'leaves', but its make_order returned a "
            r"VictimOrder, which is not a KeyedOrder",
        ):
            RadixCache(model, 10, policy="queue", plugins=made)
    assert StateCache("qwen3-next", 10**9, policy="both", plugins=made, state_share=share).policy == "both"
    with pytest.raises(PluginError, match="a ConsumedLRU, which is not a KeyedOrder"):
        RadixCache(MODEL, 10, policy="both", plugins=made)


def test_a_refusal_names_the_policies_that_serve_whatever_another_plugin_does() -> None:
    made = manager(
        own=policy("mine", ConsumedLRU, sees=frozenset({"states"})),
        two=policy("odd", LRU, sees=frozenset({"leaves"}), supports=_raises),
        three=policy("choosy", LRU, sees=frozenset({"leaves"}), supports=lambda model: "not this one"),
    )
    with pytest.raises(PluginError) as error:
        made.check_settings(Settings(policy="gdsf"), made.match(ModelSpec.preset("qwen3-next")))
    assert str(error.value) == (
        "policy 'gdsf' does not serve model 'qwen3-next': it does not rank state checkpoints, which the "
        "model keeps; take consumed-lru, fifo, filo, hazard, lfu, lru, marconi, mine, mru, priority, slru"
    )


def test_the_spec_of_a_policy_is_found_by_settings() -> None:
    made = manager(own=Plugin(match_model=lambda: 3, default_policy=lambda: "lfu"))
    found = made.match(ModelSpec.preset(MODEL))
    name, spec = made.policy_spec(Settings(), found)
    assert (name, spec) == ("lfu", made.policies()["lfu"])


def test_an_unknown_policy_gets_a_suggestion() -> None:
    with pytest.raises(PluginError, match=r"no policy 'lur': did you mean 'lru'\?"):
        RadixCache(MODEL, 10, policy="lur", plugins=manager())
    with pytest.raises(PluginError, match=r"The policies are costcache, arc, consumed-lru, fifo"):
        RadixCache(MODEL, 10, policy="quantum", plugins=manager())


def test_policy_settings_are_named_in_full() -> None:
    with pytest.raises(SettingsError, match=r"policy_settings\.protected_threshold.*'many'"):
        RadixCache(
            MODEL, 10, policy="slru", plugins=manager(), policy_settings={"protected_threshold": "many"}
        )
    with pytest.raises(
        SettingsError, match=r"unknown setting 'policy_settings\.size': known settings are none"
    ):
        RadixCache(MODEL, 10, policy="lru", plugins=manager(), policy_settings={"size": 3})


def test_make_order_gets_cost_pools_and_settings() -> None:
    told: list[Any] = []

    class Own(BaseModel):
        depth: int = 3

    def make(*arguments: Any) -> LRU:
        told.extend(arguments)
        return LRU()

    made = manager(own=Plugin(policies=lambda: {"mine": PolicySpec(make, "", Own)}))
    RadixCache(MODEL, 33, 4, policy="mine", plugins=made, policy_settings={"depth": 4})
    cost, (pool,), settings = told
    assert cost.token.kv_bytes == 131_072
    assert (pool.pool, pool.unit, pool.capacity, pool.free, pool.page_size) == ("kv", "tokens", 32, 32, 4)
    assert (pool.evictable, pool.reserved) == (0, 0)
    assert settings == Own(depth=4)


def test_describe_lists_plugins_and_policies() -> None:
    described = manager(own=policy("mine", LRU)).describe()
    plugins = {item["name"]: item for item in described["plugins"]}
    assert plugins["own"] == {"name": "own", "source": "tests:own", "hooks": ["policies"]}
    assert plugins["generic"]["hooks"] == sorted(
        set(HOOKS) - {"policies", "storage_backend", "trace_formats"}
    )
    policies = {item["name"]: item for item in described["policies"]}
    assert policies["slru"]["settings"]["protected_threshold"]["default"] == 2
    assert all(item["summary"] for item in policies.values())
    storage = {item["name"]: item for item in described["storage"]}
    assert storage["file"]["settings"]["durable"]["default"] is True
    assert described["failures"] == []


@pytest.mark.parametrize(
    "name",
    ["", "optimum", "infinite", "a,b", "a b", " a", "a\n", "a\nb", "a=b", "a.b", "-a", "\x1b[31m", "ä"],
)
def test_a_policy_name_that_nobody_could_ask_for(name: str) -> None:
    spec = PolicySpec(lambda cost, pools, settings: LRU(), "")
    made = manager(own=Plugin(policies=lambda: {name: spec, "other": spec}))
    assert "other" in made.policies()
    assert name not in made.policies()
    assert f"policy {name!r} cannot be asked for" in reasons(made)["own"]
    assert "\n" not in reasons(made)["own"]


def test_the_bounds_of_replays_are_no_names_of_policies() -> None:
    assert set(OFFLINE) <= RESERVED


def test_every_builtin_policy_would_be_accepted_as_a_plugins() -> None:
    for name, spec in manager().policies().items():
        made = PluginManager()
        made.register(_offering({f"{name}-too": spec}), "own", "tests:own")
        assert f"{name}-too" in made.policies()


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("touchs", "touch"),
        ("on_touch", "touch"),
        ("refersh", "refresh"),
        ("inserted", "insert"),
        ("nextvictim", "next_victim"),
        ("removed", "remove"),
        ("finnish", "finish"),
        ("unlcok", "unlock"),
        ("keys", "key"),
    ],
)
def test_a_misspelt_event_is_named(method: str, meant: str) -> None:
    made_of = type("Mine", (LRU,), {method: lambda self, record: None, "__module__": __name__})
    with pytest.raises(PluginError, match=f"Mine has a method '{method}', .*did you mean '{meant}'"):
        PluginManager().register(policy("mine", made_of), "own", "tests:own")
    hidden = {"make": made_of}  # not to be found without making it
    made = PluginManager()
    made.register(policy("mine", partial(_made, hidden)), "own", "tests:own")
    with pytest.raises(PluginError, match=f"did you mean '{meant}'"):
        RadixCache(MODEL, 10, policy="mine", plugins=made)


def _offering(offer: dict[str, PolicySpec]) -> Plugin:
    return Plugin(policies=lambda: offer)


def _made(hidden: dict[str, type[VictimOrder]]) -> VictimOrder:
    return hidden["make"]()


def test_a_helper_that_the_order_itself_calls_may_be_named_like_an_event() -> None:
    class Mine(LRU):
        def touched(self, record: NodeRecord) -> None:
            record.data = 1

        def weight(self, record: NodeRecord) -> int:
            return 1

        def touch(self, record: NodeRecord) -> None:
            self.touched(record)

    made = manager(own=policy("mine", Mine))
    RadixCache(MODEL, 10, policy="mine", plugins=made).insert([1])


def test_one_module_under_two_names(install: Install, tmp_path: Path) -> None:
    info = tmp_path / "again-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: again\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{PROJECT}]\nbbb = plugin_module_aaa\n")
    made = install(aaa=GOOD)
    assert reasons(made) == {"bbb": "it is loaded already, as plugin 'aaa': keep one of the two entry points"}
    assert "aaa" in made.policies()


@pytest.mark.parametrize("line", ["bbb =", "bbb = ", "bbb = :x", "bbb = a b c", "bbb = 3x:"])
def test_an_empty_entry_point(line: str, install: Install, tmp_path: Path) -> None:
    info = tmp_path / "empty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: empty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{PROJECT}]\n{line}\n")
    made = install(aaa=GOOD)
    assert "aaa" in made.policies()
    (reason,) = [f.reason for f in made.failures if f.plugin == "bbb"]
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ("costcache==0.0.1", False),
        ("costcache (==0.0.1)", False),
        ("costcache>=99", False),
        ("costcache<0.1", False),
        ("costcache[mla]==0.0.1", False),
        (f"costcache=={__version__}", True),
        ("costcache>=0.0.1", True),
        ("costcache", True),
        ("costcache==0.0.1; extra == 'test'", True),
        ("costcache-mla==0.0.1", True),
        ("costcache @ file:///nowhere", True),
    ],
)
def test_a_plugin_made_for_another_version(
    requires: str, fits: bool, install: Install, tmp_path: Path
) -> None:
    info = tmp_path / "old-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: old\nVersion: 1.0\nRequires-Dist: {requires}\n"
        "Provides-Extra: test\nRequires-Dist: numpy>=1\n"
    )
    (info / "entry_points.txt").write_text(f"[{PROJECT}]\nbbb = plugin_module_old\n")
    (tmp_path / "plugin_module_old.py").write_text(GOOD.replace("NAME", "'old'"))
    made = install(aaa=GOOD)
    assert "aaa" in made.policies()
    assert ("old" in made.policies()) is fits
    if not fits:
        assert "it was made for costcache" in reasons(made)["bbb"]
        assert f"this is {__version__}" in reasons(made)["bbb"]
