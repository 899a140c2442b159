"""A disk may fill up, vanish, or lie: that costs time, never a result; and nothing stays on it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from given_tiers import FullDisk, GivenTier
from hypothesis import given
from hypothesis import strategies as st

import recompute as rc
from recompute._tiers.disk import Pace
from recompute.events import Evicted, Fetched, Moved
from recompute.testing import EventLog, ManualClock, check_invariants

SIZE = 100_000


def dear(number: int) -> bytes:
    """Of a size that is not kept in the process."""
    return bytes([number]) * SIZE


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[rc.Cache]:
    """Of room for three values, above a disk to which everything moves."""
    with rc.Cache(350_000, tiers=[rc.Disk(folder=tmp_path, always=True)]) as cache:
        yield cache


def files(place: Path) -> list[Path]:
    """The copies, the oldest first."""
    found = [path for path in place.glob("recompute-*/*") if path.name != "lock"]
    return sorted(found, key=lambda path: int(path.name.partition("-")[0]))


def moved(number: int) -> rc.Recomputable[bytes]:
    """A result that lies on the disk."""
    value = rc.ap(dear, number)
    assert value.evict()
    assert not value.resident
    return value


def source(number: int) -> rc.Recomputable[bytes]:
    """A source that lies there."""
    value = rc.pure(dear(number))
    assert value.evict()
    return value


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[SIZE // 2] ^= 1
    path.write_bytes(content)


FAULTS: list[Callable[[Path], Any]] = [truncate, flip, Path.unlink, lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("fault", FAULTS, ids=["truncated", "flipped", "removed", "empty"])
def test_a_damaged_file_of_a_result(fault: Callable[[Path], Any], cache: rc.Cache, tmp_path: Path) -> None:
    """The value is computed again, with one warning however often; all books are right."""
    values = [moved(1), moved(2)]
    for path in files(tmp_path):
        fault(path)
    with pytest.warns(RuntimeWarning, match="could not be read from disk, so it is computed again") as told:
        assert [value.get() for value in values] == [dear(1), dear(2)]
    assert len(told) == 1
    assert cache.stats().rematerializations == 2
    check_invariants(cache, values)


@pytest.mark.parametrize("fault", FAULTS, ids=["truncated", "flipped", "removed", "empty"])
def test_a_damaged_file_of_a_source(fault: Callable[[Path], Any], cache: rc.Cache, tmp_path: Path) -> None:
    """The error names the file, each time; everything else is as before."""
    lost, other, result = source(1), source(2), moved(3)
    path = files(tmp_path)[0]
    fault(path)
    for _ in range(2):
        with pytest.raises(OSError, match=path.name):
            lost.get()
        check_invariants(cache, [lost, other, result])
    assert other.get() == dear(2)
    assert result.get() == dear(3)
    assert cache.stats().rematerializations == 0


def test_a_folder_that_has_vanished(cache: rc.Cache, tmp_path: Path) -> None:
    """What lay there is computed again; what moves from then on lies in a new folder."""
    value = moved(1)
    for path in tmp_path.iterdir():
        path.rename(tmp_path.parent / "elsewhere")
    other = moved(2)
    with pytest.warns(RuntimeWarning, match="read from disk"):
        assert value.get() == dear(1)
    assert other.get() == dear(2)
    assert cache.stats().tiers[0].fetches == 1
    check_invariants(cache, [value, other])


def test_a_fetch_without_room_is_named() -> None:
    """The error says whose value it is: a source, or what an operation made, and where that was created."""
    clock = ManualClock()

    def dear() -> bytes:
        clock.advance(100.0)
        return bytes(1500)

    with rc.Cache("3kB", tiers=rc.Host("1MB"), clock=clock) as cache:
        values = [rc.pure(bytes(1500)), rc.ap(dear)]
        for value in values:
            value.evict()
        pinned = rc.ap(bytes, 2500).pin()
        with pytest.raises(rc.BudgetError, match=r"^the fetch of a source needs 1\.53 kB"):
            values[0].get()
        with pytest.raises(rc.BudgetError, match=r"^the fetch of a result of .*dear \(created at .*test_disk.py:\d+\)"):
            values[1].get()
        pinned.unpin()
        assert [value.get() for value in values] == [bytes(1500)] * 2
    check_invariants(cache, [*values, pinned])


def test_a_folder_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder is that of the current directory when the cache was made, and goes with the cache."""
    monkeypatch.chdir(tmp_path)
    with rc.Cache(350_000, tiers=[rc.Disk(folder="place", always=True)]) as cache:
        value = source(1)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir("other")
        assert value.get() == dear(1)
        other = source(2)
        assert len(files(tmp_path / "place")) == 2
        check_invariants(cache, [value, other])
    del value, other, cache
    gc.collect()
    assert not any((tmp_path / "place").iterdir())
    assert not any(Path().iterdir())


