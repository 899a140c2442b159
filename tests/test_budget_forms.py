"""The forms of a budget: each means the same wherever a budget is taken, and what is no form is one clear error."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from fractions import Fraction
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import recompute as rc
from lib.vectors import vector
from recompute._budget import Limits, bytes_or_peak, bytes_or_share, parse_budget
from recompute._cli import main
from recompute._traces.chain import chain
from recompute.planners import plan
from recompute.simulator import Job, baseline, simulate, simulate_many
from recompute.testing import check_invariants
from recompute.traces import read

UNITS = {"B": 1, "k": 10**3, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15} | {
    "Ki": 2**10, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None

SHARES = st.floats(0, 1, exclude_min=True)
WHOLES = st.integers(1, 10**15)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int | str, int]:
    """Bytes in one of their forms, and how many they are."""
    number, decimals = draw(st.integers(1, 10**6)), draw(st.integers(0, 4))
    unit = draw(st.sampled_from([None, "", *UNITS]))
    if not unit:
        return draw(st.sampled_from([number, str(number), f"{number:_}", f" {number} "])), number
    text = f"{number // 10**decimals}.{number % 10**decimals:0{decimals}}" if decimals else str(number)
    size = int(Fraction(number, 10**decimals) * UNITS[unit])
    assume(size)
    return text + draw(st.sampled_from(["", " "])) + draw(st.sampled_from([unit, unit.lower(), unit.upper()])), size


@given(sizes())
def test_bytes(given: tuple[int | str, int]) -> None:
    """An int is bytes, and so is text of digits or with a unit, exact to the byte; nothing is asked about a whole."""
    budget, size = given
    assert parse_budget(budget) == size
    assert parse_budget(budget, whole=lambda: pytest.fail("not a share")) == size
    assert rc.Cache(budget).budget == size


@given(SHARES, WHOLES)
def test_shares(share: float, whole: int) -> None:
    """A float above 0 and at most 1 is a share of the whole, rounded down, and so is its text, but never nothing."""
    size = max(1, int(Fraction(repr(share)) * whole))
    assert parse_budget(share, whole=whole) == size
    assert parse_budget(share, whole=lambda: whole) == size
    if share > 1e-90:
        assert parse_budget(repr(share), whole=whole) == size


@given(st.integers(1, 10_000), st.sampled_from(["{}%", "{} %", " {}% "]), WHOLES)
def test_percentages(hundredths: int, form: str, whole: int) -> None:
    """A percentage is the share that it says, without what floats round away."""
    text = form.format(hundredths / 100)
    assert bytes_or_share(text) == hundredths / 10_000
    assert parse_budget(text, whole=whole) == max(1, hundredths * whole // 10_000)


def test_what_a_float_would_lose() -> None:
    """29 % of 100 bytes are 29, and 1.001 kB are 1001: neither is what a product of floats is rounded down to."""
    assert parse_budget("29%", whole=100) == parse_budget(0.29, whole=100) == 29
    assert parse_budget("1.001 kB") == 1001


def test_numbers_of_array_libraries() -> None:
    """Their whole numbers are bytes, their floats are shares, their truth values are neither."""
    np = pytest.importorskip("numpy")
    for number in (np.int64(1000), np.uint8(100), np.array(1000)):
        assert parse_budget(number) == int(number)
    for share in (np.float64(0.25), np.float32(0.25), np.array(0.25)):
        assert parse_budget(share, whole=1000) == 250
    with pytest.raises(ValueError, match="share"):
        parse_budget(np.float64(1e9))
    for wrong in (np.True_, np.array([1, 2])):
        with pytest.raises(TypeError, match="bytes"):
            parse_budget(wrong)


NO_BYTES = [0, -1, -(10**30), "0", "0 MB", "0.5 B", "000"]
NO_SHARES = [0.0, -0.5, 1.5, 5e8, nan, inf, -inf, "0.0", "1.5", "1e9", "0%", "100.1%", "500%"]
NO_FORMS = ["", " ", "MB", "%", "12 parsecs", "-3MB", "-5%", "1,5 GB", "nan", "inf", "x%", "50%%", "5 5", "0x10", "½"]
NO_BUDGETS = [True, False, None, [], [5], {}, object(), b"5MB", 3j, Fraction(1, 2)]


def one_sentence(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize("wrong", [*NO_BYTES, *NO_SHARES, *NO_FORMS])
def test_what_is_no_amount(wrong: Any) -> None:
    """No byte, a float or a percentage that is no share, another text: one ValueError that names what was given."""
    with pytest.raises(ValueError, match="budget") as error:
        parse_budget(wrong, whole=1000)
    assert repr(wrong) in one_sentence(error)


@pytest.mark.parametrize("wrong", [10**400, "9" * 400, f"{'9' * 400} GB"])
def test_more_than_any_memory(wrong: Any) -> None:
    """One ValueError, without the digits."""
    with pytest.raises(ValueError, match="larger than any memory") as error:
        parse_budget(wrong)
    assert len(one_sentence(error)) < 100


@pytest.mark.parametrize("wrong", NO_SHARES)
def test_the_cure_for_a_float(wrong: Any) -> None:
    """Whoever meant bytes is told how to write them."""
    with pytest.raises(ValueError, match="int") as error:
        parse_budget(wrong, whole=1000)
    assert "512MB" in one_sentence(error)


@pytest.mark.parametrize("wrong", NO_BUDGETS)
def test_what_is_no_budget_at_all(wrong: Any) -> None:
    """Any other object is one TypeError that names the forms."""
    with pytest.raises(TypeError, match="what must be bytes") as error:
        parse_budget(wrong, whole=1000, what="what")
    assert "512MB" in one_sentence(error)


@given(st.text(max_size=12) | st.floats() | st.integers())
def test_anything_else(budget: Any) -> None:
    """Whatever is written, it is at least one byte, at most the whole if it is a share, or a ValueError."""
    try:
        number = bytes_or_share(budget)
    except ValueError:
        return
    size = parse_budget(budget, whole=1000)
    assert 1 <= size <= 1000 if isinstance(number, float) else size == number >= 1


@pytest.mark.parametrize("share", [0.5, "50%", "0.5"])
@pytest.mark.parametrize("whole", [None, lambda: None])
def test_a_share_of_nothing_known(share: Any, whole: Any) -> None:
    """Where there is no whole, the error says of what there is none, and how to write bytes."""
    with pytest.raises(ValueError, match=r"room .* share of the garage") as error:
        parse_budget(share, whole=whole, of="the garage", what="room")
    assert "512MB" in one_sentence(error)


def test_a_share_is_one_of_the_memory_of_each_device() -> None:
    """A device is asked for its memory when its limit is, and not before."""
    asked: list[str] = []

    def memory(device: str) -> int | None:
        asked.append(device)
        return {"cpu": 1000, "gpu:0": 80}.get(device)

    limits = Limits("25%", memory)
    assert limits.given == 0.25
    assert not asked
    assert (limits.of("cpu"), limits.of("gpu:0")) == (250, 20)
    with pytest.raises(ValueError, match="gpu:1"):
        limits.of("gpu:1")
    assert asked == ["cpu", "gpu:0", "gpu:1"]


def test_each_device_in_a_form_of_its_own() -> None:
    """A mapping takes every form, and what is not in it is unlimited; given back are numbers."""
    limits = Limits({"cpu": "10%", "gpu:0": "1 kB", "gpu:1": None, "gpu:2": len}, {"cpu": 500}.get)
    assert limits.given == {"cpu": 0.1, "gpu:0": 1000, "gpu:1": None, "gpu:2": len}
    devices = ("cpu", "gpu:0", "gpu:1", "gpu:2", "gpu:3")
    assert [limits.of(device) for device in devices] == [50, 1000, None, len, None]
    for wrong in ({"cpu": 1.5}, {"cpu": "much"}):
        with pytest.raises(ValueError, match="budget"):
            Limits(wrong)


def limit_here(cache: rc.Cache) -> int | None:
    with cache:
        assert rc.ap(len, "abc").get() == 3
    return next(pool.budget for pool in cache.stats().pools if pool.device == "cpu")


@pytest.mark.skipif(MACHINE is None, reason="the machine does not say how much memory it has")
@pytest.mark.parametrize("half", [0.5, "0.5", "50%"])
def test_a_share_of_the_machine(half: Any) -> None:
    """The budget of a cache may be a share of the machine's memory, and may become another one."""
    assert MACHINE is not None
    cache = rc.Cache(half)
    assert limit_here(cache) == MACHINE // 2
    assert cache.budget == 0.5
    assert "50%" in repr(cache)
    cache.budget = "25%"
    assert limit_here(cache) == MACHINE // 4


