"""The core's policy as numbers: the tracker asks who is evicted in the middle of kernels, where no Python can run.

Each of these policies has 1 / score = base + slope * staleness. policy.h has that line, once; what is here says which
policy it is, and to which power under which pressure. tests/adapters/test_torch_native.py compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from recompute import policies

STEPS: Final = 64
"""Of the pressure, as in the core."""

_STEEP, _RECENT, _LARGE, _STEEP_ALONE, _DRAWN, _NOTHING = range(6)
_FORMS: Final = {
    policies.Needed: _STEEP,
    policies.Dtr: _STEEP,
    policies.DtrLocal: _STEEP,
    policies.Lru: _RECENT,
    policies.Size: _LARGE,
    policies.Msps: _STEEP_ALONE,
    policies.Random: _DRAWN,
    policies.Nothing: _NOTHING,
}
_AROUND: Final = {"none": 0, "ancestors": 1, "exact": 2, "needed": 3}


@dataclass(frozen=True)
class Numbers:
    """See policy.h."""

    form: int
    around: int
    powers: tuple[float, ...]
    seed: int


def numbers(policy: policies.Policy) -> Numbers:
    """Raises ValueError for a policy that is code of the user's, or whose neighbourhood is not counted in C++."""
    form = _FORMS.get(type(policy))
    if form is None or policy.neighbourhood not in _AROUND:
        names = ", ".join(name for name, cls in policies.POLICIES.items() if cls in _FORMS)
        raise ValueError(f"it does not serve policy {policy.name!r}, but {names}")
    powers = tuple([policy.under(step / STEPS).power or 1.0 for step in range(STEPS + 1)])
    return Numbers(form, _AROUND[policy.neighbourhood], powers, getattr(policy, "seed", 0))
