"""What to do about a problem of a plugin, in one line, by the words in which the problem is told."""

from __future__ import annotations

import re

__all__ = ["fix_of"]

_OTHERWISE = "correct what the error names; 'costcache.testing' runs the same checks under pytest"
_CLOCK = "let the key depend on the record and on events alone: no clock, no random number, no NaN"

_FIXES: tuple[tuple[str, str], ...] = tuple(
    (re.sub(r"\s+", " ", words), fix)
    for words, fix in (
        (r"needs the extra", "pip install 'costcache[testing]'"),
        (r"whose body no call runs", "write 'def' without 'async', and no 'yield' in it"),
        # loading
        (r"No module named", "install what the plugin imports, and name it in its dependencies"),
        (r"SyntaxError|IndentationError", "correct the line: 'python -m py_compile FILE' shows it"),
        (r"(module|package) '?[\w.]+'? has no attribute", "name an attribute that the module has"),
        (r"import failed", "make 'python -c \"import MODULE\"' end quietly: a module only defines things"),
        (
            r"its entry point is",
            'write NAME = "MODULE" under [project.entry-points.costcache], and reinstall',
        ),
        (r"was made for costcache", "install a version of the plugin for this costcache, or change its pin"),
        (r"is loaded already", "remove one of the two from [project.entry-points.costcache], and reinstall"),
        (r"there is no hook", "rename the function to the hook that is meant"),
        (r"is a wrapper", "leave out wrapper=True, and return the answer"),
        (
            r"hook '\w+' (has no argument|cannot)",
            "use the hook's own arguments, or fewer: see 'Hooks' in the docs",
        ),
        (r"is marked @costcache\.hookimpl", "mark the plugin's functions with @costcache.hookimpl"),
        (r"no 'match_model'", "add match_model, which returns an int of 1 or more for the plugin's models"),
        # architectures
        (r"match_model (answered|raised)", "return an int of 1 or more for the plugin's models, else None"),
        (
            r"with the same specificity",
            "uninstall one of them, or return a higher number from one match_model",
        ),
        (r"read the same config", "uninstall one of them, or let one read_config return None for the config"),
        (r"read_config (answered|raised)", "return a ModelSpec, or None for configs of others"),
        (
            r"token_cost",
            "return a costcache.cost.TokenCost of 1 or more bytes for each model that is claimed",
        ),
        (
            r"settings_model|setting 'architecture",
            "return a pydantic model whose fields all have defaults, or None",
        ),
        (r"default_policy", "return the name of a policy that serves the model, or None"),
        (r"free_target", "return a share from 0.0 to below 1.0"),
        (r"adjust_eviction_count", "return at least what was requested, and at most pool.capacity"),
        (r"a token of .* takes no bytes", "return the bytes of a token on one rank from token_cost"),
        # storage backends
        (
            r"storage_backend (failed|returned)|storage backend '[^']*' is taken",
            "return a dict of names of its own to costcache.storage.StorageSpec from storage_backend",
        ),
        (
            r"storage backend.*(cannot be opened|open returned)",
            "let open(path, capacity, settings) make the folder and return a StorageBackend",
        ),
        (
            r"storage backend: in another thread",
            "let any thread call the backend, one at a time: keep nothing that belongs to a thread",
        ),
        (
            r"storage backend:.*(capacity is|evicts far too much)",
            "let put evict until the new value fits, and no further; answer False if it never can",
        ),
        (
            r"storage backend: (a value that was put is missed|after opening it again)",
            "let put answer True once the value outlives the process, and list it in keys under its size",
        ),
        (
            r"storage backend:.*(put returned|get returned|keys gave)",
            "let get return bytes or None, put a bool, and keys pairs of a key and its bytes",
        ),
        # offers
        (r"claims (raised|answered)", "let claims(name, start) return True or False"),
        (r"trace.format", "return a dict of names to costcache.TraceFormat from trace_formats"),
        (r"(policy|name) '[^']*' is taken", "choose another name for the policy in what policies() returns"),
        (r"cannot be asked for", "choose another name, of letters, digits, '-' and '_'"),
        (r"which is no event", "give the method the name of the event, or begin a helper's name with '_'"),
        (r": summary is|the summary", "give PolicySpec one line of text that says what is evicted first"),
        (
            r": settings is|settings cannot be made|no description|setting 'policy_settings|ValidationError",
            "give a pydantic model whose fields all have defaults and descriptions",
        ),
        (r": sees is", "declare sees as a frozenset of 'leaves', 'nodes' or 'states'"),
        (r": (make_order|supports) is", "give PolicySpec a function"),
        (r": (windows|explains) is", "leave the field of PolicySpec out, or give it a value of its type"),
        (
            r"policies (failed|returned)",
            "return a dict of names to costcache.PolicySpec from policies()",
        ),
        (
            r"supports (raised|answered)",
            "let supports return None, or a line on why it does not serve the model",
        ),
        (
            r"no_such_setting",
            'refuse unknown settings: model_config = ConfigDict(frozen=True, extra="forbid")',
        ),
        # running
        (
            r"below (raised|returned|was refused)",
            "let below(pool) return a new VictimOrder for each tier, or None",
        ),
        (
            r"cannot be made|make_order returned|which is not a \w+Order",
            "let make_order(cost, pools, settings) return a new order of the kind that sees declares",
        ),
        (r"the (key|score) of node #\d+ is None", "let every path through it return a value"),
        (r"the key of node|equal to itself", _CLOCK),
        (
            r"that it sees leaves alone",
            "declare sees=frozenset({'nodes'}), or leave these facts out of the key",
        ),
        (r"it prints to standard output", "leave print out, or use the module logging"),
        (r"has the lower key", "set rises = False, or call requeue(record) where a key falls"),
        (
            r"the orders of all caches|another cache changed",
            "keep what it learns in attributes that __init__ makes, for each order anew",
        ),
        (r": it (names|declares)", "correct the field of PolicySpec, or leave it out"),
        (r"same stream gave other victims", _CLOCK),
        (r"depend on the process", "iterate over lists and dicts, not sets, and use no hash() of text"),
        (
            r"changed \w+ of a record|it wrote to|wrote .* data only",
            "write to record.data only: every other field is costcache's",
        ),
        (r"which is locked", "name only records of which is_evictable is true"),
        (r"which is not a leaf", "name only records of which is_evictable is true"),
        (r"named .* again", "name a victim again only after defer, or after its trim"),
        (r"has left the cache", "forget a record in remove"),
        (
            r"named no victim",
            "keep every unlocked leaf: add it in insert, unlock, defer, and in remove its parent",
        ),
        (r"offered \d+ of", "offer from 1 to all tokens of the victim"),
        (r"not a Victim", "return a costcache.Victim, or None"),
        (r"ms for a step", "do the work of an event in microseconds: no sleep, no file, no network, no scan"),
        (r"still grows", "forget in remove what was kept for a record, or bound the collection"),
        (r"lines of the policy among", "replace the loop over all leaves by a heap, a queue or a KeyedOrder"),
        (r"does not end", "find the loop that does not end, or what it waits for"),
        (r"ended the process", "raise an error in place of ending the process"),
        (r"serves none of", "declare what it sees, or let supports return None for some model"),
    )
)


def fix_of(problem: str) -> str:
    """The fix of a problem, in one line."""
    for words, fix in _FIXES:
        if re.search(words, problem):
            return fix
    return _OTHERWISE
