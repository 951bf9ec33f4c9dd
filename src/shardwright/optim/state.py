"""Optimizer state by parameter name: tensors and JSON values for checkpoints, bit for bit.

Names identify parameters here, because the order of groups and parameters depends on the layout
and on the frozen parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.optim.sharded_optimizer import (
    ElementwiseUpdate,
    Moment,
    ShardedOptimizer,
    UpdateByPiece,
)

_MAX_NAMES = 5
"""Names that a message lists."""
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum", "rule")


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the initial state of every parameter without a step; existing state is kept.

    Moments are zeros, sharded like the parameter. SGD's momentum starts at the first gradient,
    which zeros give too.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            assert isinstance(optimizer, ElementwiseUpdate | ShardedOptimizer), type(optimizer)
            optimizer.initialise_state(parameter, group)


def collect_optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, Tensor]:
    """Return the moments as `optimizer.<parameter name>.<moment>`.

    They are the tensors that the optimizer uses (DTensors under FSDP). Saving reads them,
    loading writes into them. They are created if no step has been taken. Frozen parameters have
    none.
    """
    return {
        key: moment.tensor
        for key, moment in collect_optimizer_moments(optimizer, named_parameters).items()
    }


def collect_optimizer_moments(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, Moment]:
    """Return the moments by the same names, each with its parameter and sharding."""
    create_state(optimizer)
    names = {parameter: name for name, parameter in named_parameters}
    result: dict[str, Moment] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, ShardedOptimizer):
                moments = optimizer.moments(parameter)
            else:
                state = optimizer.state[parameter]
                moments = {
                    key: Moment(state[key], names[parameter])
                    for key in _list_moment_names(optimizer)
                }
            result |= {
                f"optimizer.{moment.parameter}.{key}": moment for key, moment in moments.items()
            }
    return result


def collect_optimizer_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return as JSON the rule, and per parameter its step count and hyperparameters.

    The hyperparameters are for readers; they are not loaded.
    """
    create_state(optimizer)
    counts = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            counts[name] = (
                optimizer.state[parameter]["step"]
                if _has_step_count(optimizer)
                else torch.zeros(())
            )
    return {
        "rule": get_rule(optimizer),
        "steps": _read_counts(counts),
        "hyperparameters": collect_hyperparameters(optimizer),
    }


def collect_hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Return as JSON the hyperparameters of each parameter, by its name."""
    hyperparameters: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        group_values = {key: _to_json_value(group[key]) for key in _HYPERPARAMETERS if key in group}
        hyperparameters |= dict.fromkeys(group["param_names"], group_values)
    return hyperparameters


def _read_counts(counts: dict[str, Tensor]) -> dict[str, int]:
    """Read step counts, one copy per device, because each read waits for the device.

    Fused kernels have their counts on the GPU; Muon has those of its matrices on the CPU.
    """
    steps: dict[str, int] = {}
    for device in {count.device for count in counts.values()}:
        names = [name for name, count in counts.items() if count.device == device]
        numbers = torch.stack([counts[name] for name in names]).tolist()
        steps |= dict(zip(names, map(int, numbers), strict=True))
    return {name: steps[name] for name in counts}


def load_optimizer_values(
    optimizer: torch.optim.Optimizer,
    values: dict[str, Any],
    *,
    trainable: Collection[str] | None = None,
) -> None:
    """Set the step counts from `collect_optimizer_values`. Hyperparameters remain those of the
    recipe.

    Args:
        values: values of the whole model.
        trainable: names of the whole model's trainable parameters, if this optimizer has only
            some (those of a pipeline stage).

    Raises:
        CheckpointError: the rule or the set of trainable parameters differs.
    """
    if values["rule"] != get_rule(optimizer):
        raise CheckpointError(
            "the checkpoint was saved with another optimizer",
            field="optimizer.name",
            got=get_rule(optimizer),
            allowed=str(values["rule"]),
        )
    create_state(optimizer)
    steps = dict(values["steps"])
    local_names = {name for group in optimizer.param_groups for name in group["param_names"]}
    expected = local_names if trainable is None else set(trainable)
    if expected != steps.keys():
        raise CheckpointError(
            "the checkpoint's optimizer trained different parameters; "
            f"missing in the checkpoint: {_format_names(expected - steps.keys())}; "
            f"missing here: {_format_names(steps.keys() - expected)}",
            field="checkpoint",
            remedy="Freeze the same parameters as the run that saved it",
        )
    if _has_step_count(optimizer):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                optimizer.state[parameter]["step"].fill_(float(steps[name]))


def get_rule(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the update rule in checkpoints."""
    return (
        optimizer.rule
        if isinstance(optimizer, ShardedOptimizer)
        else type(optimizer).__name__.lower()
    )


def _list_moment_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    if isinstance(optimizer, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    assert isinstance(optimizer, torch.optim.SGD), type(optimizer)
    return ("momentum_buffer",) if optimizer.param_groups[0]["momentum"] else ()


def _has_step_count(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, UpdateByPiece) and optimizer.has_step_count


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _format_names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - _MAX_NAMES} more" if len(listed) > _MAX_NAMES else ""
    return (", ".join(listed[:_MAX_NAMES]) or "none") + more
