"""The backend `nccl` of the test device: gloo on its tensors, and NCCL's refusals.

A CPU build of torch has no NCCL. Here `init_process_group("nccl")` joins gloo and reports the
backend as `nccl`, so that runs of several ranks take the paths of CUDA: one group bound to the
device, subgroups made by splits of it, and host memory through other groups only. Import it after
the device is loaded: it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.distributed_c10d import _world

from tests.multiprocess.nccl_order.rules import RefusedByNccl, check_reduction, check_tensors

BACKEND = "nccl"
_REDUCING = ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base")
_METHODS = (
    *_REDUCING,
    *("reduce_scatter_single", "allgather", "_allgather_base", "all_gather_single", "broadcast"),
    *("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "send", "recv"),
)
errors = {"": ErrorType.SUCCESS}
"""Error of all groups of this process, as NCCL's thread would record it."""
_join = dist.init_process_group


def install_once() -> None:
    """Give this process the backend, unless it has it."""
    if dist.init_process_group is _init_process_group:
        return
    dist.init_process_group = _init_process_group
    dist.split_group = _split_group
    dist.ProcessGroupGloo.get_error = lambda _backend: errors[""]
    for name in _METHODS:
        if name in vars(dist.ProcessGroup):
            setattr(dist.ProcessGroup, name, _wrap(name, getattr(dist.ProcessGroup, name)))


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return group in _world.pg_map and _world.pg_map[group][0] == BACKEND


def _mark(group: Any) -> None:
    _world.pg_map[group] = (BACKEND, _world.pg_map[group][1])


@wraps(_join)
def _init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
    if backend != BACKEND:
        _join(backend, *arguments, **options)
        return
    assert options.get("device_id") is not None, "split_group needs a group bound to its device"
    _join("gloo", *arguments, **options)
    _mark(dist.group.WORLD)


def _split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> dist.ProcessGroup | None:
    """Make the groups one after another; `ncclCommSplit` makes them in one call of all ranks."""
    assert parent_pg is None
    assert split_ranks is not None
    world = dist.group.WORLD
    assert world is not None
    device = world.bound_device_id
    assert device is not None, "the default group is not bound"
    # A bound group is split by ranks outside of a new group too, which only NCCL can.
    world.bound_device_id = None
    everyone = [rank for ranks in split_ranks for rank in ranks]
    assert len(everyone) == len(set(everyone)), f"splits share a rank: {split_ranks}"
    own = None
    for ranks in split_ranks:
        assert ranks == sorted(ranks), "torch sorts the ranks of a split"
        group = dist.new_group(ranks, timeout=timeout, backend="gloo", group_desc=group_desc)
        if dist.get_rank() in ranks:
            own = group
            _mark(group)
    world.bound_device_id = device
    return own


def _wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
        if not _is_nccl(group):
            return method(group, *arguments, **options)
        first = arguments[0] if name != "allgather" else arguments[1]
        for tensor in _list_tensors(arguments[:2]):
            if not tensor.is_cuda:
                raise RefusedByNccl(f"No backend type associated with device type cpu ({name})")
            if tensor.device.index != torch.cuda.current_device():
                raise RefusedByNccl(f"{name} of {tensor.device} on another device's rank")
        check_tensors(name, _list_tensors([first]))
        if name in _REDUCING or name == "reduce_scatter_single":
            check_reduction(name, _list_tensors(arguments[:1]), _find_options(arguments, options))
        if name in ("send", "recv"):
            arguments = (*arguments[:2], 0)  # NCCL knows no tags
        return method(group, *arguments, **options)

    return call


def _find_options(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return next(
        (each for each in (*arguments, *options.values()) if hasattr(each, "reduceOp")), None
    )


def _list_tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _list_tensors(value)
