"""Formulas as operators, each compiled by itself to one pass over memory.

An operator hides the compiled code from whatever looks at operations: selective recomputation
repeats it, since it is no matrix product, and a rehearsal allocates its results. Inside an operator
there is neither autograd nor a mode, so that a formula has one graph for forward passes,
recomputation and evaluation.

One graph serves all numbers of tokens. Sizes of features, dtypes and constants are part of the
graph. One token is computed uncompiled, for torch would compile it once more.

Legend: N tokens, B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import RunFailed
from shardwright.model.pointwise import formulas

Formula = Callable[..., tuple[Tensor, ...]]
Constants = tuple[bool | float | str, ...]

_OPTIONS: dict[str, Any] = {
    # Results are rounded where the formula rounds, and nowhere else.
    "emulate_precision_casts": True,
}
"""Inductor's options; those that a version lacks are left out."""

compiled_formulas: dict[tuple[Any, ...], Formula] = {}
"""Compiled formulas of this process by dtypes, sizes of features and constants."""

_library = torch.library.Library("shardwright", "FRAGMENT")


def run_formula(
    formula: Formula,
    token_tensors: Sequence[Tensor],
    other_tensors: Sequence[Tensor],
    constants: Constants,
) -> tuple[Tensor, ...]:
    """Compute formula(*token_tensors, *other_tensors, *constants), compiled if there are tokens.

    Args:
        token_tensors: `[N, D]`, `[B, T, D]` or `[B, T, H, E]`, each with features of its own. B may
            be 1 for tables that all rows share.
    """
    num_feature_dims = max(1, token_tensors[0].ndim - 2)
    token_sizes = token_tensors[0].shape[:-num_feature_dims]
    merged = _merge_rows(token_tensors, len(token_sizes))
    num_dims = merged[0].ndim - num_feature_dims
    operands = (*merged, *(tensor.detach() for tensor in other_tensors))
    if min(merged[0].shape[:num_dims]) > 1 and not torch.is_inference_mode_enabled():
        for tensor in merged:
            for dim in range(num_dims):
                if tensor.shape[dim] > 1:
                    torch._dynamo.mark_dynamic(tensor, dim)
        formula = _get_compiled(formula, operands, len(merged), num_dims, constants)
    results = formula(*operands, *constants)
    if num_dims == len(token_sizes):
        return results
    return tuple(
        result if result.ndim == 1 else result.reshape(*token_sizes, *result.shape[num_dims:])
        for result in results
    )


def _merge_rows(tensors: Sequence[Tensor], num_token_dims: int) -> list[Tensor]:
    """View `[B, T, ...]` as `[N, ...]` if all tensors allow it; the views have no gradient."""
    detached = [tensor.detach() for tensor in tensors]
    if num_token_dims == 1:
        return detached
    sizes = tensors[0].shape[:num_token_dims]
    assert num_token_dims == 2, sizes
    if sizes[0] == 1:
        return [tensor.squeeze(0) for tensor in detached]
    if sizes[1] == 1 and all(tensor.shape[0] == sizes[0] for tensor in tensors):
        return [tensor.squeeze(1) for tensor in detached]
    for tensor in detached:
        is_whole = tensor.shape[0] == sizes[0]
        if not is_whole or tensor.stride(0) != sizes[1] * tensor.stride(1):
            return detached
    return [tensor.flatten(0, 1) for tensor in detached]


def _get_compiled(
    formula: Formula,
    operands: Sequence[Tensor],
    num_merged: int,
    num_dims: int,
    constants: Constants,
) -> Formula:
    """Return the compiled formula for tensors of this kind; its first call compiles."""
    key = (
        formula,
        operands[0].device.type,
        constants,
        *(
            (tensor.dtype, tensor.shape[num_dims if index < num_merged else 0 :])
            for index, tensor in enumerate(operands)
        ),
        num_dims,
        tuple(tensor.shape[0] == 1 for tensor in operands[:num_merged]),
    )
    compiled = compiled_formulas.get(key)
    if compiled is None:
        compiled = compiled_formulas[key] = _compile(formula)
    return compiled


def _compile(formula: Formula) -> Formula:
    # torch limits the graphs of a code object. Here each graph has a copy of its own.
    assert isinstance(formula, FunctionType)
    copy = FunctionType(
        formula.__code__.replace(co_name=formula.__name__),
        formula.__globals__,
        formula.__name__,
        formula.__defaults__,
        formula.__closure__,
    )
    compiled = torch.compile(copy, fullgraph=True, dynamic=False, **choose_compile_options())

    def call(*arguments: Any) -> tuple[Tensor, ...]:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            try:
                results: tuple[Tensor, ...] = compiled(*arguments)
            except torch._dynamo.exc.TorchDynamoException as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise RunFailed(
                    f"torch.compile failed for {formula.__name__}: {' '.join(lines[:2])}. "
                    f"Set model.fused_pointwise: none and model.compile: false"
                ) from error
        return results

    return call


def choose_compile_options() -> dict[str, Any]:
    """Choose backend and options of torch.compile."""
    from torch._inductor import list_options  # imports the compiler

    options = dict(_OPTIONS)
    if torch.are_deterministic_algorithms_enabled():
        options["deterministic"] = True  # measures no kernels: its choice could differ
    known = set(list_options())
    return {"options": {key: value for key, value in options.items() if key in known}}


