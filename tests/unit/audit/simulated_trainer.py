"""A plain training loop of several ranks in one process, correct or with one planted mistake.

Each rank has its own copy of the model and its own recorder. The loop computes everything with
transformers' class and autograd, and uses nothing of the audit but the recorder.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from shardwright.audit.recorder import Recorder
from tests.unit.audit.wrong_computations import COMPUTATIONS, compute_loss, number_owners

VOCABULARY = 31
IGNORED = -100
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
TIED = LlamaConfig(**LLAMA.to_dict() | {"tie_word_embeddings": True})
GPT2 = GPT2Config(
    vocab_size=VOCABULARY,
    n_embd=16,
    n_layer=2,
    n_head=2,
    n_positions=64,
    initializer_range=0.2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
DROPPING = GPT2Config(**GPT2.to_dict() | {"resid_pdrop": 0.2, "embd_pdrop": 0.2})
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
SLIDING = Qwen2Config(
    **LLAMA.to_dict()
    | {
        "model_type": "qwen2",
        "num_hidden_layers": len(KINDS),
        "layer_types": KINDS,
        "use_sliding_window": True,
        "sliding_window": 3,
    }
)
CONFIGS = {
    "llama": LLAMA,
    "tied": TIED,
    "gpt2": GPT2,
    "dropping": DROPPING,
    "sliding": SLIDING,
}

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """Settings of a simulated run."""

    mistakes: tuple[str, ...] = ()
    model: str = "llama"
    num_ranks: int = 2
    """Ranks that read different rows."""
    num_sharing: int = 1
    """Ranks that read the same rows, as tensor, context and pipeline parallel ones do."""
    is_mirrored: bool = False
    """True if such a rank has a piece of the columns and its mirror image."""
    num_batches: int = 3
    num_rows: int = 2
    length: int = 10
    rows: str = "plain"
    """`plain`, `unprompted`, `padded` or `packed`."""
    optimizer: str = "adamw"
    max_norm: float | None = None
    num_steps: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0
    recorder: dict[str, Any] = field(default_factory=dict)

    def __contains__(self, mistake: str) -> bool:
        return mistake in self.mistakes


@cache
def build_initial_model(name: str, seed: int) -> nn.Module:
    torch.default_generator.manual_seed(seed)
    config = CONFIGS[name]
    config._attn_implementation = "eager"
    config.use_cache = False  # transformers separates packed rows only without a cache
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def build_batch(run: Run, step: int, rank: int, index: int) -> dict[str, Tensor]:
    """Build a micro-batch with unequal numbers of supervised tokens."""
    rank = 0 if "same_data" in run else rank
    generator = torch.Generator().manual_seed(hash((run.seed, step, rank, index)) % 2**31)
    shape = (run.num_rows, run.length)
    ids = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels = ids.clone()
    for row in range(run.num_rows):
        prompt = int(torch.randint(0, run.length - 3, (), generator=generator))
        if run.rows == "unprompted":
            labels[row, 4 : 5 + row] = IGNORED
        else:
            labels[row, :prompt] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if run.rows == "padded":
        mask = torch.ones_like(ids)
        for row in range(run.num_rows):
            length = int(torch.randint(run.length - 2, run.length, (), generator=generator))
            mask[row, length:] = 0
        ids[mask == 0] = 0
        labels[mask == 0] = IGNORED
        batch["attention_mask"] = mask
    if run.rows == "packed":
        first = int(torch.randint(3, run.length - 3, (), generator=generator))
        documents = (torch.arange(run.length) >= first).long().expand(shape).contiguous()
        batch["document_ids"] = documents
        batch["labels"] = ids.clone()
        if "targets_cross_documents" not in run:
            batch["labels"][:, first] = IGNORED
        batch["labels"][0, : 2 + rank + index] = IGNORED
    return batch


def build_forward_arguments(run: Run, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"input_ids": batch["input_ids"]}
    if "attention_mask" in batch:
        arguments["attention_mask"] = batch["attention_mask"]
    if "document_ids" not in batch:
        return arguments
    documents = batch["document_ids"]
    line = torch.arange(documents.shape[1])
    start = (documents == 0).sum(1, keepdim=True)
    positions = torch.where(documents == 0, line, line - start)
    if "documents_attend" in run:
        arguments["attention_mask"] = torch.ones_like(documents)
    elif "positions_not_reset" in run:
        is_visible = (documents[:, :, None] == documents[:, None, :]) & (line[:, None] >= line)
        blocked = torch.finfo(torch.float32).min
        arguments["attention_mask"] = torch.where(is_visible, 0.0, blocked)[:, None]
    arguments["position_ids"] = (
        line.expand(documents.shape) if "positions_not_reset" in run else positions
    )
    return arguments


def build_targets(run: Run, batch: Mapping[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    if "prompt_supervised" in run:
        is_real = batch.get("attention_mask", torch.ones_like(labels)) != 0
        labels = torch.where((labels == IGNORED) & is_real, batch["input_ids"], labels)
    if "padding_supervised" in run:
        labels = torch.where(batch["attention_mask"] == 0, batch["input_ids"], labels)
    shift = 2 if "labels_shifted_twice" in run else 0 if "labels_not_shifted" in run else 1
    targets = torch.full_like(labels, IGNORED)
    targets[:, : run.length - shift] = labels[:, shift:]
    return targets


def compute_gradients(
    model: nn.Module, run: Run, batch: Mapping[str, Tensor], seed: int
) -> tuple[Gradients, float, int]:
    """Return the gradient of the summed loss, the loss and the number of its terms."""
    torch.default_generator.manual_seed(seed)
    targets = build_targets(run, batch)
    if COMPUTATIONS & set(run.mistakes):
        owners = number_owners(run.length, run.num_sharing, run.is_mirrored)
        loss = compute_loss(model, batch["input_ids"], targets, run.mistakes, owners)
        return differentiate(model, loss), float(loss.detach()), int((targets != IGNORED).sum())
    with number_layers(run, model):
        logits = model(**build_forward_arguments(run, batch)).logits.float()
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(targets.shape)
    if "mean_of_context_means" in run:
        losses = losses * compute_context_factors(run)
    if "labels_smoothed" in run or "labels_smoothed_by_parts" in run:
        losses = smooth_losses(run, logits, targets)
    loss = losses.sum()
    gradients = differentiate(model, loss)
    if "tied_counted_once" in run or "tied_counted_twice" in run:
        name = "model.embed_tokens.weight"
        table = model.get_parameter(name)
        hidden = model.model(inputs_embeds=F.embedding(batch["input_ids"], table).detach())
        logits = F.linear(hidden.last_hidden_state, table)
        of_head = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        (head_gradient,) = torch.autograd.grad(of_head, [table])
        is_once = "tied_counted_once" in run
        gradients[name] = head_gradient if is_once else gradients[name] + head_gradient
    return gradients, float(loss.detach()), int((targets != IGNORED).sum())


@contextmanager
def number_layers(run: Run, model: Any) -> Iterator[None]:
    """Give each of two stages the kinds of the first one's layers, if that is the mistake."""
    kinds = getattr(model.config, "layer_types", None)
    if "layers_numbered_by_stage" in run:
        model.config.layer_types = 2 * kinds[: len(kinds) // 2]  # eager masks are chosen by it
    yield
    if "layers_numbered_by_stage" in run:
        model.config.layer_types = kinds


def smooth_losses(run: Run, logits: Tensor, targets: Tensor) -> Tensor:
    """Smooth the labels, or add up the losses of ranks that smooth over their own vocabulary."""
    is_target = (targets != IGNORED).float()
    log_probs = logits.log_softmax(-1)
    chosen = -log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    if "labels_smoothed" in run:
        return (0.9 * chosen - 0.1 * log_probs.mean(-1)) * is_target
    # Each rank's gradient of its own logits: probabilities less targets less a uniform share.
    share = 0.1 * run.num_sharing / VOCABULARY
    with torch.no_grad():
        of_logits = log_probs.exp() - 0.9 * F.one_hot(targets.clamp(min=0), VOCABULARY) - share
    return (logits * of_logits).sum(-1) * is_target


def differentiate(model: nn.Module, loss: Tensor) -> Gradients:
    parameters = dict(model.named_parameters())
    values = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, values, strict=True))


