"""The backend of torch.compile: `rt.planned(step, "2GB")`, or `backend="recompute", options={"budget": "2GB"}`.

It also plans without running, for several budgets or for several batches.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import torch
from torch import fx
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, innermost_backend
from torch._dynamo.exc import ShortenTraceback, Unsupported
from torch._dynamo.symbolic_convert import tls
from torch._dynamo.utils import counters

import recompute as rc
from recompute.planners import smallest
from recompute.text import bytes_or_peak, parse_budget
from recompute_torch._compile.costs import Costs, Prices, check, drawing_elsewhere
from recompute_torch._compile.partition import Amount, Boxed, Parts, TooSmall, watching
from recompute_torch._compile.report import GraphPlan, MakeInputs, Plans

if TYPE_CHECKING:
    from recompute_torch._compile.inductor import Inductor

F = TypeVar("F", bound=Callable[..., Any])
_SMALL: Final = 0.1  # of the peak of another graph
Split = Callable[[Amount, GraphPlan], Parts]
"""Plans a graph for so many bytes, notes what came of it, and returns its parts. Raises TooSmall."""


@dataclass(frozen=True)
class Options:
    """As of `planned`. Raises ValueError or TypeError, with the cure."""

    budget: int | str | None = None
    of_peak: float | str | None = None
    costs: Costs = "measured"
    effort: float = 0.3
    graphs: int = 1
    compiler: str = "boxed"

    def __post_init__(self) -> None:
        _ = self.amount
        check(self.costs, self.effort)
        if type(self.graphs) is not int or self.graphs < 1:
            raise ValueError(f"graphs is how many graphs the step has, 1 or more, not {self.graphs!r}")
        if self.compiler not in ("boxed", "inductor"):
            raise ValueError(f"compiler is 'boxed' or 'inductor', not {self.compiler!r}")

    @property
    def amount(self) -> int | float:
        """Bytes, or a share of the peak."""
        return bytes_or_peak(self.budget, self.of_peak)


def _options(given: Mapping[str, Any]) -> Options:
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            raise ValueError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
    return Options(**given)


class _Refused(ShortenTraceback, rc.BudgetError):
    """The library's error, which dynamo lets pass as it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text, first_useful_frame=sys._getframe(1))  # what is below in the traceback is dynamo's
        self._text = text

    def __str__(self) -> str:
        return self._text


_Refused.__module__, _Refused.__name__, _Refused.__qualname__ = "recompute", "BudgetError", "BudgetError"


