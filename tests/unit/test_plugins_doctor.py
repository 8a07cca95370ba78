"""The doctor names every broken plugin with its fix; none stops the others, a cache or a replay."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from costcache import Deployment, ModelSpec, PluginError, RadixCache, Settings
from costcache.errors import ConfigError
from costcache.plugins import PluginManager
from costcache.sim.engine import Simulator
from costcache.sim.workloads import generate, workload_settings
from costcache.testing.doctor import Finding, Report, diagnose
from costcache.testing.fixes import fix_of
from tests.broken_plugins import BROKEN, HEALTHY, Broken, install
from tests.unit.commands import costcache_

WELL = Broken(HEALTHY, "", "")
HARMLESS = {"healthy": WELL} | {name: broken for name, broken in BROKEN.items() if not broken.hangs}
HANGING = {name: broken for name, broken in BROKEN.items() if broken.hangs}
PATIENT = 600.0
"""Seconds: on a busy machine everything takes long, and nothing is left out for it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Installs plugins for this module's tests."""
    before = list(sys.path)
    yield lambda plugins: _installed(tmp_path_factory.mktemp("site"), plugins)
    sys.path[:] = before


def _installed(folder: Path, plugins: dict[str, Broken]) -> None:
    install(folder, plugins)
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="module")
def report(site: Callable[..., None]) -> Report:
    """One examination of all plugins that end."""
    site(HARMLESS)
    return diagnose(seconds=PATIENT, limit=PATIENT)


def findings(report: Report, plugin: str) -> list[Finding]:
    return [each for each in report.findings if each.plugin == plugin]


@pytest.mark.parametrize("name", [name for name, broken in HARMLESS.items() if broken.says])
def test_a_broken_plugin_is_named_with_its_fix(name: str, report: Report) -> None:
    broken, found = BROKEN[name], findings(report, name)
    assert any(broken.says in each.problem and broken.fix in each.fix for each in found), found
    assert all("\n" not in each.problem + each.fix for each in found)
    assert len(found) <= 4


@pytest.mark.parametrize("name", [name for name, broken in HARMLESS.items() if not broken.says])
def test_nothing_is_said_of_the_others(name: str, report: Report) -> None:
    assert not findings(report, name)


def test_a_healthy_policy_passes_every_check_beside_them(report: Report) -> None:
    (healthy,) = (each for each in report.plugins if each.name == "healthy")
    assert healthy.policies == ["healthy"]
    assert healthy.distribution == "broken_healthy 1.0"
    assert set(healthy.checks["healthy"].values()) == {"passed"}
    assert "every process gives the same victims" in healthy.checks["healthy"]


@pytest.fixture(scope="module")
def plugins(report: Report) -> PluginManager:
    """All plugins that a process survives, loaded as a cache loads them."""
    made = PluginManager()
    made.load_entry_points()
    return made


def test_the_others_load(plugins: PluginManager) -> None:
    assert {"healthy", "lru", "sleeps"} <= set(plugins.policies())
    failed = {failure.plugin for failure in plugins.failures}
    assert {"imports", "panics", "exits", "outdated", "twice-again", "list"} <= failed
    assert not {"healthy", "twice", "formats"} & failed


ORDERS = [name for name, broken in HARMLESS.items() if "class Order" in broken.source]
REFUSED = {
    "outdated",
    "event",
    "settings-arguments",
    "async-event",
    "yields",
    "supports",
}  # before a cache is made


@pytest.mark.parametrize("policy", [name for name in ORDERS if name not in REFUSED])
def test_no_policy_stops_a_cache(policy: str, plugins: PluginManager) -> None:
    cache = RadixCache("llama-3-8b", 40, policy=policy, plugins=plugins)
    for number in range(30):
        cache.insert([number % 6] * 10)
        match = cache.match_prefix([(number + 1) % 6] * 10)
        cache.lock(match.node)
        wanted = min(3, cache.evictable)
        assert cache.evict(3).freed >= wanted
        cache.unlock(match.node)
    assert cache.free + cache.cached == 40
    assert cache.policy in (policy, "lru")


def test_no_plugin_stops_a_replay(plugins: PluginManager) -> None:
    trace = generate("chat", workload_settings("chat", {"requests": 40}))
    model = ModelSpec.preset("llama-3-8b")
    simulator = Simulator(trace, model, Deployment(page_size=16), plugins=plugins)
    for policy in ("healthy", "raises-in-event", "writes", "names-words"):
        run = simulator.run(Settings(policy=policy), 4000)
        assert run.requests == 40
        assert run.policy_in_force == ("healthy" if policy == "healthy" else "lru")


def test_what_hangs_or_kills_is_named_and_the_others_are_examined(site: Callable[..., None]) -> None:
    before = list(sys.path)
    _forget()
    site(HANGING | {"zzz-healthy": WELL})
    # Of the last one, only the first checks are begun: they must end within the limit on any machine.
    report = diagnose(seconds=0.05, limit=6.0)
    sys.path[:] = before
    for name, broken in HANGING.items():
        found = findings(report, name)
        assert any(broken.says in each.problem and broken.fix in each.fix for each in found), found
    assert not findings(report, "zzz-healthy")
    (healthy,) = (each for each in report.plugins if each.name == "zzz-healthy")
    assert "passed" in healthy.checks["zzz-healthy"].values()


@pytest.fixture
def few(site: Callable[..., None]) -> Iterator[None]:
    """A few plugins are installed, in place of the many."""
    before = list(sys.path)
    _forget()
    site({name: BROKEN[name] for name in ("tie-a", "tie-b", "zero", "free-target")} | {"healthy": WELL})
    yield
    sys.path[:] = before


def _forget() -> None:
    sys.path[:] = [path for path in sys.path if not Path(path).name.startswith("site") or "packages" in path]


def test_one_plugin_is_examined_by_name_beside_the_others(few: None) -> None:
    one = diagnose("tie-b", "gemma-3-12b", seconds=0)
    assert [each.name for each in one.plugins] == ["tie-b"]
    assert (one.model, one.winners, one.claims["tie-b"]) == ("gemma-3-12b", ["tie-a", "tie-b"], 77)
    with pytest.raises(PluginError, match=r"no installed plugin is named 'nobody' or offers such a policy"):
        diagnose("nobody", seconds=0)
    with pytest.raises(ConfigError, match="nothing-like-it"):
        diagnose(model="nothing-like-it", seconds=0)


def test_the_command_says_it_in_words_and_as_json(few: None) -> None:
    result = costcache_("plugins", "doctor", "zero", "--seconds", "0")
    assert result.exit_code == 1
    assert "zero (broken_zero): match_model answered 0, not an int of 1 or more, or None" in result.output
    assert "fix: return an int of 1 or more for the plugin's models, else None" in result.output
    assert "1 finding\n" in result.output
    asked = ("plugins", "doctor", "healthy", "--model", "llama-3-8b")
    result = costcache_(*asked, "--seconds", "0", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["findings"] == []
    assert found["model"] == "llama-3-8b"
    assert found["claims"]["free-target"] == 33
    result = costcache_(*asked, "--seconds", "0.001")
    assert "llama-3-8b is claimed by free-target with 33" in result.output
    assert "checks were left out" in result.output
    assert "nothing found" in result.output


def test_plugins_are_still_listed_without_a_subcommand() -> None:
    assert "evicts first" in costcache_("plugins").output


def test_every_problem_has_a_fix() -> None:
    assert "costcache.testing" in fix_of("something that nobody foresaw")
    assert "a new VictimOrder for each tier" in fix_of(
        "LRU had to take over: below raised PluginError: below"
    )
