"""Requests of SGLang's own logs: those of ``--log-requests``, and the dumps of ``--crash-dump-folder``.

A log has a line per finished request, in JSON (``--log-requests-format json``) or as text. Prompts are in it
from ``--log-requests-level 3`` on; level 2 shortens them. A dump is a pickle of SGLang's own objects. It is
read without SGLang, and without running any code of the file: its classes become plain bags of attributes.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

from costcache.errors import TraceError
from costcache.recording.hashes import Tokens
from costcache.recording.recorder import Ended
from costcache.records import RequestInfo
from costcache.sim.traces.files import open_source
from costcache.sim.traces.tokens import Encode, load_tokenizer

__all__ = ["read_dump", "read_log"]

_LINE = re.compile(r"(?:\[(?P<time>[^\]]*)\] )?(?P<rest>.*)", re.DOTALL)
_FINISH = "Finish: obj="
_ADVICE = "run the server with --log-requests --log-requests-level 3 --log-requests-format json"
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_LATEST = 1e12
"""Unix time, in seconds, after that of any request."""
_MOST_TOKENS = 1 << 40
Get = Callable[[str], Any]


class _Unusable(Exception):  # noqa: N818  # it is no error, but a request that is left out
    """A request without its prompt."""


def read_log(path: str | os.PathLike[str], tokenizer: str | None = None) -> Iterator[Ended]:
    """The finished requests of a log.

    Args:
        path: The file, as SGLang wrote it; lines of other kinds are skipped.
        tokenizer: Name or path of a tokenizer, for requests that were sent as text.

    Raises:
        TraceError: The file cannot be read, or holds no finished request with its prompt.
    """
    encode = _encoder(tokenizer, str(path))
    count, unusable = 0, ""
    with open_source(path) as source:
        for number, line in source.lines():
            try:
                found = _of_line(line.decode("utf-8", "replace").rstrip("\n"))
                if found is None:
                    continue
                get, out, ended = found
                yield _ended(get, out, ended - _seconds(out), ended, encode)
                count += 1
            except _Unusable as why:
                unusable = unusable or f"line {number}: {why}"
            except _DAMAGE as error:
                raise TraceError(f"{path}, line {number}: is malformed ({error!r}); {_ADVICE}") from None
    if not count:
        raise TraceError(f"{path}: holds no finished request that can be used; {unusable or _ADVICE}")


def _of_line(line: str) -> tuple[Get, dict[str, Any], float] | None:
    """Request, answer, and time of its end, of a line on a finished request; None of others."""
    parts = _LINE.fullmatch(line)
    rest = line if parts is None else parts["rest"]
    if rest.startswith("{"):
        try:
            row = json.loads(rest)
        except ValueError:
            return None
        if row.get("event") != "request.finished":
            return None
        return row["obj"].get, row["out"], datetime.fromisoformat(row["timestamp"]).timestamp()
    if not rest.startswith(_FINISH):
        return None
    time = "" if parts is None else parts["time"] or ""
    try:
        ended = datetime.strptime(time, "%Y-%m-%d %H:%M:%S").timestamp()  # SGLang's local time
        # Written as Python writes its values, so it can be read as such, without running it.
        call = ast.parse(f"f({rest.removeprefix('Finish: ')})", mode="eval").body
        given = {each.arg: each.value for each in call.keywords} if isinstance(call, ast.Call) else {}
        request = given["obj"]
        if not isinstance(request, ast.Call):
            raise TypeError("obj is no request")
        fields = {each.arg: each.value for each in request.keywords if each.arg}
        out = ast.literal_eval(given["out"])
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise _Unusable(f"is text that cannot be taken apart; {_ADVICE}") from None
    return (lambda name: _literal(fields.get(name))), out, ended


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def read_dump(path: str | os.PathLike[str], tokenizer: str | None = None) -> Iterator[Ended]:
    """The requests of a dump.

    Args:
        path: The file.
        tokenizer: Name or path of a tokenizer, for requests that were sent as text.

    Raises:
        TraceError: The file cannot be read, is no dump of SGLang, or holds no request with its prompt.
    """
    encode = _encoder(tokenizer, str(path))
    with open_source(path) as source:
        try:
            dumped = _Reader(source.stream).load()
            requests = dumped["requests"]
        except Exception as error:  # what a damaged pickle raises has no common class
            raise TraceError(f"{path}: is no dump of SGLang's requests ({error!r})") from None
    count, unusable = 0, ""
    for number, entry in enumerate(requests):
        try:
            request, out, began, ended = entry
            fields = vars(request)
            yield _ended(fields.get, out, float(began), float(ended), encode)
            count += 1
        except _Unusable as why:
            unusable = unusable or f"request {number}: {why}"
        except _DAMAGE as error:
            raise TraceError(f"{path}, request {number}: is malformed ({error!r})") from None
    if not count:
        raise TraceError(f"{path}: holds no finished request that can be used; {unusable or 'it has none'}")


class _Bag:
    """Stands for an object of any class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything."""

    def __setstate__(self, state: Any) -> None:
        for each in state if isinstance(state, tuple) else (state,):
            if isinstance(each, dict):
                vars(self).update({name: value for name, value in each.items() if isinstance(name, str)})

    def append(self, value: Any) -> None:
        """Leave out the items of a list of another class."""

    def extend(self, values: Any) -> None:
        """The same."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Leave out the entries of a dict of another class."""


