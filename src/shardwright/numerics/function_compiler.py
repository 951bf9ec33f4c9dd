"""Compilation of single functions, each used only where it computes the bits of uncompiled code.

Inductor fuses a chain of elementwise operations and reductions over a block into one pass over
memory. Its arithmetic is not that of PyTorch's own kernels everywhere, and differs between
devices and versions. So a compiled function is compared on a sample, and one whose results
differ in a bit is not used. Ranks need not agree on that choice: both sides give the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.numerics.compiled_casts import repair_casts

logger = logging.getLogger(__name__)

_ROUNDING_OPTIONS: dict[str, Any] = {
    # No multiplication is contracted into an addition, and no cast to 16 bits is left out.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
"""Inductor's options for PyTorch's own rounding."""

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
"""Compiled functions of this process, by function and options: each has one list of graphs for all
its callers."""


class FunctionCompiler:
    """Compiles functions for a device, and compares each with its uncompiled counterpart.

    Args:
        obstacle: why nothing is compiled, as one clause; None to compile.
    """

    def __init__(self, device: torch.device, obstacle: str | None = None) -> None:
        self.device = device
        self.obstacle = obstacle
        self._chosen: dict[str, Callable[..., Any]] = {}

    def __call__(
        self,
        name: str,
        formulation: Callable[..., Any],
        eager: Callable[..., Any],
        make_sample: Callable[[torch.device], Sequence[Any]],
    ) -> Callable[..., Any]:
        """Return `formulation`, compiled, or `eager` where it cannot be used; log which.

        Both take the arguments that `make_sample` returns, change the same of them and return
        the same. The first call for a name compiles, which takes seconds.

        Args:
            name: function and dtypes, for the log; it identifies the choice.
            make_sample: returns new arguments with the same values at every call, with marks of
                the dims that vary between calls (`mark_dynamic`). Those calls need no marks.
        """
        if name not in self._chosen:
            start_seconds = time.perf_counter()
            reason = self.obstacle or self._find_difference(formulation, eager, make_sample)
            if reason is None:
                seconds = time.perf_counter() - start_seconds
                logger.info("%s: compiled in %.1f s; bits as uncompiled", name, seconds)
                self._chosen[name] = compile_function(formulation)
            else:
                logger.info("%s: not compiled (%s)", name, reason)
                self._chosen[name] = eager
        return self._chosen[name]

    def _find_difference(
        self,
        formulation: Callable[..., Any],
        eager: Callable[..., Any],
        make_sample: Callable[[torch.device], Sequence[Any]],
    ) -> str | None:
        """Compile and compare. Return why the compiled function cannot be used, as one clause."""
        expected_arguments, arguments = (make_sample(self.device) for _ in range(2))
        expected = eager(*expected_arguments)
        try:
            result = compile_function(formulation)(*arguments)
        except Exception as error:
            # Whatever fails inside a compiler, the uncompiled function computes the same.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"the compiler failed: {type(error).__name__}: {' '.join(lines[:2])}"
        pairs = zip(
            tree_leaves((arguments, result)),
            tree_leaves((expected_arguments, expected)),
            strict=True,
        )
        num_differing = sum(
            int((_read_bits(found) != _read_bits(wanted)).sum())
            for found, wanted in pairs
            if isinstance(wanted, Tensor)
        )
        if num_differing:
            return f"{num_differing} numbers of a sample differ from uncompiled ones"
        return None


def build_function_compiler(
    setting: bool | Literal["auto"], device: torch.device
) -> FunctionCompiler:
    """Build the compiler of `model.compile_functions`.

    `auto` compiles on CUDA if Triton works there. On a CPU it compiles nothing, as with
    `model.compile`: a small run ends before it has regained the seconds of compiling.
    """
    obstacle: str | None
    if setting is False:
        obstacle = "model.compile_functions is false"
    elif setting == "auto" and device.type != "cuda":
        obstacle = "the device is a CPU"
    else:
        obstacle = find_compiler_obstacle(device)
    return FunctionCompiler(device, obstacle)


def compile_function(
    formulation: Callable[..., Any],
    *,
    max_graphs: int = 32,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return the compiled function, with PyTorch's own rounding; its first call compiles.

    Args:
        max_graphs: Maximum number of graphs in this process; with more, a call fails. AdamW has up
            to six for each of its settings (dtypes of copies and numbers of tensors).
        options: Inductor's options besides those of rounding.
    """
    key = (formulation, *(options or {}).items())
    if key not in _compiled:
        all_options = request_exact_rounding() | dict(options or {})
        compiled = torch.compile(formulation, fullgraph=True, dynamic=False, options=all_options)

        def call(*arguments: Any) -> Any:
            # A graph belongs to a state of autograd: called within an operator, where autograd is
            # off, or elsewhere, the function has one graph.
            config = torch._dynamo.config
            limit = config.recompile_limit
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                if limit == max_graphs:
                    return compiled(*arguments)
                config.recompile_limit = max_graphs  # a patch takes several times as long
                try:
                    return compiled(*arguments)
                finally:
                    config.recompile_limit = limit

        _compiled[key] = call
    return _compiled[key]


def request_exact_rounding() -> dict[str, Any]:
    """Let Inductor round as PyTorch does (`repair_casts`), and return the options for it.

    Options that torch lacks are left out.

    Raises:
        RuntimeError: Inductor leaves out casts.
    """
    from torch._inductor import list_options  # imports the compiler

    repair_casts()
    known = set(list_options())
    return {key: value for key, value in _ROUNDING_OPTIONS.items() if key in known}


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _read_bits(tensor: Tensor) -> Tensor:
    """View the numbers as integers, so that zeros of two signs differ and NaN equals itself."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.dtype.itemsize])
