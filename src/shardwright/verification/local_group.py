"""Process group of ranks on one machine, for the small steps of a verification.

Issuing an operation sends this rank's part to the others and returns; waiting for it takes theirs.
Every rank reduces in the order of the ranks, so that all have the same bits. Registered as the
backend `local`; `use_transport` comes before `init_process_group`.
"""

# mypy: disable-error-code="override, assignment, call-arg"
# c10d calls these methods with the arguments of one of the overloads in its type stubs only.
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.verification.local_transport import LocalTransport

BACKEND = "local"
_COLLECTIVE_TAG = -1
"""Tag of collective operations; those of messages count from 0."""

_REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}

Message = memoryview | bytearray | bytes
"""Elements of a tensor of one rank, as bytes."""

_transport: LocalTransport | None = None


def use_transport(transport: LocalTransport) -> None:
    """Let groups of this process made from now on send through a transport."""
    global _transport
    _transport = transport


def get_transport() -> LocalTransport:
    """Return the transport of groups made from now on."""
    assert _transport is not None, "use_transport has not been called"
    return _transport


class LocalWork(dist.Work):
    """Operation whose own part has been sent; the first `wait` takes the parts of the others."""

    def __init__(
        self, finish: Callable[[], None], is_ready: Callable[[], bool], result: list[Tensor]
    ) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._is_ready = is_ready
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Complete the outputs.

        Raises:
            PeerLost: a rank of the group has ended, or does not send within the time limit.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        """Return True if a wait would not block."""
        return self._finish is None or self._is_ready()

    def is_success(self) -> bool:
        """Return True: an error is raised by `wait`."""
        return True

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, and return the outputs as a future, which DDP waits for in C++."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


