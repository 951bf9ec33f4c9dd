"""Known wrong gradients are added one at a time; the verifier must fail on each, where
docs/silent-bugs.md says that it does.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.architecture import read_recipe_shape
from shardwright.verification.cell import MutationContext
from shardwright.verification.verification import VerificationReport, verify
from tests.multiprocess.assertions import assert_clean, assert_detected
from tests.multiprocess.models import build_recipe
from tests.multiprocess.mutations.checks import apply_with_checks_of
from tests.multiprocess.mutations.reductions import apply_no_mutation
from tests.multiprocess.mutations.table import BUGS, Bug
from tests.multiprocess.mutations.tensor import smooth_over_own_vocabulary
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_tensor_loss import compute_on_one_process, compute_on_ranks

PAGE = Path(__file__).parents[2] / "docs/silent-bugs.md"
CELLS = {
    f"{kind}-{bug.model.name}-{bug.layout}-{bug.case}": bug
    for kind, bugs in BUGS.items()
    for bug in bugs
}
"""One bug of each cell of the table."""


def verify_cell_of(ranks: RankPool, bug: Bug, patch: MutationContext) -> VerificationReport:
    """Verify the cell of a bug while `patch` is applied on every rank."""
    recipe = build_recipe(bug.model.config, offload=bug.offload)
    return verify(
        recipe,
        read_recipe_shape(recipe),
        [bug.layout],
        [bug.case],
        ["float64"],
        sequence_length=bug.model.sequence_length,
        pool=ranks,
        mutation=patch,
    )


EVERY_BUG = pytest.mark.parametrize(
    "bug",
    [
        pytest.param(bug, id=f"{kind}-{bug.patch.__name__}-{bug.layout}")
        for kind, bugs in BUGS.items()
        for bug in bugs
    ],
)


@EVERY_BUG
def test_the_comparison_detects(ranks: RankPool, bug: Bug) -> None:
    patch = partial(apply_with_checks_of, bug.detected_in, bug.patch)
    assert_detected(verify_cell_of(ranks, bug, patch), bug.detected_in)


@pytest.mark.long
@EVERY_BUG
def test_the_verifier_detects(ranks: RankPool, bug: Bug) -> None:
    assert_detected(verify_cell_of(ranks, bug, bug.patch), bug.detected_in)


@pytest.mark.parametrize("bug", CELLS.values(), ids=CELLS)
def test_the_same_cells_pass_without_a_bug(ranks: RankPool, bug: Bug) -> None:
    assert_clean(verify_cell_of(ranks, bug, apply_no_mutation))


def compute_wrongly_smoothed() -> list[Tensor]:
    """Return the loss and its gradients with bug 8."""
    with smooth_over_own_vocabulary():
        return compute_on_ranks(255, torch.float64, False, {"label_smoothing": 0.2})


def test_the_loss_test_detects_smoothing_over_the_own_vocabulary(ranks: RankPool) -> None:
    expected = compute_on_one_process(255, torch.float64, False, {"label_smoothing": 0.2})
    for _, gradient, weight_gradient in ranks.run(2, compute_wrongly_smoothed):
        assert float((gradient - expected[1]).norm() / expected[1].norm()) > 1e-3
        assert float((weight_gradient - expected[2]).norm() / expected[2].norm()) > 1e-3


def test_the_page_lists_the_bugs_of_the_table() -> None:
    documented = {
        (int(row[1]) if row[1] != "-" else None, name)
        for row in re.finditer(r"(?m)^\| (\d+|-) .*?\|.*?\|(.*?)\|", PAGE.read_text())
        for name in re.findall(r"`(\w+)`", row[2])
    }
    in_table = {(bug.number, bug.patch.__name__) for bugs in BUGS.values() for bug in bugs}
    assert documented == in_table | {(8, smooth_over_own_vocabulary.__name__)}
