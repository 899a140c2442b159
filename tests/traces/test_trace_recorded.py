"""Writing and reading the library's own format: what is in the file, when, and what becomes of errors."""

from __future__ import annotations

import gc
import gzip
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import recompute as rc
from interrupts import COMPILED, Tracing, modules_in, struck
from lib.vectors import vector
from recompute._engine.events import Accessed, Added, Event, Evicted, Performed
from recompute._traces.write import Recorder, write
from recompute.simulator import simulate
from recompute.testing import EventLog, ManualClock
from recompute.traces import TraceError, read, recorded_events

ROOT = Path(rc.__file__).parents[1]


def lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


def test_header(tmp_path: Path) -> None:
    """It says who wrote the trace, and how the cache was set."""
    path = tmp_path / "run.jsonl"
    with rc.Cache("2 kB", policy="lru", search="sample", release="ignore", trace=path):
        pass
    header, end = lines(path)
    assert header["recompute-trace"] == 1
    assert header["recompute"] == rc.__version__
    assert {"python", "time"} <= set(header)
    assert [header[name] for name in ("policy", "search", "release", "budget")] == ["lru", "sample", "ignore", 2000]
    assert end == {"event": "End"}


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_every_event_is_a_line(tmp_path: Path, name: str) -> None:
    """In order, with all of its fields; tuples are lists."""
    path = tmp_path / name
    cache = rc.Cache("100 B", trace=str(path))
    with cache, EventLog(cache) as log:
        values = [rc.pure(vector(1, 2)), *(rc.ap(vector, number, 0, 0) for number in range(4))]
        held = values[1].get()
        values[1].evict()
        values[1].get()
        values[1].evict()
        del held
        values[2].pin().unpin().detach()
        both = rc.ap(lambda one, two: (one.view(0, 1), two), values[1], values[2], nout=2, nbytes=8)
        del values, both
    kinds = {type(event).__name__ for event in log}
    assert kinds >= {"Added", "Performed", "Evicted", "LetGo", "TakenBack", "Accessed", "Released", "Pinned"}
    assert kinds >= {"Unpinned", "Detached", "Forgotten"}
    fields = [
        {"event": type(event).__name__}
        | {name: getattr(event, name) for name in type(event).__match_args__ if name != "thread"}
        for event in log
    ]  # threads are numbered, and the first one is not written
    assert json.loads(json.dumps(fields)) == lines(path)[1:-1]
    assert read(path).calls


def test_operations_know_their_lines_and_threads(tmp_path: Path) -> None:
    """A trace says where each operation was created and in which thread it ran, and so does a replay of it."""
    path = tmp_path / "run.jsonl"
    code = compile("a = rc.ap(vector, 1)\n\nb = rc.ap(vector, 2)", "program.py", "exec")
    with rc.Cache(trace=path) as cache:
        exec(code, {"rc": rc, "vector": vector})

        def other() -> None:
            with cache:
                rc.ap(vector, 3)

        thread = Thread(target=other)
        thread.start()
        thread.join()
    written = [line for line in lines(path) if line.get("event") == "Performed"]
    assert [line.get("thread", 0) for line in written] == [0, 0, 1]
    program = read(path)
    places = [call.place for call in program.calls]
    assert places[:2] == ["program.py:1", "program.py:3"]
    assert places[2].startswith(f"{__file__}:")
    events: list[Event] = []
    simulate(program, 1000, listener=events.append)
    assert [event.place for event in events if isinstance(event, Performed)] == places


