"""Options for replaying a trace, shared by the commands that replay one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, field_validator

from costcache.cli.from_models import Options, model_options
from costcache.cli.options import deployment_options
from costcache.cli.reading import trace_options
from costcache.cli.workload import read_assignment
from costcache.errors import SettingsError
from costcache.hookspecs import PROJECT
from costcache.settings import Settings

if TYPE_CHECKING:
    from costcache.deployment import Deployment
    from costcache.sim.engine import Simulator
    from costcache.sim.trace import Trace
    from costcache.sizes import Capacity

__all__ = ["CAPACITIES", "ReplayOptions", "pool_tokens", "replay_options", "with_own_settings"]

F = TypeVar("F", bound=Callable[..., Any])

CAPACITIES = (
    "Capacities: 5% (of the trace's distinct whole pages), 14054pages, 7195648tok, 50GB, 50GiB, "
    "80GiB-16GiB (a GPU's memory minus its weights), unlimited."
)


class ReplayOptions(Options):
    """Page size, split of the memory and plugin settings of a replay."""

    page_size: int | None = Field(
        None, ge=1, description="Tokens per page.  [default: the trace's block size]"
    )
    mamba_full_memory_ratio: float = Field(
        0.9,
        ge=0.0,
        description="Models with states: memory for states divided by memory for KV, like SGLang's option of "
        "the same name; 0 for one pool shared by both.",
    )
    known: Literal["server", "all"] = Field(
        "server",
        description="What policies are told of requests: 'server' hides what no server knows, such as that a "
        "request stopped for a tool call; 'all' tells what the trace says.",
    )
    assignments: tuple[str, ...] = Field(
        (),
        description="A setting of the model's plugin (architecture.floor=0.05) or of a policy "
        "(slru.protected_threshold=3); repeat for more.",
    )

    @field_validator("mamba_full_memory_ratio")
    @classmethod
    def _leaves_memory_for_kv(cls, ratio: float) -> float:
        if not ratio / (1 + ratio) < 1.0:
            raise ValueError("leaves nothing for KV; give 0, or a ratio such as 0.9")
        return ratio

    @property
    def state_share(self) -> float | None:
        """Share of the memory that is for states; None for one shared pool."""
        ratio = self.mamba_full_memory_ratio
        return ratio / (1 + ratio) if ratio else None

    def paged(self, deployment: Deployment, trace: Trace) -> Deployment:
        """Return the deployment with the page size of the replay."""
        return deployment.model_copy(update={"page_size": self.page_size or trace.block_size})

    def own_settings(self, policies: Sequence[str], default: str) -> dict[str, dict[str, Any]]:
        """Return the ``--set`` options by target: ``architecture`` or the name of a policy.

        Args:
            policies: The replayed policies, as named by the user.
            default: The policy that ``costcache`` stands for. Its settings apply to ``costcache`` unless it
                is also replayed under its own name.

        Raises:
            SettingsError: If the target is none of these.
        """
        targets = {name: name for name in ("architecture", *policies)}
        if PROJECT in policies:
            targets.setdefault(default, PROJECT)
        own: dict[str, dict[str, Any]] = {}
        for text in self.assignments:
            target, value = read_assignment(text, "--set", "WHERE.FIELD=VALUE")
            where, dot, field = target.rpartition(".")
            if not dot or where not in targets:
                raise SettingsError(
                    f"--set {text!r} is for {where or target!r}: write architecture.FIELD=VALUE or "
                    f"POLICY.FIELD=VALUE with one of the policies {', '.join(policies)}"
                )
            own.setdefault(targets[where], {})[field] = value
        return own


def replay_options(*fields: str) -> Callable[[F], F]:
    """Add the arguments ``replay``, ``settings``, ``reading`` and ``deployment`` with their options.

    Args:
        *fields: Fields of the deployment beyond those of every command.
    """

    def add_all(command: F) -> F:
        for add in (
            deployment_options(*fields),
            trace_options,
            model_options(Settings, "settings", "headroom", "trim"),
            model_options(
                ReplayOptions, "replay", assignments={"flag": "--set", "metavar": "WHERE.FIELD=VALUE"}
            ),
        ):
            command = add(command)
        return command

    return add_all


def with_own_settings(settings: Settings, policy: str, own: dict[str, dict[str, Any]]) -> Settings:
    """Return the settings of one policy, from the shared ones and :meth:`ReplayOptions.own_settings`."""
    own_fields = {"architecture": own.get("architecture", {}), "policy_settings": own.get(policy, {})}
    return settings.model_copy(update={"policy": policy, **own_fields})


def pool_tokens(size: Capacity, simulator: Simulator, distinct_pages: int) -> int | None:
    """Return a pool size in tokens; None when unlimited.

    Raises:
        SettingsError: If it is under one page.
    """
    return size.tokens(
        distinct_pages=distinct_pages,
        page_size=simulator.keys.page_size,
        token_bytes=simulator.token_bytes,
    )
