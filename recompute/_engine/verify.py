"""Purity: what was changed in place is noticed when an operation runs again.

Of sources samples are compared, always; on demand digests of everything, also before a value is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from recompute._adapters.adapter import fingerprint, kinds
from recompute._adapters.remembering import changed
from recompute._engine.arguments import changeable
from recompute._engine.graph import EVICTED, Operation, Value
from recompute._errors import ImpureError


def check_sources(samples: Mapping[Value, Hashable], operation: Operation) -> None:
    """Raise if a source that the operation takes was changed in place. `samples`: of what the sources held first."""
    for number, value in enumerate(operation.arguments, 1):
        known = samples.get(value)
        if known is not None and value.operation is None and value.payload is not EVICTED:
            payload = value.payload
            if kinds[type(payload)].adapter.sample(payload) != known:
                raise ImpureError(
                    f"a source, argument {number} of {operation.name} (created at {operation.created}), is a "
                    f"{type(payload).__name__} that was changed in place after it was given to the cache; give "
                    "pure() a copy, or leave it as it is"
                )


class Fingerprints:
    """Value -> digest of what it held first. O(bytes) a look: for tests and for finding a bug."""

    def __init__(self) -> None:
        self._digests: dict[Value, bytes] = {}

    def note(self, value: Value, digest: bytes | None) -> None:
        """Remember the content of a new value."""
        if digest is not None:
            self._digests[value] = digest

    def check_untouched(self, value: Value) -> None:
        """Raise if a resident value was changed in place. A source may be changed back; a result should be evicted."""
        payload = value.payload
        known = self._digests.get(value)
        if payload is EVICTED or known is None or fingerprint(payload) == known:
            return
        whose = "a source" if value.operation is None else f"the result of {value.operation.name}"
        where = "" if value.operation is None else f" (created at {value.operation.created})"
        raise ImpureError(
            f"{whose}{where} was changed in place after it was stored; work on a copy of what get() returns, "
            "and let functions leave their arguments alone"
        )

    def check_plain(self, operation: Operation) -> None:
        """Before a run: note what plain arguments hold, or raise if they hold something else than at the first run."""
        for name, part in changeable(operation):
            if not operation.runs:
                part.digest = fingerprint(part.value)
            elif part.digest is not None and fingerprint(part.again()) != part.digest:
                raise ImpureError(f"{name} of {operation.name} (created at {operation.created}) {changed(part.value)}")

    def check_repeated(self, operation: Operation, value: Value, digest: bytes | None) -> None:
        """Raise if a repeated run gave another result than the first."""
        known = self._digests.get(value)
        if known is not None and digest != known:
            raise ImpureError(
                f"the second run of {operation.name} (created at {operation.created}) gave another result than the "
                "first; make it depend on nothing but its arguments (pass seeds and times as arguments), or detach() "
                "its result"
            )

    def forget(self, value: Value) -> None:
        self._digests.pop(value, None)
