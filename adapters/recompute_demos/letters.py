"""Vowels and consonants found in a text by a hidden Markov model, in a twentieth of the memory it takes.

Cave and Neuwirth (Hidden Markov models for English, 1980) fitted two states to the letters of a text and found that
they had become vowels and consonants. The fit (Baum and Welch) reads the text forwards and then backwards, and the way
back needs every message of the way forward. Here these messages are recomputable values, one for each block of letters:
within a budget the cache drops some and recomputes them when the way back arrives. That is the island algorithm
(Binder, Murphy and Russell, Space-efficient inference in dynamic probabilistic networks, 1997), without being written:
`expect` is the same few lines with a budget and without.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import recompute as rc
from recompute_demos._twice import Progress, check, silent, twice

Array = NDArray[np.float64]
Letters = NDArray[np.uint8]

ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz "
_FLOOR: Final = 1e-12  # the least probability that a fit gives; keeps products of a few letters far from underflow
_STEPS: Final = 8  # letters in a row of a scan: the rows are vectorised, the steps are a loop
_SEED: Final = 1985  # a fit finds a local optimum, and other starts find worse ones


class Model(NamedTuple):
    """Two states; before the first letter either, evenly."""

    transition: Array
    """Of shape (2, 2): from state, to state."""
    emission: Array
    """Of shape (2, 27): state, letter."""


class Expectation(NamedTuple):
    """What the letters say about the states under one model."""

    posteriors: Array
    """Of shape (2, letters): the probability of each state at each letter, given the whole text."""
    transitions: Array
    """Of shape (2, 2): the expected number of steps from state to state."""
    log_likelihood: float
    """Of the text, in nats."""


def read() -> str:
    """The help texts that come with Python, as a to z and single spaces: English, and about 375,000 letters of it."""
    from pydoc_data.topics import topics

    return letters_only(" ".join(topics.values()))


def letters_only(text: str) -> str:
    """Lower case, with a single space for whatever is not a to z."""
    return re.sub("[^a-z]+", " ", text.lower())


def encode(text: str) -> Letters:
    """The number of each letter in the alphabet, the space last."""
    codes = np.frombuffer(text.encode("ascii"), np.uint8) - ord("a")
    return np.where(codes < 26, codes, 26).astype(np.uint8)


def random_model(seed: int = _SEED) -> Model:
    """Where a fit starts: states that differ by chance."""
    random = np.random.default_rng(seed)
    return Model(_rows(random.uniform(1, 2, (2, 2))), _rows(random.uniform(1, 2, (2, len(ALPHABET)))))


def fit(letters: Letters, model: Model, *, iterations: int, blocks: int, progress: Progress = silent) -> Model:
    """The model after some iterations of Baum and Welch, with the messages in the current cache."""
    for iteration in range(iterations):
        progress(f"iteration {iteration + 1} of {iterations}", iteration / (iterations + 1))
        model = maximize(letters, expect(letters, model, blocks=blocks))
    return model


def maximize(letters: Letters, expectation: Expectation) -> Model:
    """The model under which what was expected is most likely, but for a tiny floor under every probability."""
    counts = [np.bincount(letters, weights=posterior, minlength=len(ALPHABET)) for posterior in expectation.posteriors]
    return Model(_rows(expectation.transitions), _rows(np.array(counts)))


def expect(letters: Letters, model: Model, *, blocks: int) -> Expectation:
    """Read the text forwards, then backwards, by blocks. The current cache decides which messages it keeps."""
    parts = np.array_split(letters, blocks)
    message: Any = np.full((2, 1), 0.5)
    messages = []
    for part in parts:
        message = rc.ap(forward, model, message, part, nbytes=_message_bytes(len(part)))
        messages.append(message)
    del message

    posteriors = np.empty((2, len(letters)))
    transitions = np.zeros((2, 2))
    log_likelihood = 0.0
    after, end = np.full(2, 0.5), len(letters)
    while messages:
        part = parts.pop()
        after, part_found = backward(model, messages.pop().get(), after, part)
        posteriors[:, end - len(part) : end] = part_found.posteriors
        transitions += part_found.transitions
        log_likelihood += part_found.log_likelihood
        end -= len(part)
    return Expectation(posteriors, transitions, log_likelihood)


def forward(model: Model, before: Array, letters: Letters) -> Array:
    """P(state | the text so far) at each letter of a block, after the last of `before`: of shape (2, 1 + letters)."""
    return _scan(_steps(model), before[:, -1], letters)


def backward(model: Model, alpha: Array, after: Array, letters: Letters) -> tuple[Array, Expectation]:
    """The backward message at the head of a block, given the one at its end; and what the block's letters say."""
    beta = _scan(_steps(model).swapaxes(0, 1), after, letters[::-1])[:, ::-1]
    emitted = model.emission[:, letters]
    before = alpha[:, :-1]
    joint = model.transition[0][:, None] * before[0] + model.transition[1][:, None] * before[1]
    joint *= emitted
    log_likelihood = float(np.log(joint[0] + joint[1]).sum())
    joint *= beta[:, 1:]
    total = joint[0] + joint[1]
    onward = emitted * beta[:, 1:] / total
    pairs = [[float((before[i] * onward[j]).sum()) for j in (0, 1)] for i in (0, 1)]
    return beta[:, 0], Expectation(joint / total, model.transition * pairs, log_likelihood)


