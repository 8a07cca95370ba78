"""Tries what a plugin offers, without pytest: its contract, and what a small server shows of its manners."""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from costcache.errors import one_line
from costcache.model import ModelSpec
from costcache.plugins import PluginManager
from costcache.testing.server import SmallServer, made_cache
from costcache.testing.steps import Request, Serve, Step, stream
from costcache.testing.watched import nothing_shared, watching

__all__ = ["Doing", "try_architecture", "try_policy", "try_storage"]

Doing = Callable[[str], None]
"""Told what is about to be done, so that a plugin that ends the process can be named."""

_PLAIN, _HYBRID = "llama-3-8b", "qwen3-next"
_SLOW = 0.005
"""Seconds: a step of a small server, of which an order's part is microseconds."""
_STEPS = 12
_PROMPTS = 1000
_PACE, _WATCHED = "a small server keeps its pace", "a stream under watch"
_STATIC = (
    _WATCHED,
    "it is offered with a summary and default settings",
    "it serves some of the models and refuses the others by name",
    "a wrong setting is refused and not ignored",
)
"""Checks that say more of an order that has failed another one already."""
_LATE = "test_every_process_gives_the_same_victims"  # starts processes, so it comes last


class _SlowError(AssertionError):
    """An order is so slow that no other check would end."""


class _Heard(logging.Handler):
    """Keeps the last warning of costcache."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


@contextlib.contextmanager
def _listening() -> Iterator[_Heard]:
    heard, logger = _Heard(), logging.getLogger("costcache")
    logger.addHandler(heard)
    try:
        yield heard
    finally:
        logger.removeHandler(heard)


def try_policy(
    plugins: PluginManager, policy: str, address: str, until: float, doing: Doing
) -> tuple[list[str], dict[str, str]]:
    """Try a policy.

    Args:
        plugins: Where it is offered.
        policy: Its name.
        address: The plugin's ``module`` or ``module:attribute``, for other processes.
        until: Reading of ``time.monotonic`` after which no further check is begun.
        doing: Told of each check.

    Returns:
        The problems, each once, and the result of each check: ``passed``, ``failed``, ``skipped`` or ``left
        out``.
    """
    checks: dict[str, Callable[[], object]] = {}
    served = _served(plugins, policy)
    if served:
        checks["orders share nothing"] = lambda: _apart(plugins, policy, served)  # first: classes are as new
        checks[_PACE] = lambda: _pace(plugins, policy, served)
    if served == _PLAIN:
        checks[_WATCHED] = lambda: _watched(plugins, policy)
        checks["what it keeps is bounded"] = lambda: _bounded(plugins, policy)
    try:
        from costcache.testing.policy import PolicyContract
    except ImportError as error:
        return [f"the conformance run needs the extra 'testing': {error}"], {}
    contract = type(
        "Examined",
        (PolicyContract,),
        {"policy": policy, "address": address, "plugins": classmethod(lambda _: plugins)},
    )()
    checks |= _tests(contract, PolicyContract, last=_LATE)
    return _run(checks, until, doing, always=_STATIC)


def try_architecture(
    plugins: PluginManager, models: Sequence[ModelSpec], until: float, doing: Doing
) -> tuple[list[str], dict[str, str]]:
    """Try an architecture plugin with models that it claims; see :func:`try_policy`."""
    try:
        from costcache.testing.architecture import ArchitectureContract
    except ImportError as error:
        return [f"the conformance run needs the extra 'testing': {error}"], {}
    contract = type(
        "Examined",
        (ArchitectureContract,),
        {"serves": tuple(models), "plugins": classmethod(lambda _: plugins)},
    )()
    checks = _tests(contract, ArchitectureContract)
    del checks["it claims its models and leaves the others"]  # which it claims is shown, not judged
    return _run(checks, until, doing)


def try_storage(
    plugins: PluginManager, backend: str, until: float, doing: Doing
) -> tuple[list[str], dict[str, str]]:
    """Try a storage backend, in a folder that is removed afterwards; see :func:`try_policy`."""
    from costcache.testing.storage import StorageContract

    contract = type(
        "Examined",
        (StorageContract,),
        {"backend": backend, "plugins": classmethod(lambda _: plugins)},
    )()
    checks = _tests(contract, StorageContract)
    return _run(checks, until, doing, always=list(checks))


def _served(plugins: PluginManager, policy: str) -> str:
    with contextlib.suppress(Exception):  # the contract says what is wrong
        for name in (_PLAIN, _HYBRID):
            if plugins.refusal(policy, ModelSpec.preset(name)) is None:
                return name
    return ""


def _tests(contract: Any, kind: type, last: str = "") -> dict[str, Callable[[], object]]:
    names = [name for name in vars(kind) if name.startswith("test_")]
    names.sort(key=lambda name: name == last)
    return {_words(name): getattr(contract, name) for name in names}


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def _run(
    checks: dict[str, Callable[[], object]], until: float, doing: Doing, always: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Run checks; once one has failed, those that need a sound order only if they are in ``always``."""
    problems: list[str] = []
    results: dict[str, str] = {}
    for name, check in checks.items():
        if time.monotonic() > until or (problems and name not in always):
            results[name] = "left out"
            continue
        doing(name)
        with _listening() as heard:
            try:
                check()
                results[name] = "passed"
            except unittest.SkipTest:
                results[name] = "skipped"
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                results[name] = "failed"
                always = () if isinstance(error, _SlowError) else always
                problem = _told(error, heard.last)
                if problem not in problems:
                    problems.append(problem)
    return problems, results


