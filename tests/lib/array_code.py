"""Lines of array code with blanks, from which array programs are made.

In a template `a`, `b`, `c`, `d` are operands, `A`, `B`, `C`, `D` the same ones where the line changes them, and `xp` is
the library. `new` makes a plain array, `plain` says that what it is given must not be wrapped. A blank `{axis}`
stands for one of the texts of that name, which may have blanks of their own.

What NumPy 2.4 itself does not do twice alike, or not without harm, is left out: `square` of complex scalars (whose last
bit depends on where they lie), `accumulate` and `reduceat` into an `out` of another shape (unchecked), `take` of far
indices with mode "wrap" (takes as many steps), transforms of nothing (memory as it was found), comparisons with numbers
beyond the dtype where a mask is given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from lib.array_blanks import BLANKS
from lib.array_changes import CHANGES, UPDATES
from lib.array_functions import FUNCTIONS
from lib.array_syntax import COERCIONS, SYNTAX

LINES: Final[dict[str, tuple[str, ...]]] = SYNTAX | FUNCTIONS | COERCIONS | CHANGES
"""Part of the language -> templates."""


def lines_for(*, writable: bool) -> dict[str, tuple[str, ...]]:
    """The parts of the language for arrays that can be written to, or for those that never can.

    For the latter without assignments, methods that change an array, `out` and `flat`, and with `at`. Also without
    functions as arguments: a library that compiles them keeps them, and with them the arrays that their scope holds.
    """
    if writable:
        return LINES
    kept = {part: code for part, code in LINES.items() if part not in ("assignment", "changing", "out")}
    odd = re.compile(r"\.flat\b|lambda|sorted")
    return {part: tuple(line for line in code if not odd.search(line)) for part, code in kept.items()} | UPDATES


_BLANK: Final = re.compile(r"{([a-z ]+)}")


def fill(template: str, choose: Callable[[Sequence[str]], str]) -> str:
    """The template with one of the texts for each blank, picked by `choose`."""
    while (blank := _BLANK.search(template)) is not None and blank[1] in BLANKS:
        template = template[: blank.start()] + choose(BLANKS[blank[1]]) + template[blank.end() :]
    return template
