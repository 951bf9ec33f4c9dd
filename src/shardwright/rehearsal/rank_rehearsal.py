"""One rank's real training step on a fake process group and fake tensors.

Legend: B sequences, T tokens, H query heads, K key-value heads, E head_dim, V value width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.architecture.frozen_names import match_frozen
from shardwright.config import Recipe
from shardwright.config.model import AttentionSetting
from shardwright.data.loader import MicroBatch
from shardwright.layout import Bounds, RankGrid
from shardwright.model.attention import fused_attention
from shardwright.model.decoder import Decoder
from shardwright.numerics.precision import resolve_dtypes
from shardwright.offload import OffloadedOptimizer, ParameterOffload, WeightOffload
from shardwright.optim import build_optimizer
from shardwright.optim.state import create_state
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.experts.padded_exchange import find_padded_exchange
from shardwright.planner.update_place import choose_update_place
from shardwright.plans import Plan
from shardwright.rehearsal.collective_recorder import Collective, CollectiveRecorder
from shardwright.rehearsal.fake_contexts import FakeStorage, use_fake_group
from shardwright.rehearsal.fake_offload import (
    build_fake_activation_offload,
    build_fake_offloaded_optimizer,
    build_fake_weight_offload,
    sum_by_tier,
)
from shardwright.rehearsal.live_memory import LiveMemoryTracker, MemoryContribution, use_phase
from shardwright.rehearsal.repeated_micro_batches import ShortenedStep, UnitMarks, shorten_step
from shardwright.training.preference_objective import PreferenceObjective, has_frozen_reference
from shardwright.training.setup import (
    build_chunked_loss,
    freeze_parameters,
    install_activation_offload,
)
from shardwright.training.step import (
    TOKEN_OBJECTIVE,
    Objective,
    accumulate_gradients,
    update_parameters,
)

RehearsalDevice = Literal["cpu", "cuda"]
"""Device type of the fake tensors."""


@dataclass(frozen=True)
class RankRehearsal:
    """Memory and collectives of one rank's step; tensor bytes, without allocator overhead."""

    rank: int
    coordinates: Mapping[str, int]
    weights_bytes: int
    """Bytes of master weights, working weights and a frozen reference."""
    gradients_bytes: int
    """Bytes of gradients between the last backward pass and the update."""
    optimizer_bytes: int
    """Bytes of optimizer states on the device, staging buffers of offloaded ones included."""
    offloaded_bytes: int
    """Bytes of optimizer states in host memory or on disk."""
    offloaded_activation_bytes: int
    """Bytes of saved tensors in host memory or on disk, at most."""
    offloaded_parameter_bytes: int
    """Bytes of weights of blocks in host memory or on disk, with gradients of trained ones."""
    host_bytes: int
    """Bytes of all of them in host memory, at most; staging buffers are not counted."""
    disk_bytes: int
    """Bytes of all of them on disk, at most."""
    peak_bytes: int
    contributions: tuple[MemoryContribution, ...]
    collectives: tuple[Collective, ...]
    num_run_micro_batches: int
    """Micro-batches that were run; the step's others repeat them."""
    seconds: float

    @property
    def total_offloaded_bytes(self) -> int:
        """Bytes in host memory or on disk at most: optimizer states, saved tensors, weights, and
        the staging memory of weights on disk that the host updates."""
        return self.host_bytes + self.disk_bytes


def rehearse_rank(
    recipe: Recipe,
    plan: Plan,
    rank: int,
    device_type: RehearsalDevice = "cpu",
    should_run_each_micro_batch: bool = False,
) -> RankRehearsal:
    """Build this rank's part of the model, allocate optimizer states and run one training step.

    Fake tensors have no values: every token counts as supervised and every gradient as finite.
    On `cuda` operators take CUDA's paths, and host memory is not counted.

    Args:
        should_run_each_micro_batch: Run all micro-batches, also those that repeat earlier ones.
    """
    began = time.perf_counter()
    report = None
    # A preference objective keeps tensors of every micro-batch.
    if not should_run_each_micro_batch and recipe.preference is None:
        shortened = shorten_step(
            plan.layout,
            RankGrid(plan.layout).coordinates(rank)["pp"],
            plan.batch.gradient_accumulation_steps,
        )
        if shortened is not None:
            report = _rehearse_step(recipe, plan, rank, device_type, shortened)
    if report is None:
        report = _rehearse_step(recipe, plan, rank, device_type, None)
    assert report is not None
    return replace(report, seconds=time.perf_counter() - began)


