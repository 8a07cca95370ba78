"""Builds the columns of a trace, request by request."""

from __future__ import annotations

import math
from array import array
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from costcache.errors import TraceError
from costcache.sim.trace import HINTS, Trace

__all__ = ["Columns", "Named"]


class Named(Protocol):
    """Where requests are from: a file, or several."""

    @property
    def label(self) -> str:
        """Its name for errors."""

    @property
    def name(self) -> str:
        """Name of the trace for reports."""

    def allow(self, tokens: int) -> None:
        """Check, before they are unfolded, that it justifies so many prompt tokens in all."""


class Columns:
    """Collects the requests of a file, eight bytes per value.

    A reader appends a request's block ids to ``ids``, those of its output to ``output_ids`` if it knows
    them, and then calls :meth:`add`.

    Attributes:
        ids: Block ids of all prompts, concatenated.
        output_ids: Those of the outputs.
        names_sessions: Whether sessions are those that clients name.
    """

    def __init__(self, source: Named) -> None:
        self.names_sessions = False
        self._source = source
        self._tokens = 0
        self.ids = array("q")
        self.output_ids = array("q")
        self._times, self._inputs, self._outputs = array("d"), array("q"), array("q")
        self._offsets, self._output_offsets = array("q", [0]), array("q", [0])
        self._sessions, self._finish = array("q"), array("q")
        self._think, self._service = array("d"), array("d")
        self._priorities, self._follows = array("q"), array("q")
        self._session_numbers: dict[object, int] = {}
        self._finish_numbers: dict[str, int] = {}
        self._has_sessions = False
        self._has_outputs = True
        self._hints: dict[str, dict[int, Any]] = {name: {} for name in HINTS}  # few requests have any

    def __len__(self) -> int:
        return len(self._inputs)

    def add(
        self,
        seconds: float,
        input_tokens: int,
        output_tokens: int,
        *,
        session: object = None,
        follows: int | None = None,
        think: float | None = None,
        service: float | None = None,
        finish: str | None = None,
        priority: int = 0,
    ) -> None:
        """Add the request whose ids were just appended.

        Args:
            seconds: Arrival time, on any clock.
            input_tokens: Tokens of the prompt.
            output_tokens: Tokens generated.
            session: Key of its session; None if it has none.
            follows: Number of its predecessor in the order of the calls, -1 for none; None if that is the
                previous request of its session. To be given for all requests or for none.
            think: Seconds since the answer of its predecessor; None if unknown.
            service: Seconds that the server took; None if unknown.
            finish: The stop reason; None or empty if unknown.
            priority: Higher is kept longer; 0 if unknown.

        Raises:
            TraceError: If the file does not justify so many tokens.
        """
        self.allow(input_tokens)
        self._tokens += input_tokens
        self._times.append(seconds)
        self._inputs.append(input_tokens)
        self._outputs.append(output_tokens)
        self._offsets.append(len(self.ids))
        self._output_offsets.append(len(self.output_ids))
        if session is None:
            session = (len(self._times),)  # a session of its own
        else:
            self._has_sessions = True
        self._sessions.append(self._session_numbers.setdefault(session, len(self._session_numbers)))
        self._think.append(math.nan if think is None else think)
        self._service.append(math.nan if service is None else service)
        number = self._finish_numbers.setdefault(finish, len(self._finish_numbers)) if finish else -1
        self._finish.append(number)
        self._priorities.append(priority)
        if follows is not None:
            self._follows.append(follows)

    def allow(self, tokens: int) -> None:
        """Check, before they are unfolded, that the file justifies a further prompt of so many tokens.

        Raises:
            TraceError: If it does not.
        """
        self._source.allow(self._tokens + tokens)

    def hint(
        self,
        *,
        tenant: str | None = None,
        user: str | None = None,
        session_ends: bool = False,
        returns_after: float | str | None = None,
        keep_seconds: float | None = None,
    ) -> None:
        """Add what the client of the last request said; see :class:`~costcache.records.RequestInfo`."""
        hints, number = self._hints, len(self) - 1
        if tenant is not None:
            hints["tenants"][number] = tenant
        if user is not None:
            hints["users"][number] = user
        if session_ends:
            hints["session_ends"][number] = True
        if returns_after is not None:
            hints["labels" if isinstance(returns_after, str) else "returns_after"][number] = returns_after
        if keep_seconds is not None:
            hints["keep_seconds"][number] = keep_seconds

    def no_outputs(self) -> None:
        """Note that a request's generated tokens are unknown; the trace then has no output ids at all."""
        self._has_outputs = False

    def trace(self, block_size: int, *, from_zero: bool = False) -> Trace:
        """The requests sorted by time; those of equal times in the order in which they were added.

        Args:
            block_size: Tokens per block id.
            from_zero: Count time from the first request.

        Raises:
            TraceError: If there is no request.
        """
        if not self._inputs:
            raise TraceError(
                f"{self._source.label}: holds no request; give a file with one JSON object a line"
            )
        (tenants, tenant_names), (users, user_names) = self._numbered("tenants"), self._numbered("users")
        labels, label_names = self._numbered("labels")
        outputs = self._has_outputs and bool(self.output_ids)
        times = np.frombuffer(self._times, dtype=np.float64)
        think, service = (np.frombuffer(column, dtype=np.float64) for column in (self._think, self._service))
        return Trace(
            name=self._source.name,
            block_size=block_size,
            timestamps=times - times.min() if from_zero else times,
            input_tokens=_integers(self._inputs),
            output_tokens=_integers(self._outputs),
            ids=_integers(self.ids),
            offsets=_integers(self._offsets),
            sessions=_integers(self._sessions) if self._has_sessions else None,
            follows=_integers(self._follows) if self._follows else None,
            think_seconds=None if np.isnan(think).all() else np.nan_to_num(think),
            service_seconds=None if np.isnan(service).all() else service,
            finish=_integers(self._finish) if self._finish_numbers else None,
            finish_names=tuple(self._finish_numbers),
            priorities=_integers(self._priorities) if any(self._priorities) else None,
            output_ids=_integers(self.output_ids) if outputs else None,
            output_offsets=_integers(self._output_offsets) if outputs else None,
            names_sessions=self.names_sessions and self._has_sessions,
            tenants=tenants,
            tenant_names=tenant_names,
            users=users,
            user_names=user_names,
            session_ends=self._filled("session_ends", False),
            returns_after=self._filled("returns_after", math.nan),
            labels=labels,
            label_names=label_names,
            keep_seconds=self._filled("keep_seconds", math.nan),
        ).in_time_order()

    def _filled(self, name: str, otherwise: bool | float) -> NDArray[Any] | None:
        """Column of a hint, with ``otherwise`` for requests without it; None if none has it."""
        given = self._hints[name]
        if not given:
            return None
        column = np.full(len(self), otherwise)
        column[list(given)] = list(given.values())
        return column

    def _numbered(self, name: str) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
        """Column of a hint of text, as indices of the texts that occur, and those."""
        given = self._hints[name]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(given.values()))}
        self._hints[name] = {at: numbers[text] for at, text in given.items()}
        return self._filled(name, -1), tuple(numbers)


def _integers(column: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.int64) if column else np.empty(0, dtype=np.int64)