def _told(error: BaseException, logged: str) -> str:
    """A problem in one line; why LRU took over is in the log."""
    text = " ".join(str(error).split()) if isinstance(error, AssertionError) else one_line(error)
    if "LRU had to take over" in text and logged:
        return f"LRU had to take over: {logged.partition(' until the cache is reset: ')[2] or logged}"
    if "an answer of a hook had to be replaced" in text and logged:
        return logged
    return text or one_line(error)


def _apart(plugins: PluginManager, policy: str, model: str) -> None:
    """Check that each cache has an order of its own, which keeps what it learns and does to itself."""
    one, two = (SmallServer(made_cache(ModelSpec.preset(model), 60, 1, policy, plugins)) for _ in range(2))
    apart = nothing_shared(one.cache._pool._guard.order, two.cache._pool._guard.order)
    with apart, contextlib.redirect_stdout(io.StringIO()) as said:
        for step in stream(seed=5, steps=_STEPS):
            one.do(step)
    if said.getvalue():
        first = said.getvalue().splitlines()[0]
        raise AssertionError(f"it prints to standard output, where commands write JSON: {first[:60]!r}")


def _pace(plugins: PluginManager, policy: str, model: str) -> None:
    """Check that no step takes the time of thousands; the median, since a busy machine delays some."""
    server = SmallServer(made_cache(ModelSpec.preset(model), 60, 1, policy, plugins))
    took = []
    for step in stream(seed=5, steps=_STEPS):
        before = time.perf_counter()
        server.do(step)
        took.append(time.perf_counter() - before)
    usual = statistics.median(took)
    if usual > _SLOW:
        raise _SlowError(f"it takes {1000 * usual:.0f} ms for a step of a small server, at the median")


def _watched(plugins: PluginManager, policy: str) -> None:
    """Check each event of a stream in which requests overlap, and say what was wrong at the first one."""
    watched, orders = watching(plugins, policy, ModelSpec.preset(_PLAIN))
    server = SmallServer(made_cache(ModelSpec.preset(_PLAIN), 120, 1, "watched", watched))
    try:
        server.run(stream(seed=6, steps=200))
    except AssertionError as error:
        raise (orders[0].broken or error) from None


def _bounded(plugins: PluginManager, policy: str) -> None:
    """Check that an order forgets what left the cache."""
    tokens = 64
    server = SmallServer(made_cache(ModelSpec.preset(_PLAIN), tokens, 1, policy, plugins))

    def kept(first: int) -> int:
        for number in range(first, first + _PROMPTS):
            step: Step = Serve(Request((number, number), ()))
            server.do(step)
        return server.cache._pool.kept_entries or 0

    before, after = kept(0), kept(_PROMPTS)
    if after - before >= _PROMPTS:
        raise AssertionError(
            f"it keeps {after:,} entries after {2 * _PROMPTS:,} requests to a cache of {tokens} tokens, and "
            "still grows"
        )