def test_a_full_disk() -> None:
    """Results are dropped, sources stay in memory, and no more is tried until something leaves."""
    tier = FullDisk(limit=None, always=True)
    with rc.Cache(350_000, tiers=[tier]) as cache:
        values = [rc.ap(dear, number) for number in range(2)]
        kept = rc.pure(dear(9))
        with pytest.warns(RuntimeWarning, match="could not be written to full disk"):
            assert all(value.evict() for value in values)
        assert not kept.evict()
        assert kept.resident
        assert tier.tried == 1
        assert [value.get() for value in values] == [dear(number) for number in range(2)]
        assert kept.get() == dear(9)
        check_invariants(cache, [*values, kept])


def test_a_tier_that_has_room_again() -> None:
    """It is tried once before sources end in a BudgetError, and now and then where results are dropped instead."""
    full = [True]
    tier = GivenTier(always=True, fail_write=lambda number: OSError("there is no room") if full[0] else None)
    with rc.Cache(350_000, tiers=[tier]) as cache, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it says that nothing could be written
        kept = [rc.pure(dear(number)) for number in range(3)]
        for _ in range(2):
            before = tier.store.writes
            with pytest.raises(rc.BudgetError):
                rc.pure(dear(3))
        assert tier.store.writes == before + 1
        full[0] = False
        kept.append(rc.pure(dear(3)))
        assert [value.get() for value in kept] == [dear(number) for number in range(4)]
        check_invariants(cache, kept)

        full[0] = True
        before = tier.store.writes
        results = [rc.ap(dear, number % 9) for number in range(250)]
        assert before + 1 < tier.store.writes < before + 9
        full[0] = False
        results += [rc.ap(dear, number % 9) for number in range(500)]
        assert tier.store.writes > before + 100
        assert [value.get()[0] for value in results] == [number % 9 for number in [*range(250), *range(500)]]
        check_invariants(cache, [*kept, *results])


def test_a_limit(tmp_path: Path) -> None:
    """No more lies there than the limit; sources that find no room stay, until there is some."""
    with rc.Cache(350_000, tiers=[rc.Disk(210_000, folder=tmp_path)]) as cache:
        sources = [rc.pure(dear(number)) for number in range(5)]
        with pytest.raises(rc.BudgetError, match="in sources"):
            rc.pure(dear(5))
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 210_000
        check_invariants(cache, sources)
        del sources[:3]
        gc.collect()
        sources.append(rc.pure(dear(5)))
        sources.append(rc.pure(dear(6)))
        assert [value.get()[0] for value in sources] == [3, 4, 5, 6]
        check_invariants(cache, sources)


class Connection:
    """Cannot be packed."""

    def __init__(self) -> None:
        self.room = bytes(SIZE)

    def __reduce__(self) -> Any:
        raise TypeError("a connection cannot be pickled")


def test_what_cannot_be_packed(cache: rc.Cache) -> None:
    """A result is computed again; a source stays in memory, and says so."""
    result, connection = rc.ap(Connection), rc.pure(Connection())
    first = connection.get()
    with pytest.warns(RuntimeWarning, match="it is computed again"):
        assert result.evict()
    assert not connection.evict()
    assert connection.get() is first
    assert isinstance(result.get(), Connection)
    check_invariants(cache, [result, connection])