class _Reader(pickle.Unpickler):
    """Reads a pickle without importing or calling what it names."""

    def find_class(self, module: str, name: str) -> Any:
        """A bag of attributes for each class but one of the standard library."""
        if (module, name) == ("array", "array"):
            return array
        if (module, name) == ("array", "_array_reconstructor"):
            return _array
        return _Bag

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002  # nothing is outside of the file
        """Nothing."""
        return None


def _array(kind: Any, typecode: str, code: int, data: bytes) -> array[Any]:  # noqa: ARG001  # as pickle calls it
    found = array(typecode)
    found.frombytes(data)
    return found


def _encoder(tokenizer: str | None, label: str) -> Encode:
    """Encode text; the tokenizer is loaded for the first."""
    loaded: list[Encode] = []

    def encode(text: str) -> Sequence[int]:
        if not loaded:
            loaded.append(load_tokenizer(tokenizer, label))
        return loaded[0](text)

    return encode


def _seconds(out: dict[str, Any]) -> float:
    took = (out.get("meta_info") or {}).get("e2e_latency")
    return float(took) if isinstance(took, (int, float)) else 0.0


def _ended(get: Get, out: dict[str, Any], began: float, ended: float, encode: Encode) -> Ended:
    """A request, from its fields and its answer."""
    meta = out.get("meta_info") or {}
    prompt, text = get("input_ids"), get("text")
    if prompt is None and isinstance(text, str):
        if meta.get("prompt_tokens") and text.count("...") and len(text) == 2 * 1024 + 3:
            raise _Unusable(f"its prompt is shortened; {_ADVICE}")
        prompt = encode(text)
    if prompt is None:
        raise _Unusable(f"has no prompt; {_ADVICE}")
    if not all(isinstance(token, int) for token in prompt):
        raise _Unusable(f"its prompt is shortened; {_ADVICE}")
    output = out.get("output_ids")
    count = meta.get("completion_tokens")
    count = len(output or ()) if count is None else int(count)
    began = min(began, ended)  # clocks of two processes
    if not (0 <= count <= _MOST_TOKENS and 0.0 <= began <= ended < _LATEST):
        raise ValueError(f"it has {count} tokens from {began} to {ended}")
    if output is None and not count:
        output = ()
    known = output is not None and len(output) == count and all(isinstance(token, int) for token in output)
    reason = meta.get("finish_reason")
    cached = meta.get("cached_tokens")
    names = repr((get("extra_key"), get("cache_salt"), get("lora_path")))
    return Ended(
        Tokens(names.encode(), _raw(prompt), _raw(output) if known and output is not None else None),
        len(prompt),
        None if cached is None else max(0, min(int(cached), len(prompt))),
        began,
        ended,
        RequestInfo(
            output_tokens=count,
            finish_reason=_text(reason.get("type")) if isinstance(reason, dict) else None,
            priority=max(-(2**31), min(int(get("priority") or 0), 2**31)),
            session=_text(get("session_id")),
        ),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _raw(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
