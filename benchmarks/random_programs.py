"""The default policy on random graphs and chains, compared with the published policies.

`python benchmarks/random_programs.py [--seeds 200]` prints how often the default is better than dtr-eq, worse, and
where it fails although a published policy does not. All policies run on the library's machine.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from typing import Final

from recompute.simulator import baseline, simulate
from recompute.traces import Program

BUDGETS: Final = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2)
PUBLISHED: Final = ("dtr-eq", "dtr", "dtr-local", "lru", "size", "msps")


def random_program(seed: int) -> Program:
    """20 to 100 operations: one in four a chain with a way back, the others graphs; values go after their last use."""
    draw = random.Random(seed)
    program = Program(f"random {seed}")
    count, equal_sizes, equal_costs = draw.choice((20, 40, 60, 100)), seed % 4 == 0, seed % 4 == 1

    def make(*arguments: int, alias: bool = False) -> tuple[int, ...]:
        size = 5 if equal_sizes else draw.choice((1, 2, 4, 8, draw.randint(1, 30)))
        cost = 1.0 if equal_costs else float(draw.choice((1, 2, 5, 10, draw.randint(1, 50))))
        storages = [program.storages[arguments[0]]] if alias else [program.add_storage(size)]
        if not alias and draw.random() < 0.1:
            storages.append(program.add_storage(size))
        return program.add_call("f", arguments, storages, cost)

    values = [program.add_source(draw.randint(0, 4)) for _ in range(2)]
    if seed % 4 == 3:
        forward = values[:1]
        for _ in range(count // 2):
            forward.append(make(forward[-1])[0])
        back = make(forward[-1])[0]
        for value in reversed(forward[1:-1]):
            back = make(back, value)[0]
        values.append(back)
    else:
        for number in range(count):
            near = values[-draw.choice((3, 8, 40)) :]
            arguments = [draw.choice(near) for _ in range(draw.randint(1, 3))]
            if number > count // 2 and draw.random() < 0.6:
                arguments.append(values[(count - number - 1) % len(values)])
            values += make(*arguments, alias=draw.random() < 0.08)
    program.outputs = [values[-1]]
    last = {value: number for number, call in enumerate(program.calls) for value in (*call.arguments, *call.results)}
    gone: dict[int, list[int]] = {}
    for value, number in last.items():
        if program.makers[value] >= 0 and value not in program.outputs:
            gone.setdefault(number, []).append(value)
    steps = [step for step in program.steps if step[0] == "source"]
    for number in range(len(program.calls)):
        steps += [("call", number), *[("drop", value) for value in gone.get(number, ())]]
    program.steps[:] = steps
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many programs")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    losses: list[tuple[float, int, float, float, float]] = []
    for seed in range(options.seeds):
        program = random_program(seed)
        peak = baseline(program)
        for budget in BUDGETS:
            runs = {
                policy: simulate(program, of_peak=budget, policy=policy, peak=peak, machine="library").overhead
                for policy in ("default", *PUBLISHED)
            }
            ours, known = runs["default"], runs["dtr-eq"]
            counts["survived by the default"] += ours is not None
            counts["survived by dtr-eq"] += known is not None
            counts["lost, but survived by some published policy"] += ours is None and any(runs.values())
            if ours is not None and known is not None:
                counts["better" if ours < known - 1e-9 else "worse" if ours > known + 1e-9 else "equal"] += 1
                counts["worse by more than 0.05"] += ours > known + 0.05
                losses.append((ours - known, seed, budget, ours, known))
    print(f"{options.seeds} programs, {len(BUDGETS)} budgets each, the default against dtr-eq:")
    for name, count in counts.items():
        print(f"  {name}: {count}")
    for _, seed, budget, ours, known in sorted(losses, reverse=True)[:5]:
        print(f"  the worst: program {seed} at {budget}: {ours:.3f} instead of {known:.3f}")


if __name__ == "__main__":
    main()
