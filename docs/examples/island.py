"""The island algorithm, unwritten: a text is read forwards and backwards with O(log n) messages in memory.

The posteriors of a hidden Markov model need each forward message once more on the way back. Binder, Murphy and Russell
(Space-efficient inference in dynamic probabilistic networks, 1997) keep a few messages as islands and read the
stretches between them again. Here the messages are recomputable values, and the naive program, `posteriors`, gets a
budget of c log2 n of them. The script counts the letters read forwards, beside n log2 n, beside the algorithm written
by hand, and beside the least there can be; then it reads the whole text by blocks, and measures the memory.

    python docs/examples/island.py --picture island.png --json island.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import cycle
from math import ceil, comb, log2
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import recompute as rc
from _budgets import tracing
from _report import Advance, aligned, into_files, machine, progress, show, write
from recompute.pictures import save
from recompute.policies import PolicyName
from recompute_demos.letters import ALPHABET, Letters, Model, encode, fit, random_model, read

Array = NDArray[np.float64]

POLICIES: Final = ("needed", "dtr-eq")
_LOOKS: Final = (("#0072B2", "o"), ("#56B4E9", "^"), ("#E69F00", "D"), ("#CC79A7", "v"))  # Okabe and Ito's colours


class Chain:
    """A hidden Markov model that counts the letters it reads forwards. The count is the clock of the cache, too.

    So the counts are the same on every machine: what a letter costs is one, not some microseconds that vary.
    """

    def __init__(self, model: Model) -> None:
        """A model of any number of states; before the first letter each is as likely."""
        self.states = len(model.transition)
        self.start: Array = np.full((1, self.states), 1 / self.states)
        self.steps = [model.transition * column for column in model.emission.T]  # for each letter: from, to
        self.read = 0

    def clock(self) -> float:
        return float(self.read)

    def forward(self, before: Array, part: Letters) -> Array:
        """P(state | the text so far) at each letter of a part, given that of the part before: (letters, states)."""
        messages = np.empty((len(part), self.states))
        message = before[-1]
        for at, letter in enumerate(part.tolist()):
            message = message @ self.steps[letter]
            message /= message.sum()
            messages[at] = message
        self.read += len(part)
        return messages

    def backward(self, messages: Array, after: Array, part: Letters) -> tuple[Array, Array]:
        """P(state | the whole text) at each letter of a part, and the message from behind to the part before."""
        found = np.empty_like(messages)
        for at, letter in reversed([*enumerate(part.tolist())]):
            joint = messages[at] * after
            found[at] = joint / joint.sum()
            after = self.steps[letter] @ after
            after /= after.sum()
        return found, after

    def nbytes(self, letters: int) -> int:
        """What the messages of so many letters take."""
        return letters * self.states * 8


def posteriors(chain: Chain, parts: Sequence[Letters]) -> Iterator[Array]:
    """Forwards and backwards, naively: all messages are made, then read from the last. The cache decides what it keeps.

    Yields P(state | the whole text) of each part, the last part first.
    """
    messages = []
    message: Any = chain.start
    for part in parts:
        message = rc.ap(chain.forward, message, part, nbytes=chain.nbytes(len(part)))
        messages.append(message)
    del message
    after = np.ones(chain.states)
    for part in reversed(parts):
        found, after = chain.backward(messages.pop().get(), after, part)
        yield found


def island(chain: Chain, parts: Sequence[Letters], held: list[int]) -> Iterator[Array]:
    """The same by hand: an island in the middle, then the right half, then the left one. Sets held[0].

    That is the most messages that were there at once. Right before left: so the messages from behind are made once.
    """
    after = np.ones(chain.states)
    message = chain.forward(chain.start, parts[0])
    stack = [(message, 0, len(parts))]  # the message of the first part of a stretch, and where the stretch lies
    while stack:
        message, first, last = stack.pop()
        while last - first > 1:
            middle = (first + last) // 2
            stack.append((message, first, middle))
            for at in range(first + 1, middle + 1):
                message = chain.forward(message, parts[at])
                held[0] = max(held[0], len(stack) + (1 if at == first + 1 else 2))  # an argument may be an island
            first = middle
        found, after = chain.backward(message, after, parts[first])
        yield found


def least(n: int, slots: int) -> int:
    """The fewest steps that deliver n messages, last first, with memory for so many: no schedule needs fewer.

    Griewank and Walther (Algorithm 799: revolve, 2000): t(l, s) = r l - C(s + r, s + 1), r the least with
    C(s + r, s) >= l, for l = n + 1 states, the start among them. They count checkpoints alone. The cache counts the
    message that is being made, too, which may cost it one of them: with `slots - 1` the number can be reached.
    """
    rounds = 0
    while comb(slots + rounds, slots) < n + 1:
        rounds += 1
    return rounds * (n + 1) - comb(slots + rounds, slots + 1)


def cut(letters: Letters, size: int) -> list[Letters]:
    """Parts of so many letters; the last one may be shorter."""
    return [letters[at : at + size] for at in range(0, len(letters), size)]


def count_steps(
    model: Model, letters: Letters, factors: Sequence[float], policies: Sequence[PolicyName], advance: Advance
) -> dict[str, Any]:
    """The letters that each method reads forwards, one message for each letter of the text; their answers compared."""
    n = len(letters)
    parts = cut(letters, 1)

    def run(method: Callable[[Chain], Iterator[Array]]) -> dict[str, Any]:
        chain, digest, start = Chain(model), blake2b(), perf_counter()
        for found in method(chain):
            digest.update(found.tobytes())
            advance(1)
        return {"steps": chain.read, "seconds": perf_counter() - start, "digest": digest.hexdigest()}

    def cached(budget: int | None, policy: PolicyName) -> dict[str, Any]:
        def method(chain: Chain) -> Iterator[Array]:
            with rc.Cache(budget, policy=policy, clock=chain.clock) as cache:
                yield from posteriors(chain, parts)
            stats.append(cache.stats())

        stats: list[rc.Stats] = []
        return {**run(method), "peak": stats[0].peak // Chain(model).nbytes(1)}

    free = cached(None, "needed")
    held = [1]
    by_hand = {**run(lambda chain: island(chain, parts, held)), "held": held[0]}
    budgets: list[dict[str, Any]] = []
    for factor in factors:
        slots = max(2, ceil(factor * log2(n)))
        found = {policy: cached(Chain(model).nbytes(slots), policy) for policy in policies}
        budgets.append({"factor": factor, "slots": slots, "policies": found, "least": least(n, slots)})
    runs = [free, by_hand, *(run for budget in budgets for run in budget["policies"].values())]
    return {"n": n, "island": by_hand, "budgets": budgets, "equal": len({run["digest"] for run in runs}) == 1}


def measure_memory(model: Model, letters: Letters, block: int, factor: float, advance: Advance) -> dict[str, Any]:
    """The whole text by blocks: the likeliest state of each letter, and the memory that it takes to find it.

    `peak` is what the messages take, by the books of the cache or by hand; `traced` is the most that the whole pass had
    allocated by tracemalloc, recipes, temporary arrays and the answer (a byte for each letter) included.
    """
    parts = cut(letters, block)
    slots = max(2, ceil(factor * log2(len(parts))))
    found: dict[str, Any] = {"letters": len(letters), "blocks": len(parts), "block": block, "slots": slots}
    answers = []
    for name in ("no budget", "budget", "by hand"):
        chain, held = Chain(model), [1]
        size = chain.nbytes(block)
        cache = rc.Cache(slots * size if name == "budget" else None, clock=chain.clock)
        answer = np.empty(len(letters), np.uint8)
        with tracing() as traced, cache:
            end, start = len(letters), perf_counter()
            for posterior in island(chain, parts, held) if name == "by hand" else posteriors(chain, parts):
                answer[end - len(posterior) : end] = posterior.argmax(1)
                end -= len(posterior)
                advance(len(posterior))
        peak = held[0] * size if name == "by hand" else cache.stats().peak
        steps, seconds = chain.read, perf_counter() - start
        found[name] = {"steps": steps, "peak": peak, "traced": traced[0] + answer.nbytes, "seconds": seconds}
        answers.append(answer.tobytes())
    return {**found, "equal": len({*answers}) == 1}


def draw(rows: Sequence[dict[str, Any]], path: str | Path) -> Path:
    """Steps for each letter over n, one panel for each budget. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    sizes = [row["n"] for row in rows]
    budgets = rows[0]["budgets"]
    figure = Figure(figsize=(4.6 * len(budgets), 4.2), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for number, (axes, budget) in enumerate(zip(panels, budgets, strict=True)):
        now = [row["budgets"][number] for row in rows]
        lines = {
            "n log₂ n": ([log2(n) for n in sizes], "#777777", "", ":"),
            "island, by hand": ([row["island"]["steps"] / row["n"] for row in rows], "#D55E00", "s", "--"),
        }
        for policy, (colour, marker) in zip(budget["policies"], cycle(_LOOKS)):
            steps = [case["policies"][policy]["steps"] / n for case, n in zip(now, sizes, strict=True)]
            lines[f"cache, {policy}"] = (steps, colour, marker, "-")
        lines["least possible"] = ([case["least"] / n for case, n in zip(now, sizes, strict=True)], "#009E73", "", "-.")
        for name, (heights, colour, marker, style) in lines.items():
            axes.plot(sizes, heights, color=colour, marker=marker, linestyle=style, markersize=5, label=name)
        axes.set_xscale("log", base=2)
        axes.set(title=_memory_words(budget["factor"]), xlabel="n, letters of the text", xticks=sizes)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E4E4E4", linewidth=0.7)
    panels[0].set_ylabel("letters read forwards, for each letter")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    return save(figure, path)


def _memory_words(factor: float) -> str:
    return f"memory for {'' if factor == 1 else f'{factor:g} '}log₂ n messages"


def _step_table(rows: Sequence[dict[str, Any]], number: int) -> tuple[list[str], list[list[str]]]:
    """Steps for each letter with the budget of that number, as cells."""
    policies = [*rows[0]["budgets"][number]["policies"]]
    cells = []
    for row in rows:
        n, budget = row["n"], row["budgets"][number]
        steps = [row["island"]["steps"], *(budget["policies"][policy]["steps"] for policy in policies), budget["least"]]
        by_hand, *others = [f"{step / n:.2f}" for step in steps]
        cells.append([f"{n:,}", f"{log2(n):.4g}", by_hand, str(row["island"]["held"]), str(budget["slots"]), *others])
    return ["n", "log₂ n", "by hand", "held", "budget", *policies, "least"], cells


def _memory_table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = ["", "messages", "traced", "steps a letter", "seconds"]
    runs = [(name, found[name]) for name in ("no budget", "budget", "by hand")]
    return columns, [
        [
            name,
            f"{run['peak'] / 1e6:.2f} MB",
            f"{run['traced'] / 1e6:.2f} MB",
            f"{run['steps'] / found['letters']:.2f}",
            f"{run['seconds']:.1f}",
        ]
        for name, run in runs
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Posteriors of a text with O(log n) messages in memory.")
    add = parser.add_argument
    add("--smallest", type=int, default=8, metavar="K", help="from 2^K letters; default %(default)s")
    add("--largest", type=int, default=16, metavar="K", help="to 2^K letters; default %(default)s")
    add("--factors", type=float, nargs="+", default=[1.0, 2.0], metavar="C", help="budgets, in log2 n; default 1 2")
    add("--policies", nargs="+", default=[*POLICIES], metavar="NAME", help="default " + " ".join(POLICIES))
    add("--block", type=int, default=1024, metavar="N", help="letters in a block of the whole text; %(default)s")
    add("--no-text", action="store_true", help="leave out the whole text")
    return into_files(parser, "the steps")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    letters = encode(read())
    if not 1 <= options.smallest <= options.largest <= log2(len(letters)):
        parser.error(f"2^smallest to 2^largest must lie between 2 and {len(letters):,}, the letters of the text")
    if options.block < 1 or min(options.factors) <= 0:
        parser.error("a block has at least one letter, and a factor is more than 0")
    for path in (options.picture, options.json):
        if path and not Path(path).absolute().parent.is_dir():
            parser.error(f"there is no directory for {path}")

    with rc.Cache():
        model = fit(letters[: 2**16], random_model(), iterations=50, blocks=8)
    likelier = model.emission.argmax(0)
    for state in dict.fromkeys(likelier[[ALPHABET.index("e"), ALPHABET.index("t")]].tolist()):
        print("a state writes ", *(letter for letter, its in zip(ALPHABET, likelier, strict=True) if its == state))

    sizes = [2**k for k in range(options.smallest, options.largest + 1)]
    passes = 2 + len(options.factors) * len(options.policies)
    with progress(passes * sum(sizes) + (0 if options.no_text else 3 * len(letters))) as advance:
        rows = [count_steps(model, letters[:n], options.factors, options.policies, advance) for n in sizes]
        text = None
        if not options.no_text:
            text = measure_memory(model, letters, options.block, options.factors[0], advance)

    for number, factor in enumerate(options.factors):
        print(f"\nLetters read forwards, for each letter; {_memory_words(factor)}")
        print(aligned(*_step_table(rows, number)))
    if text is not None:
        found = f"{text['letters']:,} letters: {text['blocks']} blocks, room for {text['slots']} of them"
        print(f"\nThe whole text, {found}", aligned(*_memory_table(text)), sep="\n")
    equal = all(row["equal"] for row in rows) and (text is None or text["equal"])
    print("\nposteriors:", "equal to the last bit in all runs" if equal else "NOT EQUAL")

    if options.json:
        write({"machine": machine("numpy"), "steps": rows, "text": text, "equal": equal}, options.json)
    if options.picture:
        show(partial(draw, rows, options.picture))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
