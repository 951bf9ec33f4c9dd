"""One rank's part of verifying one layout in one case: run the real engine, hold everything against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.dataset import IGNORED_LABEL
from shardwright.data.loader import MicroBatch, step_micro_batches
from shardwright.layout import Layout, RankGrid
from shardwright.model.foreign import build_decoder
from shardwright.numerics import LossScaler, chunked_cross_entropy
from shardwright.optim import build_optimizer, set_learning_rate
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.model import local_part
from shardwright.parallel.reduce import narrow
from shardwright.plan import Plan, row_multiple
from shardwright.train.step import StepLoss, accumulate_gradients, update
from shardwright.verify.oracle import (
    GRADIENT_STEPS,
    LEARNING_RATES,
    NUM_STEPS,
    SGD_LEARNING_RATE,
    WEIGHT_DECAY,
    Problem,
    initial_value,
)

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
NEARLY_ZERO = 1e-8
"""A reference below this share of the global norm is compared absolutely, against that share of the global norm."""
_CHUNK_TOKENS = 7
_LOSS_SCALE = 1024.0

Mutation = Callable[[], AbstractContextManager[object]]
"""Puts a known bug into this process while it is entered; for the tests of the verifier."""


@dataclass(frozen=True)
class Finding:
    """One comparison: the worst of its kind on this rank. `error` is relative unless said in `subject`; nan fails."""

    quantity: str
    subject: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is small enough; nan is not."""
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """Error as a share of what is allowed, by which the worst of several is chosen; nan is as bad as inf."""
        if math.isnan(self.error):
            return math.inf
        if self.allowed == 0.0:
            return math.inf if self.error else 0.0
        return self.error / self.allowed


def verify_cell(problem: Problem, layout: Layout, reference_path: str, mutation: Mutation | None = None) -> list[Finding]:
    """All comparisons of one layout in one case, as this rank sees them. Runs on every rank of the layout."""
    reference = load_file(Path(reference_path))
    with nullcontext() if mutation is None else mutation():
        model = _build(problem, layout)
        initial = {name: local_part(parameter).detach().clone() for name, parameter in model.named_parameters()}
        findings = _verify_sgd(problem, layout, model, reference)
        if problem.dtype == "float64":
            with torch.no_grad():  # one model serves both: building it takes longer than a step
                for name, parameter in model.named_parameters():
                    local_part(parameter).copy_(initial[name])
            findings += _verify_adamw(problem, layout, model, reference)
        if has_rule(problem):
            findings += _verify_rule(problem, layout, reference)
        if problem.optimizer.name == "adamw_8bit":
            findings += _verify_quantised_rule(problem, layout)
        findings += _verify_odd_steps(problem, layout, model)
    return findings


def _verify_sgd(problem: Problem, layout: Layout, model: ParallelModel, reference: dict[str, Tensor]) -> list[Finding]:
    """Loss, raw gradients and norm, and the weights after a few steps of plain SGD, unclipped: no scale can hide."""
    allowed = TOLERANCE[problem.dtype]
    section = OptimizerSection(name="sgd")
    optimizer = build_optimizer(model.named_parameters(), section, learning_rate=SGD_LEARNING_RATE, weight_decay=0.0)
    findings, losses, norms, routers = [], [], [], []
    for step in range(NUM_STEPS):
        loss = _accumulate(problem, layout, model, step)
        if step in GRADIENT_STEPS:
            findings.append(_compare_gradients(model, reference, step, allowed))
        done = update(model, optimizer, learning_rate=SGD_LEARNING_RATE, max_grad_norm=None, routers=loss.routers)
        losses.append(loss.mean())
        norms.append(done.gradient_norm)
        routers.append(torch.zeros(0) if loss.routers is None else loss.routers)
    findings.append(_compare_numbers("loss", losses, reference["loss"], allowed))
    findings.append(_compare_numbers("norm", norms, reference["norm"], allowed))
    findings.append(_compare_tensor("routers", "loads and losses", torch.stack(routers), reference["routers"], 1.0, allowed))
    findings.append(_compare_weights("weights after SGD", model, reference, "sgd", allowed))
    return findings