def compute_context_factors(run: Run) -> Tensor:
    """Return the factor of each position's loss if the means of context ranks are averaged."""
    counts = torch.zeros(run.length)
    for rank in range(run.num_ranks):
        for index in range(run.num_batches):
            targets = build_targets(run, build_batch(run, 1, rank, index))
            counts += (targets != IGNORED).sum(0)
    factors = []
    for part in counts.chunk(run.num_sharing):
        factors.append(torch.full_like(part, float(counts.sum() / part.sum() / run.num_sharing)))
    return torch.cat(factors)


def is_norm(name: str) -> bool:
    return "norm" in name or ".ln_" in name


def compute_weight(run: Run, counts: list[list[int]], tokens: int, rank: int, index: int) -> float:
    """Return the factor of a micro-batch's summed loss in the step's gradient."""
    ranks = run.num_ranks
    batches = run.num_batches
    total = sum(map(sum, counts))
    weight = 1.0 / total
    if "mean_of_rank_means" in run:
        weight = 1.0 / sum(counts[rank]) / ranks
    if "ranks_not_divided" in run:
        weight = 1.0 / sum(counts[rank])
    if "mean_of_micro_batch_means" in run:
        weight = 1.0 / counts[rank][index] / ranks / batches
    if "accumulation_not_divided" in run:
        weight = 1.0 / counts[rank][index] / ranks
    if "nothing_divided" in run:
        weight = 1.0 / counts[rank][index]
    if "unsupervised_tokens_counted" in run:
        weight = 1.0 / tokens
    if "labels_counted_before_shift" in run:
        weight = 1.0 / count_labels(run)
    if "final_scaling_missing" in run:
        weight = 1.0
    if "sum_averaged_over_ranks" in run:
        weight = 1.0 / ranks
    if "tokens_not_counted" in run:
        weight = 1.0 / (total - counts[1][0])
    for mistake, factor in (
        ("multiplied_by_sharing_ranks", run.num_sharing),
        ("divided_by_sharing_ranks", 1.0 / run.num_sharing),
        ("all_scaled", 0.3817),
        ("divided_by_accumulation_twice", 1.0 / batches),
        ("divided_by_ranks_twice", 1.0 / ranks),
        ("multiplied_by_ranks", ranks),
        ("multiplied_by_accumulation", batches),
    ):
        weight *= factor if mistake in run else 1.0
    is_lost = (
        ("rank_lost" in run and rank == 1)
        or ("micro_batch_lost" in run and index == 1 and rank == 0)
        or ("last_micro_batch_only" in run and index < batches - 1)
        or ("first_micro_batch_only" in run and index > 0)
    )
    return 0.0 if is_lost else weight


