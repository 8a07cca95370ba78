"""Examines plugins in a process of its own, which a plugin may end, for ``costcache plugins doctor``.

python -m costcache.testing.examine, with jobs as JSON on standard input; tells what it does and finds, one
JSON object a line, on what was standard output. What plugins print goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TextIO

from costcache.deployment import Deployment
from costcache.errors import ConfigError, CostcacheError, PluginError, one_line
from costcache.hookspecs import PROJECT
from costcache.model.presets import PRESETS
from costcache.plugins import PluginManager
from costcache.settings import Settings
from costcache.testing.trial import try_architecture, try_policy, try_storage

__all__ = ["Examiner"]

_TRIED = ("llama-3-8b", "deepseek-v3", "qwen3-next")
"""Presets of three kinds, with which an architecture plugin that claims them is tried."""


class Examiner:
    """Does jobs, and tells what it finds.

    Args:
        out: Where events go.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._plugin = ""

    def tell(self, event: str, **facts: Any) -> None:
        """Tell of an event."""
        self._out.write(json.dumps({"event": event, "plugin": self._plugin, **facts}) + "\n")
        self._out.flush()

    def do(self, job: dict[str, Any]) -> None:
        """Do a job: ``load``, ``together`` or ``try``."""
        self._plugin = job.get("name", "")
        getattr(self, f"_{job['kind']}")(job)
        self.tell("done")

    def _doing(self, what: str) -> None:
        self.tell("doing", what=what)

    def _doing_of(self, policy: str, what: str) -> None:
        self._doing(f"{policy}: {what}")

    def _found(self, problem: str, part: str = "", *, tried: bool = False) -> None:
        self.tell("finding", problem=problem, part=part, tried=tried)

    def _load(self, job: dict[str, Any]) -> None:
        """Load one plugin alone, and look at what it offers."""
        self._doing("import")
        plugins = _alone(job["name"], job["value"])
        said = len(plugins.failures)
        if plugins.pm.has_plugin(job["name"]):
            listed = next(each for each in plugins.describe()["plugins"] if each["name"] == job["name"])
            owned = {each["name"] for each in PluginManager().describe()["policies"]}
            self._doing("match_model")
            claims = _claims(plugins, job["name"], job["model"])
            self.tell(
                "fact",
                hooks=listed["hooks"],
                policies=sorted(plugins.policies().keys() - owned),
                trace_formats=sorted(plugins.trace_formats()),
                storage=sorted(plugins.storage_backends().keys() - PluginManager().storage_backends()),
                claims=claims,
            )
            self._doing("read_config")
            for model in _TRIED:
                with contextlib.suppress(CostcacheError):  # what it answered wrongly is among the failures
                    plugins.read(PRESETS[model])
            if "trace_formats" in listed["hooks"]:
                self._doing("trace_formats")
                _offer_a_trace(plugins)
            for model in claims:
                self._doing(f"the hooks for {model}")
                self._claimed(plugins, model)
            for policy in sorted(plugins.policies().keys() - owned):
                self._doing(f"the settings of policy {policy!r}")
                try:
                    plugins.policies()[policy].settings()
                except Exception as error:
                    self._found(f"its settings cannot be made without arguments: {one_line(error)}", policy)
        for failure in plugins.failures:
            self._found(failure.reason)
        if not said and not plugins.failures:
            self.tell("sound")

    def _claimed(self, plugins: PluginManager, name: str) -> None:
        """Ask once what a cache of a model that a plugin claims asks."""
        try:
            architecture = plugins.match(plugins.resolve(name))
            architecture.cost(Deployment())
            architecture.pool_settings(Settings())
        except PluginError as error:
            self._found(str(error))
        except CostcacheError as error:
            self._found(f"settings_model: {error}")
        else:
            try:
                plugins.policy_name(PROJECT, architecture)
            except PluginError as error:
                self._found(str(error))

    def _together(self, job: dict[str, Any]) -> None:
        """Load all plugins that load alone, as a cache does, and let them claim models."""
        plugins = PluginManager()
        for name, value in job["points"]:
            self._plugin = name
            self._doing("import beside the others")
            plugins.load(_point(name, value))
        for failure in plugins.failures:
            self._plugin = failure.plugin
            self._found(failure.reason)
        plugins.trace_formats()
        self._plugin = ""
        ties: set[str] = set()
        for name in [job["model"]] if job["model"] else sorted(PRESETS):
            self._doing(f"match_model for {name}")
            try:
                model = plugins.resolve(name)
            except ConfigError as error:
                self.tell("error", text=str(error))
                return
            claims = plugins.claims(model)
            highest = max(claims.values())
            winners = sorted(plugin for plugin, claim in claims.items() if claim == highest)
            if len(winners) > 1 and (key := " ".join(winners)) not in ties:
                ties.add(key)
                self._plugin = winners[0]
                with contextlib.suppress(CostcacheError):
                    plugins.match(model)
                names = " and ".join(map(repr, winners))
                self._found(f"plugins {names} claim model {name!r} with the same specificity {highest}")
                self._plugin = ""
            if job["model"]:
                self.tell("claims", model=model.name, claims=claims, winners=winners)

    def _try(self, job: dict[str, Any]) -> None:
        """Try what a plugin offers, for so many seconds."""
        plugins = _alone(job["name"], job["value"])
        until = time.monotonic() + job["seconds"]
        for policy in job["policies"]:
            doing = partial(self._doing_of, policy)
            problems, results = try_policy(plugins, policy, job["value"], until, doing)
            for problem in problems:
                self._found(problem, policy, tried=True)
            self.tell("results", part=policy, results=results)
        for backend in job["storage"]:
            doing = partial(self._doing_of, backend)
            problems, results = try_storage(plugins, backend, until, doing)
            for problem in problems:
                self._found(f"storage backend: {problem}", backend, tried=True)
            self.tell("results", part=backend, results=results)
        models = [plugins.resolve(name) for name in job["models"]]
        if models:
            problems, results = try_architecture(plugins, models, until, self._doing)
            for problem in problems:
                self._found(problem, tried=True)
            self.tell("results", part="architecture", results=results)


