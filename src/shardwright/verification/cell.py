"""One rank's part of a cell: run the engine in a layout and compare with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwright.config.data import IGNORED_LABEL
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import MicroBatch, read_step_micro_batches
from shardwright.layout import RankGrid
from shardwright.model.hf.hf_decoder import build_decoder
from shardwright.model.pointwise.operators import differentiate_token_losses
from shardwright.numerics import ChunkedLoss, LossScaler, get_local_tensor
from shardwright.offload import ParameterOffload, WeightOffload
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.experts.padded_exchange import find_padded_exchange
from shardwright.plans import Plan
from shardwright.training.step import StepLoss, accumulate_gradients, update_parameters
from shardwright.verification.comparison import (
    TOLERANCES,
    ComparisonResult,
    compare_gradients,
    compare_numbers,
    compare_tensor,
    compare_weights,
    get_rank,
)
from shardwright.verification.compiled_code import (
    check_compilation,
    count_graphs,
    prepare_compilation,
)
from shardwright.verification.reference import (
    GRADIENT_STEPS,
    LEARNING_RATES,
    NUM_SGD_STEPS,
    SGD_LEARNING_RATE,
    WEIGHT_DECAY,
    VerificationProblem,
    build_initial_value,
)

_CHUNK_TOKENS = 7
_LOSS_SCALE = 1024.0

MutationContext = Callable[[], AbstractContextManager[object]]
"""Factory of a context that adds a known bug to this process, for tests of the verifier."""


def verify_cell(
    problem: VerificationProblem,
    plan: Plan,
    reference_path: str,
    mutation: MutationContext | None = None,
) -> list[ComparisonResult]:
    """Compare one layout in one case with the reference; runs on every rank of the layout."""
    reference = load_file(Path(reference_path))
    with nullcontext() if mutation is None else mutation():
        model = build_model(problem, plan)
        num_graphs = count_graphs()
        initial = {
            name: get_local_tensor(parameter).detach().clone()
            for name, parameter in model.named_parameters()
        }
        findings = _verify_sgd(problem, plan, model, reference)
        if problem.dtype == "float64":
            model.invalidate_weights()
            with torch.no_grad():  # reuse the model: building it takes longer than a step
                for name, parameter in model.named_parameters():
                    get_local_tensor(parameter).copy_(initial[name])
            findings += _verify_adamw(problem, plan, model, reference)
        model.invalidate_weights()  # wait for gathers that the last update has begun
        if plan.is_compiled:
            findings.append(check_compilation(num_graphs))
    return findings


def _verify_sgd(
    problem: VerificationProblem, plan: Plan, model: ParallelModel, reference: dict[str, Tensor]
) -> list[ComparisonResult]:
    """Compare losses, raw gradients, norms, and weights after two steps of unclipped SGD.

    With plain SGD a wrong scale of the gradients shows in the weights. Between the steps are
    two exceptional ones.
    """
    allowed = TOLERANCES[problem.dtype]
    section = OptimizerSection(name="sgd")
    optimizer = build_optimizer(
        model.named_parameters(), section, learning_rate=SGD_LEARNING_RATE, weight_decay=0.0
    )
    findings: list[ComparisonResult] = []
    losses = []
    norms = []
    routers = []
    for step in range(NUM_SGD_STEPS):
        if step == NUM_SGD_STEPS - 1:  # the reference has no such steps: they must leave no trace
            findings += _verify_exceptional_steps(problem, plan, model)
        loss = accumulate_step(problem, plan, model, step)
        if step in GRADIENT_STEPS:
            findings.append(compare_gradients(model, reference, step, allowed))
        result = update_parameters(
            model,
            optimizer,
            learning_rate=SGD_LEARNING_RATE,
            max_grad_norm=None,
            router_table=loss.router_table,
            rows_beyond_limit=loss.rows_beyond_limit,
        )
        losses.append(loss.mean())
        norms.append(result.gradient_norm)
        routers.append(torch.zeros(0) if loss.router_table is None else loss.router_table)
    findings.append(compare_numbers("loss", losses, reference["loss"], allowed))
    findings.append(compare_numbers("norm", norms, reference["norm"], allowed))
    findings.append(
        compare_tensor(
            "routers", "loads and losses", torch.stack(routers), reference["routers"], 1.0, allowed
        )
    )
    findings.append(compare_weights("weights after SGD", model, reference, "sgd", allowed))
    return findings


def _verify_adamw(
    problem: VerificationProblem, plan: Plan, model: ParallelModel, reference: dict[str, Tensor]
) -> list[ComparisonResult]:
    """Compare weights after AdamW steps with clipping, decay, loss scale and varying rates."""
    allowed = TOLERANCES[problem.dtype]
    section = problem.optimizer.model_copy(update={"name": "adamw"})
    optimizer = build_optimizer(
        model.named_parameters(),
        section,
        learning_rate=LEARNING_RATES[0],
        weight_decay=WEIGHT_DECAY,
    )
    scaler = LossScaler(PrecisionSection(kind="fp16", initial_loss_scale=_LOSS_SCALE))
    max_grad_norms = reference["max_grad_norm"].tolist()
    norms = []
    rates = []
    for step, rate in enumerate(LEARNING_RATES):
        loss = accumulate_step(problem, plan, model, step, loss_scale=scaler.scale)
        limit = max_grad_norms[step]
        result = update_parameters(
            model,
            optimizer,
            learning_rate=rate,
            max_grad_norm=limit,
            scaler=scaler,
            router_table=loss.router_table,
            rows_beyond_limit=loss.rows_beyond_limit,
        )
        norms.append(result.gradient_norm)
        rates += [abs(group["lr"] - rate) / rate for group in optimizer.param_groups]
    return [
        compare_numbers("norm under clipping", norms, reference["adamw_norm"], allowed),
        ComparisonResult("learning rates", "worst parameter group", max(rates), 0.0),
        compare_weights("weights after AdamW", model, reference, "adamw", allowed),
    ]


def _verify_exceptional_steps(
    problem: VerificationProblem, plan: Plan, model: ParallelModel
) -> list[ComparisonResult]:
    """Check two steps: a non-finite gradient on one rank, and no supervised token.

    All ranks must skip the first, and neither changes a weight.
    """
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(name="sgd"), learning_rate=1.0, weight_decay=0.0
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # Only the pipeline rank with the head scales the loss, so all its pipeline ranks get inf. The
    # last data rank has one supervised token, on any of its context ranks: the others would have
    # nothing that is infinite if the head is frozen.
    inf_ranks = RankGrid(plan.layout).group_of(plan.layout.world_size - 1, ["pp", "cp"])
    loss = accumulate_step(
        problem, plan, model, 0, loss_scale=math.inf if get_rank(plan.layout) in inf_ranks else 1.0
    )
    skipped_update = update_parameters(
        model,
        optimizer,
        learning_rate=1.0,
        max_grad_norm=1.0,
        rows_beyond_limit=loss.rows_beyond_limit,
    )
    errors = [
        not skipped_update.is_skipped,
        math.isfinite(skipped_update.gradient_norm),
        _has_changed(model, before),
    ]
    findings = [
        ComparisonResult(
            "all ranks skip", f"rank {inf_ranks[-1]} not finite", float(sum(errors)), 0.0
        )
    ]

    unsupervised = [
        replace(
            batch,
            labels_BT=torch.full_like(batch.labels_BT, IGNORED_LABEL),
            num_supervised=0,
            weight_sum=0.0,
        )
        for batch in _read_micro_batches(problem, plan, 0)
    ]
    loss = accumulate(model, unsupervised, seed=problem.seed, step=0)
    empty_update = update_parameters(
        model,
        optimizer,
        learning_rate=1.0,
        max_grad_norm=1.0,
        rows_beyond_limit=loss.rows_beyond_limit,
    )
    errors = [
        loss.mean() != 0.0,
        empty_update.is_skipped,
        empty_update.gradient_norm != 0.0,
        _has_changed(model, before),
    ]
    findings.append(
        ComparisonResult("weights unchanged", "nothing supervised", float(sum(errors)), 0.0)
    )
    return findings


def _has_changed(model: ParallelModel, before: dict[str, Tensor]) -> bool:
    """Return True if any bit of this rank's weights differs; nan differs."""
    # torch.equal of DTensors is a collective, and pipeline ranks have different parameters.
    return any(
        not torch.equal(get_local_tensor(parameter), get_local_tensor(before[name]))
        for name, parameter in model.named_parameters()
    )


