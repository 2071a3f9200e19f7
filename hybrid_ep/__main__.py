"""The command line: ``python -m hybrid_ep <command>``, also installed as ``hybrid-ep``.

A command is a folder with a ``command.py``: ``HELP`` (one line), ``add_arguments(parser)`` and
``run(args) -> int``, the exit code: 0 for success, 1 for a check that failed or a machine that
lacks something, 2 for usage. ``run`` raises ``ValueError`` for wrong usage, ``OSError`` and
``RanksFailed``, which are printed here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from hybrid_ep._version import __version__
from hybrid_ep.launch import RanksFailed

COMMANDS = ("demo", "check", "bench", "tune", "plan", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 good, 1 found a fault, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="hybrid-ep", description="Expert-parallel dispatch and combine for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"hybrid_ep {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    modules = {name: importlib.import_module(f"hybrid_ep.{name}.command") for name in COMMANDS}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        code = modules[args.command].run(args)
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"hybrid-ep {args.command}: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        if error.speaks:
            print(f"hybrid-ep {args.command}: {error.told}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of `hybrid-ep plan | head`; at exit Python would flush and say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"hybrid-ep {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