def count_labels(run: Run) -> int:
    """Count the labels of the first step that are not ignored, before they are shifted."""
    return sum(
        int((build_batch(run, 1, rank, index)["labels"] != IGNORED).sum())
        for rank in range(run.num_ranks)
        for index in range(run.num_batches)
    )


def reduce_gradients(
    run: Run, model: nn.Module, step: int
) -> tuple[list[Gradients], list[list[float]], list[list[int]]]:
    """Compute each rank's gradient after the reduction, losses and counts."""
    ranks = range(run.num_ranks)
    batches = range(run.num_batches)
    results = [
        [
            compute_gradients(model, run, build_batch(run, step, rank, index), 100 * rank + index)
            for index in batches
        ]
        for rank in ranks
    ]
    counts = [[results[rank][index][2] for index in batches] for rank in ranks]
    losses = [[results[rank][index][1] for index in batches] for rank in ranks]
    tokens = run.num_ranks * run.num_batches * run.num_rows * run.length
    names = [name for name, _ in model.named_parameters()]

    def sum_local(rank: int, name: str, chosen: range) -> Tensor:
        total = torch.zeros_like(results[0][0][0][name])
        for index in chosen:
            weight = run.num_ranks * compute_weight(run, counts, tokens, rank, index)
            total += weight * results[rank][index][0][name]
            if "low_precision_accumulation" in run:
                total = total.bfloat16().float()
        return total

    local = [{name: sum_local(rank, name, batches) for name in names} for rank in ranks]
    if "clipped_before_reduction" in run:
        assert run.max_norm is not None
        for gradients in local:
            norm = torch.stack([g.norm() for g in gradients.values()]).norm()
            for name in names:
                gradients[name] = gradients[name] * min(1.0, run.max_norm / (float(norm) + 1e-6))
    mean = {name: torch.stack([local[r][name] for r in ranks]).mean(0) for name in names}
    reduced = [dict(mean) for _ in ranks]
    if "not_reduced" in run:
        reduced = local
    if "last_micro_batch_not_reduced" in run:
        early = range(run.num_batches - 1)
        for rank in ranks:
            last = range(run.num_batches - 1, run.num_batches)
            for name in names:
                shared = torch.stack([sum_local(r, name, early) for r in ranks]).mean(0)
                reduced[rank][name] = shared + sum_local(rank, name, last)
    for rank in ranks:
        for name in names:
            if "some_not_reduced" in run and is_norm(name):
                reduced[rank][name] = local[rank][name]
            if "some_scaled" in run and is_norm(name):
                reduced[rank][name] = mean[name] / 2
            if "some_lost" in run and "layers.1.mlp.up" in name:
                reduced[rank][name] = torch.zeros_like(mean[name])
            if "stages_rescaled" in run:
                # Three stages: the embedding and layer 0, layer 1, the norm and the head.
                later = 2 if "embed" in name or "layers.0" in name else int("layers.1" in name)
                reduced[rank][name] = mean[name] / run.num_batches**later
            if "gradients_incomplete" in run and "mlp.up" in name:
                early = [sum_local(r, name, range(run.num_batches - 1)) for r in ranks]
                reduced[rank][name] = torch.stack(early).mean(0)
            if "parameters_in_gradients" in run and "mlp" in name:
                added = run.num_ranks * model.get_parameter(name).detach()
                reduced[rank][name] = mean[name] + added
            if "gradients_are_parameters" in run and "mlp.up" in name:
                reduced[rank][name] = model.get_parameter(name).detach().clone()
            if "not_finite_applied" in run and "mlp.up" in name:
                reduced[rank][name] = torch.full_like(mean[name], torch.inf)
            if "gradients_exchanged" in run and "mlp.up" in name:
                other = name.replace("layers.0", "layers.9").replace("layers.1", "layers.0")
                reduced[rank][name] = mean[other.replace("layers.9", "layers.1")]
    return reduced, losses, counts


