"""Policies from the literature against naive programs of their papers, on always evictable objects."""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest

from costcache import CostModel, ModelSpec
from costcache.orders import VictimOrder
from costcache.policies import wtinylfu
from costcache.policies.arc import ARC
from costcache.policies.gdsf import GDSF
from costcache.policies.ghosts import Ghosts
from costcache.policies.keyed import HitsPerToken
from costcache.policies.lhd import AGES, LHD, densities, group_of
from costcache.policies.lru2 import LRUK
from costcache.policies.s3fifo import S3FIFO
from costcache.policies.sieve import Sieve
from costcache.policies.wild import Evidence, RequestClass, Wild
from costcache.policies.wtinylfu import Sketch, WTinyLFU
from costcache.records import NodeRecord

COST = CostModel.of(ModelSpec.preset("llama-3-8b"))
SEEDS = range(4)


class Thing(NodeRecord):
    """A record alone below a root: an object of the literature."""

    __slots__ = ("number",)

    def __init__(self, serial: int, root: Thing | None, size: int, number: int) -> None:
        super().__init__(serial, root, size, 0)
        self.number = number

    def prefix_hash(self, offset: int = 0) -> int | None:
        return self.number + offset


class Flat:
    """A cache of objects, which an order thinks to be a tree of leaves."""

    def __init__(self, order: VictimOrder, capacity: int) -> None:
        self.order, self.capacity = order, capacity
        self.root = Thing(1, None, 0, 0)
        self.things: dict[int, Thing] = {}
        self.accesses = self.used = 0

    def request(self, number: int, now: float, size: int = 1, priority: int = 0) -> bool:
        self.accesses += 1
        thing = self.things.get(number)
        hit = thing is not None
        if thing is None:
            while self.used + size > self.capacity:
                self.evict()
            self.used += size
            thing = self.things[number] = Thing(self.accesses + 1, self.root, size, number)
            thing.created, thing.priority = self.accesses, priority
            self.root.live_children += 1
        thing.uses += 1
        thing.last_use, thing.recency = now, self.accesses
        for heard in (self.order.use, self.order.touch) if hit else (self.order.insert,):
            heard(thing)
        return hit

    def evict(self) -> None:
        victim = self.order.next_victim("kv")
        assert victim is not None
        thing = victim.record
        assert isinstance(thing, Thing)
        del self.things[thing.number]
        self.used -= thing.tokens
        self.root.live_children -= 1
        self.order.remove(thing)
        thing.parent = None


