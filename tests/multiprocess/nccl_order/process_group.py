"""Process group over the verifier's whose operations complete only when somebody waits for them.

Issuing an operation sends copies of its inputs, fills its outputs with values that nobody may read
yet, and returns. `wait` delivers the outputs. An input that has changed by then is an error,
because NCCL may read it as late as that. Every operation and every wait is recorded;
`order.check_order` then runs the records of all ranks under the model of NCCL. What arrives in
another order, or early, has no effect on the result: whether operations wait for each other depends
on the order of the calls alone. Messages of a pair have no tags, as on NCCL, and tensors that NCCL
refuses are refused (`rules`).

Registered as the backend `nccl_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.verification.local_group import LocalProcessGroup, create_group
from shardwright.verification.local_transport import PeerLost
from tests.multiprocess.nccl_order.rules import check_reduction, check_tensors

BACKEND = "nccl_order"


class Issue(NamedTuple):
    """One operation of a rank.

    Attributes:
        number: counts the operations of this rank; the same for the messages of one batch.
        group: name of the process group, the same on all its ranks.
        ranks: global ranks of the group.
        kind: `send`, `recv`, or the name of a collective.
        peer: the other rank of a send or receive; the root of a broadcast.
        size: what must be the same on all ranks.
    """

    number: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    peer: int | None
    size: tuple[Any, ...]


class Wait(NamedTuple):
    """The wait for the message at a position of the record."""

    position: int


Record = list[Issue | Wait]

record: Record = []
"""Operations and waits of this process, in order."""


class OrderError(RuntimeError):
    """This rank used a tensor of an operation that NCCL may not have completed."""


class OperationStuck(RuntimeError):
    """An operation does not complete although nothing orders it, or its peer has given up."""


class _Batch:
    """True while `batch_isend_irecv` issues its messages, which form one operation."""

    is_open = False
    number = 0


class OrderedWork(dist.Work):
    """Operation that has been issued; `wait` delivers its outputs."""

    def __init__(
        self,
        position: int,
        work: dist.Work,
        inputs: Sequence[tuple[Tensor, Tensor]],
        outputs: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Remember the tensors, each with its copy."""
        super().__init__()
        self.position = position
        self.is_delivered = False
        self._work = work
        self._inputs = inputs
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Deliver the outputs, once; every wait is recorded."""
        if not self.is_delivered:
            self.is_delivered = True
            record.append(Wait(self.position))
            try:
                self._work.wait()
            except RuntimeError as error:
                raise OperationStuck(str(error)) from error
            for tensor, copy in self._inputs:
                if not torch.equal(_get_bytes(tensor), _get_bytes(copy)):
                    issue = record[self.position]
                    raise OrderError(f"an input changed before a wait for {issue}")
            for tensor, copy in self._outputs:
                tensor.data.copy_(copy)  # `data`: autograd does not see what another rank writes
        return True

    def is_completed(self) -> bool:
        """Return False until somebody waits: the host runs ahead of the device."""
        return self.is_delivered

    def is_success(self) -> bool:
        """Return True: an error would have been raised."""
        return True

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return [tensor for tensor, _ in self._outputs]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, and return the outputs as a future: DDP waits for it in C++, without a record."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future


def _get_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _fill_unreadable(tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(torch.nan)
    else:
        tensor.data.fill_(torch.iinfo(tensor.dtype).max if tensor.dtype != torch.bool else True)


class OrderedProcessGroup(dist.ProcessGroup):
    """Process group that records its operations and runs them on copies."""

    def __init__(self, local: LocalProcessGroup, ranks: tuple[int, ...], name: str) -> None:
        """Wrap a group.

        Args:
            ranks: global ranks of the group.
        """
        super().__init__(local.rank(), local.size())
        self._local = local
        self._ranks = ranks
        self._name = name

    @property
    def group_name(self) -> str:
        """Name under which torch has registered the group."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:
        """Return this group: torch 2.14 asks the backend whether it combines messages."""
        return self

    def _issue(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        start: Callable[[list[Tensor], list[Tensor]], Any],
        *,
        peer: int | None = None,
        size: Sequence[Any] | None = None,
    ) -> OrderedWork:
        """Record an operation and start it on copies.

        Args:
            start: receives the copies of the inputs and of the outputs; an operation in place has
                outputs only.
            peer: rank in the group.
            size: numbers that are the same on all ranks; default: those of all tensors.
        """
        check_tensors(kind, inputs if kind == "allgather" else (*inputs, *outputs))
        if size is None:
            size = [(tensor.numel(), tensor.dtype) for tensor in (*inputs, *outputs)]
        # FSDP2 gathers in place: its input is a part of its output.
        written = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        is_separate = [tensor.untyped_storage().data_ptr() not in written for tensor in inputs]
        copied_inputs = [tensor.detach().clone() for tensor in inputs]
        copied_outputs = [tensor.detach().clone() for tensor in outputs]
        if not _Batch.is_open:
            _Batch.number += 1
        peer_rank = None if peer is None else self._ranks[peer]
        record.append(
            Issue(_Batch.number, self._name, self._ranks, kind, peer_rank, tuple(map(str, size)))
        )
        position = len(record) - 1
        try:
            work = start(copied_inputs, copied_outputs)
        except PeerLost as error:
            raise OperationStuck(str(error)) from error
        for tensor in outputs:
            _fill_unreadable(tensor)
        return OrderedWork(
            position,
            work,
            list(compress(zip(inputs, copied_inputs, strict=True), is_separate)),
            list(zip(outputs, copied_outputs, strict=True)),
        )

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> OrderedWork:
        """Send a tensor; NCCL knows no tags."""
        return self._issue(
            "send", tensors, [], lambda sent, _: self._local.send(sent, dst, 0), peer=dst
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> OrderedWork:
        """Receive a tensor; NCCL knows no tags."""
        return self._issue(
            "recv", [], tensors, lambda _, received: self._local.recv(received, src, 0), peer=src
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> OrderedWork:
        """Reduce tensors in place."""
        check_reduction("allreduce", tensors, opts)
        return self._issue(
            "allreduce",
            [],
            tensors,
            lambda _, reduced: self._local.allreduce_coalesced(reduced, opts),
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> OrderedWork:
        """Copy the root's tensor to all ranks."""
        return self._issue(
            "broadcast",
            [],
            tensors,
            lambda _, copies: self._local.broadcast(copies, opts),
            peer=opts.rootRank,
        )

    def barrier(self, opts: Any = None) -> OrderedWork:
        """Wait until all ranks come here; NCCL sums a number."""
        return self._issue("barrier", [], [], lambda *_: self._local.barrier())

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> OrderedWork:
        """Gather a tensor of each rank."""
        return self._issue(
            "allgather",
            inputs,
            outputs[0],
            lambda sent, gathered: self._local.allgather([gathered], sent),
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> OrderedWork:
        """Gather a tensor of each rank into one."""
        return self._issue(
            "all_gather_single",
            [source],
            [output],
            lambda sent, gathered: self._local.all_gather_single(gathered[0], sent[0]),
        )

    def reduce_scatter_single(
        self, output: Tensor, source: Tensor, opts: Any = None
    ) -> OrderedWork:
        """Reduce and keep this rank's part."""
        check_reduction("reduce_scatter", [source], opts)
        return self._issue(
            "reduce_scatter_single",
            [source],
            [output],
            lambda sent, part: self._local.reduce_scatter_single(part[0], sent[0], opts),
        )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> OrderedWork:
        """Send a part to each rank and receive one from each; the sizes may differ."""
        return self._issue(
            "all_to_all_single",
            [source],
            [output],
            lambda sent, received: self._local.all_to_all_single(
                received[0], sent[0], output_sizes, input_sizes
            ),
            size=[source.dtype],
        )

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        """Leave the connections to the transport, which other groups share."""


def _create_group(options: Any, backend_options: Any) -> OrderedProcessGroup:
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return OrderedProcessGroup(create_group(options, backend_options), ranks, options.group_id)


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu"])


@contextmanager
def batch_messages() -> Iterator[None]:
    """Record the messages of a `batch_isend_irecv` as one operation."""
    _Batch.number += 1
    _Batch.is_open = True
    try:
        yield
    finally:
        _Batch.is_open = False


_issue_batch = dist.batch_isend_irecv


def issue_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
    """Replace `dist.batch_isend_irecv`, which batches on NCCL only."""
    with batch_messages():
        works: list[dist.Work] = _issue_batch(operations)
    return works
