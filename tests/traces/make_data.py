"""Makes the traces in tests/traces/data: `python tests/traces/make_data.py`, with the adapters on the path.

`letters.jsonl.gz` is a recorded run of the demo's model on a short text, within half of its memory. `training.log` is a
training step in the published format, written by hand: a chain of layers, forwards and backwards, with a view, a
gradient that is added up in place, and the release of all but the updated weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parent / "data"
LAYERS = 24


def letters(path: Path) -> None:
    """Two iterations over 4,000 letters in 20 blocks."""
    import numpy as np

    import recompute as rc
    import recompute_numpy
    from recompute_demos.letters import encode, fit, random_model, read

    rc.adapters.register(np.ndarray, recompute_numpy.adapter)
    text = encode(read()[:4_000])
    with rc.Cache("35 kB", policy="dtr-eq", trace=path):
        fit(text, random_model(), iterations=2, blocks=20)


def training() -> Iterator[dict[str, object]]:
    """The lines of one training step."""

    def constant(name: str, size: int) -> Iterator[dict[str, object]]:
        yield {"INSTRUCTION": "CONSTANT", "NAME": name}
        yield {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(size)}

    def call(
        function: str, arguments: list[str], results: list[str], size: int, time: int, alias: int = -1
    ) -> Iterator[dict[str, object]]:
        yield {"INSTRUCTION": "CALL", "NAME": function, "ARGS": arguments, "RESULT": results, "TIME": str(time)}
        for result in results:
            yield {"INSTRUCTION": "MEMORY", "NAME": result, "MEMORY": str(0 if alias >= 0 else size)}
            yield {"INSTRUCTION": "ALIAS", "NAME": result, "ALIAS": str(alias)}

    def release(*names: str) -> Iterator[dict[str, object]]:
        for name in names:
            yield {"INSTRUCTION": "RELEASE", "NAME": name}

    yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
    yield from constant("a0", 4096)
    for layer in range(LAYERS):
        yield from constant(f"w{layer}", 1024)
    for layer in range(LAYERS):
        size = 4096 if layer % 3 else 8192
        yield from call("linear", [f"a{layer}", f"w{layer}"], [f"h{layer}"], size, 300 + 7 * layer)
        yield from call("relu", [f"h{layer}"], [f"r{layer}", f"m{layer}"], size, 40)
        yield from call("reshape", [f"r{layer}"], [f"a{layer + 1}"], 0, 1, alias=0)
        yield from release(f"h{layer}", f"r{layer}")
    yield from call("loss", [f"a{LAYERS}"], ["loss", "g"], 64, 20)
    yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"}
    yield from call("zeros", [], ["norm"], 8, 1)
    for layer in reversed(range(LAYERS)):
        yield from call(
            "linear_backward", ["g", f"a{layer}", f"m{layer}", f"w{layer}"], ["next", f"d{layer}"], 4096, 600
        )
        yield {"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["norm", f"d{layer}"], "MUTATE": [0], "TIME": "5"}
        yield {"INSTRUCTION": "COPY_FROM", "DST": "g", "SRC": "next"}
        yield from release("next", f"m{layer}", f"a{layer + 1}")
    for layer in range(LAYERS):
        yield from call("update", [f"w{layer}", f"d{layer}", "norm"], [f"v{layer}"], 1024, 10)
        yield from release(f"d{layer}")
    yield from release("g", "norm")


def main() -> None:
    DATA.mkdir(exist_ok=True)
    letters(DATA / "letters.jsonl.gz")
    text = "".join(json.dumps(line) + "\n" for line in training())
    (DATA / "training.log").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
