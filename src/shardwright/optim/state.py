"""An optimizer's state by parameter name: tensors and JSON for a checkpoint, and back, bit for bit.

Nothing here goes by the order of groups or parameters, which depends on the layout and on what is frozen; names do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.optim.cut import CutOptimizer, Moment

_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum", "rule")


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that its first step would start from, without a step; what exists stays.

    Moments are zeros, cut like the parameter. SGD starts its momentum at the first gradient, which is what zeros give.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, CutOptimizer):
                optimizer.start(parameter, group)
                continue
            state = optimizer.state[parameter]
            for name in _moment_names(optimizer):
                if state.get(name) is None:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if _counts_steps(optimizer) and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, Tensor]:
    """Moments as `optimizer.<parameter name>.<moment>`, the very tensors (DTensors under FSDP) that the optimizer uses.

    Read them to save, write into them to load; they are created where no step has been taken. Frozen parameters have none.
    """
    return {key: moment.tensor for key, moment in optimizer_moments(optimizer, named_parameters).items()}


def optimizer_moments(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, Moment]:
    """The same by the same names, each with the parameter that it belongs to and how it lies over ranks."""
    create_state(optimizer)
    names = {parameter: name for name, parameter in named_parameters}
    told: dict[str, Moment] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, CutOptimizer):
                moments = optimizer.moments(parameter)
            else:
                state = optimizer.state[parameter]
                moments = {key: Moment(state[key], names[parameter]) for key in _moment_names(optimizer)}
            told |= {f"optimizer.{moment.parameter}.{key}": moment for key, moment in moments.items()}
    return told


def optimizer_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is not a tensor, as JSON: the rule, each parameter's count of steps, and its hyperparameters for the reader."""
    create_state(optimizer)
    steps, hyperparameters = {}, {}
    for group in optimizer.param_groups:
        shown = {key: _plain(group[key]) for key in _HYPERPARAMETERS if key in group}
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            steps[name] = int(optimizer.state[parameter]["step"]) if _counts_steps(optimizer) else 0
            hyperparameters[name] = shown
    return {"rule": _rule(optimizer), "steps": steps, "hyperparameters": hyperparameters}


def load_optimizer_values(
    optimizer: torch.optim.Optimizer, values: dict[str, Any], *, trainable: Collection[str] | None = None
) -> None:
    """Set the counts of steps from `optimizer_values`. Hyperparameters stay those of the recipe.

    Args:
        values: of the whole model.
        trainable: names of the whole model's trained parameters, where this optimizer has only some (a pipeline stage's).

    Raises:
        CheckpointError: another rule, or other parameters than the ones being trained.
    """
    if values["rule"] != _rule(optimizer):
        raise CheckpointError(
            "the checkpoint is another optimizer's", field="optimizer.name", got=_rule(optimizer), allowed=str(values["rule"])
        )
    create_state(optimizer)
    steps = dict(values["steps"])
    here = {name for group in optimizer.param_groups for name in group["param_names"]}
    wanted = here if trainable is None else set(trainable)
    if wanted != steps.keys():
        raise CheckpointError(
            "the checkpoint's optimizer trained other parameters; "
            f"absent from it: {_some(wanted - steps.keys())}; absent here: {_some(steps.keys() - wanted)}",
            field="checkpoint",
            remedy="Freeze the same parameters as the run that saved it",
        )
    if _counts_steps(optimizer):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                optimizer.state[parameter]["step"].fill_(float(steps[name]))


def _rule(optimizer: torch.optim.Optimizer) -> str:
    return optimizer.rule if isinstance(optimizer, CutOptimizer) else type(optimizer).__name__.lower()


def _moment_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    assert isinstance(optimizer, torch.optim.SGD), type(optimizer)
    return ("momentum_buffer",) if optimizer.param_groups[0]["momentum"] else ()


def _counts_steps(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.AdamW | CutOptimizer)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _some(names: Iterable[str], most: int = 5) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return (", ".join(listed[:most]) or "none") + more
