"""All that an ensemble can be asked for, under jit or through the cache, and what the answers say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import Array

import recompute as rc
import recompute_jax
from _asking import shuffled
from _digits import UNSEEN
from _ensemble_network import TRUNK, Outputs, Weights, member, together, trunk

CHUNK: Final = 128  # images that are asked about together


class Functions(NamedTuple):
    """The trunk, a member, and what members think together, in one way of running them."""

    trunk: Callable[..., Outputs]
    member: Callable[..., Outputs]
    together: Callable[..., Outputs]


PLAIN: Final = Functions(jax.jit(trunk), jax.jit(member), jax.jit(together))
CACHED: Final = Functions(
    recompute_jax.op_by_op(trunk, recomputable=True),
    recompute_jax.op_by_op(member, recomputable=True),
    partial(recompute_jax.ap, PLAIN.together),  # one operation
)


def make(weights: Weights, images: Any, functions: Functions) -> Outputs:
    """All that can be asked for, by name."""
    outputs: Outputs = {}
    for start in range(0, len(images), CHUNK):
        found = functions.trunk(weights, images[start : start + CHUNK])
        of_members = [functions.member(own, found[f"trunk {TRUNK - 1}"]) for own in weights.members]
        for number, its in enumerate(of_members):
            found |= {f"member {number} {name}": array for name, array in its.items()}
        found |= functions.together([its["thinks"] for its in of_members])
        outputs |= {f"{start}: {name}": array for name, array in found.items()}
    return outputs


def got(array: Any) -> Array:
    """Out of the cache."""
    found: Array = array.get() if isinstance(array, rc.Recomputable) else array
    return found


def ask(outputs: Outputs) -> dict[str, str]:
    """A digest of each output, in random order; all are kept for whoever asks again."""
    return {name: blake2b(np.asarray(got(outputs[name])).tobytes()).hexdigest() for name in shuffled(outputs)}


def gathered(outputs: Outputs, name: str) -> Any:
    """For all images, of NumPy."""
    starts = sorted(int(output.partition(":")[0]) for output in outputs if output.endswith(f": {name}"))
    return np.concatenate([np.asarray(got(outputs[f"{start}: {name}"])) for start in starts])


def members(outputs: Outputs) -> int:
    return sum(name.startswith("0: ") and name.endswith("thinks") for name in outputs)


def describe(digits: Any, outputs: Outputs) -> str:
    """How many unseen digits are told by each member and by all, and what disagreement says of errors."""
    found = {name: gathered(outputs, name)[:UNSEEN] for name in ("together", "disagreement")}
    of_members = [gathered(outputs, f"member {number} thinks")[:UNSEEN] for number in range(members(outputs))]
    alone = ", ".join(f"{np.mean(its.argmax(1) == digits[:UNSEEN]):.1%}" for its in of_members)
    wrong = found["together"].argmax(1) != digits[:UNSEEN]
    doubtful = np.argsort(-found["disagreement"])[: UNSEEN // 10]
    return (
        f"of {UNSEEN} unseen digits the members tell {alone}; together {1 - wrong.mean():.1%}\n"
        f"{wrong[doubtful].sum()} of the {wrong.sum()} errors are in the tenth on which they disagree most"
    )
