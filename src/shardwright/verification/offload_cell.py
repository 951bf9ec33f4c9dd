"""One rank's part of a cell with offloading: bit comparison with the resident run.

Offloading changes where values are stored and no bit of them, so nothing is allowed to differ.
`cell.py` compares the resident run of the same layout with one process.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.offload import NOT_OFFLOADED, OffloadSection
from shardwright.layout import Layout
from shardwright.numerics import get_local_tensor
from shardwright.offload import ParameterOffload, offload_optimizer
from shardwright.optim import build_optimizer, collect_optimizer_moments
from shardwright.optim.sharded_optimizer import UpdateByPiece
from shardwright.plans import Plan
from shardwright.training.moment_offload import overlap_update
from shardwright.training.setup import offload_activations, offload_weights
from shardwright.training.step import update_parameters
from shardwright.verification.cell import MutationContext, accumulate_step, build_model
from shardwright.verification.comparison import (
    TOLERANCES,
    ComparisonResult,
    compare_tensor,
    find_worst,
)
from shardwright.verification.reference import LEARNING_RATES, WEIGHT_DECAY, VerificationProblem

_DEVICE = torch.device("cpu")
_MAX_GRAD_NORM = 0.5
"""Small enough that gradients which have left are clipped, too."""


@dataclass
class _Run:
    """This rank's results of a few steps: weights and moments by name, losses and norms."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    moved_bytes: dict[str, int]
    """Bytes that came from the slower tier, by key of the section."""


def verify_offload(
    problem: VerificationProblem,
    plan: Plan,
    folder: str,
    mutation: MutationContext | None = None,
) -> list[ComparisonResult]:
    """Compare a run that offloads `problem.offload` with the resident run, on every rank.

    Args:
        folder: folder of the scratch files.
        mutation: known bug of both runs, for tests of the verifier.
    """
    with nullcontext() if mutation is None else mutation():
        resident = _train(problem, plan, NOT_OFFLOADED, Path(folder))
        offloaded = _train(problem, plan, problem.offload, Path(folder))
    pairs = {
        "losses with offloading": (_as_tensors(offloaded.losses), _as_tensors(resident.losses)),
        "norms with offloading": (_as_tensors(offloaded.norms), _as_tensors(resident.norms)),
        "weights with offloading": (offloaded.weights, resident.weights),
        "moments with offloading": (offloaded.moments, resident.moments),
    }
    allowed = 0.0
    if may_round_otherwise(plan.layout, problem.offload):
        allowed = TOLERANCES[problem.dtype]
        del pairs["weights with offloading"], pairs["moments with offloading"]
    findings = [_compare(quantity, *pair, allowed) for quantity, pair in pairs.items()]
    return findings + [
        ComparisonResult("offloading", f"{key}: bytes moved", float(num_bytes == 0), 0.0)
        for key, num_bytes in offloaded.moved_bytes.items()
    ]


def _train(problem: VerificationProblem, plan: Plan, section: OffloadSection, folder: Path) -> _Run:
    """Train for a few steps with the recipe's update rule."""
    weights = offload_weights(section, plan, _DEVICE, folder, open_stored=lambda: None)
    model = build_model(problem, plan, weights)
    optimizer = build_optimizer(
        model.named_parameters(),
        problem.optimizer,
        learning_rate=LEARNING_RATES[0],
        weight_decay=WEIGHT_DECAY,
        model=model,
    )
    activations = offload_activations(model, section, plan, folder)
    store = None
    overlap = None
    if (
        section.optimizer == "disk"
        and isinstance(optimizer, UpdateByPiece)
        and not optimizer.has_collectives
        and not isinstance(weights, ParameterOffload)
        and model.weight_maxima is None
    ):
        overlap = overlap_update(model, is_deferred=True)
    if section.optimizer != "none":
        store = optimizer = offload_optimizer(
            optimizer,
            section,
            model,
            device=_DEVICE,
            default_folder=folder,
            parameters=weights if isinstance(weights, ParameterOffload) else None,
            overlap=overlap,
        )
    run = _Run({}, {}, [], [], {})
    for step, rate in enumerate(LEARNING_RATES):
        loss = accumulate_step(problem, plan, model, step)
        update = update_parameters(
            model,
            optimizer,
            learning_rate=rate,
            max_grad_norm=_MAX_GRAD_NORM,
            router_table=loss.router_table,
            rows_beyond_limit=loss.rows_beyond_limit,
            overlaps_forward=True,
        )
        run.losses.append(loss.mean())
        run.norms.append(update.gradient_norm)
    model.invalidate_weights()  # wait for gathers that the last update has begun
    named = dict(model.named_parameters())
    for key, moment in collect_optimizer_moments(optimizer, named.items()).items():
        run.moments[key] = get_local_tensor(moment.tensor).clone()
    for name in named:
        local = model.read_parameter(name)
        if name in model.trainable:  # frozen weights that are offloaded cannot be read
            run.weights[name] = torch.empty(0) if local is None else local.clone()
    users = {"optimizer": store, "parameters": weights, "activations": activations}
    for key, user in users.items():
        if user is not None:
            run.moved_bytes[key] = _sum_over_ranks(user.pop_counts().read_bytes, plan.layout)
            user.close()
    return run


def may_round_otherwise(layout: Layout, section: OffloadSection) -> bool:
    """Return True if weights that leave block by block may be rounded otherwise than resident
    ones.

    More than two addends have more than one order: DDP adds those of a bucket, offloading those
    of a block.
    """
    num_copies = layout.dp_replicate * layout.cp
    return section.parameters != "none" and not layout.is_sharded and num_copies > 2


def _sum_over_ranks(number: int, layout: Layout) -> int:
    """Sum over all ranks: one of them may have nothing to move."""
    total = torch.tensor(number)
    if layout.world_size > 1:
        dist.all_reduce(total)
    return int(total)


def _as_tensors(numbers: list[float]) -> dict[str, Tensor]:
    return {
        f"step {step}": torch.tensor(number, dtype=torch.float64)
        for step, number in enumerate(numbers)
    }


def _compare(
    quantity: str, actual: dict[str, Tensor], expected: dict[str, Tensor], allowed: float
) -> ComparisonResult:
    """Compare tensors, with 0 allowed bit by bit; return the worst."""
    return find_worst(
        [ComparisonResult(quantity, "every tensor", 0.0, allowed)]
        + [
            compare_tensor(quantity, name, actual.get(name), expected.get(name), 0.0, allowed)
            for name in sorted(actual.keys() | expected.keys())
        ]
    )