def _verify_adamw(problem: Problem, layout: Layout, model: ParallelModel, reference: dict[str, Tensor]) -> list[Finding]:
    """Weights after a few steps of AdamW under clipping, decay, a loss scale and a learning rate that changes."""
    allowed = TOLERANCE[problem.dtype]
    section = problem.optimizer.model_copy(update={"name": "adamw"})
    optimizer = build_optimizer(model.named_parameters(), section, learning_rate=LEARNING_RATES[0], weight_decay=WEIGHT_DECAY)
    scaler = LossScaler(PrecisionSection(kind="fp16", initial_loss_scale=_LOSS_SCALE))
    max_grad_norms = reference["max_grad_norm"].tolist()
    norms, rates = [], []
    for step, rate in enumerate(LEARNING_RATES):
        loss = _accumulate(problem, layout, model, step, loss_scale=scaler.scale)
        limit = max_grad_norms[step]
        done = update(model, optimizer, learning_rate=rate, max_grad_norm=limit, scaler=scaler, routers=loss.routers)
        norms.append(done.gradient_norm)
        rates += [abs(group["lr"] - rate) / rate for group in optimizer.param_groups]
    return [
        _compare_numbers("norm under clipping", norms, reference["adamw_norm"], allowed),
        Finding("learning rates", "worst parameter group", max(rates), 0.0),
        _compare_weights("weights after AdamW", model, reference, "adamw", allowed),
    ]


def has_rule(problem: Problem) -> bool:
    """Whether the recipe's update rule is held to one process too: in float64, one that looks at whole rows or matrices.

    Not `adamw_8bit`, where gradients that differ in the last bit may round to another code, which no tolerance of weights tells
    from a bug: its update is held to the bit instead, gradient by gradient (`_verify_quantised_rule`).
    """
    return problem.dtype == "float64" and problem.optimizer.name in ("muon", "adafactor")


def add_rule_reference(problem: Problem, reference_path: str) -> None:
    """Add to a reference the weights (`rule.NAME`) after a few steps of the recipe's own rule, as the engine has them alone.

    Not written out plainly as AdamW's are: what a layout changes is asked here, and what the rule is elsewhere
    (`tests/unit/optim/test_cut.py`). Runs in one process.
    """
    reference = load_file(Path(reference_path))
    model = _run_rule(problem, Layout(), range(problem.batch.data_ranks))
    reference |= {f"rule.{name}": model.full_parameter(name).detach().contiguous() for name in model.layouts}
    save_file(reference, Path(reference_path))


def _run_rule(problem: Problem, layout: Layout, data_ranks: Sequence[int]) -> ParallelModel:
    """The model after a few steps of the recipe's rule on what these data ranks read."""
    model, rate = _build(problem, layout), LEARNING_RATES[0]
    named = model.named_parameters()
    optimizer = build_optimizer(named, problem.optimizer, learning_rate=rate, weight_decay=WEIGHT_DECAY, cut=model)
    for step, rate in enumerate(LEARNING_RATES):
        data, batch = problem.dataset, problem.batch
        read = [one for data_rank in data_ranks for one in step_micro_batches(data, data.order, batch, step, data_rank)]
        loss = accumulate_gradients(model, read, seed=problem.seed, step=step)
        update(model, optimizer, learning_rate=rate, max_grad_norm=1.0, routers=loss.routers)
    return model


def _verify_rule(problem: Problem, layout: Layout, reference: dict[str, Tensor]) -> list[Finding]:
    """Weights after a few steps of the recipe's rule, against one process's."""
    model = _run_rule(problem, layout, [RankGrid(layout).data_rank(_rank(layout))])
    return [_compare_weights(f"weights after {problem.optimizer.name}", model, reference, "rule", TOLERANCE[problem.dtype])]


