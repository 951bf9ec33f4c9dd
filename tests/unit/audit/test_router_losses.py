"""Auxiliary losses of routers: a plain loop of two ranks is equal, wrong factors are named."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from shardwright.audit.check import check_recorded_step
from shardwright.audit.recorder import Recorder

NUM_RANKS = 2
NUM_BATCHES = 3
VOCABULARY = 29
NUM_EXPERTS = 4
COEFFICIENT = 0.5
IGNORED = -100
FACTORS = {
    "router_loss_multiplied_by_ranks": NUM_RANKS,
    "router_loss_multiplied_by_accumulation": NUM_BATCHES,
    "router_loss_divided_by_ranks": 1 / NUM_RANKS,
    "router_loss_divided_by_accumulation": 1 / NUM_BATCHES,
    "router_loss_missing": 0.0,
}
SCALED = 0.7
FITTED_MISTAKES = {"router_loss_counts_padding", "router_loss_scaled"}
NUM_SHARING = 2
SHARED_FACTORS = {
    "router_loss_multiplied_by_sharing_ranks": NUM_SHARING,
    "router_loss_divided_by_sharing_ranks": 1 / NUM_SHARING,
}


@cache
def build_model() -> nn.Module:
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        initializer_range=0.2,
        output_router_logits=True,
        router_aux_loss_coef=COEFFICIENT,
        use_cache=False,
        attn_implementation="eager",
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def build_batch(rank: int, index: int) -> dict[str, Tensor]:
    """Build padded rows; the first has no supervised token in some micro-batches."""
    generator = torch.Generator().manual_seed(10 * rank + index)
    ids = torch.randint(0, VOCABULARY, (2, 10), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 7 + index :] = 0
    labels = ids.clone()
    labels[0, : 10 if index == 1 else 2 + rank] = IGNORED
    labels[mask == 0] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compute_balance_loss(router_logits: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """Compute the balance loss of the tokens that are not padding, over all layers at once."""
    is_real = mask.flatten() != 0
    shares = torch.zeros(NUM_EXPERTS)
    probabilities = torch.zeros(NUM_EXPERTS)
    for logits in router_logits:
        chances = logits[is_real].softmax(-1)
        chosen = F.one_hot(chances.topk(2).indices, NUM_EXPERTS)
        shares = shares + chosen.sum((0, 1)) / int(is_real.sum()) / len(router_logits)
        probabilities = probabilities + chances.mean(0) / len(router_logits)
    return NUM_EXPERTS * (shares * probabilities).sum()


def record_steps(
    folder: Path,
    factor: float = 1.0,
    *,
    averages: bool = False,
    num_sharing: int = 1,
    counts_padding: bool = False,
) -> None:
    """Record a step of every rank whose routers' loss has a factor, or counts padding.

    With `num_sharing` there is one data rank, and so many ranks share its rows.
    """
    num_data = NUM_RANKS if num_sharing == 1 else 1
    start = build_model()
    tokens = []
    balance = []
    counts = []
    for rank in range(num_data):
        for index in range(NUM_BATCHES):
            batch = build_batch(rank, index)
            output = start(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                output_router_logits=True,
            )
            targets = batch["labels"][:, 1:]
            tokens.append(
                F.cross_entropy(
                    output.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum"
                )
            )
            mask = batch["attention_mask"]
            mask = torch.ones_like(mask) if counts_padding else mask
            balance.append(compute_balance_loss(output.router_logits, mask))
            counts.append(int((targets != IGNORED).sum()))
    loss = torch.stack(tokens).sum() / sum(counts)
    if averages:
        loss = torch.stack([t / n for t, n in zip(tokens, counts, strict=True)]).mean()
    loss = loss + factor * COEFFICIENT * torch.stack(balance).mean()
    gradients = torch.autograd.grad(loss, list(start.parameters()))
    for number in range(num_data * num_sharing):
        model = copy.deepcopy(start)
        rank = number // num_sharing
        recorder = Recorder(folder, rank=number, world_size=num_data * num_sharing, data_rank=rank)
        with recorder.record_step(model):
            for index in range(NUM_BATCHES):
                model(**build_batch(rank, index))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            recorder.after_backward(model)
            recorder.report(loss=loss)


def test_a_plain_loop_with_a_balance_loss_equals_one_process(tmp_path: Path) -> None:
    record_steps(tmp_path)
    report = check_recorded_step(tmp_path)
    assert report.passed, (report.worst_parameters[0], report.findings)
    assert not report.diagnoses


@pytest.mark.parametrize("mistake", FACTORS)
def test_a_wrong_factor_of_the_balance_loss_is_named(tmp_path: Path, mistake: str) -> None:
    record_steps(tmp_path, FACTORS[mistake])
    report = check_recorded_step(tmp_path)
    assert not report.passed
    assert report.diagnoses[0].keys == (mistake,)
    assert report.diagnoses[0].residual_after < 1e-4


@pytest.mark.parametrize("mistake", SHARED_FACTORS)
def test_a_balance_loss_that_sharing_ranks_add_is_named(tmp_path: Path, mistake: str) -> None:
    record_steps(tmp_path, SHARED_FACTORS[mistake], num_sharing=NUM_SHARING)
    report = check_recorded_step(tmp_path)
    assert report.diagnoses[0].keys == (mistake,)
    assert report.diagnoses[0].residual_after < 1e-4


def test_a_balance_loss_that_counts_padding_is_named(tmp_path: Path) -> None:
    record_steps(tmp_path, counts_padding=True)
    report = check_recorded_step(tmp_path)
    assert report.diagnoses[0].keys == ("router_loss_counts_padding",)
    assert report.diagnoses[0].residual_after < 1e-4


def test_a_factor_of_the_balance_loss_without_a_known_reason_is_fitted(tmp_path: Path) -> None:
    record_steps(tmp_path, SCALED)
    report = check_recorded_step(tmp_path)
    assert report.diagnoses[0].keys == ("router_loss_scaled",)
    assert report.diagnoses[0].subject == "factor 0.7"


def test_both_factors_and_a_wrong_mean_beside_one_are_named(tmp_path: Path) -> None:
    record_steps(tmp_path / "both", NUM_RANKS * NUM_BATCHES)
    report = check_recorded_step(tmp_path / "both")
    both = ("router_loss_multiplied_by_ranks", "router_loss_multiplied_by_accumulation")
    assert [diagnosis.keys for diagnosis in report.diagnoses] == [both, both]
    assert report.diagnoses[1].subject == "loss as reported"
    record_steps(tmp_path / "mean", NUM_RANKS, averages=True)
    report = check_recorded_step(tmp_path / "mean")
    assert set(report.diagnoses[0].keys) == {
        "mean_of_micro_batch_means",
        "router_loss_multiplied_by_ranks",
    }


def test_a_balance_loss_that_is_not_recorded_is_not_expected(tmp_path: Path) -> None:
    model = copy.deepcopy(build_model())
    model.config.output_router_logits = False  # type: ignore[union-attr]
    batch = build_batch(0, 0)
    with Recorder(tmp_path).record_step(model):
        model(**batch).loss.backward()
    report = check_recorded_step(tmp_path)
    assert report.passed, report.worst_parameters[0]
