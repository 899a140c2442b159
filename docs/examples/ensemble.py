"""An ensemble answers in any order: its models share a trunk, whose activations are evicted and recomputed.

Several small convolutional networks tell handwritten digits apart. They have their first layers in common (a TreeNet;
Lee and others, 2015), so what the trunk finds in some images serves all of them. Asked for are, for any images and in
any order: what the trunk sees, what one member sees and thinks, what they think together, and where they disagree.
Nothing here says what is to be kept for that. The functions are plain JAX: under `jax.jit` everything stays in memory,
by `recompute_jax.op_by_op` and `recompute_jax.ap` it may go and come back within a budget.

    python docs/examples/ensemble.py --table --picture ensemble.png
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import recompute as rc
from _asking import Asked, answers, chart, over, timed
from _budgets import compare, parser, table
from _digits import UNSEEN, load
from _ensemble_network import Outputs, Weights, initial, learn
from _ensemble_outputs import CACHED, PLAIN, ask, describe, gathered, got, make, members
from _report import machine, progress, show, write
from recompute.events import Event
from recompute.pictures import save
from recompute.policies import PolicyName

BUDGETS: Final = (0.75, 0.5, 0.35, 0.25, 0.15)


@dataclass(frozen=True, kw_only=True)
class Run(Asked):
    """What one way of running it took."""

    live: int
    """The most that JAX's arrays took at once, beyond those that were there before."""


def live() -> int:
    """Bytes of all arrays that JAX has now."""
    gc.collect(0)
    arrays: list[Any] = jax.live_arrays()  # type: ignore[no-untyped-call]  # JAX has no type for it
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in arrays}.values())


def ready(array: Any) -> Any:
    """Out of the cache, and computed."""
    return got(array).block_until_ready()


def run_plain(weights: Weights, images: Any, repeats: int) -> Run:
    """Under jit, everything kept."""
    before = live()
    made = partial(make, weights, images, PLAIN)
    seconds = min(timed(made, ready) for _ in range(1 + repeats))  # the first one compiles
    outputs = made()
    return Run(policy="plain jit", seconds=seconds, live=live() - before, digests=ask(outputs))


def run(
    weights: Weights, images: Any, budget: int | None = None, policy: PolicyName = "needed",
    events: list[Event] | None = None, *, repeats: int = 1,
) -> Run:  # fmt: skip
    """Within a cache: for the time, then once more for the memory, the bits and the events."""

    def wrapped() -> partial[Outputs]:
        """Of arrays that are wrapped once: the cache counts each as often as it is wrapped."""
        own, seen = rc.array((weights, images))
        return partial(make, own, seen, CACHED)

    before = live()
    most = 0
    seconds = []
    for _ in range(1 + repeats):
        with rc.Cache(budget, policy=policy):
            seconds.append(timed(wrapped(), ready))

    def look(event: Event) -> None:
        nonlocal most
        most = max(most, live() - before)
        if events is not None:
            events.append(event)

    with rc.Cache(budget, policy=policy) as cache:
        cache.subscribe(look)
        found = answers(cache, wrapped(), ask)
    return Run(budget=budget, policy=policy, seconds=min(seconds), live=most, **found)


# The script


def draw(images: Any, digits: Any, outputs: Outputs, below: Any, path: str | Path) -> Path:
    """The unseen images on which the members disagree most, over the residency chart."""
    votes = np.stack([gathered(outputs, f"member {number} thinks").argmax(1) for number in range(members(outputs))])
    disagreement = gathered(outputs, "disagreement")
    figure, above = over(below, 2, 7.4)
    for axes, at in zip(above.subplots(1, 8), np.argsort(-disagreement[:UNSEEN]), strict=False):
        axes.imshow(-images[at].reshape(8, 8), cmap="gray")
        axes.set_title(f"a {digits[at]}; votes\n" + " ".join(map(str, votes[:, at])), fontsize="medium")
        axes.axis("off")
    return save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser("An ensemble with a common trunk, asked within a memory budget.", share=0.15, repeats=3)
    add = asked.add_argument
    add("--members", type=int, default=6, metavar="N", help="members of the ensemble; default %(default)s")
    add("--channels", type=int, default=16, metavar="N", help="channels of each layer; default %(default)s")
    add("--images", type=int, default=1797, metavar="N", help="how many images to classify; default all %(default)s")
    add("--steps", type=int, default=150, metavar="N", help="steps of training; default %(default)s")
    options = asked.parse_args(arguments)
    if min(options.members, options.channels) < 1 or options.images < UNSEEN:
        asked.error(f"there is at least one of everything, and {UNSEEN} images")
    images, digits = (array[: options.images] for array in load())
    with progress(options.steps) as advance:
        weights = learn(initial(options.members, options.channels), options.steps, advance)
    given = weights, jnp.asarray(images)
    events: list[Event] = []
    within = partial(run, *given, repeats=options.repeats)
    others = BUDGETS if options.table else ()
    runs = compare(partial(run_plain, *given, options.repeats), within, options.budget, others, events=events)
    free, *budgets = runs[1:]
    same = [run.digests == free.digests for run in runs[1:]]
    plain = make(*given, PLAIN)
    print(describe(digits, plain))
    print(f"{len(free.digests)} outputs, made by {free.operations:,} operations, asked for in random order")
    print(table(runs, [run.live for run in runs], [None, *same], ("", "live"), places=1))
    if options.json:
        write(
            {"machine": machine("jax"), "options": vars(options), "runs": [asdict(run) for run in runs]}, options.json
        )
    if options.picture and events:
        below = partial(chart, runs, events, "Activations", options.budget, least=0.005)
        show(lambda: draw(images, digits, plain, below(), options.picture))
    return 0 if budgets and all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
