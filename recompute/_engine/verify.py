"""Purity on demand: digests of outputs, compared when an operation runs again and before a value is used."""

from __future__ import annotations

from recompute._adapters.adapter import fingerprint
from recompute._engine.graph import EVICTED, Operation, Value
from recompute._errors import ImpureError


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
