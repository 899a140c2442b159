"""Exports say what the trace says, and other tools can read them."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watched_programs import STEPS, Step, record

import recompute as rc
from recompute._cli import main
from recompute._sight.exports import COLUMNS, FORMATS, export
from recompute._sight.nest import trees, walk
from recompute._sight.recording import RecordedRun, open_recording, replayed
from recompute._traces.write import write
from recompute.events import Added, Evicted, Performed
from recompute.traces import read

ROOT = Path(__file__).parents[1]
UNET = str(ROOT / "simulator" / "data" / "unet.jsonl.gz")


def watched(steps: list[Step]) -> tuple[RecordedRun, Any]:
    """A generated program, recorded, and what happened while it ran."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        truth = record(steps, path)
        return open_recording(path), truth


def exported(recording: RecordedRun, to: str) -> bytes:
    return b"".join(export(recording, to))


def runs_of(recording: RecordedRun) -> list[Performed]:
    return [event for event in recording.events if isinstance(event, Performed)]


@given(STEPS)
def test_who_asked_for_a_run_is_what_the_engine_knew(steps: list[Step]) -> None:
    """The trees are rebuilt from the order of events alone; while it ran, the program looked at the stack."""
    recording, truth = watched(steps)
    (roots,) = trees(recording.events).values() or ([],)
    runs = sorted((run for run, ready in walk(roots) if ready), key=lambda run: run.event.time)
    makers: dict[int, int] = {}
    for (number, _), run in zip(truth.asked, runs, strict=True):
        makers.setdefault(run.event.results[0], number)
    told = [
        (makers[run.event.results[0]], None if run.asked is None else makers[run.asked.event.results[0]])
        for run in runs
    ]
    assert truth.asked == told


def sql(document: bytes) -> sqlite3.Connection:
    """The slices and flows of a Perfetto trace as tables, as its trace processor has them."""
    tables = sqlite3.connect(":memory:")
    tables.execute("create table slice (id integer primary key, ts, dur, category, name, tid)")
    tables.execute("create table flow (id, phase, ts, tid)")
    for line in json.loads(document)["traceEvents"]:
        start = round(line.get("ts", 0) * 1000)
        if line["ph"] == "X":
            values = (start, round(line["dur"] * 1000), line["cat"], line["name"], line["tid"])
            tables.execute("insert into slice (ts, dur, category, name, tid) values (?, ?, ?, ?, ?)", values)
        elif line["ph"] in "sf":
            tables.execute("insert into flow values (?, ?, ?, ?)", (line["id"], line["ph"], start, line["tid"]))
    return tables


SUMS = "select category, sum(dur), count(*) from slice where category != 'need' group by category"


def checked_sums(rows: list[tuple[Any, ...]], recording: RecordedRun) -> None:
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in runs_of(recording):
        kind = "recomputation" if event.again else "operation"
        times[kind] += round(event.cost * recording.program.unit * 1e9)
        counts[kind] += 1
    assert {kind: (times[kind], counts[kind]) for kind in counts} == {kind: (time, n) for kind, time, n in rows}


@given(STEPS)
def test_perfetto_has_each_run_once_and_arrows_with_both_ends(steps: list[Step]) -> None:
    """Slices sum to the compute of the trace, they nest, and each flow leads from one slice to a later one."""
    recording, truth = watched(steps)
    document = exported(recording, "perfetto")
    tables = sql(document)
    checked_sums(tables.execute(SUMS).fetchall(), recording)
    both = "select count(*) from slice a, slice b"
    crossing = "a.ts < b.ts and b.ts < a.ts + a.dur and b.ts + b.dur > a.ts + a.dur"
    assert tables.execute(f"{both} where {crossing}").fetchone() == (0,)
    ends = tables.execute("select count(*), count(distinct id) from flow group by phase").fetchall()
    asked = sum(by is not None for _, by in truth.asked)
    assert ends == ([(asked, asked)] * 2 if asked else [])
    pairs = "select count(*) from flow a, flow b where a.phase = 's' and b.phase = 'f' and a.id = b.id and a.ts < b.ts"
    assert tables.execute(pairs).fetchone() == (asked,)
    loose = (
        "select count(*) from flow f where not exists "
        "(select 1 from slice s where s.tid = f.tid and s.ts = f.ts and s.category != 'need')"
    )
    assert tables.execute(loose).fetchone() == (0,)
    tables.close()
    lines = json.loads(document)["traceEvents"]
    used = [line["args"]["bytes"] for line in lines if line["ph"] == "C" and line["name"] == "used on cpu"]
    assert max(used) == max(event.used for event in recording.events)
    evictions = [line for line in lines if line["ph"] == "i"]
    assert len(evictions) == sum(isinstance(event, Evicted) for event in recording.events)
    assert all(line["args"]["bytes"] >= 0 for line in lines if line["ph"] == "C")


