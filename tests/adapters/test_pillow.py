"""The adapter of Pillow: images take what their pixels take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute.testing import check_adapter
from recompute.testing.conformance import registered
from recompute_pillow import adapter

image = pytest.importorskip("PIL.Image", reason="the extra 'pillow' is not installed")

MODES = ("1", "L", "P", "I;16", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F")
BYTES = dict(zip(MODES, (1, 1, 1, 2, 4, 4, 4, 4, 4, 4, 4, 4), strict=True))


@pytest.fixture(scope="module", autouse=True)
def _serving() -> Iterator[None]:
    """The adapter serves its types, whether or not the package is installed."""
    with registered(adapter, image.Image):
        yield


def opened() -> Any:
    """An image whose pixels were not read yet."""
    file = BytesIO()
    image.new("RGB", (100, 50), "red").save(file, "png")
    return image.open(file)


def test_the_adapter_does_not_import_the_library() -> None:
    """Importing the package loads no Pillow."""
    code = "import recompute_pillow, sys; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_it_keeps_the_promises_of_an_adapter() -> None:
    """Images of every mode, without pixels, and from a file."""
    makers: list[Callable[[], Any]] = [lambda mode=mode: image.new(mode, (7, 5)) for mode in MODES]
    check_adapter(adapter, [*makers, lambda: image.new("L", (0, 5)), opened])
    check_adapter(adapter, [makers[1]], change=lambda value: value.putpixel((2, 3), 9))


@given(st.sampled_from(MODES), st.integers(0, 300), st.integers(0, 300))
def test_sizes_are_those_of_the_pixels(mode: str, width: int, height: int) -> None:
    """Bytes of a pixel in memory, with the filling at the end of each line."""
    value = image.new(mode, (width, height))
    assert BYTES[mode] * width * height <= rc.sizeof(value) <= (BYTES[mode] * width + 4) * height + 1_000


def test_an_image_that_was_opened_counts_what_it_will_read() -> None:
    """Pixels are read when they are first needed, and stay in the cached image."""
    value = opened()
    before = rc.sizeof(value)
    value.load()
    assert before == rc.sizeof(value) >= 4 * 100 * 50


def test_what_is_attached_is_counted() -> None:
    """A colour profile may be larger than the image."""
    value = image.new("L", (1, 1))
    value.info["icc_profile"] = bytes(1_000_000)
    assert rc.sizeof(value) > 1_000_000


def test_the_budget_holds_for_images() -> None:
    """Sixty images of 4 MB within 10 MB: the cache evicts, and each comes back."""
    with rc.Cache("10MB") as cache:
        values = [rc.ap(lambda grey: image.new("RGB", (1_000, 1_000), (grey, 0, 0)), grey) for grey in range(60)]
        assert cache.stats().evictions == 58
        assert values[3].get().getpixel((0, 0)) == (3, 0, 0)


def test_signatures_are_mode_and_size() -> None:
    """Equal ones share a signature, whatever the pixels."""
    values = [image.new("L", (3, 4)), image.new("L", (4, 3)), image.new("P", (3, 4))]
    assert adapter.signature(values[0]) == adapter.signature(image.new("L", (3, 4), 7))
    assert len({adapter.signature(value) for value in values}) == 3


def test_any_change_changes_the_digest() -> None:
    """Pixels, mode, size, palette and what is attached."""
    one = image.new("P", (4, 2))
    other = one.copy()
    other.putpalette([9, 9, 9])
    attached = one.copy()
    attached.info["dpi"] = 9
    values = [one, other, attached, image.new("P", (4, 2), 1), image.new("P", (2, 4)), image.new("L", (4, 2))]
    digests = [adapter.fingerprint(value) for value in values]
    assert None not in digests
    assert len(set(digests)) == len(values)
    assert adapter.fingerprint(one.copy()) == digests[0]