class Truncated:
    """Reads a file when it is pickled."""

    def __reduce__(self) -> Any:
        raise OSError("the image file is truncated")


def test_a_value_whose_packing_is_an_os_error(cache: rc.Cache) -> None:
    """The disk is not full: it takes the next one."""
    with pytest.warns(RuntimeWarning, match="the image file is truncated"):
        assert rc.ap(Truncated, nbytes=SIZE).evict()
    source(1)
    assert cache.stats().tiers[0].limit is None


class Mine:
    """Tells when it is unpickled."""

    seen: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name
        self.more = [name] * 5000

    def __reduce__(self) -> Any:
        return unpickled, (self.name, self.more)


def unpickled(name: str, more: list[str]) -> Mine:
    Mine.seen.append(name)
    return Mine(name)


def test_nothing_else_is_unpickled(cache: rc.Cache, tmp_path: Path) -> None:
    """A file that somebody has changed is not unpickled, even if it could be."""
    value = rc.ap(Mine, "good")
    assert value.evict()
    (path,) = files(tmp_path)
    content = path.read_bytes()
    assert b"good" in content
    path.write_bytes(content.replace(b"good", b"evil"))
    Mine.seen.clear()
    with pytest.warns(RuntimeWarning, match="read from disk"):
        assert value.get().name == "good"
    assert Mine.seen == []


class Asking:
    """Gets a value when it is unpickled."""

    wanted: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.room = bytes(SIZE)

    def __reduce__(self) -> Any:
        return asked, (self.room,)


def asked(room: bytes) -> Asking:
    for value in Asking.wanted:
        assert value.get() == dear(1)
    return Asking()


def test_what_is_unpickled_may_use_the_cache(cache: rc.Cache) -> None:
    """What it gets meanwhile is nothing that a fetch depends on: it can be evicted, and forgotten."""
    other, value = rc.ap(dear, 1, nbytes=SIZE), rc.ap(Asking, nbytes=SIZE)
    for _ in range(3):
        assert value.evict()
        other.evict()
        Asking.wanted[:] = [other]
        assert isinstance(value.get(), Asking)
        Asking.wanted.clear()
        check_invariants(cache, [value, other])
    used = cache.stats().used
    del other
    gc.collect()
    assert cache.stats().used < used
    check_invariants(cache, [value])


def test_private(cache: rc.Cache, tmp_path: Path) -> None:
    """Nobody else can read the folder or the files."""
    value = moved(1)
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert value.get() == dear(1)


def test_files_go_with_their_values(cache: rc.Cache, tmp_path: Path) -> None:
    """At once, and not when the collector comes."""
    gc.disable()
    try:
        values = [moved(1), source(2)]
        assert len(files(tmp_path)) == 2
        values.clear()
        assert files(tmp_path) == []
        assert cache.stats().tiers[0].used == 0
    finally:
        gc.enable()


def test_a_second_eviction_writes_nothing(cache: rc.Cache) -> None:
    """The copy of a value stays valid, and events tell what happened in order."""
    with EventLog(cache) as log:
        value = moved(1)
        assert value.get() == dear(1)
        assert value.evict()
        assert value.get() == dear(1)
    assert [type(event) for event in log if isinstance(event, (Moved, Evicted, Fetched))] == [
        Moved,
        Evicted,
        Fetched,
        Evicted,
        Fetched,
    ]
    assert {event.tier for event in log.of(Evicted)} == {"disk"}
    (disk,) = cache.stats().tiers
    assert (disk.moves, disk.fetches) == (1, 2)


