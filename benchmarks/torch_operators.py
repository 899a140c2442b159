"""How many operators in torch's database give the same bytes in a block that evicts after each call.

The operators in torch's `op_db`, in float64 or the first dtype that they support. Each sample's arguments are made
inside the block and evicted, and after each operator everything that can be evicted is. "Equal" means that the results
after the block have the same bytes, shapes, strides and dtypes as in plain torch, and that the random number generator
is left in the same state. With three samples of each operator it takes some minutes.

    python benchmarks/torch_operators.py [--samples 1000] [--into docs/results]
"""

from __future__ import annotations

import sys
from collections import Counter
from textwrap import fill
from typing import Final

import torch
from _common import ROOT, arguments, facts, markdown, page, publish

sys.path.insert(0, str(ROOT / "tests" / "adapters"))

from _torch_operators import SLOW, VARIANTS, compared, dtype_of, name_of, operators, samples, uncomparable

import recompute_torch as rt
from recompute_torch._native.block import NativeBudget

SLOW_SAMPLES: Final = 3
"""How many samples of the operators whose gradients take minutes."""


def main() -> None:
    """Try them all."""
    parser = arguments(__doc__, into=None)
    parser.add_argument("--samples", type=int, default=1000, help="how many of each operator, at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = facts("torch")
    text = page("Operators inside a block", __doc__, *report(options.samples), machine=machine)
    publish(options.into, "torch_operators", text)


def report(most: int) -> list[str]:
    """The parts of torch_operators.md."""
    same: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    in_mode: dict[str, set[str]] = {}
    wrong: list[str] = []
    skipped: list[str] = []
    tried = taken = repeated = 0
    for op in operators():
        name, dtype = name_of(op), dtype_of(op)
        if dtype is None or uncomparable(op):
            skipped.append(name)
            continue
        tried += 1
        for number, sample in enumerate(samples(op, dtype)):
            if number >= min(most, SLOW_SAMPLES if name in SLOW else most):
                break
            taken += 1
            for variant in VARIANTS:
                found = compared(variant, op, sample)
                if found is None:
                    continue
                outcome, how = found
                repeated += outcome.repeated
                if not how:
                    same[variant] += 1
                    refused[variant] += outcome.error is not None
                elif how == "mode":
                    in_mode.setdefault(name, set()).add(variant)
                else:
                    wrong.append(f"{name}, sample {number}, {variant}: {how}")
    path = "native" if isinstance(rt.budget(), NativeBudget) else "Python"
    rows = [(variant, f"{same[variant]:,}", str(refused[variant])) for variant in VARIANTS]
    slow = ", ".join(f"`{name}`" for name in sorted(SLOW))
    return [
        f"{tried} operators on the {path} path, {taken} samples (at most {most} of each), {repeated:,} repeated runs.",
        markdown("variant | equal to plain torch | of these, equal errors", rows),
        "## Equal to an empty dispatch mode",
        "What evicts after each operator is a dispatch mode, and inside any of those torch uses different formulas\n"
        "for these: results differ in the last bits or in strides. They are equal to those in an empty dispatch mode:",
        "\n".join(f"- `{name}`: {', '.join(sorted(variants))}" for name, variants in sorted(in_mode.items())),
        "## Different",
        "\n".join(f"- {name}" for name in wrong) or "None.",
        "## Not tried",
        fill(
            "Operators that return uninitialized memory, or that support no dtype on the CPU: "
            f"{', '.join(f'`{name}`' for name in skipped)}. At most {SLOW_SAMPLES} samples were tried of {slow}, whose "
            "gradients take minutes.",
            120,
            break_on_hyphens=False,
        ),
    ]


if __name__ == "__main__":
    main()
