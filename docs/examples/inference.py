"""Pictures through a network with skip connections; its outputs are asked for in any order, within a memory budget.

The network denoises: multi-scale DCT denoising (Yu and Sapiro, IPOL 2011; Pierazzo, Morel and Facciolo, IPOL 2017),
which has the shape of a U-Net. The encoder halves a picture three times, and at each scale 25 filters look at what the
halving has lost. What exceeds the noise goes over a skip connection to the decoder. So nothing needs to be trained, and
every feature map can be looked at: edges, texture, the picture at each scale, a segmentation. All of them together are
much larger than the pictures. `forward` is NumPy code: it runs on plain arrays, and on arrays of `recompute`.

    python docs/examples/inference.py --table --picture inference.png
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from hashlib import blake2b
from importlib import import_module
from operator import add
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import recompute as rc
from _asking import Asked, answers, chart, over, shuffled, timed
from _budgets import compare, parser, table, tracing
from _report import machine, show, write
from recompute.events import Event
from recompute.pictures import save
from recompute.policies import PolicyName

Array = Any
"""Of NumPy, of CuPy, or wrapped by `rc.array`: the network does not know."""

NAMES: Final = ("china", "flower")
LEVELS: Final = 3
SIZE: Final = 5  # of a filter; there are SIZE * SIZE
NOISE: Final = 25 / 255  # standard deviation of what is added to the pictures, which range from 0 to 1
STRENGTH: Final = 2.7  # standard deviations of the noise that a coefficient must exceed
SEGMENTS: Final = 6
BUDGETS: Final = (0.75, 0.5, 0.35, 0.25, 0.2, 0.15)


class Weights(NamedTuple):
    """What the network knows."""

    colours: Array
    """(3, 3): from red, green and blue to brightness and two differences; orthonormal."""
    filters: Array
    """(SIZE, SIZE, SIZE * SIZE): the products of cosines, orthonormal."""
    thresholds: tuple[Array, ...]
    """For each level (SIZE * SIZE,): what the noise does not exceed in the response to each filter."""
    mix: Array
    """(6, SEGMENTS): from the features of a place to the score of each segment."""
    offsets: Array
    """(SEGMENTS,): added to the scores."""


# The network


def forward(weights: Weights, picture: Array) -> dict[str, Array]:
    """All that the network can be asked for, by name. `picture`: (height, width, 3), multiples of 8.

    In the names, level 0 is that of the picture, and each further one has half its height and width.
    """
    outputs: dict[str, Array] = {}
    decoded: list[list[Array]] = [[] for _ in range(LEVELS)]
    for number, plane in enumerate(split(weights, picture)):
        skipped = []
        for level in range(LEVELS):
            small = halve(plane)
            features = convolve(plane - double(small), weights.filters)
            details = np.where(np.abs(features) > weights.thresholds[level], features, 0)
            outputs[f"features {level}.{number}"] = features
            outputs[f"details {level}.{number}"] = details
            skipped.append(details)
            plane = small
        for level in reversed(range(LEVELS)):
            plane = double(plane) + transposed_convolve(skipped[level], weights.filters)
            decoded[level].append(plane)
    for level in range(LEVELS):
        outputs[f"denoised {level}"] = np.tensordot(np.stack(decoded[level]), weights.colours, (0, 0))
        bright = inner(outputs[f"details {level}.0"])
        outputs[f"edges {level}"] = np.hypot(bright[:, :, 1], bright[:, :, SIZE])  # the two slowest cosines
        outputs[f"texture {level}"] = np.sqrt(np.einsum("ijk,ijk->ij", bright, bright))
    fine, middle, coarse = [outputs[f"texture {level}"] for level in range(LEVELS)]
    places = np.stack([*decoded[1], *map(blur, (halve(fine), middle, double(coarse)))], -1)
    outputs["segments"] = np.argmax(np.tensordot(places, weights.mix, 1) + weights.offsets, -1)
    outputs["places"] = places
    return outputs


def split(weights: Weights, picture: Array) -> list[Array]:
    """The planes of brightness and colour, (height, width) each."""
    planes = np.tensordot(weights.colours, picture, (1, 2))
    return [planes[number] for number in range(3)]


def convolve(plane: Array, filters: Array) -> Array:
    """The response of each filter wherever it touches the plane: (height + SIZE - 1, width + SIZE - 1, filters)."""
    wide = np.pad(plane, SIZE - 1, mode="symmetric")
    return np.tensordot(np.lib.stride_tricks.sliding_window_view(wide, (SIZE, SIZE)), filters, 2)


def transposed_convolve(channels: Array, filters: Array) -> Array:
    """The mean of what all windows say about a pixel: undoes `convolve`."""
    height, width = (length - SIZE + 1 for length in channels.shape[:2])
    windows = np.tensordot(channels, filters, (2, 2))
    last = SIZE - 1
    rows = reduce(add, [windows[last - i : last - i + height, :, i] for i in range(SIZE)])
    return reduce(add, [rows[:, last - i : last - i + width, i] for i in range(SIZE)]) / SIZE**2


def inner(channels: Array) -> Array:
    """Of the windows those around the pixels of the plane."""
    edge = SIZE // 2
    return channels[edge:-edge, edge:-edge]


def halve(plane: Array) -> Array:
    """Means of two by two pixels."""
    height, width = plane.shape
    return plane.reshape(height // 2, 2, width // 2, 2).mean((1, 3))


def double(plane: Array) -> Array:
    """Four pixels for each, interpolated linearly."""
    for axis in (0, 1):
        rows = np.moveaxis(np.repeat(plane, 2, axis), axis, 0)
        rows = np.pad(rows, ((1, 1), (0, 0)), mode="edge")
        plane = np.moveaxis((rows[:-2] + 2 * rows[1:-1] + rows[2:]) / 4, 0, axis)
    return plane


def blur(plane: Array) -> Array:
    """Only what two halvings leave."""
    return double(double(halve(halve(plane))))


# What it learns, without being trained


def cosines(size: int) -> Array:
    """(frequency, place): the orthonormal cosine transform."""
    at = np.arange(size)
    waves = np.cos(np.pi * (at + 0.5) * at[:, None] / size) * np.sqrt(2 / size)
    waves[0] /= np.sqrt(2)
    return waves


def learn(pictures: Sequence[Array]) -> Weights:
    """The filters are cosines, the thresholds are how the network responds to noise, the segments are clusters."""
    from sklearn.cluster import KMeans

    waves = cosines(SIZE)
    filters = np.einsum("ai,bj->ijab", waves, waves).reshape(SIZE, SIZE, SIZE**2).astype(np.float32)
    nothing = (np.zeros(SIZE**2, np.float32),) * LEVELS
    blank = np.zeros((6, SEGMENTS), np.float32)
    weights = Weights(cosines(3).astype(np.float32), filters, nothing, blank, blank[0])

    random = np.random.default_rng(0)
    found = forward(weights, random.normal(0, NOISE, (256, 256, 3)).astype(np.float32))
    thresholds = [STRENGTH * found[f"features {level}.0"].std((0, 1)) for level in range(LEVELS)]
    weights = weights._replace(thresholds=tuple(thresholds))

    places = np.concatenate([forward(weights, picture)["places"].reshape(-1, 6) for picture in pictures])
    scale = places.std(0)
    some = places[random.choice(len(places), min(4000, len(places)), replace=False)] / scale
    centres = KMeans(SEGMENTS, n_init=4, random_state=0).fit(some).cluster_centers_.astype(np.float32)
    return weights._replace(mix=(2 * centres / scale).T.copy(), offsets=-(centres**2).sum(1))


def load(crop: int | None = None) -> list[Array]:
    """The photographs that come with scikit-learn: (height, width, 3), from 0 to 1; `crop`: the middle alone."""
    from sklearn.datasets import load_sample_images

    pictures = []
    for picture in load_sample_images().images:
        sides = [min(crop or length, length) // 8 * 8 for length in picture.shape[:2]]
        top, left = [(length - side) // 2 for length, side in zip(picture.shape, sides, strict=False)]
        pictures.append(picture[top : top + sides[0], left : left + sides[1]].astype(np.float32) / 255)
    return pictures


def spoil(pictures: Sequence[Array]) -> list[Array]:
    """With noise."""
    random = np.random.default_rng(1)
    return [(picture + random.normal(0, NOISE, picture.shape)).astype(np.float32) for picture in pictures]


def decibels(picture: Array, truth: Array) -> float:
    """Peak signal to noise ratio."""
    return float(-10 * np.log10(np.mean((np.clip(picture, 0, 1) - truth) ** 2)))


# Asking


def make(weights: Weights, pictures: Sequence[Array]) -> dict[str, Array]:
    """All outputs for all pictures, by name."""
    found = zip(NAMES, [forward(weights, picture) for picture in pictures], strict=True)
    return {f"{name} {output}": array for name, outputs in found for output, array in outputs.items()}


def ask(outputs: dict[str, Array], names: Sequence[str] = ()) -> dict[str, str]:
    """A digest of each output, asked for in this order; () is a random one. All are kept for whoever asks again."""
    return {name: digest(plain(outputs[name])) for name in names or shuffled(outputs)}


def plain(array: Array) -> Any:
    """As a NumPy array: `get` takes the wrapper off, and then an array from a GPU."""
    while hasattr(array, "get"):
        array = array.get()
    return array


def digest(array: Any) -> str:
    return blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Run(Asked):
    """What one way of running it took."""

    traced: int
    """The most that was allocated at once, by tracemalloc: temporary arrays and recipes included."""


def run(
    weights: Weights, pictures: Sequence[Array], budget: int | None = None, policy: PolicyName = "needed",
    events: list[Event] | None = None, *, repeats: int = 1,
) -> Run:  # fmt: skip
    """With wrapped arrays: for the time, then once more (which is slower) for the memory, the bits and the events."""

    def wrapped() -> partial[dict[str, Array]]:
        return partial(make, *rc.array((weights, list(pictures))))

    seconds = []
    for _ in range(repeats):
        with rc.Cache(budget, policy=policy):
            seconds.append(timed(wrapped(), plain))
    gc.collect()
    with rc.Cache(budget, policy=policy) as cache, tracing() as traced:
        if events is not None:
            cache.subscribe(events.append)
        found = answers(cache, wrapped(), ask)
    return Run(budget=budget, policy=policy, seconds=min(seconds), traced=traced[0], **found)


def run_plain(weights: Weights, pictures: Sequence[Array], *, repeats: int = 1) -> Run:
    """The same without the wrapper."""
    seconds = min(timed(partial(make, weights, pictures), plain) for _ in range(repeats))
    gc.collect()
    with tracing() as traced:
        digests = ask(make(weights, pictures))
    return Run(seconds=seconds, traced=traced[0], digests=digests)


# The script


def draw(pictures: Sequence[Array], outputs: Sequence[dict[str, Any]], below: Any, path: str | Path) -> Path:
    """For each picture what went in and some of what came out, over the residency chart."""
    columns = ("with noise", "denoised 0", "edges 0", "edges 1", "segments")
    figure, above = over(below, 3.1, 7.3)
    panels = above.subplots(len(pictures), len(columns), squeeze=False)
    for number, (row, picture, found) in enumerate(zip(panels, pictures, outputs, strict=True)):
        for axes, name in zip(row, columns, strict=True):
            shown = picture if name == "with noise" else found[name]
            if name.startswith("edges"):
                axes.imshow(-np.minimum(shown, np.quantile(shown, 0.98)), cmap="gray")
            elif name == "segments":
                axes.imshow(shown, cmap="Set2", interpolation="nearest")
            else:
                axes.imshow(np.clip(shown, 0, 1))
            axes.axis("off")
            if not number:
                axes.set_title(name, fontsize="medium")
    return save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser("Feature maps of pictures, asked for in any order, within a budget.", share=0.25, repeats=3)
    add = asked.add_argument
    add("--crop", type=int, metavar="N", help="use only N by N pixels of each picture, at least 32")
    add("--library", choices=["numpy", "cupy"], default="numpy", help="the array library; default %(default)s")
    options = asked.parse_args(arguments)
    if options.crop is not None and options.crop < 32:
        asked.error("a crop has at least 32 pixels a side")
    truth = load(options.crop)
    pictures = spoil(truth)
    weights = learn(pictures)
    outputs = [forward(weights, picture) for picture in pictures]
    for name, picture, found, true in zip(NAMES, pictures, outputs, truth, strict=True):
        levels = decibels(picture, true), decibels(found["denoised 0"], true)
        height, width = picture.shape[:2]
        print(f"{name:<8} {height} x {width} pixels, {levels[0]:.1f} dB with noise, {levels[1]:.1f} dB denoised")
    shown = [{name: output[name] for name in ("denoised 0", "edges 0", "edges 1", "segments")} for output in outputs]
    del outputs

    xp = import_module(options.library)
    weights = Weights(
        xp.asarray(weights.colours),
        xp.asarray(weights.filters),
        tuple(xp.asarray(threshold) for threshold in weights.thresholds),
        xp.asarray(weights.mix),
        xp.asarray(weights.offsets),
    )
    seen = [xp.asarray(picture) for picture in pictures]
    events: list[Event] = []
    plain_arrays = partial(run_plain, weights, seen, repeats=options.repeats)
    wrapped = partial(run, weights, seen, repeats=options.repeats)
    runs = compare(plain_arrays, wrapped, options.budget, BUDGETS if options.table else (), events=events)
    free = runs[1]
    same = [run.digests == free.digests for run in runs]
    print(f"{len(free.digests)} outputs, made by {free.operations:,} operations, asked for in random order")
    print(table(runs, [run.traced for run in runs], same))
    if options.json:
        pixels = [picture.shape[:2] for picture in pictures]
        write({"machine": machine("numpy"), "pixels": pixels, "runs": [asdict(run) for run in runs]}, options.json)
    if options.picture and events:
        below = partial(chart, runs, events, "Feature maps", options.budget, least=0.01)
        show(lambda: draw(pictures, shown, below(), options.picture))
    return 0 if len(runs) > 2 and all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
