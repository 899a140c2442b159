"""How long a transfer takes: a latency and a bandwidth, measured from transfers and smoothed."""

from __future__ import annotations

from typing import Final

_SMALL: Final = 1 << 16
"""Bytes: smaller transfers tell the latency, larger ones the bandwidth."""

_NEW: Final = 0.2
"""The weight of the newest transfer."""


class Link:
    """Seconds = latency + bytes / bandwidth."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        self.latency = latency
        """Seconds."""
        self.bandwidth = bandwidth
        """Bytes a second: expected, until there was a transfer."""
        self.transfers = 0
        self.nbytes = 0
        self.time = 0.0
        """Seconds of all transfers."""

    def seconds(self, nbytes: int) -> float:
        """How long it takes to move so many bytes, as far as is known."""
        return self.latency + nbytes / self.bandwidth

    def learn(self, nbytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        self.transfers += 1
        self.nbytes += nbytes
        self.time += seconds
        if seconds <= 0:
            return
        if nbytes < _SMALL:
            self.latency += _NEW * (seconds - self.latency)
        else:
            pace = max(seconds - self.latency, seconds / 2) / nbytes
            self.bandwidth = 1 / (pace * _NEW + (1 - _NEW) / self.bandwidth)

    def __repr__(self) -> str:
        return f"<link of {self.bandwidth / 1e6:.4g} MB/s, {1e3 * self.latency:.3g} ms>"
