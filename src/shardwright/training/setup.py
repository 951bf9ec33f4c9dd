"""Setup of a run on each rank: model on its devices, optimizer, objective, matmul rate."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.config.offload import OffloadSection
from shardwright.model.block_weights import SliceReader
from shardwright.model.decoder import Decoder
from shardwright.model.head import LossFunction
from shardwright.model.hf.hf_decoder import build_decoder
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.model.hf.peft_folder import PeftFolder
from shardwright.model.hf.weight_bytes import StoredWeights
from shardwright.model.lora import initialise_adapter
from shardwright.model.pointwise.operators import differentiate_token_losses
from shardwright.model.products import nf4
from shardwright.model.routing import resolve_expert_rules
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.chunked_loss import ChunkedLoss
from shardwright.numerics.function_compiler import build_function_compiler
from shardwright.numerics.liger_loss import liger_cross_entropy
from shardwright.numerics.peak_flops import Product, measure_matmul_flops_per_second
from shardwright.numerics.precision import LossScaler
from shardwright.offload import (
    ActivationOffload,
    ParameterOffload,
    ShardOffload,
    WeightOffload,
    build_activation_offload,
    build_parameter_offload,
    build_weight_offload,
    describe_activation_offload,
    describe_parameter_offload,
    describe_weight_offload,
)
from shardwright.optim import build_optimizer, compute_learning_rate
from shardwright.parallel.apply import apply_layout
from shardwright.parallel.mesh import build_mesh
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.parallel.recompute import install_recompute
from shardwright.parallel.zero_mask import keep_zeros
from shardwright.planner.update_place import choose_update_place
from shardwright.plans import Plan
from shardwright.training.checks.offload_checks import open_stored_weights
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.moment_offload import offload_moments
from shardwright.training.preference_objective import PreferenceObjective, has_frozen_reference
from shardwright.training.rank_sync import RankSync
from shardwright.training.step import TOKEN_OBJECTIVE, Objective
from shardwright.training.training_state import TrainingState
from shardwright.units import format_items
from shardwright.version import __version__

logger = logging.getLogger("shardwright")


_MAX_PRODUCTS = 4
"""Number of matrix shapes whose rate is measured: the largest of the model."""


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
        section, model, reference, validated_run.recipe.model.smallest_loss_chunk
    )


def build_model(
    validated_run: ValidatedRun,
    device: torch.device,
    offload: WeightOffload | ParameterOffload | None = None,
) -> ParallelModel:
    """Build the recipe's decoder under the plan; each rank reads only its own shards.

    Args:
        offload: keeps the weights of blocks; None leaves them on the device.
    """
    recipe = validated_run.recipe
    plan = validated_run.plan
    if any(spec.packed_matrix is not None for spec in validated_run.shape.list_parameters()):
        compile_function = build_function_compiler(recipe.model.compile_functions, device)
        nf4.compile_unpack(device, validated_run.dtypes.compute, compile_function)
    with torch.device("meta"):
        decoder = build_decoder(
            validated_run.shape,
            attention=recipe.model.attention,
            loss_function=_build_loss_function(recipe, plan),
            compute_dtype=validated_run.dtypes.compute,
            expert_rules=resolve_expert_rules(recipe.moe, validated_run.shape),
        )
    decoder.label_smoothing = recipe.training.label_smoothing
    # Of full rows: the padded length of a micro-batch depends on the other rows in it.
    width = plan.batch.sequence_length * validated_run.shape.hidden_size
    decoder.noise_size = recipe.training.neftune_noise_alpha / math.sqrt(width)
    freeze_parameters(decoder, validated_run.frozen_names)
    return apply_layout(
        decoder,
        plan,
        build_mesh(plan.layout, device.type),
        device,
        # fp32 also for bf16 weights: untrained biases of routers stay in it.
        read_slice=build_weight_reader(
            validated_run, torch.promote_types(validated_run.dtypes.param, torch.float32)
        ),
        compile_blocks=plan.is_compiled,
        offload=offload,
    )


def freeze_parameters(decoder: Decoder, names: Collection[str]) -> None:
    """Keep parameters from being trained, besides those that the model itself does not train."""
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in names)


def _build_loss_function(recipe: Recipe, plan: Plan) -> LossFunction:
    if recipe.model.loss_kernel == "liger":
        return liger_cross_entropy
    return build_chunked_loss(recipe, plan)


def build_chunked_loss(recipe: Recipe, plan: Plan) -> LossFunction:
    """Build the loss in chunks, whose passes over logits are one where functions are compiled."""
    if plan.has_fused_losses and plan.layout.tp > 1:
        logger.info("loss: separate passes over logits (ranks of tp share the vocabulary)")
    return ChunkedLoss(
        recipe.model.smallest_loss_chunk,
        differentiate_token_losses if plan.has_fused_losses else None,
    )


def offload_weights(
    section: OffloadSection,
    plan: Plan,
    device: torch.device,
    default_folder: Path,
    open_stored: Callable[[], StoredWeights | None],
) -> WeightOffload | ParameterOffload | None:
    """Build the section's offloading of weights, with adapters of the frozen ones.

    None if none move.

    Args:
        open_stored: returns the places of weights in the model's files; None without files.

    Raises:
        OffloadFailed: the scratch file cannot be created.
    """
    if section.parameters == "none":
        return None
    if plan.shape.adapters is None:
        kind = ShardOffload if plan.layout.is_sharded else ParameterOffload
        return build_parameter_offload(
            section, device=device, default_folder=default_folder, kind=kind
        )
    return build_weight_offload(
        section, device=device, default_folder=default_folder, open_stored=open_stored
    )


def _describe_offloaded_weights(
    offload: WeightOffload | ParameterOffload | None, recipe: Recipe
) -> str:
    if recipe.adapters is None:
        assert not isinstance(offload, WeightOffload)
        return describe_parameter_offload(offload)
    assert not isinstance(offload, ParameterOffload)
    return describe_weight_offload(offload, recipe.offload)


def build_weight_reader(validated_run: ValidatedRun, dtype: torch.dtype) -> SliceReader:
    """Build the reader of weight slices, from a folder or computed from name and seed."""
    recipe = validated_run.recipe
    shape = validated_run.shape
    specs = {spec.name: spec for spec in shape.list_parameters()}
    compute = validated_run.dtypes.compute
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
            else nf4.read_dequantised_slice(matrix, narrow, read_base, dtype)
        )

    def read(name: str, narrow: Sequence[tuple[int, int]]) -> Tensor:
        spec = specs[name]
        if spec.packed_matrix is not None:
            return nf4.read_packed_slice(spec.packed_matrix, narrow, read_base)
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
    choice = choose_update_place(recipe)
    weight_offload = offload_weights(
        recipe.offload.model_copy(update={"update_on": choice.place}),
        validated_run.plan,
        device,
        RunFolder.from_recipe(recipe).path,
        partial(open_stored_weights, recipe, validated_run.shape),
    )
    model = build_model(validated_run, device, weight_offload)
    logger.info("%s", validated_run.plan.pointwise)
    if (reason := validated_run.plan.async_tensor_parallel_reason) is not None:
        kind = validated_run.plan.layout.async_tensor_parallel
        logger.info("overlap of tensor-parallel communication: %s (auto: %s)", kind, reason)
    if (reason := validated_run.plan.expert_dispatch_reason) is not None:
        order = validated_run.plan.layout.expert_dispatch
        logger.info("order of expert exchanges: %s (auto: %s)", order, reason)
    if recipe.offload.parameters != "none":
        logger.info("%s", _describe_offloaded_weights(weight_offload, recipe))
    update_device = device
    if device.type == "cuda" and choice.place == "host":
        update_device = torch.device("cpu")
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
        compile_function=build_function_compiler(recipe.model.compile_functions, update_device),
        rounding_seed=recipe.seed,
    )
    activation_offload = offload_activations(
        model,
        recipe.offload,
        validated_run.plan,
        RunFolder.from_recipe(recipe).path,
    )
    if recipe.offload.optimizer != "none":
        optimizer = offload_moments(validated_run, optimizer, model, weight_offload, choice)
    if recipe.model.keep_zeros:
        zeros = keep_zeros(model, optimizer)
        logger.info(
            "keep_zeros: %.1f%% of the trained matrices stay zero", 100.0 * zeros.zero_fraction
        )
    scaler = LossScaler(recipe.precision) if recipe.precision.kind == "fp16" else None
    return TrainingState(
        model,
        optimizer,
        scaler,
        objective=build_objective(validated_run, model),
        activation_offload=activation_offload,
        weight_offload=weight_offload,
    )


def offload_activations(
    model: ParallelModel, section: OffloadSection, plan: Plan, default_folder: Path
) -> ActivationOffload | None:
    """Install the section's offloading of saved tensors in every block; None if nothing moves.

    Raises:
        OffloadFailed: the scratch file cannot be created.
    """
    if section.activations == "none":
        return None
    logger.info("%s", describe_activation_offload(section, model.device))
    offload = build_activation_offload(section, device=model.device, default_folder=default_folder)
    if offload is not None:
        install_activation_offload(model, offload, plan)
    return offload


def install_activation_offload(
    model: ParallelModel, offload: ActivationOffload, plan: Plan
) -> None:
    """Let every block save its tensors through the offload."""
    for block in model.decoder.blocks:
        block.offload_block = offload.offload_block
    install_recompute(model.decoder, plan, offload.pack)
    if model.pipeline is not None:
        model.pipeline.gradient_store.offload = offload


def measure_ceiling(validated_run: ValidatedRun, device: torch.device) -> float:
    """Measure the FLOP/s of one device in the run's dtype, and free the GPU memory used."""
    flops_per_second = measure_matmul_flops_per_second(
        device, validated_run.dtypes.compute, list_model_products(validated_run)
    )
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return flops_per_second