class LocalProcessGroup(dist.ProcessGroup):
    """Process group over a `LocalTransport`; tensors are on the CPU."""

    def __init__(
        self, transport: LocalTransport, store: Any, ranks: Sequence[int], rank: int, name: str
    ) -> None:
        """Make one rank's end.

        Args:
            store: store of the group, for callers of `get_group_store`.
            ranks: global ranks of the group.
            rank: this rank's position in the group.
            name: the same on all its ranks, and of no other group.
        """
        super().__init__(rank, len(ranks))
        self._store = store
        self._transport = transport
        self._ranks = tuple(ranks)
        self._rank = rank
        self._name = name
        self._num_collectives = 0
        self._num_messages: Counter[tuple[str, int, int]] = Counter()

    @property
    def group_name(self) -> str:
        """Name under which torch has registered the group."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def get_group_store(self) -> Any:
        """Return the store of the group."""
        return self._store

    def getBackendName(self) -> str:  # noqa: N802 - the name in c10d
        """Return the name of the backend."""
        return BACKEND

    def _get_backend(self, device: torch.device) -> dist.ProcessGroup:
        """Return this group: torch 2.14 asks the backend whether it combines messages."""
        return self

    def _exchange(
        self,
        parts: Tensor | Sequence[Tensor] | None,
        outputs: list[Tensor],
        finish: Callable[[list[Message]], object],
        *,
        source: int | None = None,
    ) -> LocalWork:
        """Send a part to each rank, and pass the parts from all ranks to `finish` on waiting.

        Args:
            parts: one for all ranks, or by rank of the group; None sends nothing.
            outputs: result of the operation.
            finish: receives the bytes by rank, empty for ranks that do not send.
            source: the only rank that sends; None is all.
        """
        address = (self._name, _COLLECTIVE_TAG, self._num_collectives)
        self._num_collectives += 1
        own: Message = b""
        if parts is not None:
            if isinstance(parts, Tensor):
                encoded = [_encode(parts)] * self.size()
            else:
                encoded = [_encode(part) for part in parts]
            own = encoded[self._rank]
            for i, peer in enumerate(self._ranks):
                if i != self._rank:
                    self._transport.send(peer, address, encoded[i])
        senders = range(self.size()) if source is None else [source]
        others = [(i, self._ranks[i]) for i in senders if i != self._rank]

        def complete() -> None:
            received: list[Message] = [b""] * len(self._ranks)
            received[self._rank] = own
            for i, peer in others:
                received[i] = self._transport.receive(peer, address)
            finish(received)

        def is_ready() -> bool:
            return all(self._transport.has_message(peer, address) for _, peer in others)

        return LocalWork(complete, is_ready, outputs)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> LocalWork:
        """Send a tensor."""
        (tensor,) = tensors
        address = (self._name, tag, self._count_message("send", dst, tag))
        self._transport.send(self._ranks[dst], address, _encode(tensor))
        return LocalWork(lambda: None, lambda: True, [])

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> LocalWork:
        """Receive a tensor."""
        (tensor,) = tensors
        peer = self._ranks[src]
        address = (self._name, tag, self._count_message("receive", src, tag))
        return LocalWork(
            lambda: _write(tensor, self._transport.receive(peer, address)),
            lambda: self._transport.has_message(peer, address),
            tensors,
        )

    def _count_message(self, kind: str, peer: int, tag: int) -> int:
        self._num_messages[kind, peer, tag] += 1
        return self._num_messages[kind, peer, tag]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> LocalWork:
        """Reduce a tensor in place."""
        (tensor,) = tensors
        return self._exchange(
            tensor,
            tensors,
            lambda received: tensor.data.copy_(_reduce(received, tensor, opts)),
        )

    # DTensor's functional collectives call the operations on several tensors, for one too.

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> LocalWork:
        """Reduce tensors in place."""
        return _join([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any) -> LocalWork:
        """Reduce a tensor on the root; that of the others stays."""
        (tensor,) = tensors

        def finish(received: list[Message]) -> None:
            if self._rank == opts.rootRank:
                tensor.data.copy_(_reduce(received, tensor, opts))

        return self._exchange(tensor, tensors, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> LocalWork:
        """Copy the root's tensor to all ranks."""
        (tensor,) = tensors
        root = opts.rootRank
        return self._exchange(
            tensor if self._rank == root else None,
            tensors,
            lambda received: _write(tensor, received[root]),
            source=root,
        )

    def barrier(self, opts: Any = None) -> LocalWork:
        """Wait until all ranks have called it."""
        return self._exchange(torch.empty(0), [], lambda _: None)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> LocalWork:
        """Gather a tensor of each rank."""
        return self._exchange(
            inputs[0], outputs[0], lambda received: _write_all(outputs[0], received)
        )

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> LocalWork:
        """Gather a tensor of each rank into one."""
        return self._exchange(source, [output], lambda received: _write(output, b"".join(received)))

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LocalWork:
        """Gather several tensors of each rank, each into one."""
        return _join(list(map(self.all_gather_single, outputs, inputs)))

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> LocalWork:
        """Reduce a list of tensors and keep the one of this rank."""
        (output,) = outputs
        return self._exchange(
            inputs[0], outputs, lambda received: output.copy_(_reduce(received, output, opts))
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> LocalWork:
        """Reduce a tensor and keep this rank's part."""
        parts = list(source.detach().reshape(-1).chunk(self.size()))
        return self.reduce_scatter([output], [parts], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> LocalWork:
        """Reduce several tensors and keep this rank's part of each."""
        return _join(
            [
                self.reduce_scatter_single(output, source, opts)
                for output, source in zip(outputs, inputs, strict=True)
            ]
        )

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> LocalWork:
        """Send a part to each rank and receive one from each; the sizes may differ."""
        detached = source.detach()
        parts = detached.split(input_sizes) if input_sizes else detached.chunk(self.size())
        return self._exchange(parts, [output], lambda received: _write(output, b"".join(received)))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> LocalWork:
        """Gather a tensor of each rank on the root."""
        results = outputs[0] if outputs else []
        return self._exchange(inputs[0], results, lambda received: _write_all(results, received))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> LocalWork:
        """Receive one of the root's tensors."""
        root = opts.rootRank
        return self._exchange(
            inputs[0] if inputs else None,
            outputs,
            lambda received: _write(outputs[0], received[root]),
            source=root,
        )

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        """Leave the connections to the transport, which other groups share."""


def _encode(tensor: Tensor) -> memoryview:
    # A copy, because the caller may write to the tensor, and because a tensor whose memory numpy
    # has seen cannot be resized any more, which FSDP does.
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.view(-1).view(torch.uint8).numpy().data


def _decode(message: Message, like: Tensor) -> Tensor:
    """Return the elements of a message, flat."""
    if not message:
        return like.new_empty(0)
    writable = message if isinstance(message, bytearray) else bytearray(message)
    return torch.frombuffer(writable, dtype=torch.uint8).view(like.dtype)


def _write(tensor: Tensor, message: Message) -> None:
    # `data`: autograd does not see what another rank writes.
    tensor.data.copy_(_decode(message, tensor).view(tensor.shape))


def _write_all(tensors: Sequence[Tensor], messages: Sequence[Message]) -> None:
    for tensor, message in zip(tensors, messages, strict=bool(tensors)):
        _write(tensor, message)


def _reduce(messages: Sequence[Message], like: Tensor, options: Any) -> Tensor:
    """Reduce the messages of all ranks in their order."""
    kind = dist.ReduceOp.SUM if options is None else options.reduceOp
    combine = next((f for known, f in _REDUCTIONS.items() if kind == known), None)
    if combine is None:
        raise ValueError(f"reduction {kind} is not supported by the backend {BACKEND!r}")
    result = reduce(combine, (_decode(message, like) for message in messages))
    if kind == dist.ReduceOp.AVG:
        result = result / len(messages)
    return result.view(like.shape)


def _join(works: Sequence[LocalWork]) -> LocalWork:
    """Return the work that completes several, in their order."""

    def finish() -> None:
        for work in works:
            work.wait()

    return LocalWork(
        finish,
        lambda: all(work.is_completed() for work in works),
        [tensor for work in works for tensor in work.result()],
    )


def create_group(options: Any, _backend_options: Any) -> LocalProcessGroup:
    """Make this rank's end of a group, as c10d asks for it."""
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return LocalProcessGroup(
        get_transport(), options.store, ranks, options.group_rank, options.group_id
    )


if BACKEND.upper() not in dist.Backend._plugins:
    dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu"])
