"""Finds what is wrong with installed plugins: behind ``costcache plugins doctor``.

This process imports no plugin. Others do (:mod:`costcache.testing.examine`), one job after another; if one
ends, or tells nothing for too long, the plugin at hand is named, and a new process goes on with the next job.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import IO, Any

from costcache._version import __version__
from costcache.errors import ConfigError, PluginError
from costcache.hookspecs import PROJECT
from costcache.testing.fixes import fix_of

__all__ = ["Finding", "Plugin", "Report", "diagnose"]

_STARTING = 300.0
"""Seconds that a process may take to start, on a machine that is busy with other things."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with a plugin.

    Attributes:
        plugin: Name of its entry point.
        source: Its ``module`` or ``module:attribute``.
        part: Name of the policy or storage backend that it is about, empty for the plugin.
        problem: What is wrong, in one line.
        fix: What to do about it, in one line.
    """

    plugin: str
    source: str
    part: str
    problem: str
    fix: str


@dataclass
class Plugin:
    """An installed plugin.

    Attributes:
        name: Name of its entry point.
        source: Its ``module`` or ``module:attribute``.
        distribution: Name and version of its distribution; empty if unknown.
        hooks: The hooks that it has.
        policies: Names of the policies that it offers.
        trace_formats: Names of the trace formats that it offers.
        storage: Names of the storage backends that it offers.
        claims: Its claim on each model that it was asked about and claims.
        checks: Results of the conformance run by policy or storage backend, or ``architecture``, and check:
            ``passed``, ``failed``, ``skipped``, or ``left out`` for want of time.
    """

    name: str
    source: str
    distribution: str = ""
    hooks: list[str] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    trace_formats: list[str] = field(default_factory=list)
    storage: list[str] = field(default_factory=list)
    claims: dict[str, int] = field(default_factory=dict)
    checks: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass
class Report:
    """The findings.

    Attributes:
        version: Version of costcache.
        plugins: The plugins that were examined.
        model: Name of the model that was asked about; None if none was.
        claims: All claims on it, by plugin.
        winners: The plugins of the highest claim; more than one is a tie.
        findings: What is wrong.
    """

    version: str = __version__
    plugins: list[Plugin] = field(default_factory=list)
    model: str | None = None
    claims: dict[str, int] = field(default_factory=dict)
    winners: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)


def diagnose(
    name: str | None = None, model: str | None = None, *, seconds: float = 10.0, limit: float = 60.0
) -> Report:
    """Examine installed plugins.

    Args:
        name: A plugin, or a policy of one; None for all.
        model: A preset or the path of a config, for which claims are compared; None to look for ties among
            the presets.
        seconds: Seconds of the conformance run of each plugin; 0 for none.
        limit: Seconds after which a check that tells nothing does not end.

    Raises:
        PluginError: There is no plugin or policy of that name.
        ConfigError: The model cannot be read.
    """
    doctor = _Doctor(model, limit)
    doctor.load()
    chosen = doctor.chosen(name)
    if chosen and seconds > 0:
        doctor.try_out(chosen, seconds)
    report = doctor.report
    report.plugins = chosen
    if name is not None:
        names = {each.name for each in chosen}
        report.findings = [each for each in report.findings if each.plugin in names]
    return report


class _Doctor:
    def __init__(self, model: str | None, limit: float) -> None:
        self.report = Report()
        self._model = model
        self._limit = limit
        points = sorted(entry_points(group=PROJECT), key=lambda each: (each.name, each.value))
        self._all = [
            Plugin(
                point.name,
                point.value,
                "" if point.dist is None else f"{point.dist.name} {point.dist.version}",
            )
            for point in points
        ]

    def load(self) -> None:
        """Load each plugin alone, and then together those that can be."""
        jobs = [{"kind": "load", "name": each.name, "value": each.source} for each in self._all]
        for place, event in self._events(jobs):
            if event["event"] == "fact":
                for fact in ("hooks", "policies", "trace_formats", "storage", "claims"):
                    setattr(self._all[place], fact, event[fact])
            self._note(self._all[place], event)
        while True:
            points = [[each.name, each.source] for each in self._all if each.hooks]
            ended = None
            for _, event in self._events([{"kind": "together", "points": points}]):
                if event["event"] == "claims":
                    self.report.model = event["model"]
                    self.report.claims, self.report.winners = event["claims"], event["winners"]
                elif event["event"] == "error":
                    raise ConfigError(event["text"])
                about = [each for each in self._all if each.hooks and each.name == event["plugin"]]
                if about:
                    self._note(about[0], event)
                    ended = about[0] if event["event"] == "ended" else ended
            if ended is None:
                return
            ended.hooks = []  # the next try is without it

    def chosen(self, name: str | None) -> list[Plugin]:
        """The plugins of a name, or of a policy's."""
        found = [each for each in self._all if name is None or each.name == name]
        found = found or [each for each in self._all if name in each.policies]
        if not found and name is not None:
            names = ", ".join(sorted({each.name for each in self._all})) or "none"
            raise PluginError(
                f"no installed plugin is named {name!r} or offers such a policy; the plugins are {names}"
            )
        return found

    def try_out(self, plugins: Sequence[Plugin], seconds: float) -> None:
        """Run the contracts of what plugins offer."""
        able = [each for each in plugins if each.hooks and (each.policies or each.storage or each.claims)]
        jobs = [
            {
                "kind": "try",
                "name": each.name,
                "value": each.source,
                "policies": each.policies,
                "storage": each.storage,
                "models": list(each.claims)[:2],
                "seconds": seconds,
            }
            for each in able
        ]
        for place, event in self._events(jobs):
            if event["event"] == "results":
                able[place].checks[event["part"]] = event["results"]
            self._note(able[place], event)

    def _note(self, plugin: Plugin, event: dict[str, Any]) -> None:
        if event["event"] in ("finding", "ended"):
            problem, part = event["problem"], event.get("part", "")
            finding = Finding(plugin.name, plugin.source, part, problem, fix_of(problem))
            others = [
                each
                for each in self.report.findings
                if (each.plugin, each.source) == (plugin.name, plugin.source)
            ]
            # One fault fails many checks: what has the same fix is said once, in its first words.
            same_fix = event.get("tried") and any(each.fix == finding.fix for each in others)
            if not same_fix and all(each.problem != problem for each in others):
                self.report.findings.append(finding)

    def _events(self, jobs: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Do jobs in other processes: the place of a job, and an event of it; ``ended`` if it was cut off."""
        done = 0
        while done < len(jobs):
            doing: dict[str, Any] = {"plugin": "", "what": "start"}
            with _process([{"model": self._model, **job} for job in jobs[done:]]) as events:
                limit = _STARTING
                while True:
                    try:
                        event = events.get(timeout=limit)
                    except queue.Empty:
                        event = {"problem": f"it does not end: {doing['what']} took over {limit:g} s"}
                    limit = self._limit
                    if "event" not in event:  # the process ended, or has to
                        if done < len(jobs):
                            why = event["problem"].format(what=doing["what"])
                            yield done, {"event": "ended", "plugin": doing["plugin"], "problem": why}
                            done += 1
                        break
                    if event["event"] == "doing":
                        doing = event
                    elif event["event"] == "done":
                        done += 1
                    elif event["event"] != "ready":
                        yield done, event


@contextlib.contextmanager
def _process(jobs: list[dict[str, Any]]) -> Iterator[queue.Queue[dict[str, Any]]]:
    """Start a process that does jobs; its events, and as the last one how it ended."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "costcache.testing.examine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # so that what a plugin started ends with it
    )
    events: queue.Queue[dict[str, Any]] = queue.Queue()
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("pipes were asked for")
    thread = threading.Thread(target=_read, args=(process, process.stdout, events), daemon=True)
    thread.start()
    try:
        with contextlib.suppress(OSError), process.stdin as stdin:
            json.dump(jobs, stdin)
        yield events
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        thread.join()
        process.stdout.close()


def _read(process: subprocess.Popen[str], lines: IO[str], events: queue.Queue[dict[str, Any]]) -> None:
    for line in lines:
        with contextlib.suppress(ValueError):  # cut off in the middle
            events.put(json.loads(line))
    status = process.wait()
    how = f"signal {-status}" if status < 0 else f"exit status {status}"
    events.put({"problem": f"it ended the process ({how}) at: {{what}}"})
