"""A deep convolutional network learns handwritten digits in a fraction of the memory, and becomes the same network.

The model, its derivatives (HIPS autograd) and Adam are ordinary array code: they run on plain arrays, and on
recomputable ones. What the way back needs of the forward pass is then the cache's business, and the parameters are
the same, bit for bit. The script trains within a budget; measures memory and time for several (`--table`); and finds
how large a batch and how deep a network fit into a fixed one, with the cache and without (`--largest`). CuPy's arrays
take the same path (`--library cupy`).

The model is in `_training_network.py`, the training itself in `_training_steps.py`, the measurements in
`_training_memory.py`; what is left here is the command line.

    python docs/examples/training.py --budget 0.2
    python docs/examples/training.py --table --largest --picture training.png --json training.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import recompute as rc
from _report import aligned, into_files, machine, progress, show, write
from _training_memory import budget_for, budget_table, draw, enlarge, megabytes, size_table, tabulate, unlimited
from _training_network import PATCHED, Digits, load
from _training_steps import Settings, accuracy, train

SHARES: Final = (1.0, 0.75, 0.5, 0.3, 0.2)
FACTORS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)


def confine(extra: int) -> None:
    """Let the system refuse this process more address space than it has now, and `extra` bytes. Linux."""
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a network on handwritten digits within a memory budget.")
    add = parser.add_argument
    add("--budget", default="0.5", help="bytes (12MB), or a share of the activations (0.3); default %(default)s")
    add("--plain", action="store_true", help="plain arrays, no cache")
    add("--epochs", type=int, default=10, metavar="N", help="passes through the digits; default %(default)s")
    add("--batch", type=int, default=128, metavar="N", help="images in a minibatch; default %(default)s")
    add("--depth", type=int, default=32, metavar="N", help="layers; default %(default)s")
    add("--channels", type=int, default=16, metavar="N", help="channels of each layer; default %(default)s")
    add("--library", choices=["numpy", "cupy"], default="numpy", help="the array library; default %(default)s")
    add(
        "--confine",
        type=bytes_of,
        metavar="BYTES",
        help="let the system enforce the budget, by limiting the address space",
    )
    add("--table", action="store_true", help="memory and time for several budgets")
    add(
        "--budgets",
        type=float,
        nargs="+",
        default=[*SHARES],
        metavar="SHARE",
        help="shares of the activations, for --table",
    )
    add("--largest", action="store_true", help="the largest batch, and the deepest network, in the same memory")
    add("--factors", type=float, nargs="+", default=[*FACTORS], metavar="X", help="multiples to try for --largest")
    return into_files(parser, "the memory over a step")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if min(options.epochs, options.batch, options.depth, options.channels) < 1:
        parser.error("epochs, batch, depth and channels are at least 1")
    settings = Settings(
        options.depth, options.channels, options.batch, library=options.library, foresight=not options.confine
    )
    learn, examine = load(settings.xp)
    settings = replace(settings, steps=max(1, options.epochs * len(learn.images) // options.batch))

    cache = None
    if not options.plain:
        try:
            cache = settings.cache(within(options.budget, learn, settings))
        except ValueError as error:
            parser.error(str(error))
    if options.confine:
        train(learn, replace(settings, depth=2, batch=PATCHED, steps=1))  # BLAS takes buffers of its own at first use
        confine(options.confine)
    try:
        with progress(settings.steps, lines=10) as advance:
            run = train(learn, settings, cache, told=lambda step, loss, cache: advance(1, words(loss, cache)))
    except MemoryError as error:  # BudgetError is one
        print(f"it does not fit: {error}", file=sys.stderr)
        return 1
    found: dict[str, Any] = {
        "machine": machine("numpy", "autograd"),
        "settings": asdict(settings),
        "training": {
            "parameters": sum(parameter.size for parameter in run.parameters),
            "loss": run.losses[-1],
            "accuracy": accuracy(run.parameters, examine),
            "digest": run.digest,
            "milliseconds": 1000 * run.step_seconds,
            "budget": None if cache is None else cache.budget,
            "peak": None if run.stats is None else run.stats.peak,
            "overhead": None if run.stats is None else run.stats.overhead,
        },
    }
    for line in report(found["training"], settings):
        print(line)

    if options.table:
        with progress(None) as advance:
            found["table"] = tabulate(learn, settings, options.budgets, partial(advance, 1))
        print(f"\n{settings.depth} layers, {settings.batch} images")
        print(aligned(*budget_table(found["table"], settings)))
        print("parameters:", "equal to the last bit" if found["table"]["equal"] else "NOT EQUAL")
    if options.largest:
        with progress(None) as advance:
            tell = partial(advance, 1)
            found["largest"] = [enlarge(learn, settings, name, options.factors, tell) for name in ("batch", "depth")]
        for enlarged in found["largest"]:
            print(f"\n{enlarged['setting']} within {megabytes(enlarged['budget'])}")
            print(aligned(*size_table(enlarged)))
    if options.json:
        write(found, options.json)
    if options.picture:
        show(lambda: draw(learn, settings, (0.5, 0.2), options.picture))
    rows = [row for enlarged in found.get("largest", []) for row in enlarged["rows"]]
    equal = all(measured.get("equal", True) for measured in [found.get("table", {}), *rows])
    return 0 if equal else 1


def within(budget: str, digits: Digits, settings: Settings) -> int:
    """Bytes, of a budget as it is written. Raises ValueError if it makes no sense."""
    number = rc.Cache(budget).budget  # read as a cache does
    return budget_for(number, unlimited(digits, settings)) if isinstance(number, float) else int(number)


def bytes_of(size: str) -> int:
    """Of text such as 12MB, as a cache reads it. Raises ValueError, for a share too."""
    number = rc.Cache(size).budget
    if isinstance(number, float):
        raise ValueError(f"{size!r} is a share; give bytes, such as 12MB")
    return int(number)


def words(loss: float, cache: rc.Cache | None) -> str:
    """About a step."""
    if cache is None:
        return f"loss {loss:.3f}"
    most = "" if cache.budget is None else f" of {megabytes(cache.budget)}"
    return f"loss {loss:.3f}, memory {megabytes(cache.stats().peak)}{most}"


def report(found: dict[str, Any], settings: Settings) -> list[str]:
    """What a training came to, in words."""
    lines = [
        f"network      {settings.depth} layers, {found['parameters']:,} parameters, {settings.batch} images a step",
        f"training     {settings.steps} steps of {found['milliseconds']:.0f} ms, loss {found['loss']:.3f}",
        f"recognised   {found['accuracy']:.1%} of digits never seen before",
        f"parameters   {found['digest']}",
    ]
    if found["budget"] is not None:
        lines.append(f"memory       {megabytes(found['peak'])} within {megabytes(found['budget'])}")
        lines.append(f"compute      x {found['overhead']:.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