def build_model(
    problem: VerificationProblem,
    plan: Plan,
    offload: WeightOffload | ParameterOffload | None = None,
) -> ParallelModel:
    """Build the model as the trainer does, from the meta device.

    Args:
        offload: keeps the weights of blocks; None leaves them on the device.
    """
    if plan.is_compiled:
        prepare_compilation()
    with torch.device("meta"):
        decoder = build_decoder(
            plan.shape,
            attention="explicit" if problem.attention == "explicit" else "auto",
            loss_function=ChunkedLoss(
                _CHUNK_TOKENS, differentiate_token_losses if plan.has_fused_losses else None
            ),
            compute_dtype=problem.torch_dtype,
            expert_rules=problem.case.expert_rules,
        )
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in problem.frozen_names)
    specs = {spec.name: spec for spec in plan.shape.list_parameters()}
    return apply_layout(
        decoder,
        plan,
        build_mesh(plan.layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: build_initial_value(problem, specs[name], narrow),
        compile_blocks=plan.is_compiled,
        offload=offload,
    )


def _read_micro_batches(problem: VerificationProblem, plan: Plan, step: int) -> list[MicroBatch]:
    """Read micro-batches truncated to their longest row, unlike those of the reference."""
    dataset = problem.dataset
    data_rank = RankGrid(plan.layout).data_rank(get_rank(plan.layout))
    return read_step_micro_batches(dataset, dataset.order, plan.batch, step, data_rank)


def accumulate_step(
    problem: VerificationProblem,
    plan: Plan,
    model: ParallelModel,
    step: int,
    *,
    loss_scale: float = 1.0,
) -> StepLoss:
    """Compute the gradients of a step on this rank's rows."""
    return accumulate(
        model,
        _read_micro_batches(problem, plan, step),
        seed=problem.seed,
        step=step,
        loss_scale=loss_scale,
    )


def accumulate(
    model: ParallelModel,
    micro_batches: Sequence[MicroBatch],
    *,
    seed: int,
    step: int,
    loss_scale: float = 1.0,
) -> StepLoss:
    """Compute the gradients of a step, again with exact exchanges if padded ones omit rows."""
    options: dict[str, Any] = {"seed": seed, "step": step, "loss_scale": loss_scale}
    loss = accumulate_gradients(model, micro_batches, **options)
    exchange = find_padded_exchange(model.decoder)
    if exchange is None or loss.rows_beyond_limit is None or not loss.rows_beyond_limit:
        return loss
    for _, parameter in model.named_parameters():
        parameter.grad = None
    if model.trained_offload is not None:
        model.trained_offload.discard_gradients()
    with exchange.exchange_exactly():
        return accumulate_gradients(model, micro_batches, **options)
