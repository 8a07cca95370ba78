"""A prefix cache over a dict: a complete host, whose pool chooses the victims."""

from __future__ import annotations

from costcache import Deployment, ModelSpec, NodeRecord, RequestInfo, Victim
from costcache.binding import Binding
from costcache.eviction import Refused
from costcache.settings import Settings

__all__ = ["Block", "DictCache"]


class Block(NodeRecord):
    """One block of tokens, and the prefix by which the dict finds it."""

    def __init__(self, parent: NodeRecord, tokens: int, prefix: tuple[int, ...]) -> None:
        super().__init__(0, parent, tokens, len(prefix) - tokens)
        self.prefix = prefix


class DictCache:
    """Blocks of ``size`` tokens, by their whole prefix."""

    def __init__(self, model: str, capacity: int, size: int, policy: str = "costcache") -> None:
        """Make an empty cache with room for ``capacity`` tokens."""
        binding = Binding.of(ModelSpec.preset(model), Deployment(page_size=size), Settings(policy=policy))
        self.size = size
        self.blocks: dict[tuple[int, ...], Block] = {}
        self.pool = binding.pool("kv", self.take, capacity=capacity)

    def serve(self, prompt: list[int]) -> int:
        """Serve one request; returns the tokens that the cache had."""
        pool, size, end = self.pool, self.size, 0
        request, path = pool.begin(), []
        pool.clock.accesses += 1  # one more walk
        while (block := self.blocks.get(tuple(prompt[: end + size]))) and end + size <= len(prompt):
            path.append(block)
            end += size
        pool.use(path, request)  # matched
        found = request.matched = end
        last = path[-1] if path else pool.root
        pool.pin(last)  # pinned: the request needs its prefix while it runs
        room = pool.make_room((len(prompt) - end) // size * size, last)  # request victims
        parent = last
        for stop in range(end + size, end + room + 1, size):
            prefix = tuple(prompt[:stop])
            parent = self.blocks[prefix] = Block(parent, size, prefix)
            pool.insert(parent, request)  # made
        pool.unpin(last)
        pool.finish(request, RequestInfo(new_tokens=len(prompt) - found))
        return found

    def take(self, victim: Victim, needed: int) -> int | Refused:  # noqa: ARG002  # blocks go whole
        """Free a victim that the pool chose, if it is one of ours that can be evicted."""
        block = victim.record
        if not isinstance(block, Block) or self.blocks.get(block.prefix) is not block or block.live_children:
            return Refused.NOT_A_LEAF
        if block.locks:
            return Refused.LOCKED
        del self.blocks[block.prefix]
        self.pool.remove(block)  # freed
        return block.tokens