def test_perfetto_reads_it() -> None:
    """Its own trace processor finds the same sums, and both ends of each flow."""
    perfetto = pytest.importorskip("perfetto.trace_processor", reason="the package perfetto is not installed")
    shell = shutil.which("trace_processor_shell")
    if shell is None:
        pytest.skip("there is no trace_processor_shell here, and the package would download one")
    recording = open_recording(UNET, 0.4)
    document = io.BytesIO(exported(recording, "perfetto"))
    config = perfetto.TraceProcessorConfig(bin_path=shell)
    with perfetto.TraceProcessor(trace=document, config=config) as processor:
        result = processor.query(SUMS.replace("sum(dur)", "sum(dur) as total").replace("count(*)", "count(*) as n"))
        checked_sums([(row.category, row.total, row.n) for row in result], recording)
        (flows,) = processor.query(
            "select count(*) as n from flow where slice_out is not null and slice_in is not null"
        )
        assert (
            flows.n
            == sum(run.asked is not None for roots in trees(recording.events).values() for run, _ in walk(roots)) // 2
        )


@given(STEPS)
def test_speedscope_has_the_cost_of_each_function_by_stack(steps: list[Step]) -> None:
    """Frames open and close in order, and what each spends by itself is what its runs cost."""
    recording, _ = watched(steps)
    document = json.loads(exported(recording, "speedscope"))
    frames = document["shared"]["frames"]
    spent: defaultdict[str, float] = defaultdict(float)
    for profile in document["profiles"]:
        stack: list[int] = []
        now = 0.0
        for event in profile["events"]:
            assert event["at"] >= now
            if stack:
                spent[frames[stack[-1]]["name"]] += event["at"] - now
            now = event["at"]
            if event["type"] == "O":
                stack.append(event["frame"])
            else:
                assert stack.pop() == event["frame"]
        assert stack == []
        assert profile["endValue"] == now
    expected: defaultdict[str, float] = defaultdict(float)
    for run in runs_of(recording):
        expected[f"{run.function} (again)" if run.again else run.function] += run.cost
    assert {name: pytest.approx(cost) for name, cost in expected.items()} == dict(spent)
    assert all(frame["file"] == str(ROOT / "sight" / "watched_programs.py") for frame in frames)


@given(STEPS)
def test_memory_viz_has_the_bytes_of_the_cache(steps: list[Step]) -> None:
    """Blocks never overlap, and what is allocated is what the cache counted: at the peak, and in the end."""
    recording, _ = watched(steps)
    document = json.loads(exported(recording, "memory_viz"))
    (trace,) = document["device_traces"]
    blocks: dict[int, int] = {}
    most = 0
    for event in trace:
        if event["action"] == "alloc":
            assert all(event["addr"] + event["size"] <= at or at + size <= event["addr"] for at, size in blocks.items())
            blocks[event["addr"]] = event["size"]
        elif event["action"] == "free_completed":
            assert blocks.pop(event["addr"]) == event["size"]
        most = max(most, sum(blocks.values()))
    (segment,) = document["segments"]
    alive = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"}
    assert blocks == alive
    assert sum(alive.values()) == recording.events[-1].used
    assert most == max(event.used for event in recording.events)
    assert "unknown" in {event["category"] for event in trace}
    at = segment["address"]
    for block in segment["blocks"]:
        assert block["address"] == at
        at += block["size"]
    assert at == segment["address"] + segment["total_size"]


