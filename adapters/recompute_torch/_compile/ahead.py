"""What a step would be planned like, without running it: for several budgets, or for several batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final

import torch
from torch._dynamo.exc import ShortenTraceback, Unsupported

import recompute as rc
from recompute.planners import smallest
from recompute.text import bytes_or_peak, parse_budget
from recompute_torch._compile.backend import Backend, Split
from recompute_torch._compile.made_up import drawing_elsewhere
from recompute_torch._compile.partition import Amount, Parts, TooSmall
from recompute_torch._compile.report import GraphPlan, MakeInputs

Rung = GraphPlan | TooSmall
"""What became of one budget."""

_MOST: Final = 1 << 30
"""A batch; nobody trains with a larger one."""


class _Enough(ShortenTraceback):
    """All that was to be known is known. Dynamo lets it pass, so nothing is compiled or kept."""


class _Ahead(Backend):
    """Plans the first graph of a step for some budgets, and stops."""

    def __init__(self, amounts: Sequence[Amount], **options: Any) -> None:
        super().__init__(**options)
        self._amounts = amounts
        self.rungs: list[Rung] = []

    def _split(self, plan: GraphPlan, split: Split) -> Parts:
        def rung(amount: Amount) -> Rung:
            new = GraphPlan(plan.name, 0, 0, 0)
            try:
                split(amount, new)
            except TooSmall as error:
                return error
            if new.planned > new.budget:  # it may fit; that is known once it is compiled
                return TooSmall(lambda: f"the split of torch's own partitioner may take {new.planned} bytes")
            return new

        amounts = self._amounts
        if len(amounts) == 1:
            self.rungs.append(rung(amounts[0]))
        else:  # from the smallest on: what is known for less memory is known for more
            whole = rung(lambda plain: plain)
            assert isinstance(whole, GraphPlan), "without a limit it fits"
            budgets = [amount(whole.plain) for amount in amounts]
            made = {budget: rung(_exactly(budget)) for budget in sorted(set(budgets))}
            self.rungs += [made[budget] for budget in budgets]
        raise _Enough("planned", first_useful_frame=None)


def planned(step: Callable[..., Any], inputs: Any, amounts: Sequence[Amount], options: Mapping[str, Any]) -> list[Rung]:
    """What becomes of each budget. The step is traced with the inputs once, and does not run.

    `options`: as of the backend. Raises ValueError if it breaks into several graphs or has no gradients. O(one plan for
    each budget).
    """
    ahead = _Ahead(amounts, **options)
    traced: Any = torch.compile(_alone(step), backend=ahead, fullgraph=True, dynamic=False)
    try:
        if isinstance(inputs, Mapping):
            traced(**inputs)
        else:
            traced(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    except _Enough:
        return ahead.rungs
    except Unsupported as error:
        raise ValueError(
            f"only a step of one graph can be planned ahead, and this one breaks: {str(error).splitlines()[0]}; "
            "rt.compile(step, budget, fullgraph=True) shows where"
        ) from error
    raise ValueError("the step has no gradients, so there is nothing to plan: it ran as it is")


def largest_batch(
    step: Callable[..., Any], options: Mapping[str, Any], make_inputs: MakeInputs, low: int, high: int | None
) -> int:
    """See `Plans.largest_batch`."""
    budget = bytes_or_peak(options.get("budget"), options.get("of_peak"))
    if isinstance(budget, float):
        raise ValueError(f"of_peak={budget:g} is a share, which each batch would fit alike: give a budget in bytes")
    if low < 1 or (high is not None and high < low):
        raise ValueError(f"batches go from 1 or more upwards, not from {low} to {high}")
    allowed = budget // options.get("graphs", 1)

    def plan(batch: int) -> Rung:
        with drawing_elsewhere():
            return planned(step, make_inputs(batch), [_exactly(allowed)], options)[0]

    first = plan(low)
    if isinstance(first, TooSmall):
        raise rc.BudgetError(f"a batch of {low} does not fit: {first}")
    if high is not None:
        if high == low or isinstance(plan(high), GraphPlan):
            return high
    else:
        taken, high = first.plain, 2 * low
        while isinstance(rung := plan(high), GraphPlan):
            if rung.plain <= taken or high > _MOST:
                raise ValueError(
                    f"what the step takes does not grow from a batch of {high // 2} to one of {high}: "
                    "make_inputs(batch) is to return the inputs for so many samples"
                )
            taken, low, high = rung.plain, high, 2 * high
    return smallest(lambda batch: isinstance(plan(batch), TooSmall), low, high) - 1


def within(budget: int | float | str, rounded: Callable[[int], int]) -> Amount:
    """Bytes, or a share of what the step takes without a plan; `rounded` as it is to be told."""
    return lambda plain: max(1, rounded(parse_budget(budget, whole=plain)))


def _exactly(budget: int) -> Amount:
    return lambda plain: budget


def _alone(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same with code of its own: what dynamo remembers of shapes belongs to code, and is the user's."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    code = loss.__code__.replace(co_name="planned_ahead")
    return FunctionType(code, globals(), "planned_ahead", None, loss.__closure__)
