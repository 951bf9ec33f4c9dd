"""Read all imports of `src/shardwright` from the source, lazy and type-checking ones included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import shardwright

ROOT = Path(shardwright.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("masking",),
    (
        "control_characters",
        "errors",
        "files",
        "grouping",
        "store_requests",
        "units",
        "version",
        "worker_processes",
    ),
    ("config", "hardware", "telemetry"),
    ("architecture", "layout", "schedule"),
    ("placement",),
    ("plans",),
    ("hashing", "numerics"),
    ("model", "optim", "data", "checkpoint", "planner", "cluster", "convert"),
    ("parallel", "offload", "peer_copies", "report", "watchdog"),
    ("launch",),
    ("training", "inference"),
    ("verification", "rehearsal", "doctor", "audit", "tuning"),
    ("api",),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {package: depth for depth, packages in enumerate(LAYERS) for package in packages}
TORCH_FREE = {package for packages in LAYERS[:6] for package in packages} | {
    "planner",
    "report",
    "cluster",
    "convert",
}


@dataclass(frozen=True)
class Import:
    """One import: `module` imports `target` on `line`; both are dotted names."""

    module: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@cache
def list_modules() -> dict[str, Path]:
    """Map the dotted name of every module of the package to its file."""
    paths = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["shardwright", *path.relative_to(ROOT).with_suffix("").parts]
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def iterate_imports(module: str, path: Path) -> Iterator[Import]:
    """Yield every import of the file, at any depth."""
    known = list_modules()
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


@cache
def list_imports() -> list[Import]:
    """List all imports of the package."""
    return [
        each for module, path in list_modules().items() for each in iterate_imports(module, path)
    ]


def get_package(module: str) -> str | None:
    """Return the package of a module: `train` for `shardwright.training.loop`.

    Return None for other libraries and for `shardwright` itself.
    """
    parts = module.split(".")
    return parts[1] if parts[0] == "shardwright" and len(parts) > 1 else None
