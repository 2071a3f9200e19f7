"""The check of imports that `make lint` runs, on small trees of modules and on this one."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tools import check_imports

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tree:
    """Modules of ``hybrid_ep`` and what the check says of them.

    Attributes:
        files: source by path below hybrid_ep/; ``__init__.py`` is there too, empty unless named.
        says: part of each fault.
    """

    name: str
    files: dict[str, str]
    says: list[str] = field(default_factory=list)


UP = "hybrid_ep.ops.rules, line {}: imports hybrid_ep.buffer, which is above it (ops -> Buffer)"
IN_A_FUNCTION = "def check():\n    from hybrid_ep import buffer\n"
DOWN_IN_A_FUNCTION = "def check():\n    from hybrid_ep.ops import rules\n"
FOR_TYPES = (
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hybrid_ep.buffer import Buffer\n"
)
TREES = [
    Tree("downward", {"buffer.py": "import hybrid_ep.ops.rules", "ops/rules.py": "import torch"}),
    Tree(
        "downward_within_a_function",
        {
            "buffer.py": IN_A_FUNCTION.replace(
                "hybrid_ep import buffer", "hybrid_ep.ops import rules"
            ),
            "ops/rules.py": "",
        },
    ),
    Tree("upward", {"ops/rules.py": "import hybrid_ep.buffer", "buffer.py": ""}, [UP.format(1)]),
    Tree("upward_in_a_function", {"ops/rules.py": IN_A_FUNCTION, "buffer.py": ""}, [UP.format(2)]),
    Tree("upward_for_types_alone", {"ops/rules.py": FOR_TYPES, "buffer.py": ""}, [UP.format(3)]),
    Tree(
        "upward_relative",
        {"ops/rules.py": "from .. import buffer", "buffer.py": ""},
        [UP.format(1)],
    ),
    Tree(
        "upward_from_a_subpackage",
        {"backends/cuda/nvlink.py": "from ...ops import dispatch", "ops/__init__.py": ""},
        ["hybrid_ep.backends.cuda.nvlink, line 1: imports hybrid_ep.ops"],
    ),
    Tree(
        "the_library_imports_a_command",
        {"launch.py": "import hybrid_ep.plan.plan", "plan/plan.py": ""},
        ["hybrid_ep.launch, line 1: imports hybrid_ep.plan.plan"],
    ),
    Tree(
        "an_extension_is_not_the_package",
        {"backends/cuda/nvlink.py": "from hybrid_ep import _nvlink"},
    ),
    Tree(
        "a_name_of_the_package_is_the_package",
        {"backends/cuda/nvlink.py": "from hybrid_ep import Buffer"},
        ["hybrid_ep.backends.cuda.nvlink, line 1: imports hybrid_ep, which is above it"],
    ),
    Tree(
        "circle_in_a_layer",
        {
            "config.py": "import hybrid_ep.shape",
            "shape.py": "import hybrid_ep.errors",
            "errors.py": IN_A_FUNCTION.replace("buffer", "config"),
        },
        ["a circle: hybrid_ep.config -> hybrid_ep.shape -> hybrid_ep.errors -> hybrid_ep.config"],
    ),
    Tree(
        "circle_over_layers",
        {"ops/rules.py": "import hybrid_ep.buffer", "buffer.py": "import hybrid_ep.ops.rules"},
        [UP.format(1), "a circle: hybrid_ep.buffer -> hybrid_ep.ops.rules -> hybrid_ep.buffer"],
    ),
    Tree(
        "in_no_layer",
        {"util.py": "import hybrid_ep.config", "config.py": ""},
        ["no layer of tools/check_imports.py names hybrid_ep.util"],
    ),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_what_is_refused(tree: Tree, tmp_path: Path) -> None:
    for name, source in {"__init__.py": "", **tree.files}.items():
        path = tmp_path / "hybrid_ep" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    faults = list(check_imports.broken_rules(check_imports.read_graph(tmp_path)))
    assert len(faults) == len(tree.says), faults
    for fault, says in zip(faults, tree.says, strict=True):
        assert says in fault


def test_this_tree_keeps_the_layers() -> None:
    graph = check_imports.read_graph(ROOT)
    assert len(graph) > 90
    assert list(check_imports.broken_rules(graph)) == []
