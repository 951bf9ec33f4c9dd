"""From a checked recipe to a model on its devices with its optimizer: the same steps on one process or a thousand ranks."""

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
    """What changes while training. `step` counts optimizer steps done; the data cursor follows from it."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None
    step: int = 0
    skipped_in_a_row: int = 0
    best_loss: float = field(default=float("inf"))
    steps_left_out: int = 0
    """Steps' worth of data that rollbacks have passed over: step s reads what step s + steps_left_out would."""
    objective: Objective = TOKENS
    """What is learned."""
    evaluation_due: bool = False
    """A stop came before the evaluation of this step was done: the resumed run begins with it."""


def join_ranks(ranks: RankEnvironment, device: torch.device, timeout_seconds: float) -> None:
    """Join the process group; a process by itself has none.

    Raises:
        InputError: the port where the ranks should meet is taken, or this rank is.
        RankFailed: the others did not come.
    """
    if ranks.world_size == 1 or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        store = claimed_store(ranks, timeout)
        init_process_group(device.type, timeout=timeout, store=store, rank=ranks.rank, world_size=ranks.world_size)
    except dist.DistError as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error):
            raise InputError(
                f"port {port} is in use", field="MASTER_PORT", remedy="Choose a free one, or let --nproc start the ranks"
            ) from error
        raise RankFailed(f"rank {ranks.rank} could not meet the others at {address}:{port}: {first_line(str(error))}") from error


def build_objective(checked: Checked, model: ParallelModel) -> Objective:
    """What the recipe learns: tokens, or preferences, which are held to a reference.

    A frozen reference is built as the model is, from the weights that training began with, whatever checkpoint the model then goes
    on from.
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
    """The recipe's decoder, cut as the plan says, its weights filled: a rank only ever holds and reads its own slices."""
    recipe, plan = checked.recipe, checked.plan
    precision = dtypes(plan.precision)
    with torch.device("meta"):
        decoder = build_decoder(
            checked.shape,
            attention=recipe.model.attention,
            loss_function=partial(chunked_cross_entropy, chunk_tokens=recipe.model.loss_chunk_tokens),
            compute_dtype=precision.compute,
            expert_rules=resolve_rules(recipe.moe, checked.shape),
        )
    decoder.label_smoothing = recipe.training.label_smoothing
    # Of full rows: how far a micro-batch's rows are filled up depends on what else lies in it.
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
    """The slices of parameters that a rank holds, from the folder or from name and seed; adapters from theirs, or as they begin."""
    recipe, shape = checked.recipe, checked.shape
    specs, compute = {spec.name: spec for spec in shape.parameters()}, dtypes(checked.plan.precision).compute
    if recipe.model.pretrained:
        assert recipe.model.path is not None
        folder = WeightsFolder(recipe.model.path)
        folder.check(shape.base)
    begun = None
    if recipe.adapters is not None and recipe.adapters.path is not None:
        begun = PeftFolder(recipe.adapters.path, shape)

    def read_base(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        if recipe.model.pretrained:
            return folder.read(name, narrow=narrow, dtype=dtype)
        return initialise(specs[name].packed or specs[name], recipe.seed, dtype=dtype, narrow=narrow)

    def read_held(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        matrix = specs[name].packed
        return read_base(name, narrow).to(compute) if matrix is None else held_slice(matrix, narrow, read_base, dtype)

    def read(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        spec = specs[name]
        if spec.packed is not None:
            return packed_slice(spec.packed, narrow, read_base)
        if spec.beside is None:
            return read_base(name, narrow)
        if begun is not None:
            return begun.read(name, narrow, dtype)
        in_out = shape.lies_in_out(spec.beside)
        return begin(spec, recipe.seed, narrow, dtype=dtype, read_matrix=read_held, in_out=in_out)

    return read


def build_state(checked: Checked, device: torch.device) -> TrainState:
    """Model, optimizer and loss scale at step 0."""
    recipe = checked.recipe
    model = build_model(checked, device)
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=learning_rate_at(0, recipe.training, checked.total_steps, checked.plan.batch.global_batch_size),
        weight_decay=recipe.training.weight_decay,
        cut=model,
    )
    if recipe.model.keep_zeros:
        kept = keep_zeros(model, optimizer)
        logger.info("keep_zeros: %.1f%% of the trained matrices stay zero", 100.0 * kept.share)
    scaler = LossScaler(recipe.precision) if recipe.precision.kind == "fp16" else None
    return TrainState(model, optimizer, scaler, objective=build_objective(checked, model))


def describe_versions() -> dict[str, str]:
    """Versions that decide the numbers."""
    return {
        "shardwright": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }


def describe_device(device: torch.device) -> str:
    """The device as a person names it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads != 1 else ''})"
