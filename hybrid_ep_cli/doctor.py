"""What this machine has, what each backend needs of it, and what to do about the difference.

Exit code 0: the torch backend works and nothing that is installed is broken; 1 otherwise.
"""

from __future__ import annotations

import argparse

HELP = "what this machine has, what each backend needs, and what to do about it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