def test_a_trace_without_lines_has_none(tmp_path: Path) -> None:
    """One of an earlier version is read as before, and its operations have no place."""
    path = tmp_path / "run.jsonl"
    with rc.Cache(trace=path):
        rc.ap(vector, 1)
    old = [{key: value for key, value in line.items() if key != "place"} for line in lines(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    program = read(path)
    assert [call.place for call in program.calls] == [""]
    assert program.settings["policy"] == "needed"
    assert program.numbers == [1]


def test_a_name_may_have_any_character(tmp_path: Path) -> None:
    """Functions and devices are quoted."""
    path = tmp_path / "run.jsonl"
    odd = 'a "b"\n\\ü'
    events = [Performed(1.0, 8, odd, 1.0, False, (1,), (8,), (), (1,), (1,), (), odd, None), Added(1.0, 8, 2, 8, odd)]
    write(path, events, policy="none")
    program = read(path)
    assert program.calls[0].name == odd
    assert program.devices == [odd, odd]
    assert lines(path)[0]["policy"] == "none"


def test_the_program_is_what_the_user_did(tmp_path: Path) -> None:
    """Sources, calls, gets, drops, requests; what the cache did by itself is not in the steps."""
    path = tmp_path / "run.jsonl"
    with rc.Cache("64 B", trace=path, clock=ManualClock()):
        x = rc.pure(vector(1, 2))
        y = rc.ap(vector, 1)
        z = rc.ap(lambda one, two: vector(4, 5, 6), x, y, nbytes=24)
        w = rc.ap(lambda: vector(7, 8, 9), nbytes=24)  # z makes room
        assert not z.resident
        y.evict()
        z.get()
        w.pin()
        w.unpin()
        w.detach()
        del y, w
    program = read(path)
    assert program.steps == [
        ("source", 0), ("call", 0), ("call", 1), ("call", 2), ("evict", 1), ("get", 2), ("pin", 3), ("unpin", 3),
        ("detach", 3), ("drop", 1), ("drop", 3),
    ]  # fmt: skip
    assert [call.arguments for call in program.calls] == [(), (0, 1), ()]
    assert (program.sizes, program.devices) == ([16, 8, 24, 24], ["cpu"] * 4)
    assert program.calls[1].again == [0.0]
    assert [call.room for call in program.calls] == [0, 24, 24]


def test_what_was_held_outside_is_held_again(tmp_path: Path) -> None:
    """From the get on, to the moment when it was let go."""
    path = tmp_path / "run.jsonl"
    with rc.Cache(trace=path):
        y = rc.ap(vector, 1, 2)
        held = y.get()
        y.evict()
        del held
    program = read(path)
    assert program.steps == [("call", 0), ("get", 0), ("hold", 0), ("evict", 0), ("let go", 0)]


def test_a_trace_is_complete_after_each_block(tmp_path: Path) -> None:
    """The outermost one; events that come later follow, and are complete after the next block."""
    path = tmp_path / "run.jsonl.gz"
    cache = rc.Cache(trace=path)
    with cache:
        one = rc.ap(vector, 1)
        with cache:
            two = rc.ap(vector, 2)
        with pytest.raises(TraceError):
            read(path)
    assert len(read(path).calls) == 2
    one.get()
    assert ("get", 0) not in read(path).steps
    with cache:
        two.get()
    assert read(path).steps[-2:] == [("get", 0), ("get", 1)]


def test_a_trace_is_complete_when_the_cache_goes(tmp_path: Path) -> None:
    """Also without a block."""
    path = tmp_path / "run.jsonl"
    cache = rc.Cache(trace=path)
    rc.set_default_cache(cache)
    try:
        assert rc.ap(vector, 1).get() == vector(1)
    finally:
        rc.set_default_cache(None)
    del cache
    gc.collect()
    assert len(read(path).calls) == 1


def test_a_trace_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    """As when a cell of a notebook runs again: a cache that goes later leaves the trace of its successor alone."""
    path, link = tmp_path / "run.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(path)

    def cell(count: int) -> Any:
        with rc.Cache(trace=link) as cache:
            return cache, [rc.ap(vector, number) for number in range(count)]

    first = cell(50)
    second = cell(2)
    del first
    gc.collect()
    assert len(read(path).calls) == len(second[1]) == 2
    assert link.is_symlink()


def python(code: str) -> None:
    """Run a program of its own."""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)


def test_a_trace_is_complete_when_the_program_ends(tmp_path: Path) -> None:
    """A default cache is never left, and its trace is written at the interpreter's exit."""
    path = tmp_path / "run.jsonl.gz"
    code = (
        f"import recompute as rc; rc.set_default_cache(rc.Cache(trace={str(path)!r})); "
        "kept = [rc.ap(str, n) for n in range(5)]"
    )
    python(code)
    assert len(read(path).calls) == 5


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    """Its trace has no end, and says so."""
    path = tmp_path / "run.jsonl"
    code = (
        f"import os, recompute as rc; cache = rc.Cache(trace={str(path)!r}); cache.__enter__()\n"
        "kept = [rc.ap(str, n) for n in range(10_000)]; os._exit(0)"
    )
    python(code)
    assert len(path.read_text().splitlines()) > 1000
    with pytest.raises(TraceError, match="the event End is missing"):
        read(path)


def test_batches(tmp_path: Path) -> None:
    """What is written while the run goes on is whole lines, in whole members of a gzip file."""
    path = tmp_path / "run.jsonl.gz"
    recorder = Recorder(path, {})
    for number in range(30_000):
        recorder(Accessed(float(number), 0, number))
    before = lines(path)
    assert 10_000 < len(before) < 30_001
    recorder.close()
    after = lines(path)
    assert after[: len(before)] == before
    assert [line["value"] for line in after[1:-1]] == list(range(30_000))
    recorder.close()
    recorder.flush()
    assert lines(path) == after


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    """OSError when the cache is made."""
    with pytest.raises(FileNotFoundError):
        rc.Cache(trace=tmp_path / "none" / "run.jsonl")
    with pytest.raises(OSError, match=r"directory|denied"):
        rc.Cache(trace=tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
@pytest.mark.parametrize("count", [1, 10_000])
def test_a_full_disk_is_a_warning(count: int) -> None:
    """In the middle or at the end: the run goes on, and the warning comes once."""
    cache = rc.Cache(trace="/dev/full")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with cache:
            kept = [rc.ap(str, number) for number in range(count)]
        with cache:
            kept[0].get()
    (warning,) = caught
    assert "the trace /dev/full" in str(warning.message)
    assert kept[-1].get() == str(count - 1)
    assert cache.stats().operations == count


def test_what_cannot_be_written_as_text_ends_a_trace(tmp_path: Path) -> None:
    """With one warning; nothing is kept of the events that come after it."""
    recorder = Recorder(tmp_path / "run.jsonl", {})
    cache = rc.Cache()
    recorder.listen(cache)

    def get(times: int) -> None:
        for _ in range(times):
            kept.get()

    with cache:
        kept = rc.ap(str, 1)
        recorder._heard.append("\udcff")  # half of a character
        with pytest.warns(RuntimeWarning, match="is incomplete"):
            get(10_000)
        get(20_000)
    assert len(recorder._heard) < 10_000


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    """Statistics and decisions are those of the run without one."""

    def run(**options: Any) -> tuple[Any, list[Event]]:
        cache = rc.Cache("100 B", clock=ManualClock(), **options)
        with cache, EventLog(cache) as log:
            values = [rc.ap(vector, number, 0, 0) for number in range(8)]
            for value in values:
                value.get()
            return cache.stats(), [event for event in log if isinstance(event, (Evicted, Performed))]

    assert run(trace=tmp_path / "run.jsonl") == run()


def test_the_trace_of_a_child_process(tmp_path: Path) -> None:
    """A fork does not write into its parent's trace."""
    if not hasattr(os, "fork"):
        pytest.skip("there are no forks on this system")
    path = tmp_path / "run.jsonl"
    code = (
        f"import os, recompute as rc\n"
        f"with rc.Cache(trace={str(path)!r}):\n"
        "    kept = [rc.ap(str, 1)]\n"
        "    if not os.fork():\n"
        "        kept.append(rc.ap(str, 2))\n"
        "        raise SystemExit\n"
        "    os.wait()\n"
        "    kept.append(rc.ap(str, 3))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    assert len(read(path).calls) == 2


def test_results_that_move_are_read(tmp_path: Path) -> None:
    """A rerun that shares memory otherwise than the first run did makes a storage that no first run had."""
    path = tmp_path / "run.jsonl"
    runs = iter(range(9))

    def restless(one: Any) -> Any:
        copy = vector(*one.numbers)
        return (one, copy) if next(runs) % 2 else (copy, one)

    with rc.Cache(trace=path):
        x = rc.ap(vector, 1, 2)
        y, z = rc.ap(restless, x, nout=2)
        for value in (x, y, z, y, z):
            value.evict()
            value.get()
    assert len(read(path).calls) == 2


def test_events_are_read_as_they_were_told(tmp_path: Path) -> None:
    """`recorded_events` gives what a listener heard, but for the identity of threads; a file without any is named."""
    path = tmp_path / "run.jsonl.gz"
    cache = rc.Cache("100 B", trace=str(path))
    with cache, EventLog(cache) as log:
        values = [rc.pure(vector(1, 2)), *(rc.ap(vector, number, 0, 0) for number in range(4))]
        values[1].get()
        del values
    assert list(recorded_events(path)) == list(log)
    assert [event.place for event in recorded_events(path) if isinstance(event, Performed)] == [
        event.place for event in log if isinstance(event, Performed)
    ]
    path.write_text('{"INSTRUCTION": "CONSTANT", "NAME": "x"}\n')
    with pytest.raises(TraceError, match=r"run\.jsonl\.gz:1: this line is no event"):
        list(recorded_events(path))


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_no_interrupt_spoils_a_trace(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever one strikes while events are written, every operation is in the file, once."""
    monkeypatch.setattr("recompute._traces.write._BATCH", 20)
    path = tmp_path / name

    def interrupted(at: int) -> int:
        tracing = Tracing(modules_in("recompute._traces.write"))
        tracing.arm(at)
        with rc.Cache(2_000, trace=path) as cache:
            values: list[Any] = []
            try:
                with tracing.on():
                    values += (rc.ap(bytes, 50) for _ in range(20))
                    values.pop(3)
                    cache.flush()
            except KeyboardInterrupt:
                assert at
            values += [rc.ap(bytes, 60) for _ in range(5)]
            values[0].get()
        assert len(read(path).calls) == cache.stats().operations
        return tracing.crossings

    places = interrupted(0)
    assert places > 200
    for at in range(1, places + 1, max(1, places // 150)):
        interrupted(at)
        gc.collect()  # the cache of a run that was interrupted, so that none is destroyed in the next one


@pytest.mark.skipif(not COMPILED, reason="in the plain form a signal can come between a change and its event")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers on this system")
def test_no_signal_loses_an_event(tmp_path: Path) -> None:
    """Real ones, whose handler raises, wherever they strike in a run."""

    class Halt(Exception):
        pass

    def work() -> None:
        with cache:
            values = [rc.ap(bytes, 500) for _ in range(20)]
            for value in values:
                value.get()

    path = tmp_path / "run.jsonl"
    cache = rc.Cache(5_000, trace=path)
    with cache:
        rc.ap(bytes, 500).get()  # what is first asked of a type of payload is Python
    for _ in struck(work, 300, 0.0005, Halt):
        pass
    cache.flush()
    assert len(read(path).calls) == cache.stats().operations


def test_an_interrupt_in_a_listener_keeps_no_event_from_others(tmp_path: Path) -> None:
    """Those that come after it hear of it as if nothing had happened."""
    path = tmp_path / "run.jsonl"
    left = [1, 1, 1]

    def interrupt(event: Event) -> None:
        if left and isinstance(event, Performed):
            left.pop()
            raise KeyboardInterrupt

    cache = rc.Cache()
    cache.subscribe(interrupt)
    recorder = Recorder(path, {})
    recorder.listen(cache)
    with cache:
        for number in range(6):
            try:
                rc.ap(vector, number)
            except KeyboardInterrupt:
                continue
    cache.stats()
    recorder.close()
    assert not left
    assert len(read(path).calls) == 6


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes on this system")
def test_a_pipe(tmp_path: Path) -> None:
    """A trace may go to another program as it is written."""
    pipe, copy = tmp_path / "pipe.jsonl", tmp_path / "run.jsonl"
    os.mkfifo(pipe)
    reader = Thread(target=lambda: copy.write_bytes(pipe.read_bytes()))
    reader.start()
    recorder = Recorder(pipe, {})
    for number in range(20_000):
        recorder(Accessed(float(number), 0, number))
    recorder.close()
    reader.join()
    assert [line["value"] for line in lines(copy)[1:-1]] == list(range(20_000))