def _rehearse_step(
    recipe: Recipe,
    plan: Plan,
    rank: int,
    device_type: RehearsalDevice,
    shortened: ShortenedStep | None,
) -> RankRehearsal | None:
    """Run the step, or a shorter one; None if the whole step does not follow from that."""
    with use_fake_group(rank, plan.layout.world_size):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
        live = LiveMemoryTracker(None if device_type == "cpu" else device_type)
        recorder = CollectiveRecorder()
        weight_storage = FakeStorage(fake, live)
        with weight_storage:
            weight_offload = build_fake_weight_offload(
                recipe, device, live, is_sharded=plan.layout.is_sharded
            )
        model = _build_model(recipe, plan, device, weight_storage, offload=weight_offload)
        reference = None
        if recipe.preference is not None and has_frozen_reference(recipe):
            reference = _build_model(recipe, plan, device, FakeStorage(fake, live), is_frozen=True)
        objective = _build_objective(recipe, model, reference)
        with fake, live.track_resizes(), _StepTracker(live) as watch, _replace_flex_attention():
            weights_bytes = live.register_tensors(
                (parameter for _, parameter in model.named_parameters()), "weights"
            )
            if (working := model.decoder.working_weights) is not None:
                weights_bytes += live.register_tensors(working.copies, "working weights")
            activation_offload = build_fake_activation_offload(recipe, device)
            if activation_offload is not None:
                install_activation_offload(model, activation_offload, plan)
            if reference is not None:
                weights_bytes += live.register_tensors(
                    (parameter for _, parameter in reference.named_parameters()), "reference"
                )
            live.reset_peak()
            bytes_before = live.live_bytes
            with use_phase(live, "moments"):
                optimizer, _staging = _build_optimizer(recipe, model, live, weight_offload)
            optimizer_bytes = live.live_bytes - bytes_before
            with use_phase(live, "step"):
                _begin_gathers(recipe, model)
                watch.recorder = recorder
                marks = UnitMarks(plan.layout, live, recorder, activation_offload)
                num_run = _run_passes(recipe, plan, model, objective, marks, shortened)
            gradients_bytes = live.live_bytes - weights_bytes - optimizer_bytes
            if weight_offload is not None:  # the block that computed last
                gradients_bytes -= weight_offload.count_device_bytes()
            with use_phase(live, "update"), _omit_row_limit(model):
                update_parameters(
                    model,
                    optimizer,
                    learning_rate=1e-4,
                    max_grad_norm=recipe.training.max_grad_norm,
                )
    collectives: tuple[Collective, ...] | None = tuple(recorder.collectives)
    if shortened is not None:
        collectives = marks.extend_collectives(shortened)
    if collectives is None:
        return None
    activation_bytes = 0 if activation_offload is None else activation_offload.peak_bytes
    parameter_bytes = 0 if weight_offload is None else weight_offload.stored_bytes
    offloaded_bytes = optimizer.num_bytes if isinstance(optimizer, OffloadedOptimizer) else 0
    by_tier = sum_by_tier(recipe, offloaded_bytes, activation_bytes, weight_offload)
    return RankRehearsal(
        rank=rank,
        coordinates=RankGrid(plan.layout).coordinates(rank),
        weights_bytes=weights_bytes,
        gradients_bytes=gradients_bytes,
        optimizer_bytes=optimizer_bytes,
        offloaded_bytes=offloaded_bytes,
        offloaded_activation_bytes=activation_bytes,
        offloaded_parameter_bytes=parameter_bytes,
        host_bytes=by_tier["host"],
        disk_bytes=by_tier["disk"],
        peak_bytes=live.peak_bytes,
        contributions=tuple(live.list_contributions()),
        collectives=collectives,
        num_run_micro_batches=num_run,
        seconds=0.0,
    )


