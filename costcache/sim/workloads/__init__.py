"""Generated workloads by name, one module each.

All use blocks of 16 tokens. A block id stands for its whole prefix, so sharing is exact: two prompts share an
id if all their tokens up to the end of that block are equal. A partial last block has an id of its own.
Equal settings give equal requests.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from costcache.errors import SettingsError
from costcache.settings import read_settings
from costcache.sim.workloads.agentic import AgenticSettings, agentic
from costcache.sim.workloads.agents_documents import AgentsDocumentsSettings, agents_documents
from costcache.sim.workloads.chat import ChatSettings, chat
from costcache.sim.workloads.drift import DriftSettings, drift
from costcache.sim.workloads.few_shot import FewShotSettings, few_shot
from costcache.sim.workloads.in_turn import InTurnSettings, in_turn
from costcache.sim.workloads.multi_turn import MultiTurnSettings, multi_turn
from costcache.sim.workloads.random_prompts import RandomSettings, random_prompts
from costcache.sim.workloads.settings import WorkloadSettings
from costcache.sim.workloads.tenants import TenantsSettings, tenants

if TYPE_CHECKING:
    import numpy as np

    from costcache.sim.trace import Trace
    from costcache.sim.workloads.build import Blocks, Request

__all__ = ["WORKLOADS", "Workload", "WorkloadSettings", "generate", "workload_settings"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: its settings model and the generator of its sessions."""

    settings: type[WorkloadSettings]
    sessions: Callable[[Any, Blocks, np.random.Generator], Iterator[tuple[float, list[Request]]]]

    @property
    def summary(self) -> str:
        """A description of one line."""
        return (self.settings.__doc__ or "").partition("\n")[0]


WORKLOADS: Mapping[str, Workload] = {
    "agentic": Workload(AgenticSettings, agentic),
    "agents-documents": Workload(AgentsDocumentsSettings, agents_documents),
    "chat": Workload(ChatSettings, chat),
    "drift": Workload(DriftSettings, drift),
    "few-shot": Workload(FewShotSettings, few_shot),
    "in-turn": Workload(InTurnSettings, in_turn),
    "multi-turn": Workload(MultiTurnSettings, multi_turn),
    "random": Workload(RandomSettings, random_prompts),
    "tenants": Workload(TenantsSettings, tenants),
}
"""Every workload by name."""


def generate(name: str, settings: WorkloadSettings | None = None) -> Trace:
    """Generate a workload.

    Args:
        name: One of :data:`WORKLOADS`.
        settings: Its settings, as :func:`workload_settings` makes them; None for the defaults.

    Raises:
        SettingsError: If there is no such workload, or the settings are those of another one.
    """
    import numpy as np

    from costcache.sim.workloads.build import Blocks, build_trace

    workload = _workload(name)
    if settings is None:
        settings = workload.settings()
    if not isinstance(settings, workload.settings):
        raise SettingsError(
            f"workload {name}: settings are {type(settings).__name__}; give {workload.settings.__name__}"
        )
    blocks = Blocks()
    rng = np.random.Generator(np.random.PCG64(settings.seed))
    sessions = workload.sessions(settings, blocks, rng)
    return build_trace(name, sessions, blocks, settings.requests)


def workload_settings(name: str, overrides: Mapping[str, Any] | None = None) -> WorkloadSettings:
    """A workload's settings: its defaults, with some overridden.

    Args:
        name: One of :data:`WORKLOADS`.
        overrides: New values by field. A nested field is addressed by a dotted name or a mapping:
            ``{"user.median": 300}`` and ``{"user": {"median": 300}}`` are the same and leave the rest of
            ``user`` as it is.

    Raises:
        SettingsError: If there is no such workload or field, or a value is not valid; names it.
    """
    workload = _workload(name)
    values = workload.settings().model_dump()
    for field, value in (overrides or {}).items():
        _merge(values, field.split("."), value, f"{name}.")
    return read_settings(workload.settings, values, f"{name}.")


def _workload(name: str) -> Workload:
    try:
        return WORKLOADS[name]
    except KeyError:
        close = difflib.get_close_matches(name, WORKLOADS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise SettingsError(
            f"there is no workload {name!r}; {hint}choose one of {', '.join(WORKLOADS)}"
        ) from None


def _merge(values: dict[str, Any], path: list[str], value: object, where: str) -> None:
    """Override one field of ``values``, which has every known field."""
    first, rest = path[0], path[1:]
    if first not in values:
        known = ", ".join(where + field for field in values)
        raise SettingsError(f"unknown setting {where + first!r}: known settings are {known}")
    inner = values[first]
    if rest and not isinstance(inner, dict):
        raise SettingsError(f"setting {where + first!r} has no setting {rest[0]!r} in it")
    if rest:
        _merge(inner, rest, value, f"{where}{first}.")
    elif isinstance(value, Mapping) and isinstance(inner, dict):
        for field, inner_value in value.items():
            _merge(inner, str(field).split("."), inner_value, f"{where}{first}.")
    else:
        values[first] = value
