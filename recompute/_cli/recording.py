"""A recording: the peak of a run without a budget, so that a later run can ask for a share of it.

Its events are in a trace next to it: see recompute._traces.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from recompute import Stats, __version__
from recompute._cli.output import CommandError

_FORMAT: Final = 1


@dataclass(frozen=True)
class Script:
    """A script, or a module (`-m`), with its arguments."""

    name: str
    args: tuple[str, ...]
    module: bool

    def recording(self) -> Path:
        """Where its recording is by default: in the current directory."""
        stem = self.name if self.module else Path(self.name).resolve().stem
        return Path(f"{stem}.recompute.json")

    def trace(self, recording: Path) -> Path:
        """Where the events of its recorded run are by default: next to the recording."""
        return recording.with_name(self.recording().with_suffix(".jsonl.gz").name)

    def identity(self, recording: Path) -> str:
        """The same for the same program, also after a move of the folder that holds both program and recording."""
        if self.module:
            return f"-m {self.name}"
        script = os.path.realpath(self.name)
        try:
            return Path(os.path.relpath(script, os.path.realpath(recording.parent))).as_posix()
        except ValueError:  # on another drive
            return script

    def command(self, recording: Path) -> str:
        """The command that makes the recording."""
        where = [] if recording == self.recording() else ["--recording", str(recording)]
        return shlex.join(
            ["recompute", "run", "--record", *where, *(["-m"] if self.module else []), self.name, *self.args]
        )


@dataclass(frozen=True)
class RecordedPeak:
    """The peak (bytes) of each device, and the arguments it was measured with."""

    peak: dict[str, int]
    args: tuple[str, ...]


def write(path: Path, program: Script, stats: Stats, wall_time: float) -> str:
    """Record a run; why that failed, or an empty text."""
    content = {
        "format": _FORMAT,
        "program": program.identity(path),
        "args": program.args,
        "peak": {pool.device: pool.peak for pool in stats.pools},
        "totals": {
            "operations": stats.operations,
            "releases": stats.releases,
            "compute_time": stats.model_time,
            "wall_time": wall_time,
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"recompute": __version__, "python": platform.python_version()},
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


def check_writable(path: Path) -> None:
    """Raise CommandError if a recording could not be written: before the long run, not after it."""
    target = path if path.exists() else path.parent
    if path.is_dir() or not target.exists() or not os.access(target, os.W_OK):
        raise CommandError(f"the recording cannot be written to {path}: choose a file with --recording")


def read(path: Path, program: Script) -> RecordedPeak:
    """The recording of `program`. Raises CommandError, with the command that makes one, if it is of no use."""
    advice = f"make one with: {program.command(path)}"
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandError(
            f"a share is one of the peak of a recorded run, and there is no recording {path}; {advice}"
        ) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise CommandError(f"the recording {path} cannot be read: {why}; {advice}") from None
    if not _complete(content):
        raise CommandError(f"the recording {path} is not one that this version can read; {advice}")
    if content["program"] != program.identity(path):
        raise CommandError(f"the recording {path} is of {content['program']}, not of {program.name}; {advice}")
    return RecordedPeak(content["peak"], tuple(content["args"]))


def _complete(content: Any) -> bool:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return False
    peak, args = content.get("peak"), content.get("args")
    return (
        isinstance(content.get("program"), str)
        and isinstance(peak, dict)
        and bool(peak)
        and all(type(size) is int and size >= 0 for size in peak.values())
        and any(peak.values())
        and isinstance(args, list)
        and all(isinstance(arg, str) for arg in args)
    )


def differing(recorded: Sequence[str], now: Sequence[str]) -> str:
    """The warning for a recording that was made with other arguments."""

    def show(args: Sequence[str]) -> str:
        return shlex.join(args) or "none"

    return f"the recording was made with other arguments ({show(recorded)}, now {show(now)}): the peak may differ too"
