"""Finds plugins, matches the one that serves a model, and binds its hooks.

Each entry point of the group ``costcache`` is loaded on its own: one that fails is reported by name
and skipped. Hooks are bound to plain functions when a cache is made, since a pluggy call costs about
a microsecond and eviction is a hot path.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import logging
import operator
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy
from pydantic import BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema

from costcache import generic, hookspecs, policies, storage
from costcache.cost import CostModel, TokenCost
from costcache.errors import CostcacheError, PluginError, one_line
from costcache.formats import TraceFormat
from costcache.offers import (
    HOOKS,
    RESERVED,
    check_backends,
    check_hooks,
    check_methods,
    check_point,
    check_policies,
    is_settings,
    words_of,
    wrong_format,
    wrong_name,
)
from costcache.orders import KeyedOrder, VictimOrder
from costcache.policies import PolicySpec
from costcache.policies.states import StateOrder
from costcache.records import PoolState
from costcache.settings import DEFAULT_POLICY, PoolSettings, Settings, read_settings
from costcache.storage import SealedStore, StorageBackend, StorageSpec

if TYPE_CHECKING:
    from costcache.deployment import Deployment
    from costcache.model import ModelSpec

__all__ = [
    "HOOKS",
    "RESERVED",
    "Architecture",
    "PluginFailure",
    "PluginManager",
    "ask",
    "get_plugins",
    "serves",
]

T = TypeVar("T")

logger = logging.getLogger("costcache")


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin, or a part of one, that was skipped.

    Attributes:
        plugin: Name of the entry point.
        source: Its ``module:attribute``, as in the entry point.
        reason: The error, in one line.
    """

    plugin: str
    source: str
    reason: str


@dataclass(frozen=True)
class Architecture:
    """The hooks of the plugin that serves a model, bound to plain functions.

    Attributes:
        name: The plugin's name.
        specificity: Its claim on the model.
        model: The model that it serves.
        token_cost: ``token_cost(model, deployment)``.
        free_target: ``free_target(model, pool, settings)``.
        adjust_eviction_count: ``adjust_eviction_count(model, pool, requested, settings)``.
        default_policy: ``default_policy(model)``.
        settings_model: ``settings_model()``.
    """

    name: str
    specificity: int
    model: ModelSpec
    token_cost: Callable[[ModelSpec, Deployment], TokenCost]
    free_target: Callable[[ModelSpec, PoolState, PoolSettings], float]
    adjust_eviction_count: Callable[[ModelSpec, PoolState, int, PoolSettings], int]
    default_policy: Callable[[ModelSpec], str | None]
    settings_model: Callable[[], type[BaseModel] | None]

    def cost(self, deployment: Deployment) -> CostModel:
        """The cost model of this plugin's model as it is deployed.

        Raises:
            SettingsError: If the deployment does not fit the model.
            PluginError: If the plugin's ``token_cost`` raised or did not return a ``TokenCost``.
        """
        deployment = deployment.serving(self.model)
        # A CostcacheError is the deployment's fault, not the plugin's.
        what = f"plugin {self.name!r}: token_cost raised"
        token = ask(what, self.token_cost, self.model, deployment, passes=CostcacheError)
        if not isinstance(token, TokenCost):
            raise PluginError(f"plugin {self.name!r}: token_cost returned {token!r}, not a TokenCost")
        return CostModel(spec=self.model, deployment=deployment, token=token)

    def evicts_exactly(self, settings: Settings, page_size: int = 1) -> bool:
        """Whether every eviction frees exactly its shortfall, in whole pages.

        True if the plugin leaves ``adjust_eviction_count`` out, and its free target is 0 both for an empty
        pool and for a full one.

        Raises:
            SettingsError: If a setting under ``architecture`` is not valid.
            PluginError: If the plugin's ``settings_model`` raised or did not return a model.
        """
        if self.adjust_eviction_count is not generic.adjust_eviction_count:
            return False
        values, size = self.pool_settings(settings), page_size << 20
        empty = PoolState("kv", "tokens", size, size, 0, 0, page_size)
        full = empty._replace(free=0, evictable=size)
        try:
            return all(
                ask("free_target raised", self.free_target, self.model, pool, values) == 0
                for pool in (empty, full)
            )
        except PluginError:  # the pipeline reports it, and counts it as 0
            return False

    def pool_settings(self, settings: Settings) -> PoolSettings:
        """Validate the settings that the hooks are given.

        Raises:
            SettingsError: If a setting under ``architecture`` is not valid.
            PluginError: If the plugin's ``settings_model`` raised or did not return a model.
        """
        model = ask(f"plugin {self.name!r}: settings_model raised", self.settings_model)
        if not (model is None or is_settings(model)):
            raise PluginError(
                f"plugin {self.name!r}: settings_model returned {model!r}, not a pydantic model"
            )
        if model is None:
            if settings.architecture:
                read_settings(_NoArchitectureSettings, settings.architecture, "architecture.")
            return PoolSettings(settings.headroom)
        return PoolSettings(settings.headroom, read_settings(model, settings.architecture, "architecture."))


