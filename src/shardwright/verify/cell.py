"""One rank's part of a cell: run the engine in a layout and compare with the reference."""

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
"""Share of the global norm; a smaller reference is compared absolutely, with that as limit."""
_CHUNK_TOKENS = 7
_LOSS_SCALE = 1024.0

Mutation = Callable[[], AbstractContextManager[object]]
"""Factory of a context that adds a known bug to this process, for tests of the verifier."""


@dataclass(frozen=True)
class Finding:
    """Worst comparison of one quantity on this rank.

    `error` is relative unless `subject` says absolute; nan fails.
    """

    quantity: str
    subject: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """True if the error is at most `allowed`; False for nan."""
        return self.error <= self.allowed

    @property
    def severity(self) -> float:
        """Error divided by the allowed error, by which the worst is chosen; inf for nan."""
        if math.isnan(self.error):
            return math.inf
        if self.allowed == 0.0:
            return math.inf if self.error else 0.0
        return self.error / self.allowed


def verify_cell(
    problem: Problem, layout: Layout, reference_path: str, mutation: Mutation | None = None
) -> list[Finding]:
    """Compare one layout in one case with the reference; runs on every rank of the layout."""
    reference = load_file(Path(reference_path))
    with nullcontext() if mutation is None else mutation():
        model = _build(problem, layout)
        initial = {
            name: local_part(parameter).detach().clone()
            for name, parameter in model.named_parameters()
        }
        findings = _verify_sgd(problem, layout, model, reference)
        if problem.dtype == "float64":
            with torch.no_grad():  # reuse the model: building it takes longer than a step
                for name, parameter in model.named_parameters():
                    local_part(parameter).copy_(initial[name])
            findings += _verify_adamw(problem, layout, model, reference)
        if has_rule(problem):
            findings += _verify_rule(problem, layout, reference)
        if problem.optimizer.name == "adamw_8bit":
            findings += _verify_quantised_rule(problem, layout)
        findings += _verify_odd_steps(problem, layout, model)
    return findings


def _verify_sgd(
    problem: Problem, layout: Layout, model: ParallelModel, reference: dict[str, Tensor]
) -> list[Finding]:
    """Compare losses, raw gradients, norms, and weights after a few steps of unclipped SGD.

    With plain SGD a wrong scale of the gradients shows in the weights.
    """
    allowed = TOLERANCE[problem.dtype]
    section = OptimizerSection(name="sgd")
    optimizer = build_optimizer(
        model.named_parameters(), section, learning_rate=SGD_LEARNING_RATE, weight_decay=0.0
    )
    findings = []
    losses = []
    norms = []
    routers = []
    for step in range(NUM_STEPS):
        loss = _accumulate(problem, layout, model, step)
        if step in GRADIENT_STEPS:
            findings.append(_compare_gradients(model, reference, step, allowed))
        result = update(
            model,
            optimizer,
            learning_rate=SGD_LEARNING_RATE,
            max_grad_norm=None,
            routers=loss.routers,
        )
        losses.append(loss.mean())
        norms.append(result.gradient_norm)
        routers.append(torch.zeros(0) if loss.routers is None else loss.routers)
    findings.append(_compare_numbers("loss", losses, reference["loss"], allowed))
    findings.append(_compare_numbers("norm", norms, reference["norm"], allowed))
    findings.append(
        _compare_tensor(
            "routers", "loads and losses", torch.stack(routers), reference["routers"], 1.0, allowed
        )
    )
    findings.append(_compare_weights("weights after SGD", model, reference, "sgd", allowed))
    return findings


