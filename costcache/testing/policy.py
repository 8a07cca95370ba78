"""The contract of policies, as a class of tests to subclass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from collections.abc import Callable
from functools import partial
from types import FrameType, ModuleType
from typing import Any, ClassVar

from hypothesis import HealthCheck, given, settings

from costcache.errors import CostcacheError
from costcache.model import ModelSpec
from costcache.radix.cache import PrefixCache
from costcache.testing import strategies
from costcache.testing.offered import Offered
from costcache.testing.server import SmallServer, made_cache
from costcache.testing.slower import check_slower_tier, has_order_below
from costcache.testing.steps import Evict, Request, Serve, Step, stream
from costcache.testing.watched import nothing_shared, watching

__all__ = ["PolicyContract"]

_PLAIN, _HYBRID = "llama-3-8b", "qwen3-next"
_FEW, _MANY = 128, 2048
_ROUNDS = 48
_GROWTH = 4.0
"""Times as much work as with a sixteenth of the leaves: the logarithm grows 1.5 times, a scan 16 times."""

_kit = settings(
    deadline=None,
    max_examples=15,
    # Each subclass runs the same functions, and a busy machine is not wrong.
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class PolicyContract(Offered):
    """Tests that every policy must pass.

    Subclass it, and name the policy::

        class TestCheapest(PolicyContract):
            policy = "cheapest"
            plugin = costcache_cheapest

    Attributes:
        policy: The policy's name.
        plugin: The module or object that offers it; None if an installed entry point or costcache does.
        address: The plugin's ``module:attribute``, where it is an object that other processes can import.
        settings: Its settings, by name, where the defaults are not what is to be tested.
        models: Presets that it is tried with; one that it does not serve must be refused by name.
    """

    policy: ClassVar[str]
    address: ClassVar[str | None] = None
    models: ClassVar[tuple[str, ...]] = (_PLAIN, _HYBRID)

    # -- what the tests stand on -------------------------------------------------------------

    @classmethod
    def cache(cls, model: str, tokens: int = 60, page_size: int = 1, **more: Any) -> PrefixCache:
        """A small cache under the policy."""
        return made_cache(
            ModelSpec.preset(model),
            tokens,
            page_size,
            cls.policy,
            cls.plugins(),
            policy_settings=dict(cls.settings),
            **more,
        )

    @classmethod
    def served(cls) -> list[str]:
        """Those of ``models`` that the policy serves."""
        plugins = cls.plugins()
        return [name for name in cls.models if plugins.refusal(cls.policy, ModelSpec.preset(name)) is None]

    # -- tests -------------------------------------------------------------------------------

    def test_it_is_offered_with_a_summary_and_default_settings(self) -> None:
        spec = self.plugins().policies().get(self.policy)
        assert spec is not None, f"no plugin offers {self.policy!r}: {self.plugins().failures}"
        summary: Any = spec.summary
        assert isinstance(summary, str), f"the summary is {summary!r}, not a text"
        assert summary.strip(), "the summary is empty: say in a line what is evicted first"
        assert "\n" not in summary, "the summary is one line"
        spec.settings()  # can be made without arguments
        for name, field in spec.settings.model_fields.items():
            assert field.description, f"the setting {name!r} has no description, which its help text needs"
        if spec.windows is not None:
            offered = self.plugins().policies()
            assert spec.windows in offered, (
                f"{self.policy!r}: it names {spec.windows!r} for windows, and there is no such policy"
            )
        for name in self.served():
            if spec.explains and not ModelSpec.preset(name).has_states:
                assert self.cache(name)._pool._guard.order.explained() is not None, (
                    f"{self.policy!r}: it declares explains=True, and its order has no classes to explain"
                )

    def test_it_serves_some_of_the_models_and_refuses_the_others_by_name(self) -> None:
        assert self.served(), f"{self.policy!r} serves none of {', '.join(self.models)}: set models"
        for name in set(self.models) - set(self.served()):
            said = _refusal(partial(self.cache, name))
            assert f"policy '{self.policy}' does not serve model '{name}'" in said, said or "it was served"

    def test_a_wrong_setting_is_refused_and_not_ignored(self) -> None:
        for name in self.served():
            attempt = partial(
                made_cache,
                ModelSpec.preset(name),
                60,
                1,
                self.policy,
                self.plugins(),
                policy_settings={"no_such_setting": 1},
            )
            said = _refusal(attempt)
            assert "no_such_setting" in said, said or "the setting 'no_such_setting' was not refused"

    @_kit
    @given(steps=strategies.streams())
    def test_whatever_happens_it_frees_enough_and_nothing_pinned(self, steps: list[Step]) -> None:
        for name in self.served():
            for page_size in (1, 4):
                SmallServer(self.cache(name, page_size=page_size)).run(steps)

    @_kit
    @given(steps=strategies.streams())
    def test_it_names_unlocked_leaves_and_writes_to_their_data_only(self, steps: list[Step]) -> None:
        model = ModelSpec.preset(_PLAIN)
        if self.plugins().refusal(self.policy, model) is not None:
            raise unittest.SkipTest(
                f"{self.policy!r} ranks states only, which are watched by the framework's own order"
            )
        for tokens in (60, 240):  # of few leaves almost any one is the lowest
            plugins, orders = watching(self.plugins(), self.policy, model)
            cache = made_cache(model, tokens, 1, "watched", plugins, policy_settings=dict(self.settings))
            try:
                SmallServer(cache).run(steps)
            except AssertionError as error:
                raise (orders[0].broken or error) from None  # it says more than that LRU took over

    def test_equal_streams_give_equal_victims(self) -> None:
        for name in self.served():
            one, two = (SmallServer(self.cache(name, 400)).run(stream(seed=1)) for _ in range(2))
            assert one == two, (
                "the same stream gave other victims: is there a clock, or an unseeded random number?"
            )

    def test_what_another_cache_does_changes_nothing(self) -> None:
        for name in self.served():
            beside, other = SmallServer(self.cache(name, 200)), SmallServer(self.cache(name, 100))
            with nothing_shared(beside.cache._pool._guard.order, other.cache._pool._guard.order):
                alone = SmallServer(self.cache(name, 200)).run(stream(seed=4))
                for step, strange in zip(stream(seed=4), stream(seed=7), strict=True):
                    beside.do(step)
                    other.do(strange)
            assert beside.run([]) == alone, (
                "another cache changed the victims: does the order keep what it learns outside of itself?"
            )

    def test_every_process_gives_the_same_victims(self) -> None:
        plugin = self.plugin
        if self.address is None and not (plugin is None or isinstance(plugin, ModuleType)):
            raise unittest.SkipTest("the plugin is an object of the test: another process cannot import it")
        for name in self.served():
            found = {seed: self._in_a_process(name, seed) for seed in ("0", "1", "2")}
            assert len(set(found.values())) == 1, (
                f"victims depend on the process (by its hash seed: {found}): is there a hash() of text, or "
                "an order of a set? Every tensor-parallel rank must choose the same victims."
            )

    def _in_a_process(self, model: str, hash_seed: str) -> str:
        plugin = self.address or ("" if self.plugin is None else self.plugin.__name__)
        command = [sys.executable, "-m", "costcache.testing.repeat", self.policy, model, plugin]
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        done = subprocess.run(
            [*command, json.dumps(dict(self.settings))],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def test_after_a_reset_it_serves_as_a_new_one(self) -> None:
        for name in self.served():
            server = SmallServer(self.cache(name, 200))
            server.run(stream(seed=2, steps=120))
            server.cache.reset()
            server.run(stream(seed=3, steps=120))

    def test_an_order_that_it_makes_for_a_slower_tier_serves_there(self) -> None:
        """Only of a policy whose order has a method ``below``."""
        for name in self.served():
            for flat in (False, True):
                server = SmallServer(self.cache(name, 200))
                for step in stream(seed=5, steps=60):
                    server.do(step)
                if has_order_below(server.cache):
                    for _ in range(2):  # a host and a disk
                        check_slower_tier(server.cache, flat=flat)

    def test_a_victim_takes_about_as_long_among_many_leaves_as_among_few(self) -> None:
        """Counted in lines of Python, not timed; what a C function scans is not seen.

        Models with states are left out: there are few states, and an order may rank all of them now and then.
        """
        for name in self.served():
            if ModelSpec.preset(name).has_states:
                continue
            few, many = (self._work(name, leaves) for leaves in (_FEW, _MANY))
            assert many <= _GROWTH * few + 50, (
                f"a request runs {many:.0f} lines of the policy among {_MANY} leaves, and {few:.0f} among "
                f"{_FEW}: it should grow as their logarithm. Is there a loop over all leaves?"
            )

    def _work(self, model: str, leaves: int) -> float:
        """Lines of Python that a request and its eviction run, with so many leaves."""
        cache = self.cache(model, 4 * leaves)
        server = SmallServer(cache)

        def prompt(number: int) -> Step:
            return Serve(Request((number % 7, number, number, number), ()))

        for number in range(leaves):
            server.do(prompt(number))

        def requests(first: int) -> None:
            for number in range(first, first + _ROUNDS):
                server.do(prompt(number - number % 3))
                server.do(Evict(2))

        requests(leaves)  # the first victims may find work that was left for them
        return _lines(lambda: requests(leaves + _ROUNDS)) / _ROUNDS


def _refusal(attempt: Callable[[], object]) -> str:
    """The words in which costcache refuses an attempt; empty if it succeeds."""
    try:
        attempt()
    except CostcacheError as error:
        return str(error)
    return ""


def _lines(function: Callable[[], None]) -> float:
    """Lines of Python that a call runs."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return float(count)