def _define(schema: str, compute: Callable[..., Any], allocate: Callable[..., Any]) -> Any:
    """Define an operator; `allocate` returns empty results, as for fake tensors."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardwright::{name}", allocate, lib=_library)
    return getattr(torch.ops.shardwright, name).default


def _allocate_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Allocate one contiguous tensor like each."""
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors
    )


def _allocate_scale(x: Tensor) -> Tensor:
    """Allocate one number per token, in fp32 or wider."""
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))


def _allocate_gradients(x: Tensor, *weights: Tensor, has_weight: bool) -> list[Tensor]:
    return list(_allocate_like(x, *(weights if has_weight else ())))


rms_norm = _define(
    "fused_rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: run_formula(formulas.normalise_rms, (x,), (weight,), (eps,)),
    lambda x, weight, eps: (*_allocate_like(x), _allocate_scale(x)),
)

rms_norm_backward = _define(
    "fused_rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor weight, "
    "bool has_weight) -> Tensor[]",
    lambda gradient, x, scale, weight, has_weight: list(
        run_formula(formulas.differentiate_rms, (gradient, x, scale), (weight,), (has_weight,))
    ),
    lambda gradient, x, scale, weight, has_weight: _allocate_gradients(
        x, weight, has_weight=has_weight
    ),
)

add_rms_norm = _define(
    "fused_add_rms_norm(Tensor x, Tensor update, Tensor weight, float eps, float update_scale) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x, update, weight, eps, update_scale: run_formula(
        formulas.add_normalise_rms, (x, update), (weight,), (eps, update_scale)
    ),
    lambda x, update, weight, eps, update_scale: (*_allocate_like(x, x), _allocate_scale(x)),
)

add_rms_norm_backward = _define(
    "fused_add_rms_norm_backward(Tensor total_gradient, Tensor gradient, Tensor total, "
    "Tensor scale, Tensor weight, bool has_weight) -> Tensor[]",
    lambda total_gradient, gradient, total, scale, weight, has_weight: list(
        run_formula(
            formulas.add_differentiate_rms,
            (total_gradient, gradient, total, scale),
            (weight,),
            (has_weight,),
        )
    ),
    lambda total_gradient, gradient, total, scale, weight, has_weight: _allocate_gradients(
        total, weight, has_weight=has_weight
    ),
)

add_layer_norm = _define(
    "fused_add_layer_norm(Tensor x, Tensor update, Tensor weight, Tensor bias, float eps, "
    "float update_scale) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, update, weight, bias, eps, update_scale: run_formula(
        formulas.add_normalise_layer, (x, update), (weight, bias), (eps, update_scale)
    ),
    lambda x, update, weight, bias, eps, update_scale: (
        *_allocate_like(x, x),
        _allocate_scale(x),
        _allocate_scale(x),
    ),
)

add_layer_norm_backward = _define(
    "fused_add_layer_norm_backward(Tensor total_gradient, Tensor gradient, Tensor total, "
    "Tensor mean, Tensor scale, Tensor weight, bool has_weight) -> Tensor[]",
    lambda total_gradient, gradient, total, mean, scale, weight, has_weight: list(
        run_formula(
            formulas.add_differentiate_layer,
            (total_gradient, gradient, total, mean, scale),
            (weight,),
            (has_weight,),
        )
    ),
    lambda total_gradient, gradient, total, mean, scale, weight, has_weight: _allocate_gradients(
        total, weight, weight, has_weight=has_weight
    ),
)

gate = _define(
    "fused_gate(Tensor gate, Tensor up, str activation) -> Tensor",
    lambda gate, up, activation: run_formula(formulas.apply_gate, (gate, up), (), (activation,))[0],
    lambda gate, up, activation: _allocate_like(gate)[0],
)

gate_backward = _define(
    "fused_gate_backward(Tensor gradient, Tensor gate, Tensor up, str activation) "
    "-> (Tensor, Tensor)",
    lambda gradient, gate, up, activation: run_formula(
        formulas.differentiate_gate, (gradient, gate, up), (), (activation,)
    ),
    lambda gradient, gate, up, activation: _allocate_like(gate, up),
)

clamped_gate = _define(
    "fused_clamped_gate(Tensor gate, Tensor up, float limit, float gain) -> Tensor",
    lambda gate, up, limit, gain: run_formula(
        formulas.apply_clamped_gate, (gate, up), (), (limit, gain)
    )[0],
    lambda gate, up, limit, gain: _allocate_like(gate)[0],
)

clamped_gate_backward = _define(
    "fused_clamped_gate_backward(Tensor gradient, Tensor gate, Tensor up, float limit, "
    "float gain) -> (Tensor, Tensor)",
    lambda gradient, gate, up, limit, gain: run_formula(
        formulas.differentiate_clamped_gate, (gradient, gate, up), (), (limit, gain)
    ),
    lambda gradient, gate, up, limit, gain: _allocate_like(gate, up),
)

rotate = _define(
    "fused_rotate(Tensor x, Tensor cos, Tensor sin, float direction) -> Tensor",
    lambda x, cos, sin, direction: run_formula(formulas.rotate, (x, cos, sin), (), (direction,))[0],
    lambda x, cos, sin, direction: _allocate_like(x)[0],
)

differentiate_token_losses = _define(
    "fused_token_losses(Tensor(a!) logits, Tensor labels, Tensor factors, float logit_scale, "
    "float soft_cap, float label_smoothing) -> Tensor",
    lambda logits, labels, factors, *constants: run_formula(
        formulas.differentiate_token_losses,
        (logits, labels, logits.gather(1, labels), factors),
        (),
        constants,
    )[0],
    lambda logits, *_others: _allocate_scale(logits),
)
