"""What this machine has, what each backend needs of it, and what to do about the difference.

Exit code 0: the torch backend works and nothing that is installed is broken; 1 otherwise.
"""

from __future__ import annotations

import argparse

from hybrid_ep_cli.options import add_files

HELP = "what this machine has, what each backend needs, and what to do about it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_files(parser, json="facts and findings")
