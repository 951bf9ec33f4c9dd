"""Compiled code in a verification: what the engine compiles, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from shardwright.architecture import HFShape, ModelShape
from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.numerics.compilation import (
    choose_compilation,
    compiles_wide_attention,
    find_compiler_obstacle,
)
from shardwright.placement.compilation import (
    CompileChoice,
    PointwiseChoice,
    check_blocks,
    choose_blocks,
    choose_pointwise,
)
from shardwright.verification.cases import VerificationDtype
from shardwright.verification.comparison import ComparisonResult

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CompiledCode:
    """Code that ranks compile; the reason is one clause for a person to read."""

    dtypes: tuple[VerificationDtype, ...]
    """Dtypes in which blocks are compiled."""
    reason: str
    pointwise: PointwiseChoice
    has_all_dtypes: bool = True
    """True if `dtypes` are those of the verification."""

    def __str__(self) -> str:
        answer = "yes" if self.dtypes else "no"
        if self.dtypes and not self.has_all_dtypes:
            answer = f"in {' and '.join(self.dtypes)} only"
        return f"blocks compiled: {answer} ({self.reason})"


def choose_compiled_code(
    recipe: Recipe, shape: ModelShape, dtypes: Sequence[VerificationDtype]
) -> CompiledCode:
    """Choose what ranks compile: what a run of the recipe compiles on this machine.

    Ranks run on CPUs, so the kernels are a CPU's where a run would have CUDA's. Graphs, their
    derivatives and their communication are the run's.

    Raises:
        RecipeError: the recipe compiles, and torch.compile cannot compile for this CPU or blocks of
            transformers' own class, or the model does not call the functions.
    """
    has_cuda = recipe.run.device != "cpu" and torch.cuda.is_available()
    auto = choose_compilation(torch.device("cuda") if has_cuda else _CPU)
    obstacle = find_compiler_obstacle(_CPU)
    if auto.is_compiled and obstacle is not None:
        auto = CompileChoice(False, obstacle)
    auto = choose_blocks(auto, shape)
    setting = recipe.model.compile
    check_blocks(setting, shape)
    is_compiled = auto.is_compiled if setting == "auto" else setting
    pointwise = choose_pointwise(
        recipe.model.fused_pointwise,
        shape,
        has_compiled_blocks=is_compiled,
        auto_compilation=auto,
    )
    for field, is_required in (
        ("compile", setting is True),
        ("fused_pointwise", recipe.model.fused_pointwise in ("compiled", "loss")),
    ):
        if is_required and obstacle is not None:
            raise RecipeError(
                f"torch.compile cannot compile for a CPU, on which ranks run: {obstacle}",
                field=f"model.{field}",
                got=str(getattr(recipe.model, field)).lower(),
                allowed="auto",
                remedy=f"Install what is missing, or set model.{field} to auto",
            )
    if not is_compiled:
        reason = f"auto: {auto.reason}" if setting == "auto" else "model.compile: false"
        if setting == "auto" and not isinstance(shape, HFShape):
            reason += "; add --set model.compile=true for a run that compiles them"
        return CompiledCode((), reason, pointwise)
    reason = "model.compile: true"
    if setting == "auto":
        reason = (
            f"auto: {auto.reason}; every comparison takes many times as long: add --set "
            "model.compile=false for one of the layout alone"
        )
    if "float64" in dtypes and not compiles_wide_attention():
        reason = f"torch {torch.__version__} cannot compile fp64 attention for a CPU"
        narrow = tuple(dtype for dtype in dtypes if dtype != "float64")
        return CompiledCode(narrow, reason, pointwise, has_all_dtypes=False)
    return CompiledCode(tuple(dtypes), reason, pointwise)


def prepare_compilation() -> None:
    """Let torch compile the next model of this process as the first one of a run."""
    inductor: Any = import_module("torch._inductor.config")

    torch._dynamo.reset()  # graphs of earlier models count towards torch's limit
    inductor.compile_threads = 1  # or each rank starts compilers of its own, which import torch
    let_compiler_trace_groups()


def let_compiler_trace_groups() -> None:
    """Let torch 2.11 trace process groups of ranks: it knows torch's own classes, not a subclass.

    Elsewhere it breaks the graph at their collectives.
    """
    variables: Any = import_module("torch._dynamo.variables.distributed")
    if hasattr(variables, "ProcessGroupVariable"):  # newer versions trace every class
        variables.ProcessGroupVariable.is_process_group = staticmethod(
            lambda value: isinstance(value, dist.ProcessGroup)
        )


def count_graphs() -> int:
    """Count the graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters  # imports the compiler

    return int(counters["stats"]["unique_graphs"])


def check_compilation(num_before: int) -> ComparisonResult:
    """Fail if torch.compile has made no graph since `num_before`: it may be disabled."""
    return ComparisonResult(
        "compiled blocks", "a graph was made", float(count_graphs() == num_before), 0.0
    )
