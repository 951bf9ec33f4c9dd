"""Setup of a run on each rank: process group, model on its devices, optimizer, objective."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from importlib import metadata

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright import __version__
from shardwright.errors import InputError, RankFailed
from shardwright.model.adapters import begin
from shardwright.model.foreign import build_decoder
from shardwright.model.init import initialise
from shardwright.model.load import WeightsFolder
from shardwright.model.nf4 import held_slice, packed_slice
from shardwright.model.peft import PeftFolder
from shardwright.model.routing import resolve_rules
from shardwright.numerics.loss import chunked_cross_entropy
from shardwright.numerics.precision import LossScaler, dtypes
from shardwright.optim import build_optimizer, learning_rate_at
from shardwright.parallel.apply import Fill, apply_layout
from shardwright.parallel.mesh import build_mesh, init_process_group
from shardwright.parallel.model import ParallelModel
from shardwright.parallel.zeros import keep_zeros
from shardwright.train.claim import claimed_store
from shardwright.train.outcome import first_line
from shardwright.train.preference import PreferenceObjective, wants_frozen_reference
from shardwright.train.preflight import Checked
from shardwright.train.ranks import RankEnvironment
from shardwright.train.step import TOKENS, Objective

logger = logging.getLogger("shardwright")


@dataclass
class TrainState:
    """State that changes during training. `step` counts completed optimizer steps."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    step: int = 0
    skipped_in_a_row: int = 0
    best_loss: float = field(default=float("inf"))
    steps_left_out: int = 0
    """Data steps that rollbacks have skipped: step s reads the data of s + steps_left_out."""
    objective: Objective = TOKENS
    """Loss that is trained."""
    evaluation_due: bool = False
    """True if a stop prevented the evaluation of this step; the resumed run starts with it."""


def join_ranks(ranks: RankEnvironment, device: torch.device, timeout_seconds: float) -> None:
    """Join the process group; does nothing for a world size of 1.

    Raises:
        InputError: The rendezvous port or this rank is taken.
        RankFailed: The other ranks cannot be reached.
    """
    if ranks.world_size == 1 or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = claimed_store(ranks, timeout)
        init_process_group(
            device.type, timeout=timeout, store=store, rank=ranks.rank, world_size=ranks.world_size
        )
    except dist.DistError as error:
        address = os.environ.get("MASTER_ADDR")
        port = os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error):
            raise InputError(
                f"port {port} is in use",
                field="MASTER_PORT",
                remedy="Choose a free port, or let --nproc start the ranks",
            ) from error
        reason = first_line(str(error))
        raise RankFailed(
            f"rank {ranks.rank} could not connect to the other ranks at {address}:{port}: {reason}"
        ) from error


def build_objective(checked: Checked, model: ParallelModel) -> Objective:
    """Build the recipe's objective: token cross-entropy, or preferences against a reference.

    A frozen reference has the initial weights of the run, also after a resume.
    """
    section = checked.recipe.preference
    if section is None:
        return TOKENS
    reference = None
    if wants_frozen_reference(checked.recipe):
        frozen = frozenset(spec.name for spec in checked.shape.parameters())
        reference = build_model(replace(checked, frozen=frozen), model.device)
        reference.decoder.eval()
    return PreferenceObjective(section, model, reference, checked.recipe.model.loss_chunk_tokens)


def build_model(checked: Checked, device: torch.device) -> ParallelModel:
    """Build the recipe's decoder under the plan; each rank reads only its own shards."""
    recipe = checked.recipe
    plan = checked.plan
    precision = dtypes(plan.precision)
    with torch.device("meta"):
        decoder = build_decoder(
            checked.shape,
            attention=recipe.model.attention,
            loss_function=partial(
                chunked_cross_entropy, chunk_tokens=recipe.model.loss_chunk_tokens
            ),
            compute_dtype=precision.compute,
            expert_rules=resolve_rules(recipe.moe, checked.shape),
        )
    decoder.label_smoothing = recipe.training.label_smoothing
    # Of full rows: the padded length of a micro-batch depends on the other rows in it.
    width = plan.batch.sequence_length * checked.shape.hidden_size
    decoder.noise_size = recipe.training.neftune_noise_alpha / math.sqrt(width)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in checked.frozen)
    return apply_layout(
        decoder,
        plan,
        build_mesh(plan.layout, device.type),
        device,
        fill=weight_source(checked, precision.param),
        compile_blocks=recipe.model.compile,
    )


def weight_source(checked: Checked, dtype: torch.dtype) -> Fill:
    """Build the reader of weight slices, from a folder or computed from name and seed."""
    recipe = checked.recipe
    shape = checked.shape
    specs = {spec.name: spec for spec in shape.parameters()}
    compute = dtypes(checked.plan.precision).compute
    if recipe.model.pretrained:
        assert recipe.model.path is not None
        folder = WeightsFolder(recipe.model.path)
        folder.check(shape.base)
    adapter_folder = None
    if recipe.adapters is not None and recipe.adapters.path is not None:
        adapter_folder = PeftFolder(recipe.adapters.path, shape)

    def read_base(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        if recipe.model.pretrained:
            return folder.read(name, narrow=narrow, dtype=dtype)
        return initialise(
            specs[name].packed or specs[name], recipe.seed, dtype=dtype, narrow=narrow
        )

    def read_stored(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        matrix = specs[name].packed
        return (
            read_base(name, narrow).to(compute)
            if matrix is None
            else held_slice(matrix, narrow, read_base, dtype)
        )

    def read(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        spec = specs[name]
        if spec.packed is not None:
            return packed_slice(spec.packed, narrow, read_base)
        if spec.beside is None:
            return read_base(name, narrow)
        if adapter_folder is not None:
            return adapter_folder.read(name, narrow, dtype)
        in_out = shape.lies_in_out(spec.beside)
        return begin(spec, recipe.seed, narrow, dtype=dtype, read_matrix=read_stored, in_out=in_out)

    return read


def build_state(checked: Checked, device: torch.device) -> TrainState:
    """Build model, optimizer, loss scaler and objective at step 0."""
    recipe = checked.recipe
    model = build_model(checked, device)
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=learning_rate_at(
            0, recipe.training, checked.total_steps, checked.plan.batch.global_batch_size
        ),
        weight_decay=recipe.training.weight_decay,
        cut=model,
    )
    if recipe.model.keep_zeros:
        zeros = keep_zeros(model, optimizer)
        logger.info("keep_zeros: %.1f%% of the trained matrices stay zero", 100.0 * zeros.share)
    scaler = LossScaler(recipe.precision) if recipe.precision.kind == "fp16" else None
    return TrainState(model, optimizer, scaler, objective=build_objective(checked, model))


def describe_versions() -> dict[str, str]:
    """Return the versions of the software that affects numerical results."""
    return {
        "shardwright": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def describe_device(device: torch.device) -> str:
    """Return the name of the device, for a CPU with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads != 1 else ''})"