def _verify_quantised_rule(problem: Problem, layout: Layout) -> list[Finding]:
    """Weights after a few steps of 8-bit AdamW: to the bit those that one process makes of the very gradients of the layout.

    The gradients themselves are held to the reference elsewhere in the cell, so that the two together say of a step what a
    tolerance of its weights cannot (docs/decisions/0052-quantised-moments-proven.md).
    """
    model, alone = _build(problem, layout), _build(problem, Layout())
    options: dict[str, Any] = {"learning_rate": LEARNING_RATES[0], "weight_decay": WEIGHT_DECAY}
    ours = build_optimizer(model.named_parameters(), problem.optimizer, cut=model, **options)
    theirs = build_optimizer(alone.named_parameters(), problem.optimizer, cut=alone, **options)
    for step, rate in enumerate(LEARNING_RATES):
        _accumulate(problem, layout, model, step)
        for name, parameter in alone.named_parameters():
            parameter.grad = model.full_gradient(name)
        update(model, ours, learning_rate=rate, max_grad_norm=None)
        set_learning_rate(theirs, rate)
        theirs.step()
    wanted = {f"rule.{name}": alone.full_parameter(name).detach() for name in alone.layouts}
    return [_compare_weights("weights after adamw_8bit", model, wanted, "rule", 0.0)]


