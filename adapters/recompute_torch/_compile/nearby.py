"""Less fusion: only of what lies close together in a graph, so that kernels keep to the order of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V

_SPAN: Final = 8
"""Places in the order of a graph, from the first node of a kernel to its last."""


@contextmanager
def fused_nearby() -> Iterator[None]:
    """Inductor fuses less in here, unless the user has chosen how it fuses.

    By default it also fuses what is far apart: results come before they are needed, and operands stay until then. In a
    T5 planned for half of its memory that took 15.3 MB instead of 9.7, and 10.6 in this way; steps took as long.
    """
    if config.inductor_choices_class is not None:
        yield
        return
    with config.patch(inductor_choices_class=_Nearby), V.set_choices_handler(_Nearby()):
        yield


class _Nearby(InductorChoices):
    """The choices of inductor, but for fusion."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """What inductor asks for each pair of kernels."""
        span = max(abs(node1.min_order - node2.max_order), abs(node2.min_order - node1.max_order))
        return span <= _SPAN and bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))

    def uuid(self) -> str:
        """What distinguishes kernels in inductor's cache."""
        return f"recompute: {_SPAN}"