class Backend:
    """Compiles the graphs of one step, each within its share of the budget."""

    __name__ = "recompute"

    def __init__(self, options: Options) -> None:
        self.options = options
        self._budget, self._graphs = options.amount, options.graphs
        compiler: type[Boxed | Inductor] = Boxed
        if options.compiler == "inductor":
            from recompute_torch._compile.inductor import Inductor as compiler  # takes seconds
        self._compiler = compiler(Prices(options.costs), options.effort)
        self._codes: set[Hashable] = set()
        self.plans: list[GraphPlan] = []

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        plan = GraphPlan(f"graph {len(self.plans)}", 0, 0, 0)
        watched = watching(plan, self._compiler.meter)
        try:
            compiled = self._compiler.compile(module, inputs, plan, partial(self._partition, plan), watched)
        except TooSmall as error:
            raise _Refused(f"{plan.name}: {error}") from None
        if plan.budget:
            self.plans.append(plan)
        return compiled

    def plans_of(self, model: Callable[..., Any]) -> Plans:
        """Of the graphs that it has compiled so far and will; `model` is what it compiles."""
        return Plans(self.plans, partial(largest_batch, model, self.options))

    def _partition(
        self,
        plan: GraphPlan,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **__: Any,
    ) -> Parts:
        def split(amount: Amount, plan: GraphPlan) -> Parts:
            return self._compiler.split(module, num_fwd_outputs, amount, plan, static_lifetime_input_indices)

        if not inputs:  # a `nested_compile_region`, which the graph around it runs as one operator
            return split(lambda plain: plain, GraphPlan(plan.name, 0, 0, 0))
        return self._split(plan, split)

    def _split(self, plan: GraphPlan, split: Split) -> Parts:
        """The parts of a graph, planned for its part of the budget."""
        plan.code = self._count()
        return split(partial(self._share, plan), plan)

    def _share(self, plan: GraphPlan, plain: int) -> int:
        """Bytes for a graph: its part of the budget, or so much of what it takes without a plan.

        Of what is small beside another graph of the step that is all: much of it may be a single operator.
        """
        if isinstance(self._budget, int):
            return max(1, self._budget // self._graphs)
        largest = max([other.plain for other in self.plans if other.code != plan.code], default=0)
        share = 1.0 if plain <= _SMALL * largest else self._budget
        plan.whole = share == 1
        return parse_budget(share, whole=plain)

    def _count(self) -> Hashable:
        """One more graph; another compilation of the same code, for other shapes say, is none. Which code it is."""
        context = getattr(tls, "current_tx", None)
        code: Hashable = None
        if context is not None:  # unlike its number, this is the same after `torch.compiler.reset()`, and elsewhere
            now = context.f_code
            code = now.co_filename, now.co_firstlineno, now.co_name, now.co_names, now.co_code
        if code in self._codes:
            return code
        self._codes.add(code)
        if len(self._codes) == self._graphs + 1:
            warnings.warn(
                f"the step breaks into more graphs than {self._graphs}: what one keeps for its backward is in memory "
                f"while the others run, and each was planned for its share alone. Give "
                f"fullgraph=True, which shows where it breaks, or graphs={self._graphs + 1} or more, as many as "
                "rt.plans(step) has",
                stacklevel=2,
            )
        return code


_OF_BACKENDS: Final = ("backend", "mode", "options")
"""What `torch.compile` takes and hands on to a backend."""

_asked: Final[dict[int, tuple[Any, Backend]]] = {}
"""Of `torch.compile(backend="recompute")`, which hands in nothing but these options: by their id, and the options."""


def recompute(module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """What torch finds by the name "recompute"."""
    return _backend_for(options)(module, inputs)


def _backend_for(options: Mapping[str, Any] | None) -> Backend:
    if id(options) not in _asked:
        _asked[id(options)] = options, Backend(_options(options or {}))
    return _asked[id(options)][1]


recompute.reset = _asked.clear  # type: ignore[attr-defined]  # torch.compiler.reset() calls it


@overload
def planned(
    step: F,
    budget: int | str | None = None,
    *,
    of_peak: float | str | None = None,
    costs: Costs = "measured",
    effort: float = 0.3,
    graphs: int = 1,
    compiler: str = "boxed",
    **options: Any,
) -> F: ...
@overload
def planned(
    step: None = None,
    budget: int | str | None = None,
    *,
    of_peak: float | str | None = None,
    costs: Costs = "measured",
    effort: float = 0.3,
    graphs: int = 1,
    compiler: str = "boxed",
    **options: Any,
) -> Callable[[F], F]: ...
def planned(
    step: Callable[..., Any] | None = None,
    budget: int | str | None = None,
    *,
    of_peak: float | str | None = None,
    costs: Costs = "measured",
    effort: float = 0.3,
    graphs: int = 1,
    compiler: str = "boxed",
    **options: Any,
) -> Any:
    """`torch.compile` with a budget for what a step takes beside parameters and inputs.

    That is: what the forward keeps for the backward, gradients, and what operators need while they run. Best given a
    function that ends with the loss, since what is outside of it is not planned. The first call of the step compiles
    and plans. Where operators must run again to fit, the cheapest ones that were found do, any number of times; unless
    inductor compiles them, results are those of `backend="aot_eager"` to the bit.

    Parameters
    ----------
    budget
        Bytes ("2GB"). They hold for the shapes that a graph was compiled with.
    of_peak
        Instead: a share (0.5, "50%") of the peak of each graph if every operator runs once. What is small beside
        another graph of the step, such as a metric after the loss, takes what it takes.
    costs
        "measured": every operator of the graph is timed once, on made-up tensors. "estimated": from FLOPs and bytes, so
        that the plan is the same on every machine of a kind.
    effort
        1 is about ten seconds of search for the cheapest plan.
    graphs
        How many graphs the step has, if it breaks: each gets an equal share.
    compiler
        "boxed": operator by operator, as in eager mode. "inductor": as kernels, of which inductor chooses order and
        fusion. What they take is read from the code that it writes around them, and seen on made-up tensors before
        training; if it is too much, less is fused, or less is planned for. Results are those of inductor but for
        rounding. What the default partitioner does is taken if it fits.
    options
        Those of `torch.compile`: fullgraph, dynamic and others, but not of its backends.

    The result has an attribute `plan`, which is what `plans` returns for it. `compile` is another name of this, and
    `@compile(budget="2GB")` is a decorator. Where torch.compile is disabled, the step comes back as it is.

    Raises ValueError or TypeError for wrong arguments; the first call of the step raises `recompute.BudgetError`, which
    says the least that works, if the budget is too small.
    """
    if not (step is None or callable(step)):
        raise TypeError(
            f"planned takes a function or a module first, not {step!r}; as a decorator: @planned(budget={step!r})"
        )
    for name in _OF_BACKENDS:
        if name in options:
            raise TypeError(f"planned takes no {name}, which is for another backend; it has compiler='inductor'")
    asked = Options(budget, of_peak, costs, effort, graphs, compiler)

    def compiled(step: Callable[..., Any]) -> Any:
        if isinstance(step, type):
            raise TypeError(f"planned takes no class, but an object of one: planned({step.__name__}(...), budget)")
        backend = Backend(asked)
        made: Any = torch.compile(step, backend=backend, **options)
        if made is step:  # compiling is disabled
            return made
        _context_of(made).enter_exit_hooks.append(_called)
        if type(made) is OptimizedModule:
            made.__class__ = _PlannedModule
        else:
            made.plan = backend.plans_of(step)
        return made

    return compiled if step is None else compiled(step)


def _called() -> Callable[[], None]:
    """A call of a step begins; what is returned is called when it is over, and warns of what was not compiled in it."""
    before, handled = _not_compiled(), sys.exc_info()[1]

    def over() -> None:
        failed = sys.exc_info()[1] is not handled
        if _not_compiled() > before and torch.is_grad_enabled() and not failed:
            warnings.warn(
                "torch compiles a part of the step only: it leaves a function as it is if it breaks within a loop, for "
                "example. What is not compiled is not planned, and what it keeps for its backward is not within the "
                "budget. fullgraph=True shows where the step breaks; mend that, or train in a block `with "
                "rt.budget(...)`, which works with any step",
                stacklevel=3,
            )

    return over


def _not_compiled() -> int:
    """How many functions dynamo gave up in this process."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"]


class _PlannedModule(OptimizedModule):
    """A compiled module. Its copies, pickled ones too, have plans of their own."""

    @property
    def plan(self) -> Plans:
        """What `plans` returns for it."""
        return plans(self)


compile = planned


def plans(step: Callable[..., Any]) -> Plans:
    """What was planned for each graph of a step that was compiled with a budget. Raises TypeError for another."""
    step = getattr(step, "_compiled_call_impl", None) or step  # what `Module.compile` leaves
    backend = _backend_of(step)
    if backend is None:
        raise TypeError(
            'this is no step compiled with a budget: rt.compile(model, "2GB"), or torch.compile(model, '
            'backend="recompute", options={"budget": "2GB"}), and hand in what they return'
        )
    model: Any = getattr(step, "_orig_mod", None) or getattr(step, "_torchdynamo_orig_callable", step)
    if isinstance(step, MethodType):  # it was compiled as a function
        model = MethodType(model, step.__self__)
    return backend.plans_of(model)


def _context_of(step: Any) -> Any:
    """What torch enters for a call of a compiled step; None: it did not compile it."""
    cells = getattr(getattr(step, "__func__", step), "__closure__", None) or ()
    contexts = [getattr(step, "dynamo_ctx", None), *[cell.cell_contents for cell in cells]]
    return next((context for context in contexts if isinstance(context, OptimizeContext)), None)


def _backend_of(step: Any) -> Backend | None:
    context = _context_of(step)
    if context is None:
        return None
    wrapper: Any = innermost_backend(context.callback)
    compiler = getattr(wrapper, "compiler_fn", wrapper)
    if compiler is recompute:
        return _backend_for(wrapper.kwargs.get("options"))
    return compiler if isinstance(compiler, Backend) else None


Rung = GraphPlan | TooSmall
"""What became of one budget."""

_MAX_BATCH: Final = 1 << 30
_SAME: Final = 2  # times that a batch twice as large may take no more
"""Samples: no batch is larger."""


class _Enough(ShortenTraceback):
    """All that was to be known is known. Dynamo lets it pass, so nothing is compiled or kept."""


class _Ahead(Backend):
    """Plans the first graph of a step for some budgets, and stops."""

    def __init__(self, amounts: Sequence[Amount], options: Options) -> None:
        super().__init__(options)
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


def ladder(step: Callable[..., Any], inputs: Any, amounts: Sequence[Amount], options: Options) -> list[Rung]:
    """What becomes of each budget. The step is traced with the inputs once, and does not run.

    Raises ValueError if it breaks into several graphs or has no gradients. O(one plan for each budget).
    """
    ahead = _Ahead(amounts, options)
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
    step: Callable[..., Any], options: Options, make_inputs: MakeInputs, low: int, high: int | None
) -> int:
    """See `Plans.largest_batch`."""
    budget = options.amount
    if isinstance(budget, float):
        raise ValueError(f"of_peak={budget:g} is a share, which each batch would fit alike: give a budget in bytes")
    if not isinstance(low, int) or not isinstance(high, int | None):
        raise TypeError(f"low and high are whole numbers, not {low!r} and {high!r}")
    if low < 1 or (high is not None and high < low):
        raise ValueError(f"batches go from 1 or more upwards, not from {low} to {high}")
    allowed = budget // options.graphs

    def plan(batch: int) -> Rung:
        with drawing_elsewhere():
            return ladder(step, make_inputs(batch), [_exactly(allowed)], options)[0]

    first = plan(low)
    if isinstance(first, TooSmall):
        raise rc.BudgetError(f"a batch of {low} does not fit: {first}")
    if high is not None:
        if high == low or isinstance(plan(high), GraphPlan):
            return high
    else:
        most, same, high = first.plain, 0, 2 * low
        while isinstance(rung := plan(high), GraphPlan):
            same = 0 if rung.plain > most else same + 1  # a library may need more beside its results for fewer samples
            if same > _SAME or high > _MAX_BATCH:
                raise ValueError(
                    f"what the step takes does not grow up to a batch of {high}: make_inputs(batch) is to return the "
                    "inputs for so many samples"
                )
            most, low, high = max(most, rung.plain), high, 2 * high
    return smallest(lambda batch: isinstance(plan(batch), TooSmall), low, high) - 1


def _exactly(budget: int) -> Amount:
    return lambda plain: budget


def _alone(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same with code of its own: what dynamo remembers of shapes belongs to code, and is the user's."""

    def loss(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    code = loss.__code__.replace(co_name="planned_ahead")
    return FunctionType(code, globals(), "planned_ahead", None, loss.__closure__)
