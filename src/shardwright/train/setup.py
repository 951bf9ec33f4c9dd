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
from shardwright.launch.rank_claim import claim_rank
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.model.hf_decoder import build_decoder
from shardwright.model.hf_weights import WeightsFolder
from shardwright.model.lora import initialise_adapter
from shardwright.model.nf4 import read_dequantised_slice, read_packed_slice
from shardwright.model.peft_folder import PeftFolder
from shardwright.model.routing import resolve_expert_rules
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.loss import chunked_cross_entropy
from shardwright.numerics.precision import LossScaler, resolve_dtypes
from shardwright.optim import build_optimizer, compute_learning_rate
from shardwright.parallel.apply import ParameterReader, apply_layout
from shardwright.parallel.mesh import build_mesh, init_process_group
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.parallel.zero_mask import keep_zeros
from shardwright.train.preference_objective import PreferenceObjective, has_frozen_reference
from shardwright.train.run_checks import ValidatedRun
from shardwright.train.step import TOKEN_OBJECTIVE, Objective

logger = logging.getLogger("shardwright")


@dataclass
class TrainingState:
    """State that changes during training. `step` counts completed optimizer steps."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    step: int = 0
    num_consecutive_skips: int = 0
    best_loss: float = field(default=float("inf"))
    skipped_data_steps: int = 0
    """Data steps that rollbacks have skipped: step s reads the data of s + steps_left_out."""
    objective: Objective = TOKEN_OBJECTIVE
    """Loss that is trained."""
    is_evaluation_due: bool = False
    """True if a stop prevented the evaluation of this step; the resumed run starts with it."""


def join_ranks(
    rank_environment: RankEnvironment, device: torch.device, timeout_seconds: float
) -> None:
    """Join the process group; does nothing for a world size of 1.

    Raises:
        InputError: The rendezvous port or this rank is taken.
        RankFailed: The other ranks cannot be reached.
    """
    if rank_environment.world_size == 1 or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = claim_rank(rank_environment, timeout)
        init_process_group(
            device.type,
            timeout=timeout,
            store=store,
            rank=rank_environment.rank,
            world_size=rank_environment.world_size,
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
        reason = extract_first_line(str(error))
        raise RankFailed(
            f"rank {rank_environment.rank} could not connect to the other ranks at {address}:{port}: {reason}"
        ) from error


def build_objective(validated_run: ValidatedRun, model: ParallelModel) -> Objective:
    """Build the recipe's objective: token cross-entropy, or preferences against a reference.

    A frozen reference has the initial weights of the run, also after a resume.
    """
    section = validated_run.recipe.preference
    if section is None:
        return TOKEN_OBJECTIVE
    reference = None
    if has_frozen_reference(validated_run.recipe):
        frozen = frozenset(spec.name for spec in validated_run.shape.list_parameters())
        reference = build_model(replace(validated_run, frozen_names=frozen), model.device)
        reference.decoder.eval()
    return PreferenceObjective(
        section, model, reference, validated_run.recipe.model.loss_chunk_tokens
    )


def build_model(validated_run: ValidatedRun, device: torch.device) -> ParallelModel:
    """Build the recipe's decoder under the plan; each rank reads only its own shards."""
    recipe = validated_run.recipe
    plan = validated_run.plan
    precision = resolve_dtypes(plan.precision)
    with torch.device("meta"):
        decoder = build_decoder(
            validated_run.shape,
            attention=recipe.model.attention,
            loss_function=partial(
                chunked_cross_entropy, chunk_tokens=recipe.model.loss_chunk_tokens
            ),
            compute_dtype=precision.compute,
            expert_rules=resolve_expert_rules(recipe.moe, validated_run.shape),
        )
    decoder.label_smoothing = recipe.training.label_smoothing
    # Of full rows: the padded length of a micro-batch depends on the other rows in it.
    width = plan.batch.sequence_length * validated_run.shape.hidden_size
    decoder.noise_size = recipe.training.neftune_noise_alpha / math.sqrt(width)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in validated_run.frozen_names)
    return apply_layout(
        decoder,
        plan,
        build_mesh(plan.layout, device.type),
        device,
        read_slice=build_weight_reader(validated_run, precision.param),
        compile_blocks=recipe.model.compile,
    )


def build_weight_reader(validated_run: ValidatedRun, dtype: torch.dtype) -> ParameterReader:
    """Build the reader of weight slices, from a folder or computed from name and seed."""
    recipe = validated_run.recipe
    shape = validated_run.shape
    specs = {spec.name: spec for spec in shape.list_parameters()}
    compute = resolve_dtypes(validated_run.plan.precision).compute
    if recipe.model.is_pretrained:
        assert recipe.model.path is not None
        folder = WeightsFolder(recipe.model.path)
        folder.check(shape.base_shape)
    adapter_folder = None
    if recipe.adapters is not None and recipe.adapters.path is not None:
        adapter_folder = PeftFolder(recipe.adapters.path, shape)

    def read_base(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        if recipe.model.is_pretrained:
            return folder.read(name, narrow=narrow, dtype=dtype)
        return initialise_parameter(
            specs[name].packed_matrix or specs[name], recipe.seed, dtype=dtype, narrow=narrow
        )

    def read_stored(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        matrix = specs[name].packed_matrix
        return (
            read_base(name, narrow).to(compute)
            if matrix is None
            else read_dequantised_slice(matrix, narrow, read_base, dtype)
        )

    def read(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        spec = specs[name]
        if spec.packed_matrix is not None:
            return read_packed_slice(spec.packed_matrix, narrow, read_base)
        if spec.adapted_matrix is None:
            return read_base(name, narrow)
        if adapter_folder is not None:
            return adapter_folder.read(name, narrow, dtype)
        in_out = shape.is_in_out(spec.adapted_matrix)
        return initialise_adapter(
            spec, recipe.seed, narrow, dtype=dtype, read_matrix=read_stored, in_out=in_out
        )

    return read


def build_state(validated_run: ValidatedRun, device: torch.device) -> TrainingState:
    """Build model, optimizer, loss scaler and objective at step 0."""
    recipe = validated_run.recipe
    model = build_model(validated_run, device)
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=compute_learning_rate(
            0,
            recipe.training,
            validated_run.total_steps,
            validated_run.plan.batch.global_batch_size,
        ),
        weight_decay=recipe.training.weight_decay,
        model=model,
    )
    if recipe.model.keep_zeros:
        zeros = keep_zeros(model, optimizer)
        logger.info(
            "keep_zeros: %.1f%% of the trained matrices stay zero", 100.0 * zeros.zero_fraction
        )
    scaler = LossScaler(recipe.precision) if recipe.precision.kind == "fp16" else None
    return TrainingState(model, optimizer, scaler, objective=build_objective(validated_run, model))


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