_ceilings: dict[tuple[torch.device, torch.dtype], float] = {}
"""Rates of earlier generations of this process."""


def agree_on_ceiling(
    validated_run: ValidatedRun, device: torch.device, rank_sync: RankSync
) -> float:
    """Return the rate of any rank's earlier generation, or let rank 0 measure it. Collective.

    So a spare that takes a lost rank does not let the others wait for a measurement.
    """
    key = (device, validated_run.dtypes.compute)
    rate = max(row[0] for row in rank_sync.gather([_ceilings.get(key, 0.0)]))
    if rate == 0.0:
        if rank_sync.rank_environment.is_main_rank:
            rate = measure_ceiling(validated_run, device)
        rate = rank_sync.gather([rate])[0][0]
    return _ceilings.setdefault(key, rate)


def list_model_products(validated_run: ValidatedRun) -> tuple[Product, ...]:
    """List the model's largest matrix products, at the tokens of one rank's micro-batch."""
    layout = validated_run.plan.layout
    batch = validated_run.plan.batch
    num_tokens = max(1, batch.micro_batch_size * batch.sequence_length // layout.cp)
    matrices = set()
    for spec in validated_run.shape.list_parameters():
        shape = (spec.packed_matrix or spec).shape
        if len(shape) > 1 and spec.adapter_part is None:
            rows, columns = shape[-2:]
            matrices.add(
                (columns, rows) if validated_run.shape.is_in_out(spec) else (rows, columns)
            )
    largest = sorted(matrices, key=lambda sizes: sizes[0] * sizes[1])[-_MAX_PRODUCTS:]
    return tuple((num_tokens, outputs, inputs) for outputs, inputs in largest)


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
    return f"cpu ({format_items(threads, 'thread')})"