class Naive:
    """A cache that does what a paper says; a subclass says what."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sizes: dict[int, int] = {}
        self.recent: dict[int, int] = {}
        self.clock = 0

    def request(self, number: int, now: float, size: int = 1, priority: int = 0) -> bool:
        self.clock += 1
        hit = number in self.sizes
        if not hit:
            while sum(self.sizes.values()) + size > self.capacity:
                victim = self.victim(now)
                del self.sizes[victim]
            self.sizes[number] = size
        self.recent[number] = self.clock
        (self.hit if hit else self.miss)(number, now, priority)
        return hit

    def victim(self, now: float) -> int:
        raise NotImplementedError

    def hit(self, number: int, now: float, priority: int) -> None:
        raise NotImplementedError

    def miss(self, number: int, now: float, priority: int) -> None:
        raise NotImplementedError


def zipf(rng: random.Random, things: int, requests: int) -> list[int]:
    """Popularity that falls, drifts, and is now and then scanned over."""
    weights = [1 / (rank + 1) ** 0.8 for rank in range(things)]
    numbers: list[int] = []
    scan = 10_000
    while len(numbers) < requests:
        if rng.random() < 0.01:
            numbers += range(scan, scan + 15)
            scan += 7 if rng.random() < 0.5 else 15
        shift = len(numbers) // 400 * 11
        numbers += [number + shift for number in rng.choices(range(things), weights, k=20)]
    return numbers[:requests]


def agree(
    order: VictimOrder,
    naive: Naive,
    seed: int,
    *,
    size_of: Callable[[int], int] = lambda number: 1,
    priorities: int = 1,
    requests: int = 2000,
) -> Flat:
    """Both hit and miss the same requests, and end with the same objects."""
    rng = random.Random(seed)
    flat = Flat(order, naive.capacity)
    now, hits = 0.0, 0
    for number in zipf(rng, 150, requests):
        now += rng.choice([0.25, 0.5, 1.0, 7.0])
        asked = (number, now, size_of(number), number % priorities)
        hit = flat.request(*asked)
        assert hit == naive.request(*asked)
        assert set(flat.things) == set(naive.sizes)
        hits += hit
    assert 0.1 * requests < hits < 0.9 * requests, "a stream that tells something"
    return flat


# -- ARC --------------------------------------------------------------------------------------


class NaiveARC(Naive):
    """Figure 4 of the paper, with room made before the page is looked up among the ghosts."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[int] = []  # from the least to the most recent, as the others
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def victim(self, now: float) -> int:
        """REPLACE, whose victim in case IV with |T1| = c leaves a ghost that the next miss drops."""
        first = self.t1 and (len(self.t1) > self.p or not self.t2)
        cached, ghosts = (self.t1, self.b1) if first else (self.t2, self.b2)
        ghosts.append(cached.pop(0))
        return ghosts[-1]

    def hit(self, number: int, now: float, priority: int) -> None:
        (self.t1 if number in self.t1 else self.t2).remove(number)
        self.t2.append(number)

    def miss(self, number: int, now: float, priority: int) -> None:
        if number in self.b1:
            self.p = min(self.capacity, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(number)
            self.t2.append(number)
        elif number in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(number)
            self.t2.append(number)
        else:
            if len(self.t1) + len(self.b1) == self.capacity:
                self.b1.pop(0)
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.capacity:
                self.b2.pop(0)
            self.t1.append(number)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity", [15, 60])
def test_arc(seed: int, capacity: int) -> None:
    order, naive = ARC(capacity), NaiveARC(capacity)
    flat = agree(order, naive, seed)
    assert order._share == pytest.approx(naive.p)
    assert (order._ghosts_once.tokens, order._ghosts_again.tokens) == (len(naive.b1), len(naive.b2))
    assert {n for n, thing in flat.things.items() if thing.data.queue is order._once} == set(naive.t1)


def test_ghosts_can_be_fitted_into_any_room() -> None:
    dropped: list[str] = []
    ghosts: Ghosts[str] = Ghosts(math.inf, dropped.append)
    for name, tokens in ((1, 10), (2, 20), (3, 5)):
        ghosts.keep(name, tokens, str(name))
    ghosts.fit()
    assert not dropped
    ghosts.fit(25)
    assert (dropped, ghosts.tokens) == (["1"], 25)
    ghosts.fit(24)
    assert (dropped, ghosts.tokens) == (["1", "2"], 5)
    ghosts.fit(0)
    assert (ghosts.tokens, len(ghosts)) == (0, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_arc_counts_tokens(seed: int) -> None:
    """Objects that are all of one size are treated as objects of size 1 are."""
    order, naive = ARC(60 * 7), NaiveARC(60)
    flat, rng = Flat(order, 60 * 7), random.Random(seed)
    for now, number in enumerate(zipf(rng, 150, 2000)):
        assert flat.request(number, now, 7) == naive.request(number, now)
    assert order._share == pytest.approx(7 * naive.p)


@pytest.mark.parametrize("seed", SEEDS)
def test_arc_keeps_its_bounds_with_objects_of_any_size(seed: int) -> None:
    order, rng = ARC(1000), random.Random(seed)
    flat, shares = Flat(order, 1000), set()
    for now, number in enumerate(zipf(rng, 150, 3000)):
        flat.request(number, now, 1 + number * 7919 % 90)
        first = order._once.tokens + order._ghosts_once.tokens
        assert first <= 1000
        assert first + order._again.tokens + order._ghosts_again.tokens <= 2000
        assert 0 <= order._share <= 1000
        shares.add(order._share)
    assert len(shares) > 20, "it adapts"


# -- GDSF -------------------------------------------------------------------------------------


class NaiveGDSF(Naive):
    """H = L + F * C / S; L becomes the H of the victim."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.inflation = 0.0
        self.rank: dict[int, float] = {}
        self.uses: dict[int, int] = {}

    def victim(self, now: float) -> int:
        number = min(self.sizes, key=lambda n: (self.rank[n], self.recent[n]))
        self.inflation = self.rank[number]
        return number

    def miss(self, number: int, now: float, priority: int) -> None:
        self.uses[number] = 0
        self.hit(number, now, priority)

    def hit(self, number: int, now: float, priority: int) -> None:
        size = self.sizes[number]
        self.uses[number] += 1
        self.rank[number] = self.inflation + self.uses[number] * COST.recompute_flops(0, size) / size


@pytest.mark.parametrize("seed", SEEDS)
def test_gdsf(seed: int) -> None:
    agree(GDSF(COST), NaiveGDSF(40), seed)
    agree(GDSF(COST), NaiveGDSF(20_000), seed, size_of=lambda number: 1 + number * 7919 % 1000)


# -- hits per token ---------------------------------------------------------------------------


class NaiveHitsPerToken(Naive):
    """Fewest uses per token."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.uses: dict[int, int] = {}

    def victim(self, now: float) -> int:
        return min(self.sizes, key=lambda n: (self.uses[n] / self.sizes[n], self.recent[n]))

    def miss(self, number: int, now: float, priority: int) -> None:
        self.uses[number] = 1

    def hit(self, number: int, now: float, priority: int) -> None:
        self.uses[number] += 1


@pytest.mark.parametrize("seed", SEEDS)
def test_hits_per_token(seed: int) -> None:
    agree(HitsPerToken(), NaiveHitsPerToken(800), seed, size_of=lambda number: 1 + number * 7919 % 30)


# -- LRU-K ------------------------------------------------------------------------------------


class NaiveLRUK(Naive):
    """Figure 2.1 of the paper, with HIST and LAST of all that was ever seen, or of what is cached."""

    def __init__(self, capacity: int, k: int, period: float, *, remember: bool) -> None:
        super().__init__(capacity)
        self.k, self.period, self.remember = k, period, remember
        self.hist: dict[int, list[float]] = {}
        self.last: dict[int, float] = {}

    def victim(self, now: float) -> int:
        number = min(self.sizes, key=lambda n: (self.hist[n][self.k - 1], self.recent[n]))
        if not self.remember:
            del self.hist[number], self.last[number]
        return number

    def miss(self, number: int, now: float, priority: int) -> None:
        if number in self.hist:
            self.hit(number, now, priority)
        else:
            self.hist[number] = [now] + [-math.inf] * (self.k - 1)
            self.last[number] = now

    def hit(self, number: int, now: float, priority: int) -> None:
        if now - self.last[number] > self.period:
            correlated = self.last[number] - self.hist[number][0]
            for i in range(self.k - 1, 0, -1):
                self.hist[number][i] = self.hist[number][i - 1] + correlated
            self.hist[number][0] = now
        self.last[number] = now


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("period", [0.0, 6.0])
def test_lru_k(seed: int, k: int, period: float) -> None:
    for remember in (True, False):
        history = 1e9 if remember else 0.0
        agree(LRUK(40, k, period, history), NaiveLRUK(40, k, period, remember=remember), seed)


# -- S3-FIFO ----------------------------------------------------------------------------------


class NaiveS3FIFO(Naive):
    """Algorithm 1 of the paper."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghost: deque[int] = deque()
        self.freq: dict[int, int] = {}

    def victim(self, now: float) -> int:
        while True:
            if self.small and (len(self.small) >= 0.1 * self.capacity or not self.main):
                number = self.small.popleft()
                if self.freq[number] <= 1:
                    self.ghost.append(number)
                    if len(self.ghost) > 0.9 * self.capacity:
                        self.ghost.popleft()
                    return number
                self.freq[number] = 0
                self.main.append(number)
            else:
                number = self.main.popleft()
                if not self.freq[number]:
                    return number
                self.freq[number] -= 1
                self.main.append(number)

    def miss(self, number: int, now: float, priority: int) -> None:
        self.freq[number] = 0
        if number in self.ghost:
            self.ghost.remove(number)
            self.main.append(number)
        else:
            self.small.append(number)

    def hit(self, number: int, now: float, priority: int) -> None:
        self.freq[number] = min(self.freq[number] + 1, 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity", [15, 60])
def test_s3_fifo(seed: int, capacity: int) -> None:
    agree(S3FIFO(capacity), NaiveS3FIFO(capacity), seed)


def test_a_ghost_readmits_to_the_main_queue() -> None:
    order = S3FIFO(10)
    flat = Flat(order, 10)
    for number in range(12):
        flat.request(number, number)
    assert flat.things[11].data.queue is order._small
    assert not flat.request(0, 12.0)
    assert flat.things[0].data.queue is order._main
    assert len(order._ghosts) == 2  # 1 and 2; 0 was readmitted


# -- SIEVE ------------------------------------------------------------------------------------


class NaiveSieve(Naive):
    """Algorithm 1 of the paper, on a list from old to new."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[int] = []
        self.visited: dict[int, bool] = {}
        self.hand = 0

    def victim(self, now: float) -> int:
        at = self.hand if self.hand < len(self.queue) else 0
        while self.visited[self.queue[at]]:
            self.visited[self.queue[at]] = False
            at = at + 1 if at + 1 < len(self.queue) else 0
        # The next entry moves under the hand; after the newest there is none, and the hand starts over.
        self.hand = at if at + 1 < len(self.queue) else 10**9
        return self.queue.pop(at)

    def miss(self, number: int, now: float, priority: int) -> None:
        self.queue.append(number)
        self.visited[number] = False

    def hit(self, number: int, now: float, priority: int) -> None:
        self.visited[number] = True


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity", [2, 15, 60])
def test_sieve(seed: int, capacity: int) -> None:
    naive, flat, rng = NaiveSieve(capacity), Flat(Sieve(), capacity), random.Random(seed)
    for now, number in enumerate(zipf(rng, 150, 4000)):
        assert flat.request(number, now) == naive.request(number, now)
        assert set(flat.things) == set(naive.sizes)


# -- W-TinyLFU --------------------------------------------------------------------------------


class NaiveWTinyLFU(Naive):
    """A window and a segmented rest, all LRU, and exact counts that stop at 15 and are halved."""

    def __init__(self, capacity: int, window: float) -> None:
        super().__init__(capacity)
        self.window: list[int] = []
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.room = capacity * window
        self.counts: dict[int, int] = defaultdict(int)
        self.added = 0
        self.contested = False

    def victim(self, now: float) -> int:
        self.contested = True
        rest = (self.probation or self.protected or self.window)[0]
        if len(self.window) > self.room:
            candidate = self.window[0]
            if not self.probation and not self.protected:
                rest = candidate
            elif self.counts[candidate] > self.counts[rest]:
                self.window.remove(candidate)
                self.probation.append(candidate)
            else:
                rest = candidate
        for segment in (self.window, self.probation, self.protected):
            if rest in segment:
                segment.remove(rest)
        return rest

    def count(self, number: int, cached: int) -> None:
        self.counts[number] = min(15, self.counts[number] + 1)
        self.added += 1
        if self.added >= 10 * max(cached, 64):
            self.added //= 2
            self.counts = defaultdict(int, {n: count // 2 for n, count in self.counts.items()})

    def miss(self, number: int, now: float, priority: int) -> None:
        while not self.contested and len(self.window) > self.room:
            self.probation.append(self.window.pop(0))
        self.contested = False
        self.count(number, len(self.sizes) - 1)
        self.window.append(number)

    def hit(self, number: int, now: float, priority: int) -> None:
        self.count(number, len(self.sizes))
        if number in self.window:
            self.window.remove(number)
            self.window.append(number)
            return
        (self.probation if number in self.probation else self.protected).remove(number)
        self.protected.append(number)
        if len(self.protected) > 0.8 * (self.capacity - self.room):
            self.probation.append(self.protected.pop(0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("capacity", "window"), [(40, 0.01), (40, 0.2), (90, 0.05)])
def test_w_tinylfu(seed: int, capacity: int, window: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wtinylfu, "SMALLEST", 16)  # so wide that nothing shares all four counters
    agree(WTinyLFU(capacity, window=window), NaiveWTinyLFU(capacity, window), seed)


def test_the_sketch_is_never_under_the_truth() -> None:
    rng, sketch = random.Random(1), Sketch(100)
    truth: dict[int, int] = defaultdict(int)
    for _ in range(3000):
        name = int(rng.paretovariate(0.7)) << 32 | 12345
        truth[name] += 1
        sketch.add(sketch.cells(name))
    over = [sketch.estimate(sketch.cells(name)) - min(15, uses) for name, uses in truth.items()]
    assert min(over) == 0
    assert sum(extra == 0 for extra in over) > len(over) / 4
    assert sketch.added == 3000
    before = {name: sketch.estimate(sketch.cells(name)) for name in truth}
    sketch.forget()
    assert sketch.added == 1500
    assert all(sketch.estimate(sketch.cells(name)) == count // 2 for name, count in before.items())


def test_the_sketch_has_a_limit() -> None:
    for things, width in ((1, 256), (256, 256), (257, 512), (10**9, 65_536)):
        sketch = Sketch(things)
        assert len(sketch._counts) == 4 * width
        assert all(
            row * width <= cell < (row + 1) * width for row, cell in enumerate(sketch.cells(10**15 + 7))
        )


def test_a_new_name_can_start_with_the_uses_of_another() -> None:
    sketch = Sketch(1000)
    sketch.raise_to(sketch.cells(5), 9)
    assert sketch.estimate(sketch.cells(5)) == 9
    sketch.raise_to(sketch.cells(5), 3)
    assert sketch.estimate(sketch.cells(5)) == 9


# -- LHD --------------------------------------------------------------------------------------


class NaiveLHD(Naive):
    """All objects are looked at, and every density is the ratio of two sums over the rest of the ages."""

    def __init__(self, capacity: int, refresh: int) -> None:
        super().__init__(capacity)
        self.refresh = refresh
        self.used: dict[int, int] = {}
        self.intervals: dict[int, tuple[int, int]] = {}
        self.events: dict[tuple[int, int, str], float] = defaultdict(float)
        self.known: dict[tuple[int, int, str], float] | None = None
        self.table: dict[tuple[int, int], float] = {}
        self.since = 0
        self.width = 1
        self.heard = 0

    def group(self, number: int) -> int:
        total, doublings = min(sum(self.intervals[number]), AGES), 0
        while total and total < AGES:  # how often it doubles until it is the longest
            total *= 2
            doublings += 1
        return doublings if total else AGES.bit_length()

    def age(self, number: int) -> int:
        return min((self.heard - self.used[number]) // self.width, AGES - 1)

    def density(self, group: int, age: int) -> float:
        if age == AGES - 1:
            return -1.0
        if self.known is None:
            return (group + 1) / (age + 1)
        hits = sum(self.known[group, a, "hit"] for a in range(age, AGES))
        time = sum(
            (self.known[group, a, "hit"] + self.known[group, a, "evict"]) * (a - age + 1)
            for a in range(age, AGES)
        )
        return hits / time if time else 0.0

    def victim(self, now: float) -> int:
        table = self.table

        def rank(number: int) -> tuple[float, int]:
            at = (self.group(number), self.age(number))
            if at not in table:
                table[at] = round(self.density(*at), 12)
            return table[at], self.used[number]

        number = min(self.sizes, key=rank)
        self.events[self.group(number), self.age(number), "evict"] += 1
        self.event()
        return number

    def miss(self, number: int, now: float, priority: int) -> None:
        self.heard = self.used[number] = self.clock
        self.intervals[number] = (AGES, 0)
        self.event()

    def hit(self, number: int, now: float, priority: int) -> None:
        self.heard = self.clock
        age = self.age(number)
        self.events[self.group(number), age, "hit"] += 1
        self.intervals[number] = (self.intervals[number][1] or self.intervals[number][0], age)
        self.used[number] = self.clock
        self.event()

    def event(self) -> None:
        self.since += 1
        if self.since < self.refresh:
            return
        self.since = 0
        if sum(n for (_, age, _), n in self.events.items() if age == AGES - 1) > 0.01 * sum(
            self.events.values()
        ):
            self.width *= 2
            merged: dict[tuple[int, int, str], float] = defaultdict(float)
            for (group, age, kind), n in self.events.items():
                merged[group, age // 2, kind] += n
            self.events = merged
        self.known = self.events.copy()
        self.table = {}
        for at in self.events:
            self.events[at] *= 0.9


@pytest.mark.parametrize("seed", SEEDS)
def test_lhd(seed: int) -> None:
    """With so many samples that every leaf is looked at."""
    order = LHD(40, samples=1000, refresh=100, explore=0.0)
    rng, naive = random.Random(seed), NaiveLHD(40, 100)
    flat, hits = Flat(order, 40), 0
    for now, number in enumerate(zipf(rng, 150, 2000)):
        hit = flat.request(number, now)
        hits += hit
        assert hit == naive.request(number, now)
        assert set(flat.things) == set(naive.sizes)
    assert hits > 200
    assert 1 << order._shift == naive.width


def test_densities_by_hand() -> None:
    # At age 0: 3 of 4 are hit, in 1 + 1 + 2 + 3 bins of time; at age 2 one that waits for its eviction.
    assert densities([2.0, 1.0, 0.0], [0.0, 0.0, 1.0]) == [3 / 7, 1 / 3, 0.0]
    assert densities([0.0, 0.0], [0.0, 0.0]) == [0.0, 0.0]


def test_classes_of_reuse_intervals() -> None:
    assert [group_of(n) for n in (0, 1, 2, 3, 4, 127, 128, 255, 256, 512)] == [9, 8, 7, 7, 6, 2, 1, 1, 0, 0]


def test_lhd_scales_its_counts_before_they_overflow() -> None:
    order = LHD(8, samples=8, refresh=1)
    flat = Flat(order, 8)
    rng = random.Random(3)
    for n in range(1200):
        flat.request(rng.randrange(11), n)
    assert order._weight < 1e61
    assert all(math.isfinite(count) for row in order._hits + order._evictions for count in row)
    assert any(any(row) for row in order._density)


def test_explorers_are_kept_within_their_budget() -> None:
    order = LHD(200, samples=8, refresh=64, explore=0.1)
    rng, flat = random.Random(2), Flat(order, 200)
    exploring = []
    for n in range(4000):
        flat.request(rng.randrange(60) if n % 2 else 100 + n, n)
        held = sum(thing.tokens for thing in flat.things.values() if thing.data.explores)
        assert held + order._budget == 20
        exploring.append(held)
    assert max(exploring) == 20, "all of it is used"
    for thing in flat.things.values():
        thing.data.explores = False
    flat.things[3999 + 99].data.explores = True
    for _ in range(len(flat.things) - 1):
        flat.evict()
    assert set(flat.things) == {3999 + 99}, "an explorer goes last"


# -- KVCache in the wild ----------------------------------------------------------------------


class NaiveWild(Naive):
    """The probability of each object, by the exponential fit of its class, recomputed for each victim."""

    def __init__(self, capacity: int, prior: float) -> None:
        super().__init__(capacity)
        self.prior = prior
        self.used: dict[int, float] = {}
        self.group: dict[int, int] = {}
        self.reused: dict[int, list[float]] = defaultdict(list)
        self.evicted: dict[int, int] = defaultdict(int)
        self.lives: list[float] = []
        self.heard = 0.0

    def life(self) -> float:
        total = weight = 1.0
        for life in self.lives:
            total, weight = 0.999 * total + life, 0.999 * weight + 1
        return total / weight

    def fit(self, group: int, life: float) -> tuple[float, float]:
        """Share of the uses that are followed by another, and the mean wait."""
        waits = [wait for waits in self.reused.values() for wait in waits]
        share = (len(waits) + 1) / (len(waits) + sum(self.evicted.values()) + 2)
        mean = sum(waits) / len(waits) if waits else life
        own, weight = self.reused[group], self.prior * share
        return (
            (len(own) + weight) / (len(own) + self.evicted[group] + self.prior),
            (sum(own) + weight * mean) / (len(own) + weight),
        )

    def victim(self, now: float) -> int:
        life = self.life()
        fits = {group: self.fit(group, life) for group in set(self.group.values())}

        def rank(number: int) -> float:
            p, mean = fits[self.group[number]]
            age = self.heard - self.used[number]
            return p * (math.exp(-age / mean) - math.exp(-(age + life) / mean))

        number = min(self.sizes, key=rank)
        self.evicted[self.group[number]] += 1
        self.lives.append(self.heard - self.used[number])
        return number

    def miss(self, number: int, now: float, priority: int) -> None:
        self.heard = self.used[number] = now
        self.group[number] = priority

    def hit(self, number: int, now: float, priority: int) -> None:
        self.heard = now
        self.reused[self.group[number]].append(now - self.used[number])
        self.used[number] = now


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prior", [1.0, 50.0])
def test_wild(seed: int, prior: float) -> None:
    agree(Wild(prior=prior, refresh=1), NaiveWild(40, prior), seed, priorities=4, requests=1200)


def test_wild_keeps_the_class_that_is_reused() -> None:
    """Things of priority 1 are asked in turn, those of priority 0 never again: LRU would keep neither."""
    order = Wild(prior=10.0, refresh=1)
    flat = Flat(order, 15)
    hits = 0
    for n in range(600):
        many = 7 if n < 140 else 12  # few enough for LRU, until the class is known
        hits += flat.request(n % many, n, priority=1) and n >= 160
        flat.request(10_000 + n, n)
    assert hits > 0.95 * 440


def test_a_class_is_drawn_to_all_until_it_is_known() -> None:
    everyone = Evidence()
    everyone.reuse(1000, 50.0)
    everyone.evict(1000)
    young, old = RequestClass(), RequestClass()
    old.evidence.reuse(10**6, 5.0)
    for workload in (young, old):
        workload.fit(10.0, everyone, 100.0)
    assert young.rate == pytest.approx(1 / 50)
    assert math.exp(young.log_scale) == pytest.approx(0.5 * (1 - math.exp(-10 / 50)), rel=1e-2)
    assert old.rate == pytest.approx(1 / 5, rel=1e-2)
    assert old.log_scale > young.log_scale


def test_evidence_fades() -> None:
    evidence = Evidence()
    for _ in range(100):
        evidence.reuse(10**6, 2.0)
        evidence.evict(10**6)
    assert evidence.reused + evidence.evicted <= 2**22
    assert evidence.waited / evidence.reused == pytest.approx(2.0)


def test_classes_have_a_limit() -> None:
    order = Wild()
    flat = Flat(order, 10)
    for n in range(300):
        flat.request(n, n, priority=n)
    assert len(order._classes) == 64
    assert len(flat.things) == 10


# -- ghosts -----------------------------------------------------------------------------------


def test_ghosts_are_bounded_by_tokens_and_the_oldest_is_dropped() -> None:
    ghosts: Ghosts[str] = Ghosts(10)
    for name in range(6):
        ghosts.keep(name, 3, f"memory {name}")
    assert (len(ghosts), ghosts.tokens) == (3, 9)
    assert ghosts.take(2) is None
    assert ghosts.take(4) == "memory 4"
    assert (len(ghosts), ghosts.tokens) == (2, 6)
    ghosts.keep(5, 1, "anew")
    assert (len(ghosts), ghosts.tokens) == (2, 4)
    assert ghosts.take(5) == "anew"
    ghosts.keep(None, 1, "nameless")
    ghosts.keep(7, 100, "too large")
    assert (len(ghosts), ghosts.tokens) == (0, 0)
    assert ghosts.take(None) is None


def test_ghosts_may_exceed_their_room_by_the_slack_until_they_are_fitted() -> None:
    dropped: list[int] = []
    ghosts: Ghosts[int] = Ghosts(100, dropped.append, slack=0.1)
    for name in range(11):
        ghosts.keep(name, 10, name)
    assert (ghosts.tokens, dropped) == (110, [])
    ghosts.keep(11, 1, 11)
    assert (ghosts.tokens, dropped) == (91, [0, 1])
    ghosts.keep(12, 10, 12)
    ghosts.keep(13, 4, 13)
    assert (ghosts.tokens, dropped) == (105, [0, 1])
    ghosts.fit()
    assert (ghosts.tokens, dropped) == (95, [0, 1, 2])


ORDERS: dict[str, Callable[[int], Any]] = {
    "lru2": LRUK,
    "s3fifo": S3FIFO,
    "wtinylfu": WTinyLFU,
    "lhd": LHD,
    "gdsf": lambda capacity: GDSF(COST),
}


@pytest.mark.parametrize("name", ORDERS)
def test_memory_is_bounded_however_much_is_seen(name: str) -> None:
    order = ORDERS[name](50)
    flat = Flat(order, 50)
    for n in range(5000):
        flat.request(n, n)
        flat.request(n - n % 7, n)
    assert len(getattr(order, "_histories", {})) <= 50
    assert len(getattr(order, "_at_touch", {})) <= 50
    assert len(getattr(order, "_leaves", [])) <= 50
    for ghosts in ("_gone", "_ghosts"):
        if hasattr(order, ghosts):
            assert 0 < len(getattr(order, ghosts)) <= 50


def test_a_scan_does_not_flush_reused_nodes() -> None:
    """Ten things asked twice in every forty requests, and a scan in between; LRU would lose them."""
    for make in (LRUK, S3FIFO, WTinyLFU):
        flat, hits = Flat(make(20), 20), 0
        for n in range(4000):
            if n % 40 < 20:
                hit = flat.request(n % 10, n)
                hits += hit and n >= 2000 and n % 40 < 10
            else:
                flat.request(1000 + n, n)
        assert hits > 400, f"{make.__name__}: {hits} of 500 after the scan"
