"""Layers of packages: imports point down, packages of one layer do not import each other, there are
no cycles, and some packages import no torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter

from tests.architecture.imports import (
    LAYER_OF,
    ROOT,
    TORCH_FREE,
    get_package,
    list_imports,
    list_modules,
)


def test_every_package_has_a_layer() -> None:
    packages = {get_package(module) for module in list_modules()} - {None}
    missing = packages - set(LAYER_OF)
    assert not missing, f"packages without a layer: {sorted(map(str, missing))}"


def test_imports_point_down() -> None:
    wrong = []
    for each in list_imports():
        importer = get_package(each.module)
        imported = get_package(each.target)
        if importer and imported and importer != imported:
            from_layer = LAYER_OF[importer]
            to_layer = LAYER_OF[imported]
            if to_layer >= from_layer:
                wrong.append(f"{each} (layer {from_layer} -> {to_layer})")
    assert not wrong, "\n".join(wrong)


def test_no_cycles() -> None:
    graph: dict[str, set[str]] = {module: set() for module in list_modules()}
    for each in list_imports():
        # A package's __init__ may import its modules, which must not import the package in turn.
        if each.target in graph and each.target != each.module:
            graph[each.module].add(each.target)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "cycle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_torch_free_packages_never_import_torch() -> None:
    heavy = {"torch", "torchao", "transformers", "accelerate"}
    wrong = [
        str(each)
        for each in list_imports()
        if get_package(each.module) in TORCH_FREE and each.target.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_few_modules_import_transformers() -> None:
    importers = {
        each.module for each in list_imports() if each.target.split(".")[0] == "transformers"
    }
    assert len(importers) <= 3, f"transformers is imported in {sorted(importers)}"


TORCH_FREE_MODULES = sorted(
    module
    for module in list_modules()
    if get_package(module) in TORCH_FREE
    or module in ("shardwright", "shardwright.cli", "shardwright.cli.main")
)


def test_torch_free_packages_and_the_command_line_import_without_torch() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE_MODULES!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


FILE_LIMITS = {"audit/recorder.py": 870}
"""Lines of files that are longer for a reason: this one is copied into other projects
(docs/decisions/0069-vendorable-recorder.md)."""


MAX_FILE_LINES = 450


def test_files_stay_readable() -> None:
    too_long = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = FILE_LIMITS.get(name, MAX_FILE_LINES)
        if num_lines > limit:
            too_long.append(f"{name}: {num_lines} lines, at most {limit}")
    assert not too_long, "split these files:\n" + "\n".join(too_long)


MAX_STATEMENT_LINES = 60
FUNCTION_LIMITS = {
    "planner/memory/activations.py::_compute_layer_activations": 108,
    "planner/memory/peaks.py::_compute_loss_peak": 109,
    "planner/published/measurements.py::read_published_run": 63,
    "planner/time/compute.py::compute_layer_seconds": 68,
    "rehearsal/rank_rehearsal.py::_rehearse_step": 74,
    "telemetry/sinks.py::_describe_event": 68,
}
"""Lines of functions that are longer: numbers of one formula, or one list in reading order. Lower a
limit when its function becomes shorter; add none."""


def test_functions_stay_readable() -> None:
    too_long = []
    lengths = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                lengths[name] = max(lengths.get(name, 0), count_statement_lines(node))
                limit = FUNCTION_LIMITS.get(name, MAX_STATEMENT_LINES)
                if lengths[name] > limit:
                    too_long.append(f"{name}: {lengths[name]} lines, at most {limit}")
    assert not too_long, "split into named steps:\n" + "\n".join(too_long)
    done = [name for name in FUNCTION_LIMITS if lengths.get(name, 0) <= MAX_STATEMENT_LINES]
    assert not done, f"remove the limits of {done}: these functions are short now"


def count_statement_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function after its signature and its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    return function.end_lineno - (first.end_lineno if has_docstring else first.lineno - 1)


MAX_MODULES = 25


def test_packages_stay_small() -> None:
    modules = Counter(path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    crowded = {name: number for name, number in modules.items() if number > MAX_MODULES}
    assert not crowded, f"group their modules into subpackages: {crowded}"
