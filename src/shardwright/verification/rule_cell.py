"""One rank's part of a cell with an update rule that `cell.py` does not run for every recipe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from shardwright.config.training import OptimizerName
from shardwright.data.loader import read_step_micro_batches
from shardwright.layout import RankGrid
from shardwright.optim import build_optimizer, set_learning_rate
from shardwright.parallel import ParallelModel
from shardwright.plans import Plan
from shardwright.training.step import update_parameters
from shardwright.verification.cell import (
    MutationContext,
    accumulate,
    accumulate_step,
    build_model,
)
from shardwright.verification.comparison import (
    TOLERANCES,
    ComparisonResult,
    compare_weights,
    get_rank,
)
from shardwright.verification.reference import LEARNING_RATES, WEIGHT_DECAY, VerificationProblem

_VERIFIED_BY_EVERY_CELL: tuple[OptimizerName, ...] = ("sgd", "adamw")
_GIVEN_GRADIENTS: tuple[OptimizerName, ...] = ("adamw_8bit", "adafactor")
"""Rules that turn a rounding error of a gradient into a difference of weights that no tolerance
separates from a bug: `adamw_8bit` may choose another code. Adafactor divides a parameter's gradient
by its size, so a gradient that is zero but for rounding (that of the keys' bias) updates weights as
much as any other."""


def needs_rule_reference(problem: VerificationProblem) -> bool:
    """Return True if weights after the recipe's own rule are compared with one process's.

    All rules are, in float64, but those that every cell runs, and those for which `verify_rule`
    gives one process the layout's gradients instead.
    """
    name = problem.optimizer.name
    is_verified_otherwise = name in _VERIFIED_BY_EVERY_CELL or name in _GIVEN_GRADIENTS
    return problem.dtype == "float64" and not is_verified_otherwise


def should_verify_rule(problem: VerificationProblem) -> bool:
    """Return True if the recipe's own rule is compared with one process, in whichever way."""
    name = problem.optimizer.name
    return name == "adamw_8bit" or (
        problem.dtype == "float64" and name not in _VERIFIED_BY_EVERY_CELL
    )


def add_rule_reference(problem: VerificationProblem, reference_path: str) -> None:
    """Add the weights after a few steps of the recipe's own rule (`rule.NAME`) to a reference.

    They are the engine's own on one process, not a plain implementation as for AdamW: here only
    the effect of the layout counts; `tests/unit/optim/test_sharded_optimizer.py` tests the rule.
    Runs in one process.
    """
    reference = load_file(Path(reference_path))
    model = _run_rule(problem, problem.single_plan, range(problem.batch.data_ranks))
    reference |= {
        f"rule.{name}": model.gather_parameter(name).detach().contiguous() for name in model.layouts
    }
    save_file(reference, Path(reference_path))


def verify_rule(
    problem: VerificationProblem,
    plan: Plan,
    reference_path: str,
    mutation: MutationContext | None = None,
) -> list[ComparisonResult]:
    """Compare weights after steps of the recipe's rule; runs on every rank of the layout.

    Blocks run uncompiled: an update reads gradients, which other comparisons of the cell cover.
    """
    plan = replace(plan, is_compiled=False)
    with nullcontext() if mutation is None else mutation():
        if not needs_rule_reference(problem):
            return _compare_with_given_gradients(problem, plan)
        model = _run_rule(problem, plan, [RankGrid(plan.layout).data_rank(get_rank(plan.layout))])
        return [
            compare_weights(
                f"weights after {problem.optimizer.name}",
                model,
                load_file(Path(reference_path)),
                "rule",
                TOLERANCES[problem.dtype],
            )
        ]


def _run_rule(problem: VerificationProblem, plan: Plan, data_ranks: Sequence[int]) -> ParallelModel:
    """Train a model for a few steps with the recipe's rule on these data ranks' batches."""
    model = build_model(problem, plan)
    rate = LEARNING_RATES[0]
    named = model.named_parameters()
    optimizer = build_optimizer(
        named, problem.optimizer, learning_rate=rate, weight_decay=WEIGHT_DECAY, model=model
    )
    for step, rate in enumerate(LEARNING_RATES):
        data = problem.dataset
        batch = problem.batch
        micro_batches = [
            micro_batch
            for data_rank in data_ranks
            for micro_batch in read_step_micro_batches(data, data.order, batch, step, data_rank)
        ]
        loss = accumulate(model, micro_batches, seed=problem.seed, step=step)
        update_parameters(
            model,
            optimizer,
            learning_rate=rate,
            max_grad_norm=1.0,
            router_table=loss.router_table,
            rows_beyond_limit=loss.rows_beyond_limit,
        )
    model.invalidate_weights()
    return model


def _compare_with_given_gradients(
    problem: VerificationProblem, plan: Plan
) -> list[ComparisonResult]:
    """Compare weights after steps of a rule with one process that gets the same gradients.

    Those of `adamw_8bit` must be equal bit by bit. Other comparisons of the cell cover the
    gradients. Both together prove what a tolerance of the weights cannot prove
    (docs/decisions/0052-quantised-moments-proven.md).
    """
    model = build_model(problem, plan)
    single = build_model(problem, problem.single_plan)
    options: dict[str, Any] = {"learning_rate": LEARNING_RATES[0], "weight_decay": WEIGHT_DECAY}
    section = problem.optimizer
    optimizer = build_optimizer(model.named_parameters(), section, model=model, **options)
    single_optimizer = build_optimizer(single.named_parameters(), section, model=single, **options)
    for step, rate in enumerate(LEARNING_RATES):
        loss = accumulate_step(problem, plan, model, step)
        for name, parameter in single.named_parameters():
            parameter.grad = model.gather_gradient(name)
        update_parameters(
            model,
            optimizer,
            learning_rate=rate,
            max_grad_norm=None,
            rows_beyond_limit=loss.rows_beyond_limit,
        )
        set_learning_rate(single_optimizer, rate)
        single_optimizer.step()
    model.invalidate_weights()
    expected = {f"rule.{name}": single.gather_parameter(name).detach() for name in single.layouts}
    # Adafactor's sums over a parameter are added in another order.
    tolerance = 0.0 if section.name == "adamw_8bit" else TOLERANCES[problem.dtype]
    return [compare_weights(f"weights after {section.name}", model, expected, "rule", tolerance)]
