"""Expert parallelism by DeepEP's kernels: a token is sent once to each rank with its experts.

`dispatch` sends the rows; `combine` returns one row for each and adds those of a token. The
gradient of each is the other. The rank of the experts copies the received rows for them and adds
the weighted results, as in `token_exchange`.

A first dispatch, of a few zeros per token, exchanges the choices of experts and their weights. It
returns the handle with which all rows of the micro-batch are then sent, without a wait of the host;
recomputation takes both from the forward pass. The package does not describe the handle, except
that it is a tuple of tensors, so operators pass it on as one tensor of bytes.

Communication is started by one operator and awaited by another, as in `row_exchange`.

Legend: N tokens, K experts per token, E experts, e experts of one rank, V rows received, R choices
received, X rows either way, T tensors of a handle, B bytes of a handle, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import ExpertShape
from shardwright.layout.degrees import DEEP_EP_ROW_UNIT
from shardwright.model.communication_results import keep_statistic
from shardwright.model.products.row_copies import RowCopies, copy_rows, map_copies, sum_copies
from shardwright.model.routing import Routing, count_tokens
from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.experts import row_exchange
from shardwright.parallel.experts.deep_ep import load_buffer_class
from shardwright.parallel.pipelined.pending_communication import PendingCommunication

_ALIGNMENT = 16
"""Bytes to whose multiples the tensors of a handle are aligned."""
_HANDLE_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)


class _Plan(NamedTuple):
    """Indices, weights and handle of an exchange, known before rows are sent."""

    counts_e: Tensor
    """Choices of each expert of this rank."""
    order_R: Tensor
    """Choices received, as indices of `[V, K]`, sorted by expert; int32."""
    received: RowCopies
    """Rows of the experts, as copies of the rows received."""
    weights_VK: Tensor
    """Weights of the rows received."""
    handle_B: Tensor
    """Tensors of DeepEP's handle."""
    sizes_T3: Tensor
    """Their dtypes and sizes, in host memory."""