def test_torch_reads_memory_viz(tmp_path: Path) -> None:
    """Its own readers of snapshots sum up the segments, print the trace, and make a page of it."""
    viz = pytest.importorskip("torch.cuda._memory_viz", reason="the extra 'torch' is not installed")
    document = json.loads(exported(open_recording(UNET, 0.5), "memory_viz"))
    told = viz.trace(document)
    assert f"{len(document['device_traces'][0])} entries" in told
    assert "total_allocated: " in viz.segsum(document)
    assert "segments: 1" in viz.segsum(document)
    assert viz.segments(document, format_flamegraph=lambda lines: lines)
    assert "snapshot.pickle" in viz.trace_plot(document)


@given(STEPS)
def test_rows_have_each_run_and_each_eviction(steps: list[Step]) -> None:
    """One row each, in order, with what the trace says of it; CSV and Arrow say the same."""
    recording, _ = watched(steps)
    text = exported(recording, "csv").decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    wanted = [event for event in recording.events if isinstance(event, Performed | Evicted)]
    assert [float(row["time"]) for row in rows] == [event.time for event in wanted]
    assert [row["why"] for row in rows if row["why"]] == [event.why for event in wanted if isinstance(event, Evicted)]
    runs = [row for row in rows if row["kind"] != "eviction"]
    assert [row["kind"] == "recomputation" for row in runs] == [run.again for run in runs_of(recording)]
    assert [bool(row["for"]) for row in runs] == [run.again for run in runs_of(recording)]


def test_arrow_has_the_rows_of_the_table() -> None:
    """The same columns and rows, with types."""
    pa = pytest.importorskip("pyarrow", reason="the extra 'pyarrow' is not installed")
    recording = open_recording(UNET, 0.5)
    table = pa.ipc.open_file(exported(recording, "arrow")).read_all()
    assert tuple(table.column_names) == COLUMNS
    rows = list(csv.DictReader(io.StringIO(exported(recording, "csv").decode())))
    assert table["bytes"].to_pylist() == [int(row["bytes"]) for row in rows]
    assert table["kind"].to_pylist() == [row["kind"] for row in rows]


def test_threads_have_tracks_of_their_own(tmp_path: Path) -> None:
    """What each thread ran is in a track, a profile and a number of its own."""
    from threading import Thread

    path = tmp_path / "run.jsonl"
    with rc.Cache(trace=path) as cache:
        rc.ap(bytes, 3)

        def other() -> None:
            with cache:
                rc.ap(bytes, 4)

        thread = Thread(target=other)
        thread.start()
        thread.join()
    recording = open_recording(path)
    lines = json.loads(exported(recording, "perfetto"))["traceEvents"]
    assert {line["tid"] for line in lines if line["ph"] == "X"} == {1, 2}
    assert len(json.loads(exported(recording, "speedscope"))["profiles"]) == 2
    assert [row["thread"] for row in csv.DictReader(io.StringIO(exported(recording, "csv").decode()))] == ["1", "2"]


@pytest.mark.parametrize(
    "place",
    ["train.py", "C:\\train.py", "train.py:12:3", "train.py:", "train.py:x", "train.py:12345678901234567890"],
)
def test_places_of_other_programs(place: str, tmp_path: Path) -> None:
    """What is no `file:line` is a file without a line."""
    path = tmp_path / "run.jsonl"
    event = Performed(1.0, 8, "f", 1.0, False, (2,), (8,), (1,), (2,), (2,), (1,), place=place)
    write(path, [Added(0.0, 0, 1, 0, "cpu"), event])
    recording = open_recording(path)
    (frame,) = json.loads(exported(recording, "speedscope"))["shared"]["frames"]
    snapshot = json.loads(exported(recording, "memory_viz"))
    (block,) = snapshot["segments"][0]["blocks"]
    line = 3 if place == "train.py:12:3" else 0
    assert (frame.get("line", 0), block["frames"][0]["line"]) == (line, line)
    assert replayed(read(path)).program.calls[0].place == place