def in_a_process(place: Path, more: str) -> subprocess.Popen[str]:
    """One that has a value on a disk, and then does something."""
    script = f"""
        import os, signal, sys
        import recompute as rc
        with rc.Cache("350kB", tiers=[rc.Disk(folder={str(place)!r}, always=True)]):
            value = rc.pure(b"x" * {SIZE})
            assert value.evict()
            print("ready", flush=True)
            {more}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    """Of a process that ends as it should."""
    process = in_a_process(tmp_path, "assert os.listdir(sys.path[0] or '.') is not None")
    process.communicate()
    assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_what_a_crash_has_left(tmp_path: Path) -> None:
    """Is removed by the next cache there, but not what belongs to a process that lives."""
    living, dead = in_a_process(tmp_path, "sys.stdin.read()"), in_a_process(tmp_path, "sys.stdin.read()")
    for process in (living, dead):
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    dead.send_signal(signal.SIGKILL)
    dead.communicate()
    assert len(list(tmp_path.iterdir())) == 2
    cache = rc.Cache("1MB", tiers=[rc.Disk(folder=tmp_path)])
    assert len(list(tmp_path.iterdir())) == 2  # of the living one, and the new one
    living.communicate("")
    assert living.returncode == 0
    assert len(list(tmp_path.iterdir())) == 1
    del cache


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_fork_has_all_of_it(cache: rc.Cache, tmp_path: Path) -> None:
    """A child reads its values although its parent has let go of them, and leaves the parent's files alone."""
    values = [source(1), moved(2)]
    kept = source(3)
    hurry, gone = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.read(hurry, 1)
            status = int([value.get() for value in values] != [dear(1), dear(2)])
            values.clear()
            del kept
        finally:
            os._exit(status)
    values.clear()
    os.write(gone, b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert kept.get() == dear(3)
    os.close(hurry)
    os.close(gone)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
def test_a_fork_where_the_folder_has_vanished(cache: rc.Cache, tmp_path: Path) -> None:
    """The child computes again, and neither writes to its parent's place nor leaves anything there."""
    value = moved(1)
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)
    child = os.fork()
    if not child:
        status = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same = value.get() == dear(1)
                value.evict()
                status = int(not same or value.get() != dear(1) or list(tmp_path.iterdir()) != [])
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork.*:RuntimeWarning")
@pytest.mark.parametrize("vanished", [False, True])
def test_a_fork_closes_its_parents_files(cache: rc.Cache, tmp_path: Path, vanished: bool) -> None:
    """Nothing is left open in a child, of which Python would warn when it goes."""
    kept = moved(1)
    if vanished:
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        child = os.fork()
        if not child:
            status = 1
            try:
                del kept, cache
                gc.collect()
                status = int(any(issubclass(warning.category, ResourceWarning) for warning in told))
            finally:
                os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("given", [{"limit": "many"}, {"limit": 0}, {"bandwidth": "fast"}, {"bandwidth": -1}])
def test_a_disk_that_makes_no_sense(given: dict[str, Any]) -> None:
    """Is refused when it is asked for."""
    with pytest.raises(ValueError, match=r"the (limit|bandwidth) of a (tier|disk)"):
        rc.Disk(**given)


@pytest.mark.parametrize("given", ["50GB", 7, ["50GB"], {"cpu": "50GB"}, rc.Disk])
def test_what_is_no_tier(given: Any) -> None:
    """Is refused with what a tier looks like."""
    with pytest.raises(TypeError, match=r"such as rc.Disk\('50GB'\) .*, not ('50GB'|7|<class)"):
        rc.Cache("1MB", tiers=given)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    """A file instead of the folder is an OSError of the cache."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        rc.Cache("1MB", tiers=[rc.Disk(folder=tmp_path / "file")])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1_000)), min_size=1, max_size=20))
def test_threads_share_a_bandwidth(transfers: list[tuple[int, int]]) -> None:
    """Whoever moves bytes, all of them together are no faster than the bandwidth."""
    pace = Pace(100.0)
    times = [0.0] * 4  # of four threads
    for thread, nbytes in transfers:
        times[thread] += pace.wait(nbytes, times[thread], times[thread])
    assert max(times) == pytest.approx(sum(nbytes for _, nbytes in transfers) / 100.0)


def test_bandwidth() -> None:
    """What is limited is believed to be so slow, so that little moves."""
    with rc.Cache(350_000, tiers=[rc.Disk(bandwidth="1kB")]) as cache:
        values = [rc.ap(dear, number) for number in range(6)]
        assert [value.get()[0] for value in values] == list(range(6))
        assert cache.stats().tiers[0].moves == 0
