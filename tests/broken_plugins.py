"""Plugins with a fault of one kind each: their sources, and what a doctor has to say of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from costcache.hookspecs import PROJECT

__all__ = ["BROKEN", "HEALTHY", "Broken", "install"]

_NEXT = "    def next_victim(self, pool):\n"
_EACH = "        for record in self.records.values():\n"
_HOOK = "from costcache import hookimpl\n@hookimpl\n"
_OFFER = _HOOK + "def policies():\n    from costcache import PolicySpec\n    return "
_ORDER = """
import itertools, random, time
from typing import Any
from costcache import KeyedOrder, PolicySpec, Victim, VictimOrder, hookimpl
from costcache.policies.keyed import LRU

class Order(BASE):
    def __init__(self):
        super().__init__()
        self.count, self.kept, self.records, self.last = 0, [], {}, None
BODY

@hookimpl
def policies():
    return {"NAME": PolicySpec(lambda cost, pools, settings: Order(), "broken", sees=frozenset({"nodes"}))}
"""


@dataclass(frozen=True)
class Broken:
    """A plugin with a fault.

    Attributes:
        source: Its module; ``NAME`` stands for its name.
        says: Words of the finding.
        fix: Words of the fix.
        value: What its entry point names; its module by default.
        requires: A requirement of its distribution.
        hangs: Whether it never ends, or ends the process: no cache can bear that.
    """

    source: str
    says: str
    fix: str
    value: str | None = None
    requires: str | None = None
    hangs: bool = False


def _order(body: str, says: str, fix: str, base: str = "LRU", hangs: bool = False) -> Broken:
    source = _ORDER.replace("BASE", base).replace("BODY", body)
    return Broken(source, says, fix, hangs=hangs)


def _key(expression: str) -> str:
    return f"    def key(self, record):\n        return {expression}\n"


def _hearing(event: str, statement: str) -> str:
    arguments = {"finish": "request, info", "trim": "record, tokens"}.get(event, "record")
    return f"    def {event}(self, {arguments}):\n        super().{event}({arguments})\n        {statement}\n"


def _naming(statement: str) -> str:
    return (
        "    def next_victim(self, pool):\n        victim = super().next_victim(pool)\n"
        f"        {statement}\n        return victim\n"
    )


_EVERY = """
    def insert(self, record):
        self.records[record.serial] = record
    def remove(self, record):
        self.records.pop(record.serial, None)
        if record.parent is not None and record.parent.parent is not None:
            self.records[record.parent.serial] = record.parent
"""

_STORE = """
import sqlite3
from costcache import hookimpl
from costcache.storage import StorageBackend, StorageSpec

class Store(StorageBackend):
    def __init__(self, capacity):
        self.values, self.capacity, self.db = {}, capacity, sqlite3.connect(":memory:")
    def get(self, key):
        return self.values.get(key)
    def put(self, key, value):
        self.values.pop(key, None)
        if len(value) > self.capacity:
            return False
        while self.values and sum(map(len, self.values.values())) + len(value) > self.capacity:
            del self.values[next(iter(self.values))]
        self.values[key] = value
        return True
    def delete(self, key):
        self.values.pop(key, None)
    def keys(self):
        yield from ((key, len(value)) for key, value in self.values.items())
    def close(self):
        self.db.close()

@hookimpl
def storage_backend():
    return {"NAME": StorageSpec(lambda path, capacity, settings: Store(capacity), "Nowhere.")}