def _run_passes(
    recipe: Recipe,
    plan: Plan,
    model: ParallelModel,
    objective: Objective,
    marks: UnitMarks,
    shortened: ShortenedStep | None,
) -> int:
    """Run the forward and backward passes of the step; return the number of micro-batches."""
    batches = _build_micro_batches(plan, has_documents=has_several_documents(recipe))
    if shortened is not None:
        batches = batches[: shortened.num_micro_batches]
    accumulate_gradients(model, batches, seed=recipe.seed, step=0, times=marks, objective=objective)
    return len(batches)


def _begin_gathers(recipe: Recipe, model: ParallelModel) -> None:
    """Begin the gathers of updated parameters, as the update of the step before does."""
    updates_pieces = recipe.moved_offload.optimizer != "none" or recipe.model.keep_zeros
    if model.early_gathers is not None and not updates_pieces:
        model.early_gathers.begin()


def _omit_row_limit(model: ParallelModel) -> AbstractContextManager[None]:
    """Omit the read of the rows beyond the limit: fake tensors have no number of them."""
    exchange = find_padded_exchange(model.decoder)
    return nullcontext() if exchange is None else exchange.exchange_exactly()


def _build_optimizer(
    recipe: Recipe,
    model: ParallelModel,
    live: LiveMemoryTracker,
    weight_offload: WeightOffload | ParameterOffload | None,
) -> tuple[torch.optim.Optimizer, object]:
    """Build the recipe's optimizer with its states, on the device or in a slower tier.

    The second value is the staging memory of that tier, which lives as long as the step.
    """
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=1e-4,
        weight_decay=0.1,
        model=model,
    )
    offload = recipe.moved_offload
    if offload.optimizer == "none":
        create_state(optimizer)
        return optimizer, None
    return build_fake_offloaded_optimizer(
        optimizer,
        offload,
        model,
        live,
        is_on_cpu=recipe.run.device == "cpu",
        is_updated_on_host=choose_update_place(recipe).place == "host",
        parameters=weight_offload if isinstance(weight_offload, ParameterOffload) else None,
    )


def choose_rehearsed_attention(recipe: Recipe, device_type: str) -> AttentionSetting:
    """Return the recipe's attention kernel; on a CPU, which lacks some, `auto` or `explicit`."""
    attention = recipe.model.attention
    return attention if device_type == "cuda" or attention == "explicit" else "auto"


def has_several_documents(recipe: Recipe) -> bool:
    """Return True if rows hold packed documents or the two responses of a preference pair."""
    return recipe.data.packing == "documents" or recipe.preference is not None


def _build_objective(
    recipe: Recipe, model: ParallelModel, reference: ParallelModel | None
) -> Objective:
    """Build the recipe's objective, with the reference model if there is one."""
    if recipe.preference is None:
        return TOKEN_OBJECTIVE
    if reference is not None:
        reference.decoder.eval()
    return PreferenceObjective(
        recipe.preference, model, reference, recipe.model.smallest_loss_chunk
    )


def _build_model(
    recipe: Recipe,
    plan: Plan,
    device: torch.device,
    storage: AbstractContextManager[None] | None,
    *,
    is_frozen: bool = False,
    offload: WeightOffload | ParameterOffload | None = None,
) -> ParallelModel:
    """Build the model as the trainer does: shard it on the meta device, then fill it."""
    precision = resolve_dtypes(plan.precision)
    with torch.device("meta"):
        decoder = Decoder(
            plan.shape,
            attention=choose_rehearsed_attention(recipe, device.type),
            loss_function=build_chunked_loss(recipe, plan),
            compute_dtype=precision.compute,
        )
    if is_frozen:
        decoder.requires_grad_(False)
    else:
        freeze_parameters(decoder, match_frozen(recipe.model.freeze, plan.shape))

    def fill(_name: str, bounds: Bounds) -> Tensor:
        return torch.empty([length for _, length in bounds], dtype=precision.param)

    return apply_layout(
        decoder,
        plan,
        build_mesh(plan.layout, device.type),
        device,
        read_slice=fill,
        storage=storage,
        offload=offload,
    )