def test_a_share_of_an_unknown_device() -> None:
    """What would be made there is refused, by the name of the device; the rest goes on."""
    with rc.Cache(0.5) as cache:
        kept = rc.ap(vector, 1, 2)
        with pytest.raises(ValueError, match="gpu:0"):
            rc.ap(vector, 1, 2, device="gpu:0")
        assert kept.get() == vector(1, 2)
        check_invariants(cache, [kept])


def test_a_share_of_what_is_available() -> None:
    """`available` takes a share as text, too, and no bytes."""
    for share in (0.9, "90%", "0.9"):
        budget = rc.available(share, probe=lambda: 1000, seconds=0.0)
        assert budget.fraction == 0.9
        assert budget(0) == 900
    for wrong in ("512MB", "500%", "much", "", 0.0, 1.5):
        with pytest.raises(ValueError, match="fraction"):
            rc.available(wrong, probe=lambda: 1000)


def test_no_share_of_bytes_to_be_freed() -> None:
    """`release_memory` takes bytes in every form, and no share."""
    with rc.Cache() as cache:
        values = [rc.ap(vector, number, number) for number in range(5)]
        assert cache.release_memory("0.03 kB") == 32
        assert sum(value.resident for value in values) == 3
        with pytest.raises(ValueError, match="nbytes"):
            cache.release_memory("50%")  # type: ignore[arg-type, unused-ignore]


