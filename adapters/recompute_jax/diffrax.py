"""Differential equations of diffrax within a budget: `diffeqsolve(..., adjoint=BudgetAdjoint("2GB"))`."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax

from recompute import BudgetError
from recompute.text import format_bytes, parse_budget
from recompute_jax._program.segments import nbytes


def _bytes(budget: Any) -> int:
    return parse_budget(budget, of="what", what="budget")


class BudgetAdjoint(diffrax.AbstractAdjoint):
    """Backpropagation through the solver, with as many checkpoints as fit into a budget of bytes.

    It is `diffrax.RecursiveCheckpointAdjoint`, whose `checkpoints` follow from what the solver carries from step to
    step: more memory means fewer steps that are computed twice, and with room for all `max_steps` none is.

    Parameters
    ----------
    budget
        Bytes for checkpoints ("2GB"), beside what one step and its gradient need, and what `saveat` keeps. While steps
        are computed twice, XLA may hold each checkpoint twice for a moment, so that each counts twice. Under `vmap` the
        bytes are those of one element.

    A solve raises BudgetError if there is no room for one checkpoint. Stumm and Walther, New Algorithms for Optimal
    Online Checkpointing (2010).
    """

    budget: int = eqx.field(static=True, converter=_bytes)

    def checkpoints(self, init_state: Any, max_steps: int | None) -> int:
        """How many fit, of what a solver carries; at most one for each step."""
        buffers = init_state.save_state, init_state.dense_ts, init_state.dense_infos
        size = max(1, _nbytes(init_state) - _nbytes(buffers))
        if max_steps is not None and max_steps * size <= self.budget:
            return max_steps
        if self.budget < 2 * size:
            raise BudgetError(
                f"one checkpoint of this solver takes {format_bytes(2 * size)}, more than the budget of "
                f"{format_bytes(self.budget)}; raise the budget"
            )
        return self.budget // (2 * size)

    def loop(self, *, init_state: Any, max_steps: int | None, **others: Any) -> Any:
        """As diffrax calls it."""
        inner = diffrax.RecursiveCheckpointAdjoint(checkpoints=self.checkpoints(init_state, max_steps))
        return inner.loop(init_state=init_state, max_steps=max_steps, **others)  # type: ignore[no-untyped-call]  # diffrax's


def _nbytes(tree: Any) -> int:
    """Of the arrays in a tree."""
    return sum(nbytes(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf))