def _build_micro_batches(plan: Plan, *, has_documents: bool = False) -> list[MicroBatch]:
    """Build micro-batches of the plan's sizes, all tokens supervised.

    A row is one document, or two documents of half the length.
    """
    batch = plan.batch
    shape = (batch.micro_batch_size, batch.sequence_length)
    ids_BT = torch.zeros(shape, dtype=torch.int64)
    positions_BT = torch.arange(batch.sequence_length).expand(shape)
    samples_B = torch.arange(batch.micro_batch_size)
    documents_BT = None
    host_documents_BT = None
    if has_documents:
        half = batch.sequence_length // 2
        documents_BT = (positions_BT >= half).long()
        is_second_T = np.arange(batch.sequence_length) >= half
        host_documents_BT = np.broadcast_to(is_second_T, shape).astype(np.int64)
        positions_BT = positions_BT % max(1, half)
    num_supervised = batch.micro_batch_size * batch.sequence_length
    rows = MicroBatch(
        ids_BT,
        ids_BT,
        positions_BT,
        documents_BT,
        samples_B,
        num_supervised,
        # Fake tensors have no values for the host to read.
        host_labels_BT=np.zeros(shape, dtype=np.int64),
        host_document_ids_BT=host_documents_BT,
    )
    return [rows] * batch.gradient_accumulation_steps


class _StepTracker(TorchDispatchMode):
    """Mode that replaces operators that need values, counts storages and records collectives.

    One mode, because three would pass each operator through Python three times. More than half
    of a step's operators are torch's queries for a tensor's device, which are answered here.
    """

    def __init__(self, tracker: LiveMemoryTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.recorder: CollectiveRecorder | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OPERATOR and type(args[0]) is FakeTensor:
            return args[0].fake_device
        result = _run_operator(func, args, kwargs or {})
        self.tracker.record(func, result)
        if self.recorder is not None:
            self.recorder.record(func, args)
        return result


_DEVICE_OPERATOR = torch.ops.prim.device.default


def _run_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator; for operators that read values, return those of an ordinary step.

    Every norm is 1 and every flag is False. Fake tensors have no pinned memory.
    """
    if func is torch.ops.aten._pin_memory.default:
        return args[0]
    if func is torch.ops.aten._local_scalar_dense.default:
        return 1.0 if args[0].dtype.is_floating_point else 0
    return func(*args, **kwargs)


@contextmanager
def _replace_flex_attention() -> Iterator[None]:
    """Replace FlexAttention, which would be compiled, by a function that allocates its tensors."""
    fused_attention.flex_replacement = _allocate_attention
    try:
        yield
    finally:
        fused_attention.flex_replacement = None


def _allocate_attention(q_BHTE: Tensor, k_BKTE: Tensor, v_BKTV: Tensor, **_options: Any) -> Any:
    out_BHTV, lse_BHT = _FakeFlexAttention.apply(q_BHTE, k_BKTE, v_BKTV)
    return out_BHTV, AuxOutput(lse=lse_BHT)


class _FakeFlexAttention(torch.autograd.Function):
    """Save and allocate what the CUDA kernel does."""

    @staticmethod
    def forward(ctx: Any, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTV: Tensor) -> tuple[Tensor, Tensor]:
        out_BHTV = q_BHTE.new_empty((*q_BHTE.shape[:3], v_BKTV.shape[3]))
        lse_BHT = q_BHTE.new_empty(q_BHTE.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q_BHTE, k_BKTE, v_BKTV, out_BHTV, lse_BHT)
        return out_BHTV, lse_BHT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_BHTE, k_BKTE, v_BKTV, _, lse_BHT = ctx.saved_tensors
        _delta_BHT = torch.empty_like(lse_BHT)
        return tuple(torch.empty_like(part) for part in (q_BHTE, k_BKTE, v_BKTV))