CHAIN = chain(40)
PEAK = sum(baseline(CHAIN).values())


@given(sizes() | st.tuples(SHARES | SHARES.map("{:.6%}".format), st.just(0)))
def test_the_same_in_a_replay(given: tuple[Any, int]) -> None:
    """A replay takes every form: bytes for each device, or a share of the peak of each by its name."""
    budget, size = given
    if size:
        assert simulate(CHAIN, {"cpu": budget}, policy="lru", peak={"cpu": PEAK}).budget_bytes == size
        run = simulate(CHAIN, budget, policy="lru", peak={"cpu": PEAK})
    else:
        try:
            size = parse_budget(budget, whole=PEAK)
        except ValueError:  # a percentage that is rounded to zero
            assume(False)
        run = simulate(CHAIN, of_peak=budget, policy="lru", peak={"cpu": PEAK})
    assert run.budget_bytes == size
    assert run.budget_ratio == pytest.approx(size / PEAK, abs=1 / PEAK)


def by_name(budget: Any) -> dict[str, Any]:
    """The argument for bytes or for a share, where something is planned."""
    return {"of_peak" if isinstance(bytes_or_share(budget), float) else "budget": budget}


@pytest.mark.parametrize("text", ["1 kB", "30", "50%", "0.75", "1.0", "100%"])
def test_the_same_in_a_plan(text: str) -> None:
    """A plan takes every form, and a share is one of the peak."""
    assert plan(CHAIN, **by_name(text), method="chen-sqrt").budget == parse_budget(text, whole=PEAK)