def _verify_adamw(
    problem: Problem, layout: Layout, model: ParallelModel, reference: dict[str, Tensor]
) -> list[Finding]:
    """Compare weights after AdamW steps with clipping, decay, loss scale and varying rates."""
    allowed = TOLERANCE[problem.dtype]
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
        loss = _accumulate(problem, layout, model, step, loss_scale=scaler.scale)
        limit = max_grad_norms[step]
        result = update(
            model,
            optimizer,
            learning_rate=rate,
            max_grad_norm=limit,
            scaler=scaler,
            routers=loss.routers,
        )
        norms.append(result.gradient_norm)
        rates += [abs(group["lr"] - rate) / rate for group in optimizer.param_groups]
    return [
        _compare_numbers("norm under clipping", norms, reference["adamw_norm"], allowed),
        Finding("learning rates", "worst parameter group", max(rates), 0.0),
        _compare_weights("weights after AdamW", model, reference, "adamw", allowed),
    ]


def has_rule(problem: Problem) -> bool:
    """Return True if the recipe's own update rule is compared with one process, too.

    Rules that read whole rows or matrices are, in float64. `adamw_8bit` is not: gradients that
    differ in the last bit may round to another code, and no tolerance of weights separates that
    from a bug. `_verify_quantised_rule` compares its update bit by bit instead.
    """
    return problem.dtype == "float64" and problem.optimizer.name in ("muon", "adafactor")


def add_rule_reference(problem: Problem, reference_path: str) -> None:
    """Add the weights after a few steps of the recipe's own rule (`rule.NAME`) to a reference.

    They are the engine's own on one process, not a plain implementation as for AdamW: here only
    the effect of the layout counts; `tests/unit/optim/test_cut.py` tests the rule. Runs in one
    process.
    """
    reference = load_file(Path(reference_path))
    model = _run_rule(problem, Layout(), range(problem.batch.data_ranks))
    reference |= {
        f"rule.{name}": model.full_parameter(name).detach().contiguous() for name in model.layouts
    }
    save_file(reference, Path(reference_path))


def _run_rule(problem: Problem, layout: Layout, data_ranks: Sequence[int]) -> ParallelModel:
    """Train a model for a few steps with the recipe's rule on these data ranks' batches."""
    model = _build(problem, layout)
    rate = LEARNING_RATES[0]
    named = model.named_parameters()
    optimizer = build_optimizer(
        named, problem.optimizer, learning_rate=rate, weight_decay=WEIGHT_DECAY, cut=model
    )
    for step, rate in enumerate(LEARNING_RATES):
        data = problem.dataset
        batch = problem.batch
        micro_batches = [
            micro_batch
            for data_rank in data_ranks
            for micro_batch in step_micro_batches(data, data.order, batch, step, data_rank)
        ]
        loss = accumulate_gradients(model, micro_batches, seed=problem.seed, step=step)
        update(model, optimizer, learning_rate=rate, max_grad_norm=1.0, routers=loss.routers)
    return model


def _verify_rule(problem: Problem, layout: Layout, reference: dict[str, Tensor]) -> list[Finding]:
    """Compare weights after a few steps of the recipe's rule with those of one process."""
    model = _run_rule(problem, layout, [RankGrid(layout).data_rank(_rank(layout))])
    return [
        _compare_weights(
            f"weights after {problem.optimizer.name}",
            model,
            reference,
            "rule",
            TOLERANCE[problem.dtype],
        )
    ]


def _verify_quantised_rule(problem: Problem, layout: Layout) -> list[Finding]:
    """Compare weights after steps of 8-bit AdamW with one process that gets the same gradients.

    They must be equal bit by bit. Other comparisons of the cell cover the gradients. Both
    together prove what a tolerance of the weights cannot prove
    (docs/decisions/0052-quantised-moments-proven.md).
    """
    model = _build(problem, layout)
    single = _build(problem, Layout())
    options: dict[str, Any] = {"learning_rate": LEARNING_RATES[0], "weight_decay": WEIGHT_DECAY}
    section = problem.optimizer
    optimizer = build_optimizer(model.named_parameters(), section, cut=model, **options)
    single_optimizer = build_optimizer(single.named_parameters(), section, cut=single, **options)
    for step, rate in enumerate(LEARNING_RATES):
        _accumulate(problem, layout, model, step)
        for name, parameter in single.named_parameters():
            parameter.grad = model.full_gradient(name)
        update(model, optimizer, learning_rate=rate, max_grad_norm=None)
        set_learning_rate(single_optimizer, rate)
        single_optimizer.step()
    expected = {f"rule.{name}": single.full_parameter(name).detach() for name in single.layouts}
    return [_compare_weights("weights after adamw_8bit", model, expected, "rule", 0.0)]


