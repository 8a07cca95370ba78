"""Checks of a plugin's offers before they are used: its entry point, its hooks, and what they return."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any, TypeVar, get_args

from pydantic import BaseModel

from costcache import generic, hookspecs
from costcache._version import __version__
from costcache.errors import PluginError
from costcache.formats import TraceFormat
from costcache.orders import KeyedOrder, VictimOrder
from costcache.policies import PolicySpec
from costcache.policies.spec import Sight
from costcache.policies.states import StateOrder
from costcache.storage import StorageSpec

__all__ = [
    "HOOKS",
    "RESERVED",
    "check_backends",
    "check_hooks",
    "check_methods",
    "check_point",
    "check_policies",
    "is_settings",
    "words_of",
    "wrong_format",
    "wrong_name",
]

Spec = TypeVar("Spec", PolicySpec, StorageSpec)

RESERVED = frozenset({"", "architecture", "optimum", "infinite"})
"""Names that cannot be a policy's: on the command line they mean bounds, a target of --set, or nothing."""
_OURS = re.compile(r"costcache\s*(?![\w.-])")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_NAME_OF = "letters, digits, '-' and '_'"
_EVENTS = (
    *(name for name, value in vars(VictimOrder).items() if not name.startswith("_") and callable(value)),
    "key",
    "score",
)

HOOKS = tuple(
    name for name in hookspecs.__all__ if hasattr(getattr(hookspecs, name), f"{hookspecs.PROJECT}_spec")
)
"""Names of all hooks."""


def check_point(point: EntryPoint) -> None:
    """Check what an entry point says before its module is imported.

    Raises:
        PluginError: It names no module, or its distribution was made for another version of costcache.
    """
    if not point.name.strip() or not EntryPoint.pattern.match(point.value):
        raise PluginError(
            f"its entry point is {f'{point.name} = {point.value}'!r}: write NAME = MODULE or "
            "NAME = MODULE:ATTRIBUTE"
        )
    dist = point.dist
    for line in (dist.requires if dist is not None else None) or ():
        if not _OURS.match(line):
            continue
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            needs = Requirement(line)
        except InvalidRequirement:
            continue
        applies = needs.marker is None or needs.marker.evaluate({"extra": ""})
        if applies and not needs.specifier.contains(__version__, prereleases=True):
            raise PluginError(
                f"it was made for costcache{needs.specifier}, and this is {__version__}: install a version "
                "of the plugin that names this one"
            )