def test_the_same_in_many_replays() -> None:
    """Jobs may be in forms of any kind."""
    amounts: list[dict[str, Any]] = [*map(by_name, ("50%", 30, 0.75)), {"budget": {"cpu": "1 kB"}}]
    jobs = [Job(0, {**amount, "policy": "lru"}) for amount in amounts]
    found = [run.budget_bytes for run in simulate_many([CHAIN], jobs, processes=2)]
    assert found == [PEAK // 2, 30, PEAK * 3 // 4, 1000]


def chained(x: Any) -> Any:
    values = [x]
    for number in range(20):
        values.append(rc.ap(lambda payload, number=number: vector(*(n + number for n in payload.numbers)), values[-1]))
    total = values.pop()
    while values:
        total = rc.ap(
            lambda one, other: vector(*map(sum, zip(one.numbers, other.numbers, strict=True))), total, values.pop()
        )
    return total


@pytest.mark.parametrize("budget", [2000, "2 kB", 0.5, "50%", "0.5", 1.0, "100%"])
def test_the_same_in_a_planned_function(budget: Any) -> None:
    """A planned function takes every form, and a share is one of what the example needs at its peak."""
    planned = rc.planned(chained, **by_name(budget), time_limit=0.1)
    planned(vector(1, 2))
    assert planned.plan.budget == parse_budget(budget, whole=sum(baseline(planned.program).values()))


PLACES: dict[str, Callable[[Any], object]] = {
    "Cache": rc.Cache,
    "one device": lambda budget: rc.Cache({"cpu": budget}),
    "set later": lambda budget: setattr(rc.Cache(), "budget", budget),
    "planned": lambda budget: rc.planned(chained, budget),
    "simulate": lambda budget: simulate(CHAIN, budget),
    "plan": lambda budget: plan(CHAIN, budget, "chen-sqrt"),
}


@pytest.mark.parametrize("place", ["planned", "simulate", "plan"])
@pytest.mark.parametrize("share", [0.4, "0.4", "40%"])
def test_a_share_of_a_peak_has_a_name(place: str, share: Any) -> None:
    """Where something is planned or replayed, a share as the budget is an error that says how to write it."""
    with pytest.raises(ValueError, match=r"of_peak=0\.4"):
        PLACES[place](share)


@pytest.mark.parametrize("wrong", [0, 0.0, -1, -0.5, 2, 1.5, "0%", "500%", "1", True])
def test_what_is_no_share_of_a_peak(wrong: Any) -> None:
    """It is said what a share is, and not asked for bytes."""
    with pytest.raises(TypeError if wrong is True else ValueError, match=r"of_peak.*share"):
        bytes_or_peak(None, wrong)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrong", [0, 0.0, 1.5, 5e8, "5e8", "0%", "500%", "much", "", True])
def test_refused_in_every_place(place: str, wrong: Any) -> None:
    """What is no form is refused everywhere alike."""
    with pytest.raises(TypeError if wrong is True else ValueError, match="budget"):
        PLACES[place](wrong)


SCRIPT = """\
import recompute as rc
values = [rc.pure(bytes(1000))]
for n in range(20):
    values.append(rc.ap(lambda x, n: x + bytes(0 * n), values[-1], n))
total = values[0]
while values:
    total = rc.ap(lambda a, b: bytes(len(a)), total, values.pop())
print(len(total.get()))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script, its recording and its trace."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "script.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "--record", "script.py"]) == 0
    return folder


@pytest.mark.parametrize("text", ["12kB", "12 KiB", "15000", "60%", "0.6", ".75", "1.0", "100%"])
def test_the_same_on_the_command_line(
    text: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run`, `simulate` and `plan` read the same bytes as the library, of the same peak."""
    monkeypatch.chdir(recorded)
    trace = "script.recompute.jsonl.gz"
    peak = sum(json.loads(Path("script.recompute.json").read_text())["peak"].values())
    assert sum(baseline(read(trace)).values()) == peak
    size = parse_budget(text, whole=peak)
    assert main(["run", "--budget", text, "--json", "script.py"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["budget"] == size
    for command in (["simulate"], ["plan", "--method", "chen-sqrt"]):
        assert main([*command, trace, "--budget", text, "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["budget_bytes"] == size


@pytest.mark.parametrize("command", ["run", "simulate", "plan", "compare", "plot memory", "demo"])
@pytest.mark.parametrize("wrong", ["0", "0.0", "1.5", "5e8", "0%", "500%", "much"])
def test_refused_on_the_command_line(
    command: str, wrong: str, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command refuses what is no form in one line, with status 2, before it does anything."""
    monkeypatch.chdir(recorded)
    if command in ("compare", "plot memory"):
        pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    budget = ["--budget", wrong]
    trace = [] if command == "demo" else ["script.recompute.jsonl.gz"]
    assert main(["run", *budget, "script.py"] if command == "run" else [*command.split(), *trace, *budget]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert "budget" in line
    assert repr(wrong) in line


@given(sizes())
def test_the_same_in_torch(given: tuple[Any, int]) -> None:
    """A budget block takes bytes in every form."""
    rt = pytest.importorskip("recompute_torch", exc_type=ImportError)
    assert rt.budget(given[0]).budget == given[1]
    assert rt.budget({"cpu": given[0]}).budget == {"cpu": given[1]}


@pytest.mark.skipif(MACHINE is None, reason="the machine does not say how much memory it has")
@pytest.mark.parametrize("half", [0.5, "0.5", "50%"])
def test_shares_in_torch(half: Any) -> None:
    """A share in a budget block is one of each device's memory."""
    assert MACHINE is not None
    rt = pytest.importorskip("recompute_torch", exc_type=ImportError)
    for budget in (half, {"cpu": half}):
        assert limit_here(rt.budget(budget, native=False).cache) == MACHINE // 2
    for wrong in (1.5, 0.0, "500%", "much", 0):
        with pytest.raises(ValueError, match="budget"):
            rt.budget(wrong)


@given(sizes() | SHARES.map(lambda share: (share, 0)))
def test_the_same_in_jax(given: tuple[Any, int]) -> None:
    """`planned` takes every form of bytes, and of a share as `of_peak`: what that is becomes known by compiling."""
    rj = pytest.importorskip("recompute_jax", exc_type=ImportError)
    budget, size = given
    asked = rj.planned(abs, budget) if size else rj.planned(abs, of_peak=budget)
    assert repr(asked) == f"<abs planned within {f'{size:,} bytes' if size else f'{budget:g} of the peak'}>"


def test_a_budget_of_what_is_planned_is_bytes_or_a_share_of_the_peak() -> None:
    assert bytes_or_peak("512MB", None) == 512_000_000
    assert bytes_or_peak(100, None) == 100
    assert (bytes_or_peak(None, 0.5), bytes_or_peak(None, "40%"), bytes_or_peak(None, 1)) == (0.5, 0.4, 1.0)


@pytest.mark.parametrize(
    ("budget", "of_peak", "error", "cure"),
    [
        (None, None, TypeError, "of_peak=0.5"),
        (100, 0.5, TypeError, "of_peak=0.5"),
        (0.5, None, ValueError, "of_peak=0.5"),
        ("40%", None, ValueError, "of_peak=0.4"),
        (None, "512MB", ValueError, "bytes are the budget"),
        (None, 100, ValueError, "bytes are the budget"),
        (None, 1.5, ValueError, "above 0 and at most 1"),
        (None, [], TypeError, "of_peak must be"),
    ],
)
def test_a_share_and_bytes_are_not_mixed_up(budget: Any, of_peak: Any, error: type[Exception], cure: str) -> None:
    with pytest.raises(error, match=re.escape(cure)):
        bytes_or_peak(budget, of_peak)
