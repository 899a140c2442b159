"""A state machine: the steps of programs in any order, each followed by every invariant and the identity's answer."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import recompute as rc
from lib.programs import (
    Apply,
    Budget,
    Detach,
    Drop,
    Evict,
    Gather,
    Get,
    Hold,
    Interpreter,
    LetGo,
    Pin,
    ReleaseMemory,
    Source,
    Step,
    Unpin,
    difference,
)
from lib.strategies import applications, references, settings_of_caches, sources
from recompute.testing import Identity, ManualClock, check_invariants


class CacheMachine(RuleBasedStateMachine):
    """One cache and the identity, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = rc.Cache()
        self.under_test = Interpreter(rc, self.cache)
        self.model = Interpreter(Identity)

    @initialize(options=settings_of_caches(), budget=st.one_of(st.none(), st.integers(1, 300)))
    def choose(self, options: dict[str, object], budget: int | None) -> None:
        self.cache = rc.Cache(budget, clock=ManualClock(), **options)  # type: ignore[arg-type]  # drawn by name
        self.under_test = Interpreter(rc, self.cache)

    def both(self, step: Step) -> None:
        wrong = difference([self.model.do(step)], [self.under_test.do(step)])
        assert wrong is None, wrong

    @rule(step=sources())
    def pure(self, step: Source) -> None:
        self.both(step)

    @rule(step=applications())
    def ap(self, step: Apply) -> None:
        self.both(step)

    @rule(step=applications(faults=False))
    def ap_again(self, step: Apply) -> None:
        self.both(step)

    @rule(values=st.lists(references(), max_size=3), how=st.sampled_from(("list", "tuple", "dict", "traverse")))
    def gather(self, values: list[int], how: str) -> None:
        self.both(Gather(tuple(values), how))  # type: ignore[arg-type]  # one of the four

    @rule(value=references())
    def get(self, value: int) -> None:
        self.both(Get(value))

    @rule(value=references())
    def hold(self, value: int) -> None:
        self.both(Hold(value))

    @rule()
    def let_go(self) -> None:
        self.both(LetGo())

    @rule(value=references())
    def evict(self, value: int) -> None:
        self.both(Evict(value))

    @rule(value=references())
    def pin(self, value: int) -> None:
        self.both(Pin(value))

    @rule(value=references())
    def unpin(self, value: int) -> None:
        self.both(Unpin(value))

    @rule(value=references())
    def detach(self, value: int) -> None:
        self.both(Detach(value))

    @rule(value=references())
    def drop(self, value: int) -> None:
        self.both(Drop(value))

    @rule(share=st.integers(20, 200))
    def set_budget(self, share: int) -> None:
        self.both(Budget(share))

    @rule(nbytes=st.one_of(st.none(), st.integers(1, 60)), device=st.sampled_from(("cpu", "gpu:0")))
    def release_memory(self, nbytes: int | None, device: str) -> None:
        self.both(ReleaseMemory(nbytes, device))

    @invariant()
    def books_are_right(self) -> None:
        check_invariants(self.cache, self.under_test.roots)

    def teardown(self) -> None:
        wrong = difference(self.model.finish(), self.under_test.finish())
        assert wrong is None, wrong


TestMachine = CacheMachine.TestCase
TestMachine.settings = settings(max_examples=max(50, settings().max_examples // 2), stateful_step_count=50)
