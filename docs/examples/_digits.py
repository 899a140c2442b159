"""The handwritten digits that come with scikit-learn: 64 pixels each."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

UNSEEN: Final = 360
"""The first so many are for examination alone."""


def load() -> tuple[Any, Any]:
    """In random order: images (1797, 64) from 0 to 1, and the digits that they show, (1797,)."""
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    return (images[order] / 16).astype(np.float32), digits[order].astype(np.int32)
