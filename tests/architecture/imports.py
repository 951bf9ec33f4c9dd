"""Who imports whom in `src/shardwright`, read from the source: top-level, lazy and type-checking
imports alike.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import shardwright

ROOT = Path(shardwright.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "files", "units"),
    ("config", "hardware", "telemetry"),
    ("architecture", "layout", "schedule"),
    ("plan", "placement"),
    ("layout_rules",),
    ("model", "numerics", "optim", "data", "checkpoint", "planner", "cluster", "convert"),
    ("parallel", "report", "watchdog"),
    ("launch",),
    ("train", "inference"),
    ("verify", "rehearse", "doctor"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}
TORCH_FREE = {room for rooms in LAYERS[:5] for room in rooms} | {
    "planner",
    "report",
    "cluster",
    "convert",
}


@dataclass(frozen=True)
class Import:
    """`module` imports `target` on `line`; both dotted names."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["shardwright", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Every import statement in the file, wherever it stands."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = (
                    module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                )
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield Import(module, whole if whole in known else base, node.lineno)


def all_imports() -> list[Import]:
    """All imports of the package."""
    return [found for module, path in modules().items() for found in imports_of(module, path)]


def room_of(module: str) -> str | None:
    """`shardwright.train.loop` -> `train`; None outside the package and for the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "shardwright" and len(parts) > 1 else None
