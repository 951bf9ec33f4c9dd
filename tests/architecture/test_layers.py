"""The house's walls: imports point down, siblings are strangers, nothing goes round, and the light
rooms need no torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.imports import LAYER_OF, ROOT, TORCH_FREE, all_imports, modules, room_of


def test_every_room_has_a_layer() -> None:
    rooms = {room_of(module) for module in modules()} - {None}
    assert rooms <= set(LAYER_OF), f"rooms without a layer: {sorted(rooms - set(LAYER_OF))}"


def test_imports_point_down() -> None:
    wrong = []
    for found in all_imports():
        here = room_of(found.module)
        there = room_of(found.target)
        if here and there and here != there and LAYER_OF[there] >= LAYER_OF[here]:
            wrong.append(f"{found} (layer {LAYER_OF[here]} -> {LAYER_OF[there]})")
    assert not wrong, "\n".join(wrong)


def test_no_cycles() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in all_imports():
        # A package's __init__ that gathers its own modules is no cycle: children may not import it
        # back.
        if found.target in graph and found.target != found.module:
            graph[found.module].add(found.target)
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "cycle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for target in sorted(graph[module]):
                walk(target, (*trail, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_light_rooms_never_name_torch() -> None:
    heavy = {"torch", "torchao", "transformers", "accelerate"}
    wrong = [
        str(f)
        for f in all_imports()
        if room_of(f.module) in TORCH_FREE and f.target.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


def test_transformers_has_few_doors() -> None:
    doors = {f.module for f in all_imports() if f.target.split(".")[0] == "transformers"}
    assert len(doors) <= 3, f"transformers is imported in {sorted(doors)}"


LIGHT = sorted(
    m
    for m in modules()
    if room_of(m) in TORCH_FREE or m in ("shardwright", "shardwright.cli", "shardwright.cli.main")
)


def test_light_rooms_and_the_command_line_import_without_torch() -> None:
    script = (
        "import importlib, sys\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} brings in {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_stay_readable(path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450, (
        "read it again: this file has become two"
    )
