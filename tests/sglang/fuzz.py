"""Random operations on a cache, in the ways that SGLang's scheduler uses it."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tests.sglang.serving import Server

FAMILIES = 9
LENGTHS = (3, 70, 130, 200, 260, 400)
MOST_RUNNING = 5
MOST_WAITING = 3


@dataclass
class Fuzz:
    """One server under random requests.

    Attributes:
        server: The server.
        seed: Same seed, same operations.
        sessions: Open and close sessions.
        namespaces: Use extra keys, salts and adapters.
        counts: Operations done, by name.
        victims: What each pool's evictions freed, if asked for.
    """

    server: Server
    seed: int
    sessions: bool = False
    namespaces: bool = True
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._session_turns = 0
        self.waiting: list[Any] = []

    def step(self) -> str:
        """One operation; SGLang's own check follows it. Returns its name."""
        server, rng = self.server, self.rng
        choices = {"start": 5, "refresh": 1, "evict": 1, "look": 1}
        if server.running:
            choices |= {"decode": 3, "finish": 4, "retract": 1, "abort": 1}
        if len(server.running) >= MOST_RUNNING:
            del choices["start"]
        if server.shape.hicache is not None:
            choices["evict_host"] = 1
        if self.sessions:
            choices["close"] = 1
        name = rng.choices(list(choices), list(choices.values()))[0]
        getattr(self, f"_{name}")()
        self.counts[name] = self.counts.get(name, 0) + 1
        server.cache.sanity_check()
        self._count_slots()
        return name

    # -- operations --------------------------------------------------------------------------

    def _tokens(self) -> list[int]:
        rng = self.rng
        start = rng.randrange(FAMILIES) * 1000
        tokens = list(range(start, start + rng.choice(LENGTHS)))
        if rng.random() < 0.7:
            tokens += [20_000 + rng.randrange(4000) for _ in range(rng.choice((1, 5, 70)))]
        return tokens

    def _namespace(self) -> dict[str, Any]:
        if not self.namespaces or self.rng.random() < 0.8:
            return {}
        return self.rng.choice(
            ({"extra_key": "x"}, {"cache_salt": "s"}, {"extra_key": "x", "cache_salt": "s"}, {"lora_id": "l"})
        )

    def _start(self) -> None:
        server, rng = self.server, self.rng
        session = f"s{rng.randrange(4)}" if self.sessions and rng.random() < 0.5 else None
        req = server.request(
            self._tokens(), priority=rng.randrange(3), session_id=session, **self._namespace()
        )
        if session is not None:
            req.session_generation = server.cache.session_refs.ensure_session_generation(session)
        if session is None and not server.shape.has_states and rng.random() < 0.5:
            req.init_next_round_input(server.cache)  # it waits while others run and evict
            self.waiting.append(req)
            if len(self.waiting) <= MOST_WAITING:
                return
            req = self.waiting.pop(0)
        if not self._fits(len(req.origin_input_ids) + 2 * server.shape.page_size):
            return
        for _ in range(rng.choice((0, 0, 0, 2))):
            req.init_next_round_input(server.cache)  # it waits, and is matched again
        server.start(req)

    def _fits(self, tokens: int) -> bool:
        """Whether the scheduler would admit a request: what is free or can be evicted."""
        server, cache = self.server, self.server.cache
        free = server.free()
        if free["kv"] + cache.full_evictable_size() < tokens + 64:
            return False
        if "swa" in free and free["swa"] + cache.swa_evictable_size() < tokens + 64:
            return False
        return "state" not in free or free["state"] + cache.mamba_evictable_size() >= 6

    def _decode(self) -> None:
        if self._fits(2 * self.server.shape.page_size):
            req = self.rng.choice(self.server.running)
            self.server.decode(req, [self.rng.randrange(4000) for _ in range(self.rng.choice((1, 3)))])

    def _finish(self) -> None:
        self.server.finish(self.rng.choice(self.server.running))

    def _retract(self) -> None:
        """The scheduler takes a running request's memory back; it does not come again here."""
        server = self.server
        req = self.rng.choice(server.running)
        server.running.remove(req)
        release_kv_cache(req, server.cache, checkpoint=not server.shape.has_states)
        if server.shape.hicache is not None:
            server.settle()

    def _abort(self) -> None:
        server = self.server
        req = self.rng.choice(server.running)
        server.running.remove(req)
        req.finished_reason = FINISH_ABORT("fuzz")
        req.finished_len = len(req.output_ids)
        release_kv_cache(req, server.cache, checkpoint=self.rng.random() < 0.5)
        if server.shape.hicache is not None:
            server.settle()

    def _refresh(self) -> None:
        namespace = self._namespace()
        namespace.pop("lora_id", None)
        self.server.cache.touch_prefix(
            RadixKey(
                array("q", self._tokens()), namespace.get("extra_key"), cache_salt=namespace.get("cache_salt")
            )
        )

    def _look(self) -> None:
        self.server.match(self._tokens())

    def _evict(self) -> None:
        rng, shape = self.rng, self.server.shape
        self.server.cache.evict(
            EvictParams(
                num_tokens=rng.choice((1, 33, 300)),
                swa_num_tokens=rng.choice((0, 64)) if shape.has_windows else 0,
                mamba_num=rng.choice((0, 1, 2)) if shape.has_states else 0,
            )
        )
        if shape.hicache is not None:
            self.server.settle()

    def _evict_host(self) -> None:
        shape, rng, cache = self.server.shape, self.rng, self.server.cache
        if (shape.has_states or shape.has_windows) and rng.random() < 0.4:
            if shape.has_states:
                cache.evict_host(1, ComponentType.MAMBA)
            else:
                cache.evict_host(rng.choice((1, 64)), ComponentType.SWA)
        else:
            cache.evict_host(rng.choice((1, 100, 500)))

    def _close(self) -> None:
        self.server.cache.release_radix_session(f"s{self.rng.randrange(4)}")
        self._session_turns += 1

    # -- slots -------------------------------------------------------------------------------

    def _count_slots(self) -> None:
        """Every slot and state is free, cached, or a running request's own."""
        server, cache, page = self.server, self.server.cache, self.server.shape.page_size
        cached = cache.full_evictable_size() + cache.full_protected_size()
        held = sum(
            -(-req.kv.kv_allocated_len // page) * page - req.kv.cache_protected_len for req in server.running
        )
        free, whole = server.free(), server.whole
        assert free["kv"] + cached + held == whole["kv"], "a slot was lost, or is in two places"
        if "swa" in free:
            windows = self._window_slots()
            assert len(windows) == len(set(windows)), "a window's slot is in two places"
            held = page * len({slot // page for slot in windows})  # the last page may not be full
            assert free["swa"] + held == whole["swa"], "a window's slot was lost"
        if "state" in free and not server.shape.unified:
            cached = cache.mamba_evictable_size() + cache.mamba_protected_size()
            assert free["state"] + cached + server.held_states() == whole["state"], (
                "a state was lost, or is in two places"
            )

    def _window_slots(self) -> list[int]:
        """Sliding-window slots behind all full-attention slots that are cached or running requests' own."""
        server, core = self.server, self.server.cache.tree_core
        parts = [
            server.rows.req_to_token[
                req.kv.req_pool_idx, req.kv.cache_protected_len : req.kv.kv_allocated_len
            ]
            for req in server.running
        ]
        nodes = [node for node in core._collect_all_nodes() if node is not core.root_node]
        values = (node.component_data[ComponentType.FULL].value for node in nodes)
        parts += [value for value in values if value is not None]
        if not parts:
            return []
        used = torch.cat([part.to(torch.int64) for part in parts])
        behind = server.allocator.full_to_swa_index_mapping[used]
        slots: list[int] = behind[behind > 0].tolist()
        return slots

    def end(self) -> None:
        """Finish all requests, evict everything, and see that no slot was lost."""
        if self.sessions:
            for number in range(4):
                self.server.cache.release_radix_session(f"s{number}")
        self.server.drain()
