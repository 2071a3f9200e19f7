#!/usr/bin/env python3
"""Fails on a circle among the imports of the Python packages, and on an import that goes up.

Every import counts, also one inside a function and one for types alone: each is something that a
reader of the module has to know.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("hybrid_ep", "hybrid_ep_cli")


@dataclass(frozen=True)
class Layer:
    """Modules that import each other without a circle, and those of the layers below.

    Attributes:
        modules: names; a package stands for what is in it, unless a layer names that.
    """

    name: str
    modules: tuple[str, ...]


# From the top down. A module is named in one layer, or its package is.
LAYERS = (
    Layer("entry", ("hybrid_ep.__main__",)),
    Layer("command line", ("hybrid_ep_cli",)),
    Layer(
        "commands",
        (
            "hybrid_ep.bench",
            "hybrid_ep.check",
            "hybrid_ep.demo",
            "hybrid_ep.doctor",
            "hybrid_ep.output",
            "hybrid_ep.plan",
            "hybrid_ep.tune",
        ),
    ),
    Layer("integrations", ("hybrid_ep.integrations",)),
    Layer(
        "what a user holds",
        ("hybrid_ep", "hybrid_ep.launch", "hybrid_ep.maps", "hybrid_ep.moe", "hybrid_ep.saving"),
    ),
    Layer("Buffer", ("hybrid_ep.buffer",)),
    Layer("ops", ("hybrid_ep.ops",)),
    Layer("communicator", ("hybrid_ep.communicator",)),
    Layer("backends", ("hybrid_ep.backends",)),
    Layer(
        "shape, group and config",
        (
            "hybrid_ep._version",
            "hybrid_ep.config",
            "hybrid_ep.errors",
            "hybrid_ep.group",
            "hybrid_ep.handle",
            "hybrid_ep.integers",
            "hybrid_ep.layout",
            "hybrid_ep.shape",
        ),
    ),
)

Graph = Mapping[str, Mapping[str, int]]  # module -> what it imports -> the line where it first does


def read_graph(root: Path) -> Graph:
    """The imports among the modules of the packages below ``root``."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: _imports(name, path, modules) for name, path in modules.items()}


def _imports(name: str, path: Path, modules: Mapping[str, Path]) -> dict[str, int]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # a module of the package, else a name in it; an extension module is neither
            imported = [
                full if (full := f"{base}.{alias.name}") in modules else base
                for alias in node.names
                if alias.name not in ("_nvlink", "_nvshmem")
            ]
        else:
            continue
        for each in imported:
            if each in modules and each != name:
                found[each] = min(node.lineno, found.get(each, node.lineno))
    return found


def broken_rules(graph: Graph) -> Iterator[str]:
    """Every upward import, and one circle."""
    for module, imported in graph.items():
        height = _height(module)
        if height is None:
            yield f"no layer of tools/check_imports.py names {module}"
            continue
        for other, line in imported.items():
            above = _height(other)
            if above is not None and above < height:
                yield (
                    f"{module}, line {line}: imports {other}, which is above it "
                    f"({LAYERS[height].name} -> {LAYERS[above].name})"
                )
    if circle := _circle(graph):
        yield f"a circle: {' -> '.join(circle)}"


def _height(module: str) -> int | None:
    """The index of the layer that names the module, or the room it is in; None without one."""
    layers = {name: height for height, layer in enumerate(LAYERS) for name in layer.modules}
    if module in layers:
        return layers[module]
    room, _, _ = module.rpartition(".")
    return None if room in ("", "hybrid_ep") else _height(room)


def _circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of one circle, the first one again at the end; empty where there is none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for other in graph[module]:
            if circle := visit(other):
                return circle
        done.add(path.pop())
        return []

    return next((circle for module in graph if (circle := visit(module))), [])


def main() -> int:
    graph = read_graph(ROOT)
    faults = list(broken_rules(graph))
    for fault in faults:
        print(f"imports: {fault}", file=sys.stderr)
    if not faults:
        print(f"imports: {len(graph)} modules, no circle, none upward")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
