"""Steps of `make gpu`: commands, parts, what they compile and time. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from benchmarks.shapes import SHAPES, TINY, Shape

MODULE = (sys.executable, "-m")
_ENGINE = tuple(
    f"src/shardwright/{name}"
    for name in ("hashing.py", "model", "numerics", "offload", "optim", "parallel", "training")
)
GOALS = {
    "real": (
        "speed llama-3-8b-12-layers-bf16-weights-4096-compile",
        *("low precision all layers", "offload llama-3.2-1b-4096"),
        "speed llama-3-8b-12-layers-4096-compile",
        *("speed llama-3-8b-lora-4096-compile", "attention", "functions"),
        *("speed gemma-2-9b-4096-compile", "speed gpt-oss-20b-4096-compile"),
        *("speed qwen3-30b-a3b-lora-4096-compile", "profile llama-3-8b-12-layers-4096-compile"),
        "profile llama-3-8b-12-layers-4096-compile-tensorwise",
    ),
    "tiny": (
        *("speed tiny-64-compile", "low precision all layers", "offload tiny-64"),
        *("speed tiny-lora-64", "attention", "functions", "profile tiny-64-compile"),
    ),
}
"""Steps that measure the speeds we aim at, the most important first."""
GOAL_CONTENDERS = ("shardwright", "torchtune")
_COMPILED_RECIPES = ("bf16", "tensorwise", "rowwise")
"""Products whose steps of all layers are compiled ahead; the goals have no others."""
_PROFILED = {"real": "llama-3-8b-12-layers", "tiny": "tiny"}
"""Shape whose compiled step is profiled."""


@dataclass(frozen=True)
class Step:
    """One process of a part; `{out}` in its command is its own folder."""

    name: str
    part: int
    time_limit_seconds: float
    command: tuple[str, ...]
    result: str
    """File in its folder with the result."""
    estimated_seconds: float = 60.0
    """Seconds that it takes on a fast GPU when its kernels are compiled; used until there is a
    result."""
    compile_commands: tuple[tuple[str, ...], ...] = ()
    """Commands that compile its kernels, each in a process of its own. `{out}` is a folder of
    theirs."""
    is_timed: bool = True
    """False if other processes may use the device meanwhile: tests."""
    code: tuple[str, ...] = _ENGINE
    """Files and folders with the code that it times or tests, besides its own module."""
    shape_name: str = ""
    """Shape whose configuration is written to `{out}/config.json`; "": the first one."""
    whole_command: tuple[str, ...] = ()
    """Command of the whole step if this one is shortened by `--goals`, else empty."""


def list_steps(arguments: argparse.Namespace) -> list[Step]:
    """List the steps by part, or those of the goals by importance; `--step` selects by name."""
    shapes = SHAPES if arguments.shapes == "real" else TINY
    steps = [
        *_list_checks(arguments),
        *_list_speeds(arguments, shapes),
        *_list_profiles(arguments, shapes),
        *_list_low_precision(arguments),
    ]
    name, shape = next(iter(shapes.items()))
    length, rows = next(iter(shape.micro_batch_sizes.items()))
    config = (arguments.device, choose_precision(arguments), "{out}/config.json")
    command = (*MODULE, "benchmarks.gpu_step_cost", *config, str(length), str(rows))
    quick = ("--steps", "3", "--num-variants", "1") if arguments.quick else ()
    result = "step-cost.json"
    command = (*command, f"{{out}}/{result}", *quick)
    steps.append(Step(f"step cost {name}-{length}", 3, 500, command, result, 250))
    command = (*command, *(() if arguments.quick else ("--steps", "30")), "--more")
    steps.append(Step(f"step cost more {name}-{length}", 11, 510, command, result, 330))
    command = (*MODULE, "benchmarks.gpu_offload", *config, str(length), str(rows))
    # Of the goals: the resident step, and moments on the host with either update.
    options: tuple[str, ...] = ("--num-variants", "3") if arguments.goals else ()
    if arguments.quick:
        options = ("--steps", "1", "--num-variants", "2")
    command = (*command, "{out}/offload.json")
    more = (*command, *(options if arguments.quick else ()), "--more")
    steps.append(Step(f"offload more {name}-{length}", 12, 300, more, "offload.json", 170))
    command = (*command, *options)
    seconds = 70 if arguments.goals else 140
    steps.append(Step(f"offload {name}-{length}", 8, 300, command, "offload.json", seconds))
    steps.sort(key=lambda step: step.part)
    if arguments.goals:
        every_step = argparse.Namespace(**vars(arguments) | {"goals": False, "step": []})
        whole = {step.name: step.command for step in list_steps(every_step)}
        steps = [
            replace(step, whole_command=whole[step.name])
            if step.command != whole[step.name]
            else step
            for step in _select_goals(steps, GOALS[arguments.shapes])
        ]
    patterns = arguments.step or ["*"]
    return [step for step in steps if any(fnmatchcase(step.name, pattern) for pattern in patterns)]


def choose_precision(arguments: argparse.Namespace) -> str:
    """Return the precision of compute on the device."""
    return "bf16" if arguments.device == "cuda" else "fp32"


def _select_goals(steps: Iterable[Step], names: tuple[str, ...]) -> list[Step]:
    """Return the steps of the goals in their order, against one peer only."""
    by_name = {step.name: step for step in steps}
    chosen = [by_name[name] for name in names]
    peers = tuple(word for name in GOAL_CONTENDERS for word in ("--contender", name))
    return [
        replace(step, command=(*step.command, *peers)) if step.name.startswith("speed ") else step
        for step in chosen
    ]


def _list_checks(arguments: argparse.Namespace) -> list[Step]:
    """List parts 1 and 2: the device, a run of all our code, numbers, and the tests."""
    device = arguments.device
    smoke = (
        *("--device", device, "--shapes", "tiny", "--case", "tiny-64"),
        *("--contender", "shardwright", "--rounds", "1", "--steps", "3", "--warmup", "1"),
        *("--time-limit", "100", "--no-tests", "--out", "{out}"),
    )
    tests = (
        *(*MODULE, "pytest", "-q", "-p", "no:cacheprovider", "-W", "default"),
        *("-o", "addopts=--strict-markers -ra", "-m", "gpu" if device == "cuda" else "not gpu"),
        *("--junit-xml", "{out}/junit.xml"),
        *(("-k", arguments.tests) if arguments.tests else ()),
    )

    def test(name: str, part: int, seconds: float, *modules: str, is_timed: bool = False) -> Step:
        files = tuple(f"tests/gpu/test_{module}.py" for module in modules)
        return Step(
            *(name, part, 300, (*tests, *files), "junit.xml", seconds),
            is_timed=is_timed,
            code=("src/shardwright", *files),
        )

    others = (
        *("experts_on_cuda", "context_on_cuda", "offload_on_cuda", "doctor_on_cuda"),
        *("layouts_on_nccl", "faults_on_nccl"),
    )
    sizes = (choose_precision(arguments), arguments.shapes)

    def measure(name: str, part: int, limit: float, seconds: float, *options: str) -> Step:
        module = f"benchmarks.gpu_{name}"
        command = (*MODULE, module, device, *options, f"{{out}}/{name}.json")
        return Step(name, part, limit, command, f"{name}.json", seconds)

    return [
        replace(measure("device", 1, 90, 10), code=()),
        Step("smoke", 1, 120, (*MODULE, "benchmarks.gpu", *smoke), "one-gpu.json", 25),
        measure("numbers", 1, 150, 15),
        test("tests of numbers", 1, 190, "numerics_on_cuda", "decoder_on_cuda"),
        measure("attention", 2, 200, 60, *sizes),
        measure("functions", 2, 150, 60, sizes[1]),
        test("tests of training", 2, 65, "training_on_cuda", "optimizers_on_cuda"),
        test("other tests", 2, 60, *others),
        test("tests of switches", 12, 120, "switches_on_nccl", is_timed=True),
    ]


def _list_speeds(arguments: argparse.Namespace, shapes: dict[str, Shape]) -> list[Step]:
    """List the cases, the smallest model and its plain variant first."""
    visits: tuple[str, ...] = ("--rounds", "2", "--steps", "8", "--warmup", "3")
    if arguments.quick:
        visits = ("--rounds", "1", "--steps", "2", "--warmup", "1", "--contender", "shardwright")
    command = (*_build_speed_command(arguments), *visits, "--time-limit", "150")
    steps = []
    for place, (name, shape) in enumerate(shapes.items()):
        for number, length in enumerate(shape.micro_batch_sizes):
            for variant in shape.variants:
                is_first = place == number == 0 and variant in ("", "-compile")
                case = f"{name}-{length}{variant}"
                steps.append(
                    Step(
                        f"speed {case}",
                        3 if is_first else shape.part,
                        300,
                        (*command, "--case", case, "--out", "{out}"),
                        "one-gpu.json",
                        70 if shape.has_peers else 60,
                        _list_compile_commands(arguments, shape, case),
                    )
                )
    return steps


def _build_speed_command(arguments: argparse.Namespace) -> tuple[str, ...]:
    precision = choose_precision(arguments)
    fixed = ("--device", arguments.device, "--shapes", arguments.shapes, "--precision", precision)
    return (*MODULE, "benchmarks.gpu", *fixed, "--no-tests")


def _list_compile_commands(
    arguments: argparse.Namespace, shape: Shape, case: str
) -> tuple[tuple[str, ...], ...]:
    """List the commands that compile a case, one per contender; none if blocks are not compiled."""
    if "-compile" not in case:
        return ()
    has_peers = shape.has_peers and not arguments.quick
    contenders: tuple[str, ...] = ("shardwright",)
    if has_peers:
        contenders = GOAL_CONTENDERS if arguments.goals else (*GOAL_CONTENDERS, "trainer")
    command = (*_build_speed_command(arguments), "--compile-only", "--case", case)
    return tuple((*command, "--contender", name, "--out", "{out}") for name in contenders)


def _list_profiles(arguments: argparse.Namespace, shapes: dict[str, Shape]) -> list[Step]:
    """List the profiles of one step: plain, compiled, with 8-bit products, with moments on the
    host.
    """
    name = next(iter(shapes))
    profiled = _PROFILED[arguments.shapes]
    recipe = ("--recipe", "tensorwise")
    variants: list[tuple[str, str, int, tuple[str, ...]]] = [
        (name, "", 3, ()),
        (profiled, "-compile", 7, ("--compile",)),
        (profiled, "-compile-tensorwise", 7, ("--compile", *recipe)),
        (name, "-offload", 8, ("--offload", '{"optimizer": "host", "update_on": "device"}')),
    ]
    steps = []
    for shape_name, suffix, part, options in variants:
        length, rows = next(iter(shapes[shape_name].micro_batch_sizes.items()))
        fixed = (arguments.device, choose_precision(arguments), "{out}/config.json")
        numbers = (str(length), str(rows), "{out}/profile.json")
        step = Step(
            f"profile {shape_name}-{length}{suffix}",
            part,
            200,
            (*MODULE, "benchmarks.gpu_profile", *fixed, *numbers, *options),
            "profile.json",
            45,
            shape_name=shape_name,
        )
        # Commands that other steps have too, so that they run once.
        if recipe == options[1:]:
            step = replace(step, compile_commands=_list_recipe_commands(arguments, "tensorwise"))
        elif "--compile" in options:
            case = f"{shape_name}-{length}{suffix}"
            commands = _list_compile_commands(arguments, shapes[shape_name], case)[:1]
            step = replace(step, compile_commands=commands)
        steps.append(step)
    return steps


def _list_low_precision(arguments: argparse.Namespace) -> list[Step]:
    """List the comparison of recipes and, of its own, the steps of all layers."""
    command = _build_low_precision_command(arguments)
    quick = ("--only", "steps/bf16*") if arguments.quick else ()
    compiled = _list_recipe_commands(arguments, *_COMPILED_RECIPES)
    result = "low-precision.json"
    all_layers = (*command, "--all-layers", *quick)
    seconds = 150
    if arguments.goals and not quick:
        seconds = 120
        for recipe in _COMPILED_RECIPES:
            all_layers += ("--only", f"steps/{recipe},*")
    with_adapters = (*command, "--lora", *quick)
    for recipe in () if quick else _COMPILED_RECIPES:
        with_adapters += ("--only", f"steps/{recipe},*")
    return [
        Step("low precision", 7, 500, command, result, 230),
        Step("low precision all layers", 7, 400, all_layers, result, seconds, compiled),
        Step("low precision lora", 12, 200, with_adapters, result, 110),
    ]


def _build_low_precision_command(arguments: argparse.Namespace) -> tuple[str, ...]:
    fixed = (arguments.device, arguments.shapes, "{out}/low-precision.json")
    return (*MODULE, "benchmarks.gpu_low_precision", *fixed)


def _list_recipe_commands(
    arguments: argparse.Namespace, *recipes: str
) -> tuple[tuple[str, ...], ...]:
    """List the commands that compile blocks with the products of each recipe."""
    command = (*_build_low_precision_command(arguments), "--compile-only", "--all-layers")
    return tuple((*command, "--only", f"steps/{recipe},*") for recipe in recipes)
