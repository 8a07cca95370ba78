"""Full and window KV under pressure, in one pool of bytes and in two: every count against a naive one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from costcache.binding import Binding
from costcache.deployment import Deployment
from costcache.radix.node import Node
from costcache.radix.windows import WindowRecord, WindowTree
from costcache.records import RequestInfo
from costcache.settings import Settings
from tests.property.test_states import key
from tests.property.test_windows_machine import PLUGINS, model_with_window

POLICIES = ("lru", "mru", "lfu", "arc", "gdsf", "hazard", "s3fifo", "sieve", "tlru", "wtinylfu")
PAGE = 4


def new(policy: str, pages: int, windows: int | None, window: int) -> WindowTree:
    binding = Binding.of(
        model_with_window(window), Deployment(page_size=PAGE), Settings(policy=policy), plugins=PLUGINS
    )
    room = -(-window // PAGE) * PAGE
    return WindowTree(
        binding,
        pages * PAGE + room,
        window_capacity=None if windows is None else windows * PAGE + room,
        page_bytes=8,
    )


def check(tree: WindowTree) -> None:
    """Counts, locks and records against the tree itself."""
    nodes = list(tree.walk())
    full = sum(node.tokens for node in nodes)
    windows = [node.window for node in nodes if node.window is not None]
    kept = sum(record.tokens for record in windows)
    assert (tree.full_tokens, tree.window_tokens) == (full, kept)
    locked = sum(node.tokens for node in nodes if node.locks)
    held = sum(record.tokens for record in windows if record.locks)
    shared = tree.windows is tree.pool
    assert tree.windows.pinned == held + (locked if shared else 0)
    for node in nodes:
        record = node.window
        if record is not None:
            assert isinstance(record, WindowRecord)
            assert (record.node, record.depth, record.tokens) == (node, node.depth, node.tokens)
            assert tree.windows.live[record.serial] is record
            assert record.is_leaf
            assert node.locks or not record.locks
    assert tree.windows.root.live_children == len(windows)
    assert tree.windows.root.locks == sum(record.locks for record in windows)
    assert len(tree.windows.live) == len(windows) + (len(nodes) if shared else 0)
    if shared:
        assert tree.free_bytes == tree.memory - full * tree.kv_bytes - kept * tree.window_bytes >= 0
        unlocked = (full - locked) * tree.kv_bytes + (kept - held) * tree.window_bytes
        assert tree.pool.state().evictable == unlocked
    else:
        assert tree.pool.free == tree.pool.capacity - full >= 0
        assert tree.windows.free == tree.windows.capacity - kept >= 0
    assert not any(pool.fallbacks for pool in tree.pools.values())


class Server:
    """Requests one after the other, some of which stay locked for a while."""

    def __init__(self, tree: WindowTree) -> None:
        self.tree = tree
        self.held: list[Node] = []

    def serve(self, pages: list[int], hold: bool) -> None:
        tree, data = self.tree, key(pages)
        request = tree.pool.begin()
        node = tree.find(tree.root(()), data, request)
        usable = tree.usable(node)
        self.is_longest(node, usable.end)
        found = request.matched = usable.end
        computed = len(pages) * PAGE - found
        room, windows = tree.make_room(usable, computed, min(computed, tree.kept))
        if room < computed or windows < min(computed, tree.kept):
            tree.pin(usable)  # what is missing is nowhere to be had
            if tree.windows is tree.pool:
                assert not tree.evictable_bytes
            else:
                assert room == computed or not tree.pool.evictable
                assert windows == min(computed, tree.kept) or not tree.windows.evictable
            tree.unpin(usable)
        node = tree.match(tree.root(()), data, request)
        cached = node.end
        added = min(len(pages) * PAGE - cached, room)
        if added > 0:
            node = tree.append(node, tree.part(data, cached, added), None, request)
        if node.parent is not None:
            tree.keep_both(node, cached, found, request)
        if hold and node.parent is not None:
            tree.pin(node)
            self.held.append(node)
        tree.finish(request, RequestInfo(output_tokens=3))

    def is_longest(self, node: Node, end: int) -> None:
        """No longer prefix of what matched has its last window cached, page by page."""
        has = {at for each in node.path() if each.window for at in range(each.depth, each.end, PAGE)}
        whole = []
        for stop in range(PAGE, node.end + 1, PAGE):
            pages = range(0, stop, PAGE)
            if all(at in has for at in pages if at + PAGE > stop - self.tree.window):
                whole.append(stop)
        assert end == max(whole, default=0)


@given(
    stream=st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=9), st.booleans(), st.booleans(), st.booleans()
        ),
        max_size=40,
    ),
    policy=st.sampled_from(POLICIES),
    pages=st.integers(2, 20),
    windows=st.none() | st.integers(1, 12),
    window=st.integers(1, 10),
    merge_from=st.sampled_from([1, 64]),
)
def test_counts_and_matches(
    stream: list[tuple[list[int], bool, bool, bool]],
    policy: str,
    pages: int,
    windows: int | None,
    window: int,
    merge_from: int,
) -> None:
    server = Server(new(policy, pages, windows, window))
    tree = server.tree
    tree.merge_from = tree.merge_alike = merge_from
    for prompt, hold, release, grows in stream:
        if release and server.held:
            tree.unpin(server.held.pop(0))
        for size in range(1, len(prompt)) if grows else ():  # a chain of nodes, which are merged
            server.serve(prompt[:size], False)
        server.serve(prompt, hold)
        check(tree)
    for node in server.held:
        tree.unpin(node)
    check(tree)
    for pool in reversed(tree.pools.values()):
        evictable = pool.state().evictable
        assert pool.evict(evictable).freed == evictable
        check(tree)
    assert not tree.window_tokens
    assert not tree._locked