@given(size=st.integers(0, 3))
def test_nothing_happened(size: int) -> None:
    """A run without operations is a document, too."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with rc.Cache(trace=path):
            values = [rc.pure(b"12") for _ in range(size)]
        recording = open_recording(path)
        for to in ("perfetto", "speedscope", "memory_viz"):
            json.loads(exported(recording, to))
        assert exported(recording, "csv").decode() == ",".join(COLUMNS) + "\n"
        assert len(values) == size


def test_a_deep_chain_is_no_problem(tmp_path: Path) -> None:
    """Two thousand runs that one `get` asked for are exported without recursion, and to a depth that can be drawn."""
    path = tmp_path / "run.jsonl"
    with rc.Cache(trace=path):
        chain = [rc.ap(int, 1)]
        for _ in range(2_000):
            chain.append(rc.ap(int, chain[-1]))
        for value in chain:
            value.evict()
        chain[-1].get()
    recording = open_recording(path)
    lines = json.loads(exported(recording, "perfetto"))["traceEvents"]
    assert sum(line.get("cat") == "need" for line in lines) == 400
    assert sum(line.get("cat") == "recomputation" for line in lines) == 2_001
    assert len(json.loads(exported(recording, "speedscope"))["profiles"][0]["events"]) == 4 * 2_001


@pytest.mark.parametrize("to", [name for name in FORMATS if name != "arrow"])
def test_the_command_writes_to_a_file_or_to_standard_output(
    to: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The same bytes, and --json says how many."""
    path = tmp_path / "out"
    assert main(["export", UNET, "--to", to, "--budget", "50%"]) == 0
    shown = capfdbinary.readouterr().out
    assert main(["export", UNET, "--to", to, "--budget", "50%", "-o", str(path), "--json"]) == 0
    told = json.loads(capfdbinary.readouterr().out)
    assert path.read_bytes() == shown
    assert told == {"trace": "unet.jsonl.gz", "format": to, "output": str(path), "bytes": len(shown)}


def test_an_export_through_a_link(tmp_path: Path) -> None:
    """A link stays one, and the export is in the file that it names, which may be new."""
    link, folder = tmp_path / "link", tmp_path / "folder"
    folder.mkdir()
    link.symlink_to(Path("folder", "out"))
    for to in ("perfetto", "csv"):
        assert main(["export", UNET, "--to", to, "-o", str(link)]) == 0
        assert link.is_symlink()
        assert [file.name for file in folder.iterdir()] == ["out"]
    assert (folder / "out").read_bytes() == exported(open_recording(UNET), "csv")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"traceEvents": []}\n', ":1: this is no trace: its first line has neither"),
        ('{"recompute-trace": 1}\n', ":1: the file is truncated: the line with the event End is missing"),
        ('{"recompute-trace": 2, "recompute": "9.0"}\n', "with the recompute that wrote it (9.0)"),
        ("PNG\n", ":1: not JSON"),
        ("", "the trace is empty"),
    ],
)
def test_what_is_no_trace_is_one_clear_line(
    content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Foreign JSON, a truncated trace, another version, another file: what is wrong, and no file is left behind."""
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    assert main(["export", str(path), "--to", "csv", "-o", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("recompute: error: ")
    assert says in err
    assert len(err.splitlines()) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.jsonl", "--to", "csv"], "nowhere.jsonl cannot be read: No such file"),
        ([UNET, "--to", "csv", "--budget", "1kB"], "does not run in 1,000 bytes: oom; give it a larger --budget"),
        ([UNET, "--to", "csv", "--json"], "--json needs -o FILE"),
        ([UNET, "--to", "csv", "--budget", "30%,40%"], "--budget is one budget"),
        ([UNET, "--to", "xml"], "invalid choice: 'xml'"),
        ([UNET, "--to", "csv", "-o", "no/such/folder"], "no/such/folder cannot be written"),
    ],
)
def test_errors_of_the_command(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line each."""
    assert main(["export", *arguments]) != 0
    _, err = capsys.readouterr()
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_closed_standard_output_needs_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nowhere to write to, and the error says what to do."""
    monkeypatch.setattr("sys.stdout", None)
    assert main(["export", UNET, "--to", "csv"]) == 2
    assert capsys.readouterr().err == "recompute: error: standard output is closed: give -o FILE\n"
