"""Evicted neighbourhoods: union-find against components from scratch, closures against brute force, worked examples."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._engine.graph import Storage
from recompute._engine.needed import Needs
from recompute._engine.neighbours import Closure, Component, Components, evicted_neighbours
from recompute.testing import EventLog, ManualClock, check_invariants
from recompute.testing._invariants import evicted_components, evicted_neighbourhood


class Tape:
    """Operations by name, of cost and size one unless said otherwise, over one cache."""

    def __init__(self, budget: int | None = None, policy: str = "dtr-eq", release: Any = "eager") -> None:
        self.clock = ManualClock()
        self.cache = rc.Cache(budget, policy=policy, release=release, clock=self.clock)
        self.values: dict[str, rc.Recomputable[Any]] = {}

    def __getitem__(self, name: str) -> rc.Recomputable[Any]:
        return self.values[name]

    def storage(self, name: str) -> Storage:
        return self[name]._node.storage

    def op(self, name: str, *arguments: str, cost: float = 1.0, nbytes: int = 1) -> None:
        def function(*payloads: Any) -> str:
            self.clock.advance(cost)
            return f"{name}({', '.join(payloads)})"

        function.__qualname__ = name
        with self.cache:
            self.values[name] = rc.ap(function, *(self[argument] for argument in arguments), nbytes=nbytes)

    def evict(self, *names: str) -> None:
        for name in names:
            assert self[name].evict()

    def evicted(self) -> set[str]:
        return {name for name, value in self.values.items() if not value.resident}

    def check(self) -> None:
        check_invariants(self.cache, self.values.values())

    def neighbours(self, name: str) -> float:
        return self.cache._engine.memory.neighbourhood.cost(self.storage(name))


def test_two_evicted_components_of_the_talk() -> None:
    """Evicted {t1, t2, t4}, of cost 3, and {t5, t7}, of cost 2, are two components."""
    tape = Tape()
    tape.op("t0")
    tape.op("t1", "t0")
    tape.op("t2", "t1")
    tape.op("t3", "t1")
    tape.op("t4", "t2")
    tape.op("t6", "t3")
    tape.op("t5", "t6")
    tape.op("t7", "t5")
    tape.op("t8", "t4", "t7")
    tape.neighbours("t8")
    tape.evict("t1", "t2", "t4", "t5", "t7")
    components = tape.cache._engine.memory.neighbourhood
    assert isinstance(components, Components)
    roots = {name: components.root(tape.storage(name)) for name in sorted(tape.evicted())}
    assert roots["t1"] is roots["t2"] is roots["t4"] is not roots["t5"]
    assert roots["t5"] is roots["t7"]
    assert (roots["t1"].cost, roots["t5"].cost) == (3.0, 2.0)
    assert tape.neighbours("t8") == 5.0
    assert tape.neighbours("t0") == 3.0
    assert tape.neighbours("t6") == 2.0
    tape.check()


@pytest.mark.parametrize("policy", ["dtr", "dtr-eq"])
def test_the_rematerialization_of_the_talk(policy: str) -> None:
    """Budget of four unit tensors; t7 = op7(t5, t6), t5 evicted, t3 resident: t2 and then t3 are evicted."""
    tape = Tape(policy=policy)
    # t5 is made from t3, and t3 from t2; in memory are t2, t3, t6 and u, which fill the budget
    tape.op("t0", cost=1.0)
    tape.op("t1", "t0", cost=8.0)
    tape.op("t2", "t1", cost=1.0)
    tape.op("t3", "t2", cost=2.0)
    tape.op("t4", "t3", cost=1.0)
    tape.op("t5", "t3", cost=1.0)
    tape.op("t6", "t4", cost=1.0)
    tape.evict("t0", "t1", "t4", "t5")
    tape.op("u", cost=1.0, nbytes=1)  # an unrelated value, used all the time
    tape["u"].pin()
    tape.cache.budget = 4
    assert tape.evicted() == {"t0", "t1", "t4", "t5"}
    with EventLog(tape.cache) as log:
        tape.op("t7", "t5", "t6")
    victims = [tape_name(tape, number) for number in log.victims()]
    assert victims == ["t2", "t3"]
    assert log.names() == ["t5", "t7"]
    assert tape["t7"].get() == "t7(t5(t3(t2(t1(t0())))), t6(t4(t3(t2(t1(t0()))))))"
    tape.check()


def tape_name(tape: Tape, number: int) -> str:
    return next(name for name, value in tape.values.items() if value.number == number)


def test_a_storage_that_comes_back_takes_its_cost_along() -> None:
    """Rematerialized, it leaves its component with its cost; what it joined stays joined: a phantom connection."""
    tape = Tape()
    for number in range(5):
        tape.op(f"t{number}", *([f"t{number - 1}"] if number else []), cost=2.0**number)
    tape.neighbours("t4")
    tape.evict("t1", "t2", "t3")
    assert tape.neighbours("t4") == tape.neighbours("t0") == 2 + 4 + 8
    tape["t2"].get()  # brings t1 and t2 back
    assert tape.neighbours("t4") == 8.0
    assert tape.neighbours("t2") == 8.0
    assert tape.neighbours("t0") == 0.0
    tape.evict("t1")
    assert tape.neighbours("t0") == 2.0
    tape.check()


def test_components_are_joined_when_a_cost_is_first_wanted() -> None:
    """Until then nothing is kept; the first cost is that of the true components."""
    tape = Tape()
    for number in range(4):
        tape.op(f"t{number}", *([f"t{number - 1}"] if number else []))
    tape.evict("t1", "t2")
    assert tape.storage("t1").nearby is None
    assert tape.neighbours("t3") == 2.0
    assert isinstance(tape.storage("t1").nearby, Component)
    tape.check()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_union_find_is_an_equivalence(pairs: list[tuple[int, int]]) -> None:
    """After any unions two nodes have one root just if a path joins them, and the root has the sums."""
    forest = Components(lambda storage: None)
    nodes = [Component(float(number), members=1) for number in range(31)]
    groups = [{number} for number in range(31)]
    for a, b in pairs:
        forest._union(nodes[a].root(), nodes[b].root())
        if groups[a] is not groups[b]:
            groups[a] |= groups[b]
            for member in groups[b]:
                groups[member] = groups[a]
    for a in range(31):
        assert nodes[a].root().cost == sum(groups[a])
        assert nodes[a].root().members == len(groups[a])
        for b in range(31):
            assert (nodes[a].root() is nodes[b].root()) == (b in groups[a])


def test_a_long_chain_of_unions_needs_no_recursion() -> None:
    """A hundred thousand nodes joined one by one are found."""
    forest = Components(lambda storage: None)
    nodes = [Component() for _ in range(100_000)]
    for one, other in pairwise(nodes):
        forest._union(one.root(), other.root())
    assert nodes[0].root() is nodes[-1].root()


graphs = st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=2, max_size=18)
moves = st.lists(st.tuples(st.sampled_from(("evict", "get", "ask", "drop")), st.integers(0, 17)), max_size=40)


@pytest.mark.parametrize("policy", ["dtr", "dtr-eq", "msps", "needed"])
@given(graph=graphs, steps=moves, early=st.booleans())
def test_neighbourhoods_of_random_graphs(
    policy: str, graph: list[list[int]], steps: list[tuple[str, int]], early: bool
) -> None:
    """After any steps the costs are those of brute force, or no less, and not below the lower bounds."""
    tape = Tape(policy=policy)
    for number, back in enumerate(graph):
        arguments = dict.fromkeys(f"t{number - steps_back}" for steps_back in back if steps_back <= number)
        tape.op(f"t{number}", *arguments, cost=float(1 + number % 4))
    if early:
        tape.neighbours("t0")
    for what, number in steps:
        name = f"t{number % len(graph)}"
        if name not in tape.values:
            continue
        match what:
            case "evict":
                tape[name].evict()
            case "get":
                tape[name].get()
            case "drop":
                del tape.values[name]
            case "ask" if tape[name].resident:
                tape.neighbours(name)
        tape.check()
        compare(tape)


def compare(tape: Tape) -> None:
    neighbourhood = tape.cache._engine.memory.neighbourhood
    for value in tape.values.values():
        storage = value._node.storage
        if not storage.resident:
            continue
        lower_bound = neighbourhood.lower_bound(storage)
        answer = neighbourhood.cost(storage)
        assert lower_bound <= answer + 1e-9
        if isinstance(neighbourhood, Needs):
            continue
        if isinstance(neighbourhood, Closure):
            around = evicted_neighbourhood(storage, descendants=neighbourhood.descendants)
            assert answer == pytest.approx(sum(neighbour.cost for neighbour in around))
        else:
            everything = {other._node.storage for other in tape.values.values()}
            near = set(evicted_neighbours(storage))
            true = [component for component in evicted_components(connected(everything)) if component & near]
            assert answer >= sum(member.cost for component in true for member in component) - 1e-9


@pytest.mark.parametrize("policy", ["needed", "dtr-eq"])
@given(graph=graphs, steps=moves)
def test_a_released_value_stays_exactly_while_it_is_wanted(
    policy: str, graph: list[list[int]], steps: list[tuple[str, int]]
) -> None:
    """By default it is evicted at once unless something evicted and needed is made from it, and as soon as not."""
    tape = Tape(policy=policy)
    storages: dict[str, Storage] = {}
    for number, back in enumerate(graph):
        arguments = dict.fromkeys(f"t{number - steps_back}" for steps_back in back if steps_back <= number)
        tape.op(f"t{number}", *arguments)
        storages[f"t{number}"] = tape.storage(f"t{number}")
    stay: set[Storage] = set()
    for what, number in steps:
        name = f"t{number % len(graph)}"
        if name not in tape.values:
            continue
        storage = storages[name]
        if what == "evict":
            tape[name].evict()
        elif what == "get":
            tape[name].get()
        elif what == "drop":
            there = storage.resident
            del tape.values[name]
            tape.cache.stats()  # sees to references that went
            assert storage.resident == (there and policy == "needed" and wanted(storage))
            if storage.resident:
                stay.add(storage)
        for kept in list(stay):
            assert kept.resident == wanted(kept)
            if not kept.resident:
                stay.discard(kept)
        tape.check()


def wanted(storage: Storage) -> bool:
    """Whether something evicted that is referred to is made from it, through evicted ones."""
    below = evicted_neighbourhood(storage) - evicted_neighbourhood(storage, descendants=False)
    return any(value.referred for one in below for value in one.values)


def connected(storages: set[Storage]) -> set[Storage]:
    """With what only other storages lead to."""
    found = set(storages)
    stack = list(storages)
    while stack:
        storage = stack.pop()
        outputs = [output for value in storage.values for user in value.each_user() for output in user.outputs]
        for neighbour in (*storage.neighbours_up(), *(output.storage for output in outputs if output is not None)):
            if neighbour not in found:
                found.add(neighbour)
                stack.append(neighbour)
    return found


def test_the_neighbourhood_counts_ancestors_and_descendants_but_no_cousins() -> None:
    """e* of a value: what it needs and what needs it; the component holds its cousins too."""
    costs = {}
    for policy in ("dtr", "dtr-eq", "msps"):
        tape = Tape(policy=policy)
        tape.op("root", cost=1.0)
        tape.op("left", "root", cost=10.0)
        tape.op("right", "root", cost=100.0)
        tape.op("low", "left", cost=1000.0)
        tape.evict("root", "right", "low")
        costs[policy] = tape.neighbours("left")
    assert costs == {"dtr": 1001.0, "dtr-eq": 1101.0, "msps": 1.0}


@pytest.mark.parametrize("side", ["above", "below"])
def test_what_left_before_a_cost_was_asked_for_counts_beyond_the_reach_of_a_walk(side: str) -> None:
    """A chain whose middle is evicted without pressure: its ends count it all, as if costs had been asked for."""
    tape = Tape(policy="default")
    tape.op("t0")
    for number in range(1, 200):
        tape.op(f"t{number}", f"t{number - 1}")
    tape.evict(*(f"t{number}" for number in range(1, 199)))
    assert tape.neighbours("t199" if side == "above" else "t0") == 198.0


@given(st.integers(2, 12), st.integers(1, 42))
def test_branches_beyond_the_reach_of_a_walk_are_not_grossly_underestimated(branches: int, length: int) -> None:
    """Long chains that meet in one value: it is known to be at least a quarter as dear as all of them."""
    tape = Tape(policy="default")
    tape.op("source")
    for branch in range(branches):
        for number in range(length):
            tape.op(f"{branch}, {number}", f"{branch}, {number - 1}" if number else "source")
    tape.op("end", *(f"{branch}, {length - 1}" for branch in range(branches)))
    for number in range(length):
        for branch in range(branches):
            tape.neighbours(f"{branch}, {number}")
            tape.evict(f"{branch}, {number}")
    assert branches * length / 4 <= tape.neighbours("end") <= branches * length


def test_a_repriced_operation_changes_its_component() -> None:
    """When a second run turns out cheaper, so does what the neighbours see."""
    tape = Tape()
    times = iter([5.0, 2.0])

    def warm(payload: str) -> str:
        tape.clock.advance(next(times))
        return payload

    tape.op("a")
    with tape.cache:
        tape.values["b"] = rc.ap(warm, tape["a"], nbytes=1)
    tape.op("c", "b")
    tape.evict("b")
    assert tape.neighbours("c") == 5.0
    tape["b"].get()
    tape.evict("b")
    assert tape.neighbours("c") == 2.0
    tape.check()


def test_phantom_connections_do_not_grow_without_bound() -> None:
    """A thousand rounds of eviction and recomputation leave costs that are sums of what is evicted."""
    tape = Tape()
    draw = random.Random(1)
    for number in range(30):
        tape.op(f"t{number}", *{f"t{draw.randrange(number)}" for _ in range(2) if number})
    tape.neighbours("t0")
    for _ in range(1000):
        name = f"t{draw.randrange(30)}"
        if tape[name].resident:
            tape.evict(name)
        else:
            tape[name].get()
    tape.check()
    for name in tape.values:
        if tape[name].resident:
            assert tape.neighbours(name) <= len(tape.evicted()) + 1e-6