def check_hooks(plugin: object, marker_of: Callable[[object, str], Mapping[str, Any] | None]) -> None:
    """Check the hooks of a plugin before it is registered.

    Args:
        plugin: A module, class or object.
        marker_of: Gives what ``@hookimpl`` noted of an attribute; None without it.

    Raises:
        PluginError: It has no hook, misspells one, wraps one, or takes other arguments.
    """
    hooks = []
    for attribute in dir(plugin):
        marker = marker_of(plugin, attribute)
        if marker is None:
            continue
        hook = marker.get("specname") or attribute
        if hook not in HOOKS:
            close = difflib.get_close_matches(hook, HOOKS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the hooks are {', '.join(HOOKS)}"
            raise PluginError(f"there is no hook {hook!r}: {hint}")
        if marker.get("wrapper") or marker.get("hookwrapper"):
            raise PluginError(f"hook {hook!r} is a wrapper: hooks of costcache cannot be wrapped")
        function = getattr(plugin, attribute)
        _check_arguments(hook, function)
        kind = _never_runs(function)
        if kind is not None:
            raise PluginError(f"hook {hook!r} is {kind}, whose body no call runs: make it a plain function")
        hooks.append(hook)
    if not hooks:
        raise PluginError("no function in it is marked @costcache.hookimpl")
    useless = [hook for hook in hooks if hook in generic.DEFAULTS]
    if useless and "match_model" not in hooks:
        raise PluginError(
            f"it has {useless[0]!r} and no 'match_model', so it would never be asked: claim the models "
            "that it is for"
        )


def _never_runs(function: Any) -> str | None:
    """What a function is, if a call of it runs none of its body; None for a plain one."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "async"
    return "a generator" if inspect.isgeneratorfunction(function) else None


def _check_arguments(hook: str, function: Callable[..., Any]) -> None:
    known = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for argument in inspect.signature(function).parameters.values():
        if argument.name not in known:
            problem = f"has no argument {argument.name!r}; it has ({', '.join(known)})"
        elif argument.default is not argument.empty:
            problem = f"cannot give {argument.name!r} a default: it is always passed"
        elif argument.kind is not argument.POSITIONAL_OR_KEYWORD:
            problem = f"cannot take {argument.name!r} by keyword or position only"
        else:
            continue
        raise PluginError(f"hook {hook!r} {problem}")


def check_policies(offer: Any) -> None:
    """Check what the hook ``policies`` returned, but for the names: see :func:`wrong_name`.

    Raises:
        TypeError: It is no dict of names to PolicySpec, or one of these is wrong.
    """
    for policy, spec in _checked_specs("policies", offer, PolicySpec, ("make_order", "supports")):
        for order in _classes_in(spec.make_order):
            check_methods(order)
        known = get_args(Sight)
        sees: Any = spec.sees
        if not isinstance(sees, frozenset) or not sees or not sees.issubset(known):
            raise TypeError(
                f"{policy!r}: sees is {sees!r}, not a frozenset of one or more of {words_of(known)}"
            )
        windows: Any = spec.windows
        if windows is not None and not isinstance(windows, str):
            raise TypeError(f"{policy!r}: windows is {windows!r}, not the name of a policy or None")
        if not isinstance(spec.explains, bool):
            raise TypeError(f"{policy!r}: explains is {spec.explains!r}, not True or False")


def wrong_name(policy: str) -> str | None:
    """Say what is wrong with the name of a policy; None if nothing is."""
    if policy in RESERVED:
        return "the name means something else"
    return None if _NAME.fullmatch(policy) else f"name it with {_NAME_OF}"


def check_backends(offer: Any) -> None:
    """Check what the hook ``storage_backend`` returned.

    Raises:
        TypeError: It is no dict of names to StorageSpec, or one of these is wrong.
    """
    for backend, _ in _checked_specs("storage_backend", offer, StorageSpec, ("open",)):
        if not _NAME.fullmatch(backend):
            raise TypeError(f"{backend!r} is no name: use {_NAME_OF}")


def _checked_specs(
    hook: str, offer: Any, kind: type[Spec], functions: tuple[str, ...]
) -> Iterator[tuple[str, Spec]]:
    """The specs that a hook returned, by name, each once it has been checked for what all kinds have.

    Args:
        hook: The hook.
        offer: What it returned.
        kind: The class of its specs.
        functions: Fields of a spec that are functions.
    """
    if not isinstance(offer, dict):
        raise TypeError(f"{hook} returned {offer!r}, not a dict of names to {kind.__name__}")
    for name, spec in offer.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no name: use {_NAME_OF}")
        if not isinstance(spec, kind):
            raise TypeError(f"{name!r}: {spec!r} is not a {kind.__name__}")
        settings: Any = spec.settings
        if not is_settings(settings):
            raise TypeError(f"{name!r}: settings is {settings!r}, not a pydantic model")
        if not _is_summary(spec.summary):
            raise TypeError(f"{name!r}: summary is {spec.summary!r}, not one line of text")
        for field in functions:
            function: Any = getattr(spec, field)
            if not callable(function):
                raise TypeError(f"{name!r}: {field} is {function!r}, not a function")
        yield name, spec


def _is_summary(value: Any) -> bool:
    return isinstance(value, str) and len(value.splitlines()) <= 1


def wrong_format(name: Any, found: Any) -> str | None:
    """Say what is wrong with an offer of a trace format; None if nothing is."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"cannot be asked for: name it with {_NAME_OF}"
    if not isinstance(found, TraceFormat):
        return f"is {found!r}, not a TraceFormat"
    for field in ("read", "claims"):
        function: Any = getattr(found, field)
        if not callable(function):
            return f"has the {field} {function!r}, not a function"
    if not _is_summary(found.summary):
        return f"has the summary {found.summary!r}, not one line of text"
    return None


def _classes_in(make_order: Callable[..., Any]) -> list[type[VictimOrder]]:
    """Classes of orders that a function refers to: those that it is likely to make."""
    if isinstance(make_order, type):
        return [make_order] if issubclass(make_order, VictimOrder) else []
    function = inspect.unwrap(make_order)
    if not inspect.isfunction(function):
        return []
    seen = inspect.getclosurevars(function)
    values = [*seen.nonlocals.values(), *seen.globals.values()]
    return [value for value in values if isinstance(value, type) and issubclass(value, VictimOrder)]


def check_methods(order: type[VictimOrder]) -> None:
    """Check that no method of an order is a misspelt event, which nobody would ever call, or never runs.

    Raises:
        TypeError: A public method is named almost like an event, and no method of the class refers to it; or
            an event is async, or a generator.
    """
    own: dict[str, Any] = {}
    for base in reversed(order.__mro__):
        if issubclass(base, VictimOrder) and base.__module__.partition(".")[0] != hookspecs.PROJECT:
            own |= vars(base)
    codes = [code for value in own.values() if (code := getattr(value, "__code__", None)) is not None]
    named = {name for code in codes for name in code.co_names}
    for name in sorted(own.keys() & set(_EVENTS)):
        kind = _never_runs(getattr(own[name], "__func__", own[name]))
        if kind is not None:
            raise TypeError(
                f"{order.__name__}.{name} is {kind}, whose body no call runs: make it a plain function"
            )
    for name, value in own.items():
        if (
            name.startswith("_")
            or not inspect.isfunction(value)
            or hasattr(VictimOrder, name)
            or name in named
        ):
            continue
        if hasattr(KeyedOrder, name) or hasattr(StateOrder, name):
            continue
        close = difflib.get_close_matches(name.removeprefix("on_"), _EVENTS, 1, 0.75)
        if close:
            raise TypeError(
                f"{order.__name__} has a method {name!r}, which is no event and would never be called: did "
                f"you mean {close[0]!r}? Give a helper a name that begins with an underscore"
            )


def words_of(sees: Iterable[str]) -> str:
    """The things that an order sees, in words."""
    return ", ".join(map(repr, sorted(sees)))


def is_settings(value: object) -> bool:
    """Whether a value is a settings model."""
    return isinstance(value, type) and issubclass(value, BaseModel)
