"""What checkers refuse: each line marked `# wrong`, and no other."""

from __future__ import annotations

import recompute as rc


def half(number: int) -> float:
    return number / 2


def split(number: int) -> tuple[int, str]:
    return number, str(number)


@rc.lift
def double(number: int) -> int:
    return 2 * number


text = rc.pure("abc")

length: str = rc.ap(len, text).get()  # wrong
held: int = text.get()  # wrong
narrow: rc.Recomputable[bool] = rc.pure(3)  # wrong
shout: rc.Recomputable[int] = text.map(str.upper)  # wrong
through: str = rc.ap(rc.pure(half), 3).get()  # wrong
applied: str = rc.pure(half).apply(3).get()  # wrong
doubled: str = double(3).get()  # wrong
one, two, three = rc.ap(split, 3, nout=2)  # wrong
both: rc.Recomputable[int] = rc.ap(split, 3, nout=2)  # wrong
pair: tuple[str, str] = rc.sequence((text, rc.pure(3))).get()  # wrong
words: list[str] = rc.traverse(double, [1]).get()  # wrong

rc.ap(3, text)  # wrong
rc.ap(text, 3)  # wrong
rc.lift(3)  # wrong
text.apply(3)  # wrong
text.map(half)  # wrong
text.gett()  # wrong
double(3).get().upper()  # wrong
rc.sequence([3])  # wrong
rc.stage(double, of_peak=0.5)(3).upper()  # wrong
rc.Cache(policy="dtrr")  # wrong
rc.Cache(release="lazy")  # wrong

print(rc.simulater)  # wrong
print(rc.simulator.simulat)  # wrong
rc.pur(3)  # wrong
