"""The command `recompute`: one file a command; an error is one clear line and a non-zero status.

A command is a module with `NAME`, `HELP` (one line), `configure(parser)` and `run(options) -> int`, the exit status.
To add one, write the module and put it into `COMMANDS`.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol

from recompute import _form as _form  # first of all: `recompute/__init__.py` may be that of another package

# isort: split

from recompute import BudgetError, ImpureError, __version__
from recompute._cli import arguments, compare, demo, doctor, export, plan, plot, report, simulate, story
from recompute._cli import run as run_script
from recompute._cli.output import CommandError, complain, flush, no_interrupt_lost, silence
from recompute._cli.plugins import FRAMEWORKS, TOOLS, version_of_package

_EXAMPLES: Final = """\
examples:
  recompute demo                                 see it work on real text
  recompute run --record train.py                run once without a budget; remember the peak
  recompute run --budget 25% train.py            run again within a quarter of that memory
  recompute run --budget 1.5GiB -m package.train
  recompute simulate train.recompute.jsonl.gz --budget 50%    what would half the memory have cost?
  recompute compare train.recompute.jsonl.gz                  compare policies and planners
  recompute plot residency train.recompute.jsonl.gz           when each value was in memory
  recompute report train.recompute.jsonl.gz                   a page about what each budget would cost
  recompute doctor                               what is installed, which devices are seen
"""


class Command(Protocol):
    """The names that a module in `COMMANDS` has."""

    NAME: str
    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> int: ...


COMMANDS: Final[tuple[Command, ...]] = (run_script, simulate, plan, compare, plot, report, export, story, demo, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (`sys.argv[1:]` by default); the exit status."""
    try:
        options = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = options.run
        with no_interrupt_lost(), arguments.standard_input(options):
            status = run(options)
        flush(sys.stdout)
    except SystemExit as stop:  # argparse has shown the help or the version
        return int(stop.code or 0)
    except CommandError as error:
        return complain(str(error), error.status)
    except (BudgetError, ImpureError) as error:
        return complain(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        silence(sys.stdout)
        return 141
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        return complain(f"{type(error).__name__}: {error} (python -X dev -m recompute ... shows where)", 1)
    return status


class _Version(argparse.Action):
    """Versions are looked up only when they are asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        versions = {package: version_of_package(package) for package in dict.fromkeys([*FRAMEWORKS, *TOOLS])}
        print(f"recompute {__version__}")
        print(f"python {platform.python_version()}")
        for package, version in versions.items():
            if version is not None:
                print(f"{package} {version}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see: {self.prog} --help)")


class _Options(_Parser):
    """The arguments of a command, in front of, between and behind its options.

    Not where the rest belongs to a script (`run`), and not with a `--`, behind which there are no options.
    """

    _mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._mixing or "--" in args or any(action.nargs == argparse.REMAINDER for action in self._actions):
            return super().parse_known_args(args, namespace)
        self._mixing = True  # which calls this again
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixing = False


def _parser() -> _Parser:
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="recompute",
        description="Run programs within a memory budget: values are dropped, and recomputed when they are needed.",
        epilog=_EXAMPLES,
        formatter_class=form,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action=_Version, help="show the versions of recompute, Python and the supported libraries"
    )
    commands = parser.add_subparsers(title="commands", metavar="command", required=True, parser_class=_Options)
    for command in COMMANDS:
        own = commands.add_parser(command.NAME, help=command.HELP, formatter_class=form, allow_abbrev=False)
        command.configure(own)
        own.set_defaults(run=command.run)
    return parser
