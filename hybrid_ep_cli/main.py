"""``hybrid-ep COMMAND``: read the options, run the command, print what it raises."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hybrid_ep_cli import bench, check, deep_ep_path, demo, doctor, plan, tune
from hybrid_ep_cli.options import as_typed

COMMANDS = {
    "demo": demo,
    "check": check,
    "bench": bench,
    "tune": tune,
    "plan": plan,
    "doctor": doctor,
    "deep-ep-path": deep_ep_path,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 good, 1 found a fault, 2 wrong usage)."""
    args = make_parser().parse_args(argv)
    if COMMANDS[args.command] is deep_ep_path:  # the one that needs no torch
        return deep_ep_path.run(args)
    # torch is imported here, and not for help
    command = importlib.import_module(f"hybrid_ep.{args.command}.command")
    from hybrid_ep.launch import RanksFailed

    try:
        code = command.run(args)
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"hybrid-ep {args.command}: {as_typed(str(error))}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        if error.is_broken_pipe:
            _drop_output()
        elif error.speaks:
            print(f"hybrid-ep {args.command}: {error.told}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of `hybrid-ep plan | head`
        _drop_output()
        return 1
    except OSError as error:
        print(f"hybrid-ep {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: what it does not know is an error with the command's usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments; exits with code 2 where some are unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(unknown, self._option_string_actions))
        return found, unknown


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="hybrid-ep", description="Expert-parallel dispatch and combine for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"hybrid_ep {_version()}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command", parser_class=CommandParser
    )
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
    return parser


def _unknown(unknown: Sequence[str], options: Iterable[str]) -> str:
    """What argparse says of arguments that it does not know, and which option is spelled alike."""
    told = f"unrecognized arguments: {' '.join(unknown)}"
    alike = difflib.get_close_matches(unknown[0].partition("=")[0], list(options), n=1)
    return f"{told}; did you mean {alike[0]}?" if alike else told


def _drop_output() -> None:
    """Nobody reads it any more; at exit Python would flush it, and say so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version() -> str:
    """The version of the package beside this one, read without importing it."""
    file = Path(__file__).parents[1] / "hybrid_ep" / "_version.py"
    return runpy.run_path(str(file))["__version__"]