def _steps(model: Model) -> Array:
    """What one letter does to a message: for each a matrix, of shape (2, 2, 27)."""
    steps: Array = model.transition[:, :, None] * model.emission
    return steps


def _scan(steps: Array, first: Array, letters: Letters) -> Array:
    """`first` times the matrices of ever more letters, each product divided by its sum: of shape (2, 1 + letters).

    The letters are folded into rows. The products within a row are found for all rows at once, then the message goes
    from row to row, then all messages at once are products with the message at the head of their row.
    """
    count = len(letters)
    folded = np.zeros((-(-count // _STEPS), _STEPS), np.intp)  # the last row ends with letters that are not read
    folded.reshape(-1)[:count] = letters
    products = steps.take(np.ascontiguousarray(folded.T), axis=2)  # from, to, step, row
    product = products[:, :, 0]
    for step in range(1, _STEPS):
        matrix = products[:, :, step]
        product = product[:, :1] * matrix[0] + product[:, 1:] * matrix[1]
        product /= product.sum((0, 1))
        products[:, :, step] = product

    a, b = first.tolist()
    heads = []
    for aa, ab, ba, bb in zip(*product.reshape(4, -1).tolist(), strict=True):
        heads.append((a, b))
        a, b = a * aa + b * ba, a * ab + b * bb
        total = a + b
        a, b = a / total, b / total
    head = np.array(heads).T[:, None, None, :]
    inner = head[0] * products[0] + head[1] * products[1]
    inner /= inner[0] + inner[1]
    messages = np.empty((2, 1 + count))
    messages[:, 0] = first
    messages[:, 1:] = inner.swapaxes(1, 2).reshape(2, -1)[:, :count]
    return messages


def _message_bytes(letters: int) -> int:
    """What `forward` returns for a block."""
    return 2 * (1 + letters) * np.dtype(np.float64).itemsize


def _rows(weights: Array) -> Array:
    """Each row as probabilities."""
    raised: Array = weights / weights.sum(1, keepdims=True) + _FLOOR
    raised /= raised.sum(1, keepdims=True)
    return raised


def demo(
    *,
    budget: float = 0.05,
    iterations: int = 50,
    blocks: int = 384,
    picture: str | Path | None = "recompute-demo.png",
    echo: Callable[[str], None] = print,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Fit Python's help texts without a budget, then within `budget` of that memory, and compare to the last bit.

    Parameters
    ----------
    budget
        A fraction of the peak of the run without a budget; `rc.BudgetError` says so if it is too little.
    iterations, blocks
        Of the fit; into how many values its messages are cut.
    picture
        Where to draw which block was in memory when, in the last pass over the text; None: nowhere.
    echo
        Takes the report, line by line.
    progress
        Takes a few words on what is being done and the share of it that is done, at each iteration.

    Returns the figures as a dict that JSON can hold: bytes, seconds, counts.
    """
    letters = encode(read())
    check(budget, picture)
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, not {iterations!r}")
    if not 2 <= blocks <= len(letters):
        raise ValueError(f"blocks must be at least 2 and at most {len(letters)}, the number of letters, not {blocks!r}")

    def program(progress: Progress, record: Callable[[], Any]) -> tuple[Model, Expectation]:
        model = fit(letters, random_model(), iterations=iterations, blocks=blocks, progress=progress)
        progress("a last pass", iterations / (iterations + 1))
        record()
        return model, expect(letters, model, blocks=blocks)

    runs = twice(program, budget, progress)
    (model, expectation), (free_model, free_expectation) = runs.tight, runs.free
    pairs = [*zip(model, free_model, strict=True), (expectation.posteriors, free_expectation.posteriors)]
    figures: dict[str, Any] = {
        "text_letters": len(letters),
        "blocks": blocks,
        "iterations": iterations,
        "states": _states(model),
        "posteriors_equal": all(np.array_equal(one, other) for one, other in pairs),
        "log_likelihood": expectation.log_likelihood,
        **runs.figures,
    }
    lines = _report(figures)
    for line in [*lines[:-1], *runs.report(), lines[-1]]:
        echo(line)
    title = f"Forwards and backwards through {blocks} blocks of text, in {100 * budget:.3g} % of the memory"
    figures["picture"] = runs.draw(title, picture, echo)
    return figures


def _states(model: Model) -> list[str]:
    """The letters that each state is likelier to write than the other; the state with the letter e first."""
    likelier = model.emission.argmax(0)
    first = likelier[ALPHABET.index("e")]
    return [
        "".join(letter for letter, state in zip(ALPHABET, likelier, strict=True) if (state == first) == wanted)
        for wanted in (True, False)
    ]


def _report(figures: dict[str, Any]) -> list[str]:
    """The figures as lines to read."""
    shown = [" ".join(letters.replace(" ", "_")) for letters in figures["states"]]
    equal = "equal to the last bit" if figures["posteriors_equal"] else "NOT EQUAL"
    return [
        f"text                {figures['text_letters']:,} letters of Python's help texts; _ is the space",
        f"states              {shown[0]}",
        f"                    {shown[1]}",
        f"fit                 {figures['iterations']} iterations, log likelihood {figures['log_likelihood']:,.0f}",
        f"model, posteriors   {equal}, without a budget and within it",
        f"overhead            x {figures['overhead']:.2f} for the messages only: "
        f"{figures['evictions']:,} evictions, {figures['rematerializations']:,} rematerializations",
    ]
