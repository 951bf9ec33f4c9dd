"""Resolve `layout.async_tensor_parallel` for a run: the kernels that this machine has."""

from __future__ import annotations

from dataclasses import replace

import torch

from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.launch.devices import should_use_cuda
from shardwright.layout.degrees import AsyncTensorParallel
from shardwright.plans import Plan

_FIELD = "layout.async_tensor_parallel"


def resolve_async_tensor_parallel(recipe: Recipe, plan: Plan) -> Plan:
    """Check the setting against model, layout and machine, and resolve `auto`.

    Every rank of a run calls this with the same plan on the same kind of machine.

    Raises:
        RecipeError: the recipe names an overlap that cannot run.
    """
    setting = plan.layout.async_tensor_parallel
    if setting == "none":
        return plan
    obstacle = _find_model_obstacle(plan)
    if obstacle is None and setting != "chunked":
        has_cuda = should_use_cuda(recipe.run.device, field="run.device")
        obstacle = find_fused_obstacle(plan, has_cuda=has_cuda)
    if setting == "auto":
        kind: AsyncTensorParallel = "fused" if obstacle is None else "none"
        layout = replace(plan.layout, async_tensor_parallel=kind)
        return replace(
            plan,
            placement=replace(plan.placement, layout=layout),
            async_tensor_parallel_reason=obstacle or "symmetric memory is available",
        )
    if obstacle is None:
        return plan
    raise RecipeError(
        obstacle,
        field=_FIELD,
        got=setting,
        allowed="none, auto" if _find_model_obstacle(plan) else "none, auto, chunked",
        remedy="Remove the key",
    )


def _find_model_obstacle(plan: Plan) -> str | None:
    """Return why no product of the plan overlaps with communication; None if products do."""
    if plan.layout.tp == 1:
        return "without tensor parallelism (tp 1) no product waits for communication"
    adapters = plan.shape.adapters
    if adapters is not None and not adapters.is_additive:
        option = "adapters.kind dora" if adapters.kind == "dora" else "adapters.dropout"
        return f"with {option} products do not overlap with communication"
    if adapters is not None and adapters.quantize is not None:
        return "products of quantised matrices do not overlap with communication"
    if plan.precision.low_precision is not None:
        return f"{plan.precision.kind} products do not overlap with communication"
    return None


def find_fused_obstacle(plan: Plan, *, has_cuda: bool) -> str | None:
    """Return why PyTorch's kernels over symmetric memory cannot run; None if they can."""
    if not plan.layout.sequence_parallel:
        return "PyTorch's fused kernels gather and scatter tokens: sequence_parallel is false"
    if plan.is_compiled and plan.recompute == "auto":
        # One operator has both results: compiled code keeps both or none.
        return (
            "in compiled blocks PyTorch's fused kernels keep the gathered tokens if their products "
            "are kept, and recompute within a budget chooses each for itself"
        )
    if not has_cuda:
        return "symmetric memory needs CUDA, and the device is a CPU"
    if not _has_fused_kernels():
        return (
            f"PyTorch {torch.__version__} has no fused_all_gather_matmul that returns the gathered "
            "tensor: PyTorch 2.7 or later is needed"
        )
    num_devices = torch.cuda.device_count()
    if plan.layout.tp > num_devices:
        return f"{plan.layout.tp} ranks share a layer, and this node has {num_devices} devices"
    unreachable = next(
        (
            peer
            for peer in range(1, min(num_devices, plan.layout.tp))
            if not torch.cuda.can_device_access_peer(0, peer)
        ),
        None,
    )
    if unreachable is not None:
        return f"device 0 cannot access the memory of device {unreachable}"
    return None


def _has_fused_kernels() -> bool:
    try:
        import torch.distributed._symmetric_memory  # registers the operators

        schema = torch.ops.symm_mem.fused_all_gather_matmul.default._schema
    except (ImportError, AttributeError):
        return False
    return any(argument.name == "return_A" for argument in schema.arguments)