class DeepEPExchange:
    """`model.parallel_hooks.TokenExchangeHooks` of `expert_dispatch: deep_ep`."""

    def __init__(self, group: dist.ProcessGroup, shape: ExpertShape, row_bytes: int) -> None:
        """Allocate DeepEP's buffers; every rank of the group does so at the same time.

        Args:
            row_bytes: bytes of a token's row.

        Raises:
            LayoutError: the package is missing or has another API.
        """
        self.group_name = row_exchange.register_group(group)
        self.shape = shape
        _allocate_buffer(group, self.group_name, row_bytes)

    def place_rows(self, experts_NK: Tensor, counts_E: Tensor) -> None:
        """Return None: these exchanges have no padding."""

    def accepts(self, routing: Routing) -> bool:
        """Return True: no row is left to `ExpertParallelHooks`."""
        return True

    def run_experts(
        self,
        experts: Callable[[Tensor, Tensor], Tensor],
        x_ND: Tensor,
        routing: Routing,
        overlapped_compute: Callable[[], Tensor] | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the weighted sum of each token's experts, `[N, D]`, and `overlapped_compute`'s
        result, which runs while rows are sent.
        """
        # The kernels send weights in fp32, whatever the dtype of the rows.
        weights_NK = routing.weights_NK
        weights_NK = weights_NK.to(torch.promote_types(weights_NK.dtype, torch.float32))
        plan = self._plan(x_ND, routing.experts_NK, weights_NK)
        finish = self._send(plan, x_ND, weights_NK, plan.weights_VK.shape[0])
        overlapped = None if overlapped_compute is None else overlapped_compute()
        rows_VD, weights_VK = finish()
        del finish  # it refers to the rows
        weights_R = weights_VK.flatten().index_select(0, plan.order_R)
        rows_RD = copy_rows(rows_VD, plan.received)
        out_RD = experts(rows_RD, plan.counts_e)
        sums_VD = sum_copies(out_RD, plan.received, weights_R.to(out_RD.dtype))
        out_ND, _ = self._send(plan, sums_VD, None, x_ND.shape[0])()
        return out_ND, overlapped

    def _send(
        self, plan: _Plan, rows_XD: Tensor, weights_NK: Tensor | None, num_received: int
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """Start to send rows, or without weights to return them; return the function that waits
        for the rows and weights received.
        """
        is_return = weights_NK is None
        handle = (plan.handle_B, plan.sizes_T3, is_return, self.group_name)
        return partial(
            _finish,
            _start(rows_XD, weights_NK, *handle),
            None if is_return else plan.weights_VK,
            *handle,
            num_received,
            rows_XD.shape[1],
            rows_XD.dtype,
            rows_XD.device,
            0 if is_return else plan.weights_VK.shape[1],
            plan.weights_VK.dtype,
        )

    def _plan(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> _Plan:
        """Exchange choices and weights; the host waits for the number of rows."""
        compute = partial(
            _plan_exchange,
            x_ND.new_zeros(x_ND.shape[0], DEEP_EP_ROW_UNIT),
            experts_NK,
            weights_NK.detach().contiguous(),
            self.shape.num_experts,
            self.group_name,
        )
        counts_e, order_R, *others = keep_statistic(compute)
        copies, others = RowCopies(*others[:3]), others[3:]
        return _Plan(counts_e, order_R, copies, *others)


def _allocate_buffer(group: dist.ProcessGroup, group_name: str, row_bytes: int) -> None:
    """Allocate the buffer of a group for rows of this size, for ranks of one node."""
    buffer_class = load_buffer_class()
    ranks = group.size()
    configs = (buffer_class.get_dispatch_config(ranks), buffer_class.get_combine_config(ranks))
    size = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
    buffer = _buffers.get(group_name)  # that of another model, such as a reference
    if buffer is None or buffer.group is not group or buffer.num_nvl_bytes < size:
        _buffers[group_name] = buffer_class(group, size, 0)


_buffers: dict[str, Any] = {}
"""DeepEP's buffers by the name of their group; an operator takes no buffer."""


def _pack_handle(handle: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a handle as bytes, `[B]`, and the dtypes and sizes of its tensors, `[T, 3]`."""
    parts: list[Tensor] = []
    rows: list[list[int]] = []
    for tensor in handle:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        parts += [flat, flat.new_zeros(-flat.shape[0] % _ALIGNMENT)]
        sizes = [*tensor.shape, *[-1] * (2 - tensor.dim())]
        rows.append([_HANDLE_DTYPES.index(tensor.dtype), *sizes])
    return torch.cat(parts), torch.tensor(rows)


def _unpack_handle(handle_B: Tensor, sizes_T3: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of a handle, which share its memory."""
    tensors = []
    start = 0
    for number, *sizes in sizes_T3.tolist():
        dtype = _HANDLE_DTYPES[number]
        shape = [size for size in sizes if size >= 0]
        end = start + torch.Size(shape).numel() * dtype.itemsize
        tensors.append(handle_B[start:end].view(dtype).view(shape))
        start = end + -end % _ALIGNMENT
    return tuple(tensors)


@torch.library.custom_op(
    "shardwright::plan_deep_ep_exchange",
    mutates_args=(),
    schema="(Tensor rows, Tensor experts, Tensor weights, int num_experts, str group) -> ("
    + ", ".join(["Tensor"] * 8)
    + ")",
)
def _plan_exchange(
    rows_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, num_experts: int, group_name: str
) -> tuple[Tensor, ...]:
    buffer = _buffers[group_name]
    num_local = num_experts // row_exchange.get_group(group_name).size()
    choices_NK = experts_NK.masked_fill(experts_NK == num_experts, -1)  # dropped choices
    per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
        choices_NK, num_experts
    )
    with time_wait("expert"):
        _, choices_VK, weights_VK, counts, handle, _ = buffer.dispatch(
            rows_ND,
            topk_idx=choices_NK,
            topk_weights=weights_NK,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
    choices_VK = choices_VK.masked_fill(choices_VK < 0, num_local)
    order_R = choices_VK.flatten().argsort(stable=True)[: sum(counts)]
    num_rows, per_token = choices_VK.shape
    return (
        count_tokens(choices_VK, num_local),
        order_R.to(torch.int32),
        *map_copies(order_R // per_token, num_rows),
        weights_VK,
        *_pack_handle(handle),
    )


@_plan_exchange.register_fake
def _fake_plan(
    rows_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, num_experts: int, group_name: str
) -> tuple[Tensor, ...]:
    context = torch.library.get_ctx()
    size_R, size_V, size_B, size_T = (context.new_dynamic_size() for _ in range(4))
    degree = row_exchange.get_group(group_name).size()
    indices = [
        experts_NK.new_empty(size, dtype=torch.int32) for size in (size_R, size_R, size_R, size_V)
    ]
    return (
        experts_NK.new_empty(num_experts // degree),
        *indices,
        weights_NK.new_empty(size_V, experts_NK.shape[1]),
        experts_NK.new_empty(size_B, dtype=torch.uint8),
        torch.empty(size_T, 3, dtype=torch.int64, device="cpu"),
    )


_exchanges: PendingCommunication[tuple[Tensor, Tensor | None, Any, Any]] = PendingCommunication(
    torch.float64
)
"""Rows and weights that are received, the event to wait for, and what is sent. Tickets are floats,
so that they may require gradients."""


@torch.library.custom_op(
    "shardwright::start_deep_ep_exchange",
    mutates_args=(),
    schema="(Tensor rows, Tensor? weights, Tensor handle, Tensor sizes, bool is_return, str group) "
    "-> Tensor",
)
def _start(
    rows_XD: Tensor,
    weights_XK: Tensor | None,
    handle_B: Tensor,
    sizes_T3: Tensor,
    is_return: bool,
    group_name: str,
) -> Tensor:
    buffer = _buffers[group_name]
    # Inductor reuses the memory of inputs after this operator, while they are still sent.
    rows_XD = rows_XD.clone(memory_format=torch.contiguous_format)
    handle = _unpack_handle(handle_B, sizes_T3)
    options = {
        "previous_event": buffer.capture(),
        "async_finish": True,
        "allocate_on_comm_stream": True,
    }
    if not is_return:  # the weights were sent with the choices
        received_XD, *_, event = buffer.dispatch(rows_XD, handle=handle, **options)
        return _exchanges.add((received_XD, None, event, (rows_XD, handle)))
    if weights_XK is not None:
        weights_XK = weights_XK.clone(memory_format=torch.contiguous_format)
    received_XD, received_XK, event = buffer.combine(
        rows_XD, handle, topk_weights=weights_XK, **options
    )
    return _exchanges.add((received_XD, received_XK, event, (rows_XD, weights_XK, handle)))


@_start.register_fake
def _fake_start(
    rows_XD: Tensor,
    weights_XK: Tensor | None,
    handle_B: Tensor,
    sizes_T3: Tensor,
    is_return: bool,
    group_name: str,
) -> Tensor:
    return _exchanges.allocate_ticket()


@torch.library.custom_op(
    "shardwright::finish_deep_ep_exchange",
    mutates_args=(),
    schema="(Tensor ticket, Tensor? known_weights, Tensor handle, Tensor sizes, bool is_return, "
    "str group, SymInt num_rows, SymInt width, ScalarType dtype, Device device, "
    "SymInt num_choices, ScalarType weights_dtype) -> (Tensor, Tensor)",
)
def _finish(
    ticket: Tensor,
    known_weights_XK: Tensor | None,
    handle_B: Tensor,
    sizes_T3: Tensor,
    is_return: bool,
    group_name: str,
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    num_choices: int,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    received_XD, received_XK, event, _ = _exchanges.pop(ticket)
    with time_wait("expert"):
        event.current_stream_wait()
    if known_weights_XK is not None:
        received_XK = known_weights_XK.clone()
    elif received_XK is None:
        received_XK = received_XD.new_empty(num_rows, 0, dtype=weights_dtype)
    return received_XD, received_XK


@_finish.register_fake
def _fake_finish(
    ticket: Tensor,
    known_weights_XK: Tensor | None,
    handle_B: Tensor,
    sizes_T3: Tensor,
    is_return: bool,
    group_name: str,
    num_rows: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    num_choices: int,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    received_XD = torch.empty(num_rows, width, dtype=dtype, device=device)
    if known_weights_XK is not None:
        return received_XD, torch.empty_like(known_weights_XK)
    return received_XD, received_XD.new_empty(num_rows, num_choices, dtype=weights_dtype)


def _save_start(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # A handle is no saved tensor, so no recomputation repeats what follows the last product.
    rows_XD, weights_XK, *ctx.handle = inputs
    ctx.has_weights = weights_XK is not None
    num_choices = 0 if weights_XK is None else weights_XK.shape[1]
    weights_dtype = rows_XD.dtype if weights_XK is None else weights_XK.dtype
    ctx.sizes = (*rows_XD.shape, rows_XD.dtype, rows_XD.device, num_choices, weights_dtype)


def _differentiate_start(ctx: Any, d_ticket: Tensor) -> tuple[Any, ...]:
    handle_B, sizes_T3, is_return, group_name = ctx.handle
    d_rows_XD, d_weights_XK = _finish(
        d_ticket, None, handle_B, sizes_T3, not is_return, group_name, *ctx.sizes
    )
    return d_rows_XD, d_weights_XK if ctx.has_weights else None, None, None, None, None


def _save_finish(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.handle = inputs[2:6]


def _differentiate_finish(ctx: Any, d_rows_XD: Tensor, d_weights_XK: Tensor) -> tuple[Any, ...]:
    handle_B, sizes_T3, is_return, group_name = ctx.handle
    d_weights = None if is_return else d_weights_XK
    d_ticket = _start(d_rows_XD, d_weights, handle_B, sizes_T3, not is_return, group_name)
    return d_ticket, *[None] * 11


_start.register_autograd(_differentiate_start, setup_context=_save_start)
_finish.register_autograd(_differentiate_finish, setup_context=_save_finish)