def _point(name: str, value: str) -> EntryPoint:
    """The installed entry point, which knows its distribution."""
    for point in entry_points(group=PROJECT):
        if (point.name, point.value) == (name, value):
            return point
    return EntryPoint(name, value, PROJECT)


def _alone(name: str, value: str) -> PluginManager:
    plugins = PluginManager()
    plugins.load(_point(name, value))
    return plugins


def _offer_a_trace(plugins: PluginManager) -> None:
    """Ask every format whether it claims a file; what is wrong with one is among the failures then."""
    from costcache.sim.traces import load_trace

    line = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(CostcacheError):
        path = Path(folder, "trace.jsonl")
        path.write_text(json.dumps(line), encoding="utf-8")
        load_trace(path, plugins=plugins)


def _claims(plugins: PluginManager, plugin: str, model: str | None) -> dict[str, int]:
    """The plugin's claims on a model, or on some presets of different kinds."""
    claims = {}
    for name in [model] if model else _TRIED:
        with contextlib.suppress(ConfigError):  # one that another plugin reads
            claim = plugins.claims(plugins.resolve(name)).get(plugin)
            if claim is not None:
                claims[name] = claim
    return claims


def _main() -> None:
    jobs = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what plugins print is no event
    logging.getLogger("costcache").addHandler(logging.NullHandler())
    logging.getLogger("costcache").propagate = False
    with contextlib.suppress(ImportError):
        from hypothesis import Phase, settings

        # The first example is told as it is: shrinking takes long, and a database would be a surprise.
        settings.register_profile(
            "doctor", phases=(Phase.generate,), database=None, derandomize=True, report_multiple_bugs=False
        )
        settings.load_profile("doctor")
        import costcache.testing.architecture
        import costcache.testing.policy  # noqa: F401 # imported while nobody counts the seconds
    examiner = Examiner(out)
    examiner.tell("ready")
    for job in jobs:
        examiner.do(job)


if __name__ == "__main__":
    _main()
