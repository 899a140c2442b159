"""Pillow for recompute: images by their pixels. Does not import Pillow."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any, Final

import recompute as rc

_PIXEL: Final = {"1": 1, "L": 1, "P": 1}
"""Bytes of a pixel in memory, by mode; two for `I;16` and the like, four for all others, also where there are three
bands."""


class PillowAdapter(rc.adapters.Adapter):
    """Images. An opened image counts the pixels that it will read when they are first needed."""

    name = "pillow"

    def serves(self, cls: type) -> bool:
        """Images of all formats; a font or a path is a plain object."""
        module = sys.modules.get("PIL.Image")
        return module is not None and issubclass(cls, module.Image)

    def nbytes(self, value: Any) -> int:
        """Pixels, each line rounded up to four bytes, and what `info` holds."""
        mode: str = value.mode
        width, height = map(int, value.size)
        line = width * (2 if mode.startswith("I;") else _PIXEL.get(mode, 4))
        return height * (line + -line % 4) + super().nbytes(value.info)

    def signature(self, value: Any) -> Hashable:
        """Type, mode and size."""
        return (type(value), value.mode, value.size)

    def fingerprint(self, value: Any) -> bytes | None:
        """A digest of mode, size, palette, `info` and pixels, which are read if they have not been yet."""
        cls = type(value)
        content = value.tobytes()
        head = [f"{cls.__module__}.{cls.__qualname__}", value.mode, value.size]
        return super().fingerprint([*head, value.getpalette(), value.info, content])


adapter: Final = PillowAdapter()
