"""Random operations on a KV cache manager, in the ways that vLLM's scheduler uses it."""

from __future__ import annotations

import random
from typing import Any

from vllm.v1.request import RequestStatus

from tests.vllm.serving import Server

MOST_RUNNING = 8
WORDS = 1000


class Fuzz:
    """One server, or two that must do the same, under random requests.

    Args:
        servers: The servers. With two, every block that they hand out is compared.
        seed: Same seed, same operations.
        evictions: Also let blocks lose their contents, and let a connector hold some.
    """

    def __init__(self, *servers: Server, seed: int, evictions: bool = False) -> None:
        self.servers = servers
        self.rng = rng = random.Random(seed)
        self.evictions = evictions
        self.requests: dict[str, list[Any]] = {}
        self.waiting: list[str] = []
        self.counts: dict[str, int] = {}
        self.compared = 0  # blocks that were handed out
        self.named: dict[int, Any] = {}  # hashes of the blocks that connectors hold
        size = servers[0].size
        self.heads = [self.words(size * rng.randrange(1, 20)) for _ in range(10)]
        self.history: list[list[int]] = []  # what was answered, to go on from

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(WORDS) for _ in range(count)]

    @property
    def running(self) -> list[str]:
        return list(self.servers[0].running)

    def step(self) -> str:
        """One operation; returns its name."""
        choices = {"start": 35, "resume": 8}
        if self.running:
            choices |= {"go_on": 35, "finish": 12, "abort": 3, "preempt": 5}
        if len(self.running) >= MOST_RUNNING:
            del choices["start"]
        if self.evictions:
            choices |= {"evict": 1, "connect": 2, "disconnect": 2, "reset": 1}
        elif not self.running:
            choices["reset"] = 1
        name = self.rng.choices(list(choices), list(choices.values()))[0]
        getattr(self, f"_{name}")()
        if self.rng.random() < 0.5:
            for server in self.servers:
                server.drain(1)
        self.counts[name] = self.counts.get(name, 0) + 1
        return name

    def close(self) -> None:
        """End everything."""
        for name in self.running:
            self._each(name, lambda server, request: server.finish(request))
        for server in self.servers:
            server.drain()
            while server.pinned:
                server.pool.free_blocks(server.pinned.pop())

    def _each(self, name: str, act: Any) -> Any:
        results = [act(s, request) for s, request in zip(self.servers, self.requests[name], strict=True)]
        assert all(result == results[0] for result in results), results
        self.compared += len(results[0] or ())
        return results[0]

    def _prompt(self) -> list[int]:
        rng = self.rng
        known = rng.choice(self.history) if self.history and rng.random() < 0.4 else rng.choice(self.heads)
        prompt = known[: rng.randrange(1, len(known) + 1)] if rng.random() < 0.3 else list(known)
        if rng.random() < 0.6:
            prompt += self.words(rng.randrange(1, 120))
        return prompt[:1500]

    # -- operations --------------------------------------------------------------------------

    def _start(self) -> None:
        name, prompt = str(len(self.requests)), self._prompt()
        chunk = self.rng.choice((None, None, 64, 100))
        self.requests[name] = [server.request(name, prompt) for server in self.servers]
        if self._each(name, lambda server, request: server.start(request, chunk)) is None:
            self.waiting.append(name)

    def _resume(self) -> None:
        if not self.waiting:
            return
        name = self.waiting.pop(0)
        started = self._each(name, lambda server, request: server.start(request, 64))
        if started is None and self.rng.random() < 0.5:
            self.waiting.append(name)  # else it was aborted while it waited

    def _go_on(self) -> None:
        name, ahead = self.rng.choice(self.running), self.rng.choice((0, 0, 5))
        for _ in range(self.rng.choice((1, 1, 20))):
            if self._each(name, lambda server, request: server.go_on(request, 64, ahead)) is None:
                self._take_back(name)
                return

    def _finish(self) -> None:
        name = self.rng.choice(self.running)
        if self.rng.random() < 0.3:
            self.history = [*self.history[-20:], list(self.requests[name][0].all_token_ids)[:800]]
        self._each(name, lambda server, request: server.finish(request))

    def _abort(self) -> None:
        name = self.rng.choice(self.running)
        self._each(name, lambda server, request: server.finish(request, RequestStatus.FINISHED_ABORTED))

    def _preempt(self) -> None:
        self._take_back(self.rng.choice(self.running))

    def _take_back(self, name: str) -> None:
        self._each(name, lambda server, request: server.preempt(request))
        self.waiting.append(name)

    def _reset(self) -> None:
        done = {server.manager.reset_prefix_cache() for server in self.servers}
        assert len(done) == 1

    def _evict(self) -> None:
        """Blocks lose their contents, as when a connector failed to load them."""
        for server in self.servers:
            count = len(server.pool.blocks)
            lost = {self.rng.randrange(1, count) for _ in range(3)}
            server.manager.evict_blocks(lost)
            for number in lost:
                self.named.pop(number, None)

    def _connect(self) -> None:
        """A connector holds blocks while it copies them: those that are next, or any others."""
        for server in self.servers:
            free = list(server.pool.free_block_queue.iter_blocks_after(None))
            if self.rng.random() < 0.5:
                self.rng.shuffle(free)
            held = [block for block in free[:5] if block.block_hash is not None]
            server.pool.touch(held)
            server.pinned.append(held)
            self.named |= {block.block_id: block.block_hash for block in held}
            server.connected = True

    def _disconnect(self) -> None:
        for server in self.servers:
            if server.pinned:
                held = server.pinned.pop(0)
                for block in held:  # it copies them under this name
                    assert block.block_hash == self.named.pop(block.block_id, block.block_hash)
                server.pool.free_blocks(held)


def run(server: Server, steps: int, seed: int = 0, *, evictions: bool = False) -> Fuzz:
    """Random operations from beginning to end, with checks; no block may be lost."""
    fuzz = Fuzz(server, seed=seed, evictions=evictions)
    for step in range(steps):
        fuzz.step()
        if step % 20 == 0:
            server.check()
    fuzz.close()
    server.check()
    assert len(server.free_list()) == len(server.pool.blocks) - 1
    return fuzz
