"""Optimizer whose moments are in a store between updates, and pass through it bucket by bucket.

While one bucket is updated, the next ones are swapped in and the last ones swapped out. The
update is that of the optimizer itself, on pieces of parameters, so the bits are those of a run
whose moments stay on the device. Parameters, which are the fp32 master weights, and gradients
stay where they are (docs/decisions/0078-offloaded-optimizer.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.errors import NonFiniteError
from shardwright.numerics import get_local_tensor
from shardwright.offload.backward_update import BackwardUpdate
from shardwright.offload.bucket_stream import BucketStream
from shardwright.offload.device_buffers import DeviceBuffers
from shardwright.offload.host_update import HostUpdate
from shardwright.offload.parameter_offload import ParameterOffload
from shardwright.offload.state_buckets import (
    BucketPiece,
    OffloadedParameter,
    StatePartition,
    StepCounts,
    partition_state,
)
from shardwright.offload.store import CopyClock, Store, TransferCounts, TransferReporter
from shardwright.offload.update_overlap import StreamedUpdate, UpdateOverlap
from shardwright.optim.sharded_optimizer import (
    Moment,
    ParameterPiece,
    PiecewiseOptimizer,
    ShardedModel,
    ShardedOptimizer,
    UpdateByPiece,
)
from shardwright.optim.state import get_rule


class _UpdateInputs(NamedTuple):
    """Gradient and group of a parameter, as they were when the update began."""

    gradient: Tensor | None
    """None if the host has it."""
    group: dict[str, Any]


class OffloadedOptimizer(ShardedOptimizer):
    """Optimizer of the recipe with its moments in a store.

    Groups, learning rate and hooks are used as those of any optimizer. Step counts stay here.
    """

    def __init__(
        self,
        optimizer: PiecewiseOptimizer,
        model: ShardedModel,
        create_store: Callable[[StatePartition], Store],
        *,
        bucket_bytes: int,
        device: torch.device,
        should_fill_buckets: bool = False,
        has_host_update: bool = False,
        parameters: ParameterOffload | None = None,
        overlap: UpdateOverlap | None = None,
        device_buffer_bytes: int = 0,
    ) -> None:
        """
        Args:
            optimizer: Optimizer that has taken no step; it keeps no state.
            model: How the parameters are sharded.
            create_store: Function from the partition of this rank's state to a store of zeros.
            bucket_bytes: Size of a bucket. One matrix may need more (Adafactor: the state of a
                block, or all of it if the parameters stay).
            device: Device of parameters and gradients.
            should_fill_buckets: Give buckets equal sizes (`partition_state`).
            has_host_update: True to update on the host what is on a CUDA device.
            parameters: Brings parameters and gradients that are elsewhere, or lets the host update
                them there.
            overlap: Lets each module wait for the update of its own weights, or updates in the
                backward pass. Otherwise, and after `wait_for_update`, the device waits for the
                whole update.
            device_buffer_bytes: Device memory for buckets; it has three, whatever they take.
        """
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert overlap is None or not optimizer.has_collectives, "its update ends with the last one"
        super().__init__(optimizer.param_groups, {}, model)
        self.rule = get_rule(optimizer)
        self.optimizer: PiecewiseOptimizer = optimizer
        self.applies_factor = (
            isinstance(optimizer, UpdateByPiece)
            and optimizer.applies_factor
            and parameters is None
            and not has_host_update
        )
        self.device = device
        self._parameters = parameters
        self._overlap = overlap
        self._members = {
            name: (parameter, group)
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }
        if overlap is not None:
            self._members = {name: self._members[name] for name in overlap.sort(self._members)}
        self._partition = partition_state(
            [self._describe(name) for name in self._members],
            bucket_bytes if optimizer.is_divisible else 1 << 62,
            should_fill=should_fill_buckets,
        )
        self._store_update = None if parameters is None else parameters.prepare(self._partition)
        tensors = {name: parameter for name, (parameter, _) in self._members.items()}
        for name in frozenset() if parameters is None else tensors.keys() & parameters.names:
            del tensors[name]
        self._host_update = HostUpdate(tensors, device) if has_host_update else None
        for parameter, group in self._members.values():
            count = optimizer.create_step_count(parameter, group)
            self.state[parameter]["step"] = count.cpu() if has_host_update else count
        self._step_counts = StepCounts(
            self._partition,
            {name: self.state[member]["step"] for name, (member, _) in self._members.items()},
        )
        self._store = create_store(self._partition)
        # The threads of a disk have times of their own, which are longer.
        self._clock = CopyClock(
            self._store.counts if self._store.tier == "host" else TransferCounts(), device
        )
        if isinstance(overlap, StreamedUpdate):
            overlap.clock = self._clock
        self._stream = BucketStream(
            self._partition,
            self._store,
            DeviceBuffers(
                self._partition.max_bucket_bytes,
                self._partition.count_device_buffers(device_buffer_bytes),
                device,
                self._clock,
                is_on_training_stream=not isinstance(overlap, StreamedUpdate),
            )
            if device.type == "cuda" and not has_host_update
            else None,
        )
        self._reporter = TransferReporter()

    @property
    def tier(self) -> str:
        """Tier of the store: host or disk."""
        return self._store.tier

    @property
    def counts(self) -> TransferCounts:
        """Bytes and times of all transfers so far."""
        self._clock.collect()
        return self._store.counts

    def pop_counts(self) -> TransferCounts:
        """Return bytes and times since the previous call."""
        return self._reporter.take(self.counts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the state of this rank in the store."""
        return self._partition.num_bytes

    @property
    def host_update(self) -> HostUpdate | None:
        """Copies of weights and gradients for an update on the host; None if it is not there."""
        return self._host_update

    @property
    def num_buckets(self) -> int:
        """Number of buckets of this rank's state."""
        return len(self._partition.buckets)

    def _describe(self, name: str) -> OffloadedParameter:
        parameter, group = self._members[name]
        local = get_local_tensor(parameter.detach())
        return OffloadedParameter(
            name,
            local.numel(),
            self.optimizer.get_row_length(parameter, group),
            self.optimizer.list_state(parameter, group),
            is_divisible=self.optimizer.is_divisible and local.is_contiguous(),
            unit=None if self._parameters is None else self._parameters.get_unit(name),
        )

    def initialise_state(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Do nothing: the store begins with zeros."""

    def moments(self, parameter: Tensor) -> dict[str, Moment]:
        """Return views of the store, valid until the next step.

        Reading them saves, and writing into them loads, without a copy of the state in memory.
        """
        self.wait_for_update()
        self._stream.write_back()
        name = self.parameter_names[parameter]
        tensors = {}
        for (owner, key), place in self._partition.tensors.items():
            if owner == name:
                segment = self._store.view_segment(place.segment)
                part = segment[place.offset_bytes : place.offset_bytes + place.spec.num_bytes]
                tensors[key] = part.view(place.spec.dtype).view(place.spec.shape)
        described = self.optimizer.describe_moments(parameter, tensors)
        return {
            key: Moment(moment.tensor, name, moment.shape, moment.boxes, is_offloaded=True)
            for key, moment in described.items()
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter, bucket by bucket. Collective if the optimizer's step is.

        With an overlap the current stream has not waited for it (`wait_for_update`).
        """
        assert closure is None
        update = self._update()
        if self._overlap is not None:
            self._overlap.launch(update)
            return
        for _ in update:
            pass

    @property
    def has_backward_update(self) -> bool:
        """True if updates can begin in the backward pass (`begin_step`)."""
        return isinstance(self._overlap, BackwardUpdate)

    @property
    def is_updating(self) -> bool:
        """True between `begin_step` and the end of the step's update."""
        return isinstance(self._overlap, BackwardUpdate) and self._overlap.is_active

    def begin_step(self) -> None:
        """Update parameters in the backward pass that follows, by their unchanged gradients.

        The caller does not call `step`, but `end_step` after the pass. Learning rates must not
        change until then.
        """
        assert isinstance(self._overlap, BackwardUpdate)
        self._overlap.begin_step(self.step)

    def end_step(self, gradient_norm: float) -> None:
        """End an update that has begun in the backward pass.

        Raises:
            NonFiniteError: the norm is not finite. Later uses of weights or state are errors.
        """
        assert isinstance(self._overlap, BackwardUpdate)
        if not isfinite(gradient_norm):
            self._overlap.abandon()
            raise NonFiniteError(
                f"the gradient norm is {gradient_norm:g}, and the weights were updated in the "
                "backward pass (training.max_grad_norm is null, training.max_skipped_steps is 0); "
                "lower training.learning_rate, or resume from the last checkpoint with "
                "training.max_skipped_steps above 0"
            )
        self._overlap.wait()

    def wait_for_update(self) -> None:
        """Make the device wait for the update before what follows on the current stream.

        Required before weights, moments or step counts are read or written outside a pass.
        """
        if self._overlap is not None:
            self._overlap.wait()

    @torch.no_grad()
    def _update(self) -> Iterator[Sequence[str]]:
        """Update bucket by bucket; return the names of each one's parameters before it.

        With an overlap behind the next pass the caller may drop gradients and change groups before
        the first bucket. In a backward pass gradients follow, of any parameter that is trained.
        """
        self._step_counts.copy_first()
        factor, self.gradient_factor = self.gradient_factor, 1.0
        inputs: dict[str, _UpdateInputs] | None = None
        if self.is_updating:
            updated = {name for name, (tensor, _) in self._members.items() if tensor.requires_grad}
        else:
            updated = {name for name in self._members if self._is_updated(name)}
            if self._overlap is not None:
                inputs = self._collect_inputs(updated)
        order = [
            index
            for index, bucket in enumerate(self._partition.buckets)
            if any(piece.name in updated for piece in bucket.pieces)
        ]
        if self._host_update is not None and not self.is_updating:
            self._host_update.begin_update()
        if self._store_update is not None:
            self._store_update.begin(order, updated)
        self._stream.begin(order)
        unit: int | None = None
        for index in order:
            pieces = self._partition.buckets[index].pieces
            yield [piece.name for piece in pieces if piece.name in updated]
            planned = [
                piece
                for piece in pieces
                if piece.name in updated and (inputs is not None or self._is_updated(piece.name))
            ]
            if self._parameters is not None and self._store_update is None:
                names = [piece.name for piece in planned]
                following = self._parameters.find_unit(names)
                if following is not None and following != unit:
                    # Muon's matrices change here, and the last unit's leave in the next line.
                    self.optimizer.finish_update()
                    unit = following
                self._parameters.bring_for_update(names)
            opened: AbstractContextManager[None] = nullcontext()
            if self._store_update is not None:
                opened = self._store_update.open_bucket(index)
            with opened, self._stream.open_bucket(index) as parts:
                built = [self._build_piece(piece, parts, inputs) for piece in planned]
                self._update_pieces(built, factor)
            if self._overlap is not None:
                self._end_bucket(self._overlap, planned, inputs)
        self._stream.end()
        self.optimizer.finish_update()
        if self._host_update is not None:
            self._host_update.end_update()
            if not self.is_updating:
                self._host_update.discard_gradients()
        if self._parameters is not None:
            self._parameters.finish_update()

    def _collect_inputs(self, names: Iterable[str]) -> dict[str, _UpdateInputs]:
        groups = {id(group): dict(group) for group in self.param_groups}
        inputs = {}
        for name in names:
            parameter, group = self._members[name]
            gradient = None
            if self._host_update is None:
                gradient = parameter.grad
                assert gradient is not None
            inputs[name] = _UpdateInputs(gradient, groups[id(group)])
        return inputs

    def _end_bucket(
        self,
        overlap: UpdateOverlap,
        pieces: Sequence[BucketPiece],
        inputs: dict[str, _UpdateInputs] | None,
    ) -> None:
        """Tell the overlap which weights on the device are complete; it keeps gradients."""
        names = [piece.name for piece in pieces]
        complete = {piece.name: self._members[piece.name][0] for piece in pieces if piece.is_last}
        if inputs is None:
            gradients = [self._members[name][0].grad for name in names]
        else:
            gradients = [inputs[name].gradient for name in names]
            for name in complete:
                del inputs[name]
        for name in [name for name in complete if self._is_updated_in_store(name)]:
            del complete[name]
        overlap.end_bucket(names, complete, [item for item in gradients if item is not None])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those on the host and on disk too."""
        super().zero_grad(set_to_none)
        is_pending = self._overlap is not None and self._overlap.is_pending
        if self._host_update is not None and not is_pending:  # the update reads the host's copies
            self._host_update.discard_gradients()
        if self._parameters is not None:
            self._parameters.discard_gradients()

    def _update_pieces(self, pieces: Sequence[ParameterPiece], factor: float) -> None:
        """Update pieces with their gradients times a factor; on the host, launch the copies of
        their weights to the device."""
        if self.applies_factor:
            assert isinstance(self.optimizer, UpdateByPiece)
            self.optimizer.gradient_factor = factor
        if self._host_update is None:
            self.optimizer.update_pieces(pieces)
            return
        for piece in pieces:
            self._host_update.scale_piece(piece.gradient)
        self.optimizer.update_pieces(pieces)
        for piece in pieces:
            if self._is_updated_in_store(piece.name):
                continue
            target = get_local_tensor(self._members[piece.name][0].detach())
            if piece.first_element is not None:
                start = piece.first_element
                target = target.view(-1)[start : start + piece.local.numel()]
            self._host_update.copy_back(piece.local.view(target.shape), target)

    def _is_updated_in_store(self, name: str) -> bool:
        return self._store_update is not None and self._store_update.has_weight(name)

    def _is_updated(self, name: str) -> bool:
        parameter, group = self._members[name]
        if self._parameters is not None and self._parameters.has_gradient(name):
            return True
        return parameter.grad is not None or self.optimizer.is_updated_without_gradient(group)

    def _build_piece(
        self,
        piece: BucketPiece,
        parts: Sequence[Tensor],
        inputs: Mapping[str, _UpdateInputs] | None,
    ) -> ParameterPiece:
        state: dict[str, Any] = {key: view.read(parts) for key, view in piece.views.items()}
        state["step"] = self._step_counts[piece]
        parameter, group = self._members[piece.name]
        local = get_local_tensor(parameter.detach())
        whole: Tensor | None = None
        if inputs is not None:
            whole, group = inputs[piece.name]
        if whole is not None:
            gradient = get_local_tensor(whole)
        elif self._store_update is not None and self._store_update.has_weight(piece.name):
            return ParameterPiece(
                piece.name, *self._store_update.view(piece), state, group, piece.first_element
            )
        elif self._host_update is not None:
            local = self._host_update.get_weights(piece.name)
            gradient = self._host_update.get_gradient(piece.name)
        else:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = get_local_tensor(parameter.grad)
        return ParameterPiece(
            piece.name,
            piece.select(local),
            piece.select(gradient),
            state,
            group,
            piece.first_element,
        )

    def close(self) -> None:
        """Discard the state and free the store. No step may follow, and the weights may be those
        before the last one."""
        if self._overlap is not None:
            self._overlap.close()
        self._stream.close()