def _verify_odd_steps(problem: Problem, layout: Layout, model: ParallelModel) -> list[Finding]:
    """A gradient that is not finite on one rank, which every rank skips; a step that supervises nothing; then a common one.

    Any weights of the model will do.
    """
    optimizer = build_optimizer(model.named_parameters(), OptimizerSection(name="sgd"), learning_rate=1.0, weight_decay=0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # Of a pipeline's ranks one scales the loss, whichever has the head: all of them are told to spoil it.
    spoiled = RankGrid(layout).group_of(layout.world_size - 1, ["pp"])
    _accumulate(problem, layout, model, 0, loss_scale=math.inf if _rank(layout) in spoiled else 1.0)
    bad = update(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    wrong = [not bad.skipped, math.isfinite(bad.gradient_norm), _moved(model, before)]
    findings = [Finding("skips together", f"rank {spoiled[-1]} not finite", float(sum(wrong)), 0.0)]

    unsupervised = [
        replace(batch, labels_BT=torch.full_like(batch.labels_BT, IGNORED_LABEL), num_supervised=0, weight_sum=0.0)
        for batch in _micro_batches(problem, layout, 0)
    ]
    loss = accumulate_gradients(model, unsupervised, seed=problem.seed, step=0)
    empty = update(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    wrong = [loss.mean() != 0.0, empty.skipped, empty.gradient_norm != 0.0, _moved(model, before)]
    findings.append(Finding("stands still", "nothing supervised", float(sum(wrong)), 0.0))

    _accumulate(problem, layout, model, 0)
    good = update(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    wrong = [good.skipped, not math.isfinite(good.gradient_norm), not _moved(model, before)]
    findings.append(Finding("goes on", "after both", float(sum(wrong)), 0.0))
    return findings


def _moved(model: ParallelModel, before: dict[str, Tensor]) -> bool:
    """Whether any bit of this rank's weights differs (nan differs)."""
    # Local parts: of DTensors torch.equal asks all ranks, and pipeline ranks have different ones.
    return any(not torch.equal(local_part(parameter), local_part(before[name])) for name, parameter in model.named_parameters())


def _rank(layout: Layout) -> int:
    return dist.get_rank() if layout.world_size > 1 else 0


def _build(problem: Problem, layout: Layout) -> ParallelModel:
    """The model as the trainer builds it, from the meta device."""
    shape = problem.case.shape(problem.shape)
    with torch.device("meta"):
        decoder = build_decoder(
            shape,
            attention="explicit" if problem.attention == "explicit" else "auto",
            loss_function=partial(chunked_cross_entropy, chunk_tokens=_CHUNK_TOKENS),
            compute_dtype=problem.torch_dtype,
            expert_rules=problem.case.expert_rules,
        )
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in problem.frozen)
    specs = {spec.name: spec for spec in shape.parameters()}
    precision = PrecisionSection(kind="fp32" if problem.dtype == "float32" else "fp64")
    return apply_layout(
        decoder,
        Plan(layout, problem.batch, precision, problem.case.recompute),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        fill=lambda name, narrow: initial_value(problem, specs[name], narrow),
    )


def _micro_batches(problem: Problem, layout: Layout, step: int) -> list[MicroBatch]:
    """Rows cut off behind the longest of their micro-batch, as the trainer has them; the reference's are whole."""
    dataset, batch = problem.dataset, problem.batch
    if problem.shape.experts is None:  # what routers did is compared too, and they count every token of a row
        batch = replace(batch, row_multiple=row_multiple(layout))
    return step_micro_batches(dataset, dataset.order, batch, step, RankGrid(layout).data_rank(_rank(layout)))


def _accumulate(problem: Problem, layout: Layout, model: ParallelModel, step: int, *, loss_scale: float = 1.0) -> StepLoss:
    return accumulate_gradients(model, _micro_batches(problem, layout, step), seed=problem.seed, step=step, loss_scale=loss_scale)


def _compare_gradients(model: ParallelModel, reference: dict[str, Tensor], step: int, allowed: float) -> Finding:
    wanted = _select(reference, f"gradient.{step}.")
    scale = float(reference["norm"][step])
    whole = ((name, model.full_gradient(name), wanted.get(name)) for name in model.layouts)
    finding = _worst("gradient", whole, wanted, scale, allowed)
    held_here = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return _worse(finding, _compare_held("gradient", model, held_here, wanted, scale, allowed))


def _select(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _compare_weights(quantity: str, model: ParallelModel, reference: dict[str, Tensor], run: str, allowed: float) -> Finding:
    wanted = _select(reference, f"{run}.")
    scale = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in wanted.values()))
    whole = ((name, model.full_parameter(name), wanted.get(name)) for name in model.layouts)
    finding = _worst(quantity, whole, wanted, scale, allowed)
    held_here = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return _worse(finding, _compare_held(quantity, model, held_here, wanted, scale, allowed))


def _compare_held(
    quantity: str, model: ParallelModel, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], scale: float, allowed: float
) -> Finding:
    """What this rank itself holds, box by box: whole tensors are put together from one copy, and the others must be equal."""
    worst = Finding(quantity, "every parameter", 0.0, allowed)
    for name, tensor in tensors.items():
        want, local = wanted.get(name), local_part(tensor).double()
        if want is None:
            continue  # told by the comparison of whole tensors
        boxes = model.held(name)
        squares = [(narrow(local, box.local) - narrow(want, box.whole).double()).square().sum() for box in boxes]
        distance, size = math.sqrt(float(sum(squares))), float(want.double().norm())
        subject = f"{name}, copy of rank {_rank(model.layout)}"
        if size <= NEARLY_ZERO * scale:
            worst = _worse(worst, Finding(quantity, f"{subject} (absolute)", distance, NEARLY_ZERO * scale))
        else:
            worst = _worse(worst, Finding(quantity, subject, distance / size, allowed))
    return worst


def _worse(one: Finding, other: Finding) -> Finding:
    """The finding that is further off."""
    return max(one, other, key=lambda finding: finding.severity)


def _worst(
    quantity: str,
    pairs: Iterable[tuple[str, Tensor | None, Tensor | None]],
    wanted: dict[str, Tensor],
    scale: float,
    allowed: float,
) -> Finding:
    """The parameter that is furthest off, as a share of what is allowed; never an average over parameters."""
    worst, seen = Finding(quantity, "every parameter", 0.0, allowed), set()
    for name, got, want in pairs:
        seen.add(name)
        worst = _worse(worst, _compare_tensor(quantity, name, got, want, scale, allowed))
    missing = sorted(set(wanted) - seen)
    return Finding(quantity, f"{missing[0]}: absent", math.inf, allowed) if missing else worst


def _compare_tensor(quantity: str, name: str, got: Tensor | None, want: Tensor | None, scale: float, allowed: float) -> Finding:
    if got is None and want is None:
        return Finding(quantity, name, 0.0, allowed)
    if got is None or want is None or got.shape != want.shape:
        return Finding(
            quantity, f"{name}: {'missing' if got is None else 'not wanted' if want is None else 'shape'}", math.inf, allowed
        )
    size, distance = float(want.double().norm()), float((got.double() - want.double()).norm())
    if size <= NEARLY_ZERO * scale:
        return Finding(quantity, f"{name} (absolute)", distance, NEARLY_ZERO * scale)
    return Finding(quantity, name, distance / size, allowed)


def _compare_numbers(quantity: str, got: list[float], want: Tensor, allowed: float) -> Finding:
    errors = [abs(a - b) / abs(b) for a, b in zip(got, want.tolist(), strict=True)]
    step = max(range(len(errors)), key=lambda index: (math.isnan(errors[index]), errors[index]))
    return Finding(quantity, f"step {step}", errors[step], allowed)
