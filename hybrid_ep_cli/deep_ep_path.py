"""Print the folder for PYTHONPATH that lets `import deep_ep` find HybridEPBuffer in hybrid_ep.

For a training script that nobody wants to edit; hybrid_ep itself must be installed:

  PYTHONPATH=$(hybrid-ep deep-ep-path) torchrun ... pretrain_gpt.py ...

docs/integrations.md says for which frameworks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "the folder for PYTHONPATH that lets frameworks find hybrid_ep as deep_ep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def run(args: argparse.Namespace) -> int:
    """Print the folder; imports neither hybrid_ep nor torch."""
    package = Path(__file__).resolve().parents[1] / "hybrid_ep"
    print(package / "integrations" / "deep_ep" / "on_path")
    return 0
