"""Which members of the planner's portfolio ever win.

The library's planner begins its search with several orders of runs, the starts. Whatever plans is run as its users do,
and each call of the planner is watched. For each member of the portfolio it is counted how often it had a start that
fits, how often no other start was cheaper, and how often all others were more expensive. "Cases" are calls of the
planner with a budget below what the program takes by itself. "online" is the run of the default policy, "future" DTR
with the future known, "fitted" the program made to fit, with other random numbers each time. Nothing is timed, and
planning effort is counted in steps.

    python benchmarks/portfolio.py TRACES_FOLDER [--effort 0.1] [--only traces,random] [--into docs/results]
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from _common import arguments, page, say, section, write
from random_programs import random_program

import recompute as rc
from recompute._plans import own
from recompute._plans.liveness import cost_of
from recompute._plans.own import Meter, Online, Start
from recompute._plans.problem import Problem
from recompute._traces.chain import chain
from recompute.planners import PlanError, least, peak, plan
from recompute.simulator import baseline, iterate
from recompute.traces import Program, read

TRACES: Final = ("unet", "resnet32", "transformer", "treelstm", "unroll_gan")
BUDGETS: Final = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
SAME: Final = 1e-9


class Watch:
    """Counts what comes of the portfolio, whoever plans."""

    def __init__(self) -> None:
        self.cases = 0
        self.fits: Counter[str] = Counter()
        self.best: Counter[str] = Counter()
        self.alone: Counter[str] = Counter()
        self._portfolio = own.portfolio

    def __enter__(self) -> Watch:
        own.portfolio = self._watched
        return self

    def __exit__(self, *_: object) -> None:
        own.portfolio = self._portfolio

    def _watched(self, problem: Problem, meter: Meter, online: Online = lambda _: None) -> Iterator[Start]:
        starts = list(self._portfolio(problem, meter, online))
        if starts and starts[0].member != "program":
            costs = {start.member: cost_of(problem, start.sequence) for start in starts}
            cheapest = [name for name, cost in costs.items() if cost <= min(costs.values()) * (1 + SAME)]
            self.cases += 1
            self.fits.update(costs.keys())
            self.best.update(cheapest)
            self.alone.update(cheapest if len(cheapest) == 1 else ())
        yield from starts

    def rows(self) -> list[list[str]]:
        """One for each member, the first of the portfolio first."""
        return [[name, *[str(count[name]) for count in (self.fits, self.best, self.alone)]] for name in self.fits]


def planned(programs: Iterator[tuple[Program, Sequence[int]]], effort: float) -> None:
    """A plan of each program within each budget."""
    for program, budgets in programs:
        for budget in budgets:
            with suppress(PlanError):
                plan(program, budget, effort=effort)


def shares(program: Program, of: Sequence[float] = BUDGETS) -> list[int]:
    """Budgets in bytes."""
    whole = sum(baseline(program).values())
    return [int(share * whole) for share in of]


def recorded(folder: Path) -> Iterator[tuple[Program, Sequence[int]]]:
    for name in TRACES:
        program = read(folder / f"{name}.jsonl")
        yield program, shares(program)


def chains() -> Iterator[tuple[Program, Sequence[int]]]:
    for length in (10, 30, 100, 300):
        yield chain(length), (3, 4, 6, 9, 14, 20, 40)


def uneven_chains() -> Iterator[tuple[Program, Sequence[int]]]:
    """There and back, with costs and sizes that differ."""
    for seed in range(16):
        draw = random.Random(seed)
        program = Program(f"uneven chain {seed}")

        def make(name: str, *arguments: int, draw: random.Random = draw, program: Program = program) -> int:
            storage = program.add_storage(draw.randint(1, 30))
            return program.add_call(name, arguments, (storage,), float(draw.randint(1, 20)))[0]

        values = [program.add_source(2)]
        for _ in range(draw.choice((6, 10, 20, 40, 80))):
            values.append(make("forward", values[-1]))
        gradient = make("backward", values[-1])
        for value in reversed(values[1:-1]):
            gradient = make("backward", gradient, value)
        program.outputs = [gradient]
        low, high = least(program), peak(program)
        yield program, [low + int(share * (high - low)) for share in (0.6, 0.4, 0.2, 0.1)]


def random_graphs() -> Iterator[tuple[Program, Sequence[int]]]:
    for seed in range(48):
        program = random_program(seed)
        yield program, shares(program, (0.6, 0.4, 0.3, 0.2))


def staged() -> None:
    """A network there and back, as `rc.planned` has it."""
    import numpy as np

    def gradient(x: Any, weights: Sequence[Any]) -> rc.Recomputable[Any]:
        values = [x]
        for weight in weights:
            values.append(rc.ap(lambda value, weight: np.tanh(value @ weight), values[-1], weight))
        back = values.pop()
        for value, weight in zip(reversed(values), reversed(weights), strict=True):
            back = rc.ap(lambda back, value, weight: (back * (1 - value**2)) @ weight.T, back, value, weight)
        return back

    x = np.ones((256, 32))
    for depth in (8, 24, 60):
        for share in (0.7, 0.5, 0.4):
            with suppress(PlanError):
                rc.planned(gradient, of_peak=share, time_limit=1.0)(x, [np.eye(32)] * depth)


def foreseen(folder: Path, effort: float) -> None:
    """Rounds of programs that repeat."""
    for name in ("unet", "resnet32", "transformer"):
        program = read(folder / f"{name}.jsonl")
        for budget in (0.5, 0.3):
            list(iterate(program, of_peak=budget, iterations=2, effort=effort))


def jax_programs() -> None:
    """Functions under `jit` within a budget."""
    from jax import value_and_grad
    from jax_planning import PROGRAMS

    from recompute_jax import remat

    for make, length, budgets in PROGRAMS.values():
        loss, weights, x = make(min(length, 40))
        for share in budgets:
            with suppress(rc.BudgetError):
                remat(value_and_grad(loss), of_peak=share).plan(weights, x)


def torch_programs() -> None:
    """Compiled steps within a budget."""
    from _torch_models import TO_COMPILE, straight
    from torch_compile import alone

    import recompute_torch as rt

    for name in ("gpt2", "resnet18"):
        step = TO_COMPILE[name](straight, True)
        for share in (0.7, 0.5):
            with suppress(rc.BudgetError):
                rt.compile(alone(step), of_peak=share)(step.x, step.y).backward()


def main() -> None:
    parser = arguments(__doc__, traces=True)
    parser.add_argument("--effort", type=float, default=0.1, help="of each plan; default %(default)s")
    parser.add_argument("--only", metavar="GROUP[,..]", help="groups of programs; default all")
    options = parser.parse_args()
    folder, effort = options.traces, options.effort
    groups: dict[str, tuple[str, Callable[[], None]]] = {
        "traces": ("Recorded training iterations", lambda: planned(recorded(folder), effort)),
        "chains": ("Uniform chains", lambda: planned(chains(), effort)),
        "uneven": ("Chains whose costs and sizes differ", lambda: planned(uneven_chains(), effort)),
        "random": ("Random graphs of 20 to 100 operations", lambda: planned(random_graphs(), effort)),
        "staged": ("Staged functions", staged),
        "rounds": ("Rounds of programs that repeat", partial(foreseen, folder, effort)),
        "jax": ("JAX: functions within a budget", jax_programs),
        "torch": ("PyTorch: compiled steps", torch_programs),
    }
    parts = []
    for name in options.only.split(",") if options.only else groups:
        title, run = groups[name]
        say(title)
        with Watch() as watch:
            run()
        head = ["member", "fits", "cheapest", "the only cheapest"]
        parts.append(section(title, f"{watch.cases} cases.", head, watch.rows()))
        print(parts[-1])
    write(options.into, "portfolio", page("The planner's portfolio", __doc__, *parts))


if __name__ == "__main__":
    main()