"""

_FORMAT = (
    "from costcache import TraceFormat, hookimpl\n@hookimpl\ndef trace_formats():\n"
    "    return {'NAME': TraceFormat(lambda source, reading: None, lambda name, start: False, 'Ours.')}\n"
)

HEALTHY = _ORDER.replace("BASE", "LRU").replace("BODY", "")

BROKEN: dict[str, Broken] = {
    # -- which cannot be loaded
    "imports": Broken("import no_such_package", "No module named 'no_such_package'", "install what"),
    "syntax": Broken("def (", "SyntaxError", "py_compile"),
    "panics": Broken(
        "class Panic(BaseException): pass\nraise Panic('in Rust')", "Panic: in Rust", "end quietly"
    ),
    "exits": Broken("raise SystemExit(3)", "SystemExit: 3", "end quietly"),
    "unnamed": Broken("", "its entry point is", "reinstall", value=""),
    "attribute": Broken("x = 1", "has no attribute 'plugin'", "that the module has", value="{module}:plugin"),
    "unmarked": Broken("def policies(): return {}", "no function in it is marked", "@costcache.hookimpl"),
    "misspelt": Broken(_HOOK + "def polices(): return {}", "did you mean 'policies'?", "rename the function"),
    "arguments": Broken(
        _HOOK + "def match_model(modle): return 3", "no argument 'modle'", "own arguments, or fewer"
    ),
    "defaults": Broken(_HOOK + "def match_model(model=None): return 3", "'model' a default", "own arguments"),
    "wrapper": Broken(
        _HOOK.strip() + "(wrapper=True)\ndef match_model(model):\n    return (yield)",
        "is a wrapper",
        "leave out",
    ),
    "unclaimed": Broken(
        _HOOK + "def token_cost(model, deployment): return None", "no 'match_model'", "add match_model"
    ),
    "outdated": Broken(HEALTHY, "was made for costcache", "for this costcache", requires="costcache<0.0.1"),
    # -- whose architecture is wrong
    "zero": Broken(_HOOK + "def match_model(model): return 0", "match_model answered 0", "int of 1 or more"),
    "claims": Broken(_HOOK + "def match_model(model): raise KeyError(1)", "match_model raised", "else None"),
    "tie-a": Broken(
        _HOOK + "def match_model(model): return 77 if model.name == 'gemma-3-12b' else None",
        "'tie-a' and 'tie-b' claim model 'gemma-3-12b' with the same specificity 77",
        "uninstall one of them",
    ),
    "tie-b": Broken(
        _HOOK + "def match_model(model): return 77 if model.name == 'gemma-3-12b' else None", "", ""
    ),
    "settings-model": Broken(
        _HOOK
        + "def match_model(model): return 31 if model.name == 'llama-3-8b' else None\n@hookimpl\n"
        + "def settings_model(): return dict",
        "settings_model returned <class 'dict'>",
        "all have defaults",
    ),
    "settings-needed": Broken(
        "from pydantic import BaseModel\nclass Needs(BaseModel):\n    must: int\n"
        + _HOOK
        + "def match_model(model): return 32 if model.name == 'llama-3-8b' else None\n@hookimpl\n"
        + "def settings_model(): return Needs",
        "'architecture.must'",
        "all have defaults",
    ),
    "free-target": Broken(
        _HOOK
        + "def match_model(model): return 33 if model.name == 'llama-3-8b' else None\n@hookimpl\n"
        + "def free_target(model, pool, settings): return 7.0",
        "free_target is 7.0",
        "below 1.0",
    ),
    # -- whose offers are wrong
    "list": Broken(_HOOK + "def policies(): return ['lru']", "policies returned ['lru']", "a dict of names"),
    "taken": Broken(
        _OFFER + "{'lru': PolicySpec(lambda c, p, s: None, '')}", "'lru' is taken by", "another name"
    ),
    "reserved": Broken(
        _OFFER + "{'optimum': PolicySpec(lambda c, p, s: None, '')}", "cannot be asked for", "another name"
    ),
    "summary": Broken(
        _OFFER + "{'NAME': PolicySpec(lambda c, p, s: None, None)}", "summary is None", "one line of text"
    ),
    "sees": Broken(
        _OFFER + "{'NAME': PolicySpec(lambda c, p, s: None, '', sees=['nodes'])}",
        "sees is ['nodes']",
        "a frozenset",
    ),
    "settings-class": Broken(
        _OFFER + "{'NAME': PolicySpec(lambda c, p, s: None, '', settings={})}",
        "settings is {}",
        "a pydantic model",
    ),
    "settings-arguments": Broken(
        HEALTHY.replace(", sees=", ", settings=Needs, sees=")
        + "\nfrom pydantic import BaseModel\nclass Needs(BaseModel):\n    must: int\n",
        "cannot be made without arguments",
        "all have defaults",
    ),
    "formats": Broken(
        _HOOK + "def trace_formats(): return {'x': 3}", "is 3, not a TraceFormat", "TraceFormat"
    ),
    "format-taken": Broken(
        _FORMAT.replace("NAME", "mooncake"), "'mooncake' is taken by 'costcache'", "TraceFormat"
    ),
    "format-claims": Broken(
        _FORMAT.replace("lambda name, start", "lambda name"), "claims raised TypeError", "claims(name, start)"
    ),
    "format-claims-words": Broken(
        _FORMAT.replace("False", "None"), "claims answered None", "claims(name, start)"
    ),
    "reads-words": Broken(
        _HOOK + "def read_config(config): return 'llama'", "read_config answered 'llama'", "a ModelSpec"
    ),
    "async-hook": Broken(
        _HOOK.strip() + "\nasync def match_model(model): return 5", "is async", "'def' without 'async'"
    ),
    "async-event": _order("    async def finish(self, request, info): pass\n", "finish is async", "'def'"),
    "yields": _order(_hearing("touch", "yield"), "touch is a generator", "no 'yield' in it"),
    "supports": Broken(
        HEALTHY.replace(", sees=", ", supports=lambda model: True, sees="),
        "supports answered True",
        "a line on",
    ),
    "windows": Broken(
        HEALTHY.replace(", sees=", ", windows='nope', sees="), "names 'nope' for windows", "correct the field"
    ),
    "explains": Broken(
        HEALTHY.replace(", sees=", ", explains=True, sees="), "no classes to explain", "correct the field"
    ),
    "storage-spec": Broken(
        _HOOK + "def storage_backend(): return {'NAME': 3}", "is not a StorageSpec", "StorageSpec"
    ),
    "storage-unopened": Broken(
        _STORE.replace("Store(capacity)", "3"), "open returned 3", "return a StorageBackend"
    ),
    "storage-in-memory": Broken(
        _STORE, "storage backend: after opening it again, keys lists 0", "once the value outlives the process"
    ),
    "storage-unbounded": Broken(
        _STORE.replace("len(value) > self.capacity", "False"),
        "the capacity is 100,000",
        "let put evict until the new value fits",
    ),
    "storage-of-one-thread": Broken(
        _STORE.replace(
            "return self.values.get", "self.db.execute('select 1')\n        return self.values.get"
        ),
        "in another thread",
        "any thread call the backend",
    ),
    "storage-talks": Broken(
        _STORE.replace("return True", "return 'done'"), "put returned 'done'", "put a bool"
    ),
    "event": Broken(
        HEALTHY.replace("@hookimpl", "    def touchs(self, record): pass\n\n@hookimpl"),
        "did you mean 'touch'?",
        "the name of the event",
    ),
    "twice": Broken(_HOOK + "def trace_formats(): return {}", "", ""),
    "twice-again": Broken("", "it is loaded already", "remove one of the two", value="broken_twice"),
    # -- whose order is wrong
    "no-order": Broken(_OFFER + "{'NAME': PolicySpec(lambda c, p, s: 3, '')}", "returned 3", "a new order"),
    "one-order": Broken(
        HEALTHY.replace("settings: Order()", "settings: ONE") + "\nONE = Order()\n",
        "one order for two caches",
        "return a new order",
    ),
    "in-the-class": _order(
        "    seen = {}\n" + _key("self.seen.setdefault(record.serial, len(self.seen))"),
        "Order.seen changed",
        "__init__ makes",
        "KeyedOrder",
    ),
    "falls": _order(
        _key("-(record.data or 0)") + "    def touch(self, record):\n        record.data = record.recency\n",
        "has the lower key",
        "rises = False",
        "KeyedOrder",
    ),
    "sees-more": Broken(
        HEALTHY.replace('{"nodes"}', '{"leaves"}').replace(
            "@hookimpl", _key("(record.end, record.recency)") + "\n@hookimpl", 1
        ),
        "that it sees leaves alone",
        "frozenset({'nodes'})",
    ),
    "prints": _order(_hearing("insert", "print('made')"), "it prints to standard output", "logging"),
    "no-key": _order(_key("None"), "the key of node", "return a value", "KeyedOrder"),
    "nan": _order(_key("float('nan')"), "the key of node", "no clock", "KeyedOrder"),
    "random": _order(_key("random.random()"), "the key of node", "no random", "KeyedOrder"),
    "clock": _order(_key("time.perf_counter()"), "the key of node", "no clock", "KeyedOrder"),
    "raises-in-key": _order(_key("1 // 0"), "ZeroDivisionError", "what the error names", "KeyedOrder"),
    "raises-in-event": _order(
        _hearing("touch", "raise ValueError('event')"), "event", "what the error names"
    ),
    "exits-in-event": _order(_hearing("touch", "raise SystemExit(4)"), "4", "what the error names"),
    "writes": _order(_hearing("touch", "record.uses = 99"), "record.data only", "record.data only"),
    "frees-locked": _order(
        _EVERY
        + _NEXT
        + _EACH
        + "            if not record.live_children:\n                return Victim(record)\n"
        + "        return None\n",
        "which is locked",
        "is_evictable",
        "VictimOrder",
    ),
    "names-twice": _order(
        _naming("victim = self.last = self.last or victim"), "left the cache", "forget a record in remove"
    ),
    "names-none": _order(
        "    def next_victim(self, pool):\n        return None\n", "no victim", "every unlocked leaf"
    ),
    "names-words": _order(_naming("victim = 'leaf'"), "'leaf'", "costcache.Victim"),
    "sleeps": _order(
        _hearing("touch", "time.sleep(0.02)") + _hearing("insert", "time.sleep(0.02)"),
        "ms for a step",
        "no sleep",
    ),
    "grows": _order(_hearing("remove", "self.kept.append(record.serial)"), "still grows", "forget in remove"),
    "scans": _order(
        _EVERY
        + _NEXT
        + "        best = None\n"
        + _EACH
        + "            if record.is_evictable and (best is None or record.recency < best.recency):\n"
        + "                best = record\n        return None if best is None else Victim(best)\n",
        "lines of the policy among",
        "a heap",
        "VictimOrder",
    ),
    "hash-seed": _order(
        _key("hash(str(record.serial))"), "depend on the process", "no hash() of text", "KeyedOrder"
    ),
    # -- which no process survives
    "never-ends": _order(_hearing("touch", "while True: pass"), "does not end", "the loop", hangs=True),
    "waits-at-import": Broken("import time\ntime.sleep(1e6)", "does not end: import", "the loop", hangs=True),
    "ends-the-process": Broken(
        "import os\nos._exit(5)", "ended the process (exit status 5) at: import", "raise an error", hangs=True
    ),
    "kills-the-process": _order(
        _hearing("touch", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        "ended the process (signal 9)",
        "raise an error",
        hangs=True,
    ),
}


def install(folder: Path, plugins: dict[str, Broken]) -> None:
    """Write plugins to a folder as distributions, each with its entry point, as pip would."""
    for name, broken in plugins.items():
        module = f"broken_{name.replace('-', '_')}"
        if broken.source:
            (folder / f"{module}.py").write_text(broken.source.replace("NAME", name))
        value = module if broken.value is None else broken.value.format(module=module)
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {broken.requires}\n" if broken.requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n{needs}")
        (info / "entry_points.txt").write_text(f"[{PROJECT}]\n{name} = {value}\n")
