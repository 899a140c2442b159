"""A sample of torch's own database of operators gives the same bytes in a block that evicts after each call.

All samples and variants are tried by `python benchmarks/torch_operators.py`, whose counts are in docs/results.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
pytest.importorskip("expecttest", reason="torch's database of operators needs it")

from _torch_operators import SLOW, VARIANTS, compared, dtype_of, name_of, operators, samples, uncomparable  # noqa: E402  # after importorskip

PARTS = 16  # the whole database, in as many tests
SECOND = 5  # of so many operators, one has its gradients of gradients tried: they take most of the time


pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_inside_of_a_block(part: int) -> None:
    """Results, gradients, gradients of gradients, in-place and out= variants of the first sample equal plain torch."""
    wrong, tried, repeated = [], 0, 0
    for number, op in enumerate(operators()[part::PARTS]):
        if (dtype := dtype_of(op)) is None or uncomparable(op):
            continue
        for sample in list(samples(op, dtype))[:1]:
            for variant in VARIANTS[:1] if name_of(op) in SLOW else VARIANTS:
                if variant == "second gradients" and (number + part) % SECOND:
                    continue
                found = compared(variant, op, sample)
                if found is None:
                    continue
                tried, repeated = tried + 1, repeated + found[0].repeated
                if found[1] not in ("", "mode"):
                    wrong.append(f"{name_of(op)}, {variant}: {found[1]}")
    assert not wrong
    assert tried > 60
    assert repeated > tried


@pytest.mark.parametrize("part", range(4))
def test_complex_operators_inside_of_a_block(part: int) -> None:
    """So do those of complex numbers, with their conjugations that are never carried out."""
    wrong, tried = [], 0
    for op in operators()[part :: 4 * 4]:
        if not op.supports_dtype(torch.complex128, "cpu") or uncomparable(op) or name_of(op) in SLOW:
            continue
        for sample in list(samples(op, torch.complex128))[:1]:
            for variant in ("forward", "gradients"):
                found = compared(variant, op, sample)
                if found is not None:
                    tried += 1
                    if found[1] not in ("", "mode"):
                        wrong.append(f"{name_of(op)}, {variant}: {found[1]}")
    assert not wrong
    assert tried > 10