def ask(
    what: str,
    call: Callable[..., T],
    *arguments: Any,
    passes: type[Exception] | tuple[()] = (),
    words: Callable[[BaseException], str] = repr,
) -> T:
    """Call a plugin's code: a SystemExit of it, or the panic of an extension module, ends no server.

    Args:
        what: What has happened if it raises, the beginning of a sentence that the error ends.
        call: The plugin's function.
        arguments: Its arguments.
        passes: Errors that say enough by themselves.
        words: Says an error in words.

    Raises:
        PluginError: It raised anything else, but for the user's interrupt.
    """
    try:
        return call(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, passes):
            raise
        raise PluginError(f"{what} {words(error)}") from error


class _NoArchitectureSettings(BaseModel, frozen=True, extra="forbid"):
    pass


class PluginManager:
    """The plugins of one process.

    Attributes:
        failures: Plugins, and parts of plugins, that were skipped.
    """

    def __init__(self) -> None:
        self.pm = pluggy.PluginManager(hookspecs.PROJECT)
        self.pm.add_hookspecs(hookspecs)
        self.failures: list[PluginFailure] = []
        self._policies: dict[str, tuple[str, PolicySpec]] = {}
        self._storage: dict[str, tuple[str, StorageSpec]] = {}
        self._sources: dict[str, str] = {}
        self.register(generic, "generic", generic.__name__)
        self.register(policies, "builtin", policies.__name__)
        self.register(storage, "storage", storage.__name__)

    def load_entry_points(self) -> None:
        """Load every entry point of the group, in order of name; skip and report those that fail."""
        points = entry_points(group=hookspecs.PROJECT)
        for point in sorted(points, key=lambda p: (p.name, p.value)):
            self.load(point)

    def load(self, point: EntryPoint) -> None:
        """Load one entry point, or report why it is skipped."""
        try:
            check_point(point)
            self.register(point.load(), point.name, point.value)
        except PluginError as error:
            self._failed(point.name, point.value, str(error))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, the panic of an extension module: of this plugin alone
            self._failed(point.name, point.value, f"import failed: {one_line(error)}")

    def register(self, plugin: object, name: str, source: str = "") -> None:
        """Add one plugin.

        Args:
            plugin: A module, class or object with functions marked ``@hookimpl``.
            name: Its name in messages; names are unique.
            source: Its origin, for reports.

        Raises:
            PluginError: If it has no hook, misspells one, or takes arguments that the hook does not have,
                with defaults, or keyword-only; if a policy that it offers is not valid; or if the name is
                taken.
        """
        if self.pm.has_plugin(name):
            raise PluginError(f"a plugin of the name {name!r} is loaded already ({self._sources[name]})")
        other = self.pm.get_name(plugin)
        if other is not None:
            raise PluginError(f"it is loaded already, as plugin {other!r}: keep one of the two entry points")
        check_hooks(plugin, self.pm.parse_hookimpl_opts)
        try:
            self.pm.register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(str(error).strip()) from error
        self._sources[name] = source
        hook = "storage_backend"
        try:
            backends = self._storage_offer(name)
            hook = "policies"
            self._offer(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.pm.unregister(name=name)
            raise PluginError(f"{hook} failed: {error}") from error
        for backend, spec in backends.items():
            if backend in self._storage:
                owner = self._storage[backend][0]
                self._failed(name, source, f"storage backend {backend!r} is taken by {owner!r}")
            else:
                self._storage[backend] = (name, spec)

    def _offer(self, name: str) -> None:
        offer = self._bound(name, "policies", dict)()
        check_policies(offer)
        for policy, spec in offer.items():
            wrong = wrong_name(policy)
            if wrong is not None:
                self.skip(name, f"policy {policy!r} cannot be asked for: {wrong}")
            elif policy == hookspecs.PROJECT or policy in self._policies:
                owner = self._policies.get(policy, ("the framework", spec))[0]
                self.skip(name, f"policy {policy!r} is taken by {owner!r}")
            else:
                self._policies[policy] = (name, spec)

    def _storage_offer(self, name: str) -> dict[str, StorageSpec]:
        offer: Any = self._bound(name, "storage_backend", dict)()
        check_backends(offer)
        backends: dict[str, StorageSpec] = offer
        return backends

    def skip(self, plugin: str, reason: str) -> None:
        """Report, once, that a part of a plugin is passed over."""
        self._failed(plugin, self._sources[plugin], reason)

    def _failed(self, plugin: str, source: str, reason: str) -> None:
        failure = PluginFailure(plugin, source, reason)
        if failure in self.failures:
            return  # reported when an earlier cache was made
        self.failures.append(failure)
        logger.warning("plugin %r (%s) is skipped: %s", plugin, source, reason)

    # -- architecture plugins ----------------------------------------------------------------

    def read(
        self, config: str | os.PathLike[str] | Mapping[str, Any] | object, name: str | None = None
    ) -> ModelSpec:
        """Read a config: by the plugin that claims it with ``read_config``, else as the core does.

        Takes what `ModelSpec.from_config` takes. A plugin whose ``read_config`` raises, or answers anything
        but None or a ModelSpec, is reported and passed over.

        Raises:
            ConfigError: If no plugin reads the config, and neither does the core.
            PluginError: If two plugins read it.
        """
        from costcache.model.spec import ModelSpec, load_config

        data, _, found = load_config(config)
        read: dict[str, ModelSpec] = {}
        for impl in self.pm.hook.read_config.get_hookimpls():
            spec = self._reading(impl.plugin_name, copy.deepcopy(dict(data)))  # what one changes is its own
            if spec is not None:
                read[impl.plugin_name] = spec
        if not read:
            return ModelSpec.from_config(config, name)
        if len(read) > 1:
            names = " and ".join(repr(plugin) for plugin in sorted(read))
            raise PluginError(f"plugins {names} read the same config: uninstall one of them")
        (spec,) = read.values()
        given = name or found
        return spec.model_copy(update={"name": given}) if given else spec

    def resolve(self, name_or_path: str | os.PathLike[str]) -> ModelSpec:
        """Return a preset by name, or read a config by path, plugins first.

        Raises:
            ConfigError: If it is neither, or cannot be read.
            PluginError: If two plugins read it.
        """
        from costcache.model import ModelSpec

        text = os.fspath(name_or_path)
        if text.strip() and Path(text).exists():
            return self.read(text)
        return ModelSpec.resolve(text)

    def _reading(self, name: str, config: Mapping[str, Any]) -> ModelSpec | None:
        from costcache.model import ModelSpec

        try:
            spec: Any = ask(
                "read_config raised", self._bound(name, "read_config", generic.read_config), config
            )
        except PluginError as error:
            self.skip(name, str(error))
            return None
        if spec is None or isinstance(spec, ModelSpec):
            return spec
        self.skip(name, f"read_config answered {spec!r}, not a ModelSpec or None")
        return None

    def match(self, model: ModelSpec) -> Architecture:
        """Return the plugin with the most specific claim on ``model``, its hooks bound.

        A plugin whose ``match_model`` raises or answers anything but None or an int of 0 or more is reported
        and passed over.

        Raises:
            PluginError: If two plugins claim the model with the same specificity.
        """
        claims: dict[int, list[str]] = {}
        for plugin, claim in self.claims(model).items():
            claims.setdefault(claim, []).append(plugin)
        highest = max(claims)  # generic claims every model
        if len(claims[highest]) > 1:
            names = " and ".join(repr(name) for name in sorted(claims[highest]))
            raise PluginError(
                f"plugins {names} claim model {model.name!r} with the same specificity {highest}: "
                "uninstall one, or let one claim it more specifically"
            )
        name = claims[highest][0]
        return Architecture(
            name=name,
            specificity=highest,
            model=model,
            **{hook: self._bound(name, hook, default) for hook, default in generic.DEFAULTS.items()},
        )

    def claims(self, model: ModelSpec) -> dict[str, int]:
        """The claims of all plugins on a model, by plugin, as :meth:`match` compares them."""
        claims: dict[str, int] = {}
        for impl in self.pm.hook.match_model.get_hookimpls():
            claim = self._claim(impl.plugin_name, model)
            if claim is not None:
                claims[impl.plugin_name] = claim
        return claims

    def _claim(self, name: str, model: ModelSpec) -> int | None:
        try:
            claim: Any = ask(
                "match_model raised", self._bound(name, "match_model", generic.match_model), model
            )
        except PluginError as error:
            self.skip(name, str(error))
            return None
        if claim is None or (type(claim) is int and (claim > 0 or (claim == 0 and name == "generic"))):
            return claim
        self.skip(name, f"match_model answered {claim!r}, not an int of 1 or more, or None")
        return None

    def _bound(self, name: str, hook: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the plugin's own function for a hook, taking all of the hook's arguments, or ``default``."""
        plugin = self.pm.get_plugin(name)
        for impl in getattr(self.pm.hook, hook).get_hookimpls():
            if impl.plugin is plugin:
                names = tuple(inspect.signature(getattr(hookspecs, hook)).parameters)
                if impl.argnames == names:
                    function: Callable[..., Any] = impl.function
                    return function
                picks = tuple(names.index(argument) for argument in impl.argnames)
                return _picking(impl.function, picks)
        return default

    # -- readers of traces -------------------------------------------------------------------

    def trace_formats(self, taken: Collection[str] = ()) -> dict[str, tuple[str, TraceFormat]]:
        """The formats of trace files that plugins offer: by name, the plugin and its format.

        What is not valid is reported and left out.

        Args:
            taken: Names that are not theirs to give.
        """
        offered: dict[str, tuple[str, TraceFormat]] = {}
        for impl in self.pm.hook.trace_formats.get_hookimpls():
            plugin = impl.plugin_name
            for name, found in self._formats_of(plugin).items():
                wrong = wrong_format(name, found)
                if wrong is None and (name in taken or name in offered):
                    owner = offered[name][0] if name in offered else "costcache"
                    wrong = f"is taken by {owner!r}"
                if wrong is None:
                    offered[name] = (plugin, found)
                else:
                    self.skip(plugin, f"trace format {name!r} {wrong}")
        return offered

    def _formats_of(self, plugin: str) -> dict[Any, Any]:
        try:
            found: Any = ask("trace_formats raised", self._bound(plugin, "trace_formats", dict))
        except PluginError as error:
            self.skip(plugin, str(error))
            return {}
        if isinstance(found, dict):
            return found
        self.skip(plugin, f"trace_formats returned {found!r}, not a dict of names to TraceFormat")
        return {}

    # -- policy plugins ----------------------------------------------------------------------

    def policies(self) -> dict[str, PolicySpec]:
        """All policies by name, sorted."""
        return {name: self._policies[name][1] for name in sorted(self._policies)}

    def serving(self, model: ModelSpec) -> list[str]:
        """Names of the policies that serve a model, sorted."""
        names = []
        for name, (_, spec) in sorted(self._policies.items()):
            with contextlib.suppress(PluginError):  # an error in a policy that was not asked for
                if serves(spec, model) and self.refusal(name, model) is None:
                    names.append(name)
        return names

    def policy_name(self, name: str, architecture: Architecture) -> str:
        """Resolve the name of a policy for a model: ``costcache`` is the one that its plugin prefers.

        Raises:
            PluginError: If no policy has that name, or the plugin's ``default_policy`` failed.
        """
        if name == hookspecs.PROJECT:
            return self._preferred(architecture)
        if name in self._policies:
            return name
        raise PluginError(self.unknown(name))

    def unknown(self, name: str) -> str:
        """Say that there is no policy of this name, and which ones there are."""
        names = [hookspecs.PROJECT, *sorted(self._policies)]
        close = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"there is no policy {name!r}: {hint}The policies are {', '.join(names)}"

    def _preferred(self, architecture: Architecture) -> str:
        plugin = f"plugin {architecture.name!r}"
        chosen: Any = ask(f"{plugin}: default_policy raised", architecture.default_policy, architecture.model)
        if chosen is None:
            return DEFAULT_POLICY
        if isinstance(chosen, str) and chosen in self._policies:
            return chosen
        raise PluginError(
            f"{plugin}: default_policy answered {chosen!r}, which is not a policy: name one of "
            f"{', '.join(sorted(self._policies))}"
        )

    def check_settings(self, settings: Settings, architecture: Architecture) -> None:
        """Check, before any work is done, that a cache can be made with ``settings``.

        Raises:
            PluginError: If there is no such policy, or it does not serve the model.
            SettingsError: If a setting under ``policy_settings`` or ``architecture`` is not valid.
        """
        _, spec = self.policy_spec(settings, architecture)
        read_settings(spec.settings, settings.policy_settings, "policy_settings.")
        architecture.pool_settings(settings)

    def make_order(
        self,
        settings: Settings,
        architecture: Architecture,
        cost: CostModel,
        pools: tuple[PoolState, ...],
    ) -> tuple[str, VictimOrder]:
        """Make the order that ``settings.policy`` names, for one cache.

        Returns:
            The policy's own name, and a new order.

        Raises:
            PluginError: If there is no such policy, or it does not serve the model, cannot be made, or makes
                an order of another kind than it declares.
            SettingsError: If a setting under ``policy_settings`` is not valid.
        """
        name, spec = self.policy_spec(settings, architecture)
        values = read_settings(spec.settings, settings.policy_settings, "policy_settings.")
        where = f"policy {name!r} of plugin {self._policies[name][0]!r}"
        what = f"{where} cannot be made:"
        order = ask(what, spec.make_order, cost, pools, values, passes=CostcacheError)
        kind = _kind(spec, pools)
        if not isinstance(order, VictimOrder):
            raise PluginError(f"{where}: make_order returned {order!r}, not a VictimOrder")
        try:
            check_methods(type(order))
        except TypeError as error:
            raise PluginError(f"{where}: {error}") from error
        if not isinstance(order, kind):
            raise PluginError(
                f"{where} declares that it sees {words_of(spec.sees)}, but its make_order returned a "
                f"{type(order).__name__}, which is not a {kind.__name__}"
            )
        return name, order

    def policy_spec(self, settings: Settings, architecture: Architecture) -> tuple[str, PolicySpec]:
        """Find the policy that ``settings.policy`` names for a model.

        Returns:
            The policy's own name, and its spec.

        Raises:
            PluginError: If there is no such policy, or it does not serve the model.
        """
        name = self.policy_name(settings.policy, architecture)
        model = architecture.model
        reason = self.refusal(name, model)
        if reason is not None:
            raise PluginError(f"policy {name!r} does not serve model {model.name!r}: {reason}")
        return name, self._policies[name][1]

    def refusal(self, name: str, model: ModelSpec) -> str | None:
        """Say why a policy does not serve a model, in one line; None if it does.

        Raises:
            PluginError: If the policy's ``supports`` raised, or answered anything else.
        """
        plugin, spec = self._policies[name]
        if not serves(spec, model):
            why = (
                "it does not rank state checkpoints, which the model keeps"
                if model.has_states
                else "it ranks only state checkpoints, and the model has none"
            )
            return f"{why}; take {', '.join(self.serving(model))}"
        answer: Any = ask(f"policy {name!r} of plugin {plugin!r}: supports raised", spec.supports, model)
        if answer is None or (isinstance(answer, str) and answer.strip()):
            return answer
        raise PluginError(
            f"policy {name!r} of plugin {plugin!r}: supports answered {answer!r}, neither None nor a line on "
            "why it does not serve the model"
        )

    # -- storage plugins ---------------------------------------------------------------------

    def storage_backends(self) -> dict[str, StorageSpec]:
        """All storage backends by name, sorted."""
        return {name: self._storage[name][1] for name in sorted(self._storage)}

    def open_storage(
        self, name: str, path: Path, capacity: int, settings: Mapping[str, Any] | None = None
    ) -> SealedStore:
        """Open a storage backend; its values are checked when they come back.

        Args:
            name: Name of the backend.
            path: Its folder.
            capacity: Bytes that it may take.
            settings: Its settings.

        Raises:
            PluginError: There is no such backend, or it cannot be opened.
            SettingsError: A setting is not valid, or the folder cannot be used.
        """
        if name not in self._storage:
            known = sorted(self._storage)
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise PluginError(
                f"there is no storage backend {name!r}: {hint}The backends are {', '.join(known)}"
            )
        plugin, spec = self._storage[name]
        values = read_settings(spec.settings, dict(settings or {}), "storage_settings.")
        where = f"storage backend {name!r} of plugin {plugin!r}"
        what = f"{where} cannot be opened:"
        backend: Any = ask(what, spec.open, path, capacity, values, passes=CostcacheError, words=one_line)
        if not isinstance(backend, StorageBackend):
            raise PluginError(f"{where}: open returned {backend!r}, not a StorageBackend")
        return SealedStore(name, backend)

    def describe(self) -> dict[str, Any]:
        """Plugins, what they offer, and failures as plain data, for ``costcache plugins --json``."""
        plugins = []
        for name, plugin in sorted(self.pm.list_name_plugin(), key=lambda item: item[0]):
            hooks = sorted(caller.name for caller in self.pm.get_hookcallers(plugin) or [])
            plugins.append({"name": name, "source": self._sources[name], "hooks": hooks})
        return {
            "plugins": plugins,
            "policies": [
                {
                    "name": name,
                    "plugin": plugin,
                    "summary": spec.summary,
                    "sees": sorted(spec.sees),
                    "explains": spec.explains,
                    "settings": _schema(spec.settings),
                }
                for name, (plugin, spec) in sorted(self._policies.items())
            ],
            "storage": [
                {
                    "name": name,
                    "plugin": plugin,
                    "summary": backend.summary,
                    "settings": _schema(backend.settings),
                }
                for name, (plugin, backend) in sorted(self._storage.items())
            ],
            "trace_formats": [
                {"name": name, "plugin": plugin, "summary": found.summary}
                for name, (plugin, found) in sorted(self.trace_formats().items())
            ],
            "failures": [{"plugin": f.plugin, "source": f.source, "reason": f.reason} for f in self.failures],
        }


def serves(spec: PolicySpec, model: ModelSpec) -> bool:
    """Whether what a policy sees is enough for a model: the same rule for every host.

    With states, the policy must see states, or leaves alone: then its key ranks states. Without
    states, it must see more than states.
    """
    if model.has_states:
        return "states" in spec.sees or spec.leaves_only
    return spec.sees != {"states"}


def _kind(spec: PolicySpec, pools: tuple[PoolState, ...]) -> type[VictimOrder]:
    """The class that an order for these pools must have, given what its policy sees."""
    if "states" in spec.sees and any(pool.unit != "tokens" for pool in pools):
        return StateOrder
    return KeyedOrder if spec.leaves_only else VictimOrder


def _schema(settings: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of each field, or its description alone if some field's type has no schema."""
    try:
        properties: dict[str, Any] = settings.model_json_schema().get("properties", {})
    except PydanticInvalidForJsonSchema:
        return {name: {"description": field.description} for name, field in settings.model_fields.items()}
    return properties


def _picking(function: Callable[..., Any], picks: tuple[int, ...]) -> Callable[..., Any]:
    """Wrap ``function`` so that it is passed only those of the hook's arguments that it takes."""
    if len(picks) < 2:  # an itemgetter of one index does not return a tuple
        return lambda *arguments: function(*(arguments[i] for i in picks))
    pick = operator.itemgetter(*picks)
    return lambda *arguments: function(*pick(arguments))


@functools.cache
def get_plugins() -> PluginManager:
    """Return the process's plugins: the built-in ones and every installed entry point."""
    manager = PluginManager()
    manager.load_entry_points()
    return manager