def _verify_odd_steps(problem: Problem, layout: Layout, model: ParallelModel) -> list[Finding]:
    """Check three steps: a non-finite gradient on one rank, no supervised token, a usual step.

    All ranks must skip the first. The current weights of the model do not matter.
    """
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(name="sgd"), learning_rate=1.0, weight_decay=0.0
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # Only the pipeline rank with the head scales the loss, so all its pipeline ranks get inf.
    inf_ranks = RankGrid(layout).group_of(layout.world_size - 1, ["pp"])
    _accumulate(
        problem, layout, model, 0, loss_scale=math.inf if _rank(layout) in inf_ranks else 1.0
    )
    skipped_update = update(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    errors = [
        not skipped_update.skipped,
        math.isfinite(skipped_update.gradient_norm),
        _moved(model, before),
    ]
    findings = [
        Finding("skips together", f"rank {inf_ranks[-1]} not finite", float(sum(errors)), 0.0)
    ]

    unsupervised = [
        replace(
            batch,
            labels_BT=torch.full_like(batch.labels_BT, IGNORED_LABEL),
            num_supervised=0,
            weight_sum=0.0,
        )
        for batch in _micro_batches(problem, layout, 0)
    ]
    loss = accumulate_gradients(model, unsupervised, seed=problem.seed, step=0)
    empty_update = update(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    errors = [
        loss.mean() != 0.0,
        empty_update.skipped,
        empty_update.gradient_norm != 0.0,
        _moved(model, before),
    ]
    findings.append(Finding("stands still", "nothing supervised", float(sum(errors)), 0.0))

    _accumulate(problem, layout, model, 0)
    usual_update = update(model, optimizer, learning_rate=1.0, max_grad_norm=1.0)
    errors = [
        usual_update.skipped,
        not math.isfinite(usual_update.gradient_norm),
        not _moved(model, before),
    ]
    findings.append(Finding("goes on", "after both", float(sum(errors)), 0.0))
    return findings


def _moved(model: ParallelModel, before: dict[str, Tensor]) -> bool:
    """Return True if any bit of this rank's weights differs; nan differs."""
    # torch.equal of DTensors is a collective, and pipeline ranks have different parameters.
    return any(
        not torch.equal(local_part(parameter), local_part(before[name]))
        for name, parameter in model.named_parameters()
    )


def _rank(layout: Layout) -> int:
    return dist.get_rank() if layout.world_size > 1 else 0


def _build(problem: Problem, layout: Layout) -> ParallelModel:
    """Build the model as the trainer does, from the meta device."""
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
    """Read micro-batches truncated to their longest row, unlike those of the reference."""
    dataset = problem.dataset
    batch = problem.batch
    if problem.shape.experts is None:  # router statistics count every token of a row
        batch = replace(batch, row_multiple=row_multiple(layout))
    return step_micro_batches(
        dataset, dataset.order, batch, step, RankGrid(layout).data_rank(_rank(layout))
    )


def _accumulate(
    problem: Problem, layout: Layout, model: ParallelModel, step: int, *, loss_scale: float = 1.0
) -> StepLoss:
    return accumulate_gradients(
        model,
        _micro_batches(problem, layout, step),
        seed=problem.seed,
        step=step,
        loss_scale=loss_scale,
    )


def _compare_gradients(
    model: ParallelModel, reference: dict[str, Tensor], step: int, allowed: float
) -> Finding:
    expected = _select(reference, f"gradient.{step}.")
    scale = float(reference["norm"][step])
    pairs = ((name, model.full_gradient(name), expected.get(name)) for name in model.layouts)
    finding = _worst("gradient", pairs, expected, scale, allowed)
    local_gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return _worse(
        finding, _compare_held("gradient", model, local_gradients, expected, scale, allowed)
    )


def _select(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _compare_weights(
    quantity: str, model: ParallelModel, reference: dict[str, Tensor], run: str, allowed: float
) -> Finding:
    expected = _select(reference, f"{run}.")
    scale = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in expected.values()))
    pairs = ((name, model.full_parameter(name), expected.get(name)) for name in model.layouts)
    finding = _worst(quantity, pairs, expected, scale, allowed)
    local_weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return _worse(finding, _compare_held(quantity, model, local_weights, expected, scale, allowed))


def _compare_held(
    quantity: str,
    model: ParallelModel,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    scale: float,
    allowed: float,
) -> Finding:
    """Compare this rank's local parts; full tensors are gathered from one replica only."""
    worst = Finding(quantity, "every parameter", 0.0, allowed)
    for name, tensor in tensors.items():
        want = wanted.get(name)
        local = local_part(tensor).double()
        if want is None:
            continue  # the comparison of full tensors reports it
        boxes = model.held(name)
        squares = [
            (narrow(local, box.local) - narrow(want, box.whole).double()).square().sum()
            for box in boxes
        ]
        distance = math.sqrt(float(sum(squares)))
        norm = float(want.double().norm())
        subject = f"{name}, copy of rank {_rank(model.layout)}"
        if norm <= NEARLY_ZERO * scale:
            finding = Finding(quantity, f"{subject} (absolute)", distance, NEARLY_ZERO * scale)
        else:
            finding = Finding(quantity, subject, distance / norm, allowed)
        worst = _worse(worst, finding)
    return worst


def _worse(one: Finding, other: Finding) -> Finding:
    """Choose the finding with the larger share of its allowed error."""
    return max(one, other, key=lambda finding: finding.severity)


def _worst(
    quantity: str,
    pairs: Iterable[tuple[str, Tensor | None, Tensor | None]],
    wanted: dict[str, Tensor],
    scale: float,
    allowed: float,
) -> Finding:
    """Choose the parameter with the largest share of its allowed error, not an average."""
    worst = Finding(quantity, "every parameter", 0.0, allowed)
    seen = set()
    for name, got, want in pairs:
        seen.add(name)
        worst = _worse(worst, _compare_tensor(quantity, name, got, want, scale, allowed))
    missing = sorted(set(wanted) - seen)
    return Finding(quantity, f"{missing[0]}: absent", math.inf, allowed) if missing else worst


def _compare_tensor(
    quantity: str, name: str, got: Tensor | None, want: Tensor | None, scale: float, allowed: float
) -> Finding:
    if got is None and want is None:
        return Finding(quantity, name, 0.0, allowed)
    if got is None or want is None or got.shape != want.shape:
        problem = "missing" if got is None else "unexpected" if want is None else "wrong shape"
        return Finding(quantity, f"{name}: {problem}", math.inf, allowed)
    norm = float(want.double().norm())
    distance = float((got.double() - want.double()).norm())
    if norm <= NEARLY_ZERO * scale:
        return Finding(quantity, f"{name} (absolute)", distance, NEARLY_ZERO * scale)
    return Finding(quantity, name, distance / norm, allowed)


def _compare_numbers(quantity: str, got: list[float], want: Tensor, allowed: float) -> Finding:
    errors = [abs(a - b) / abs(b) for a, b in zip(got, want.tolist(), strict=True)]
    step = max(range(len(errors)), key=lambda index: (math.isnan(errors[index]), errors[index]))
    return Finding(quantity, f"step {step}", errors[step], allowed)