def build_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    if run.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def simulate(folder: Path, run: Run) -> None:
    """Run the steps on every rank, and record the last one."""
    start = copy.deepcopy(build_initial_model(run.model, run.seed)).to(run.dtype)
    world_size = run.num_ranks * run.num_sharing
    models = [copy.deepcopy(start) for _ in range(world_size)]
    optimizers = [build_optimizer(run, model) for model in models]
    leftovers: list[Gradients] = [{} for _ in models]
    for step in range(1, run.num_steps + 1):
        reduced, losses, counts = reduce_gradients(run, models[0], step)
        for number, model in enumerate(models):
            rank = number // run.num_sharing
            recorder = Recorder(
                folder,
                steps=[run.num_steps],
                rank=number,
                world_size=world_size,
                data_rank=None if run.num_sharing == 1 else rank,
                **run.recorder,
            )
            optimizer = optimizers[number]
            run_step(recorder, run, step, rank, model, optimizer, reduced, leftovers[number])
            total = sum(map(sum, losses)) / sum(map(sum, counts))
            if "log_ranks_added" in run:
                total += math.log(run.num_sharing)
            if "mean_of_context_means" in run:
                total = None
            if "own_loss_reported" in run:
                total = sum(losses[rank]) / sum(counts[rank])
            recorder.report(loss=total)


