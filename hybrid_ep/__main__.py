"""The command line: ``python -m hybrid_ep <command>``, also installed as ``hybrid-ep``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hybrid_ep._version import __version__

COMMANDS = ("demo", "check", "bench", "tune", "plan", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 good, 1 found a fault, 2 wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="hybrid-ep", description="Expert-parallel dispatch and combine for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"hybrid_ep {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    modules = {name: importlib.import_module(f"hybrid_ep.cli.{name}") for name in COMMANDS}
    for name, module in modules.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return modules[args.command].run(args)
    except ValueError as error:
        print(f"hybrid-ep {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