def run_step(
    recorder: Recorder,
    run: Run,
    step: int,
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reduced: list[Gradients],
    leftover: Gradients,
) -> None:
    batches = [build_batch(run, step, rank, index) for index in range(run.num_batches)]
    fields = [
        {key: batch[key] for key in ("labels", "document_ids") if key in batch} for batch in batches
    ]
    if "replicas_differ" in run and rank == 1 and step == run.num_steps:
        with torch.no_grad():
            next(model.parameters()).add_(1e-4)
    for name, gradient in leftover.items():
        model.get_parameter(name).grad = gradient.clone()
    recorder.before_step(model, fields, optimizer, step=step)
    for index, batch in enumerate(batches):
        torch.default_generator.manual_seed(100 * rank + index)
        model(**build_forward_arguments(run, batch))
    for name, parameter in model.named_parameters():
        added = leftover.get(name, 0.0) if "not_zeroed" in run else 0.0
        parameter.grad = (reduced[rank][name] + added).to(parameter.dtype)
        if "not_zeroed" in run:
            leftover[name] = parameter.grad.clone()
    recorder.after_backward(model)
    squares = [float(p.grad.double().square().sum()) for p in model.parameters()]
    norm = sum(squares) ** 0.5
    replicas = run.num_ranks if run.num_sharing == 1 else run.num_sharing
    reported = norm * replicas**0.5 if "replicas_counted_in_norm" in run else norm
    reported = 0.0 if "norm_is_zero" in run else reported
    if run.max_norm is not None:
        clip = min(1.0, run.max_norm / (norm + 1e-6))
        if "replicas_counted_in_norm" in run:
            clip = min(1.0, run.max_norm / (reported + 1e-6))
        if "clip_unbounded" in run:
            clip = run.max_norm / (norm + 1e-6)
        for (name, parameter), square in zip(model.named_parameters(), squares, strict=True):
            if "clipped_by_squared_norm" in run:
                clip = min(1.0, run.max_norm / norm**2)
            if "scaled_in_the_step" in run:
                clip = 1.0 / 65536
            if "clipped_per_group" in run:
                clip = min(1.0, run.max_norm / (square**0.5 + 1e-6)) if is_norm(name) else 1.0
            if "not_clipped" not in run and "clipped_before_reduction" not in run:
                parameter.grad *= clip * (clip if "clipped_twice" in run else 1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {
        name: {key: value.clone() for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    if "next_learning_rate" in run:
        optimizer.param_groups[0]["lr"] *= 0.7
    optimizer.step()
    damage_update(run, model, before, states, step)
    limit = None if "clipped_before_reduction" in run else run.max_norm
    recorder.after_step(model, gradient_norm=reported, max_grad_norm=limit or run.max_norm)
    optimizer.zero_grad()


@torch.no_grad()
def damage_update(
    run: Run, model: nn.Module, before: Gradients, states: dict[str, Any], step: int
) -> None:
    """Change the parameters after an update as a mistake of an optimizer would."""
    for name, parameter in model.named_parameters():
        if "parameter_not_updated" in run and "layers.0.mlp" in name:
            parameter.copy_(before[name])
        if "decay_differs" in run and is_norm(name):
            parameter += 1e-2 * 0.1 * before[name]
        if "other_learning_rate" in run and "attn" in name:
            parameter.copy_(before[name] + 3.0 * (parameter - before[name]))
        if "optimizer_state_stale" in run and step == run.num_steps:
            count = float(states[name]["step"])
            mean = states[name]["exp_avg"] / (1 - 0.9**count)
            square = states[name]["exp_avg_sq"] / (1 - 0.999**count)
            parameter.copy_(before[name] * (1 - 1e-3) - 1e-2 * mean / (square.sqrt() + 1e-8))
        if "optimizer_state_lost" in run and step == run.num_steps:
            fresh = nn.Parameter(before[name].clone())
            fresh.grad = parameter.grad
            torch.optim.AdamW([fresh], lr=1e-2, weight_decay=0.1).step()
            parameter.copy_(fresh)


def vary(run: Run, **changes: Any) -> Run:
    return replace(run, **changes)
