"""A plain Llama and a plain sparse block whose ranks compute a part of it wrongly.

Everything is written out here with the weights of transformers' module, rank by rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100
COMPUTATIONS = {
    "key_gradients_lost",
    "query_gradients_lost",
    "heads_mixed",
    "heads_and_tokens_mixed",
    "head_gradient_not_summed",
    "vocabulary_gradients_lost",
    "logits_summed_over_copies",
}


class _RingAttention(torch.autograd.Function):
    """Causal attention of [B, H, T, D] whose ranks keep only some gradients of their columns."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, owners: Tensor, lost: str
    ) -> Tensor:
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        chances = scores.masked_fill(future, float("-inf")).softmax(-1)
        output = chances @ v
        ctx.save_for_backward(q, k, v, chances, output, owners)
        ctx.lost = lost
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = gradients
        q, k, v, chances, output, owners = ctx.saved_tensors
        of_chances = gradient @ v.transpose(2, 3)
        of_scores = chances * (of_chances - (gradient * output).sum(-1, keepdim=True))
        of_scores = of_scores / q.shape[-1] ** 0.5
        is_own = owners[:, None] == owners
        for_keys = is_own if "key" in ctx.lost else torch.ones_like(is_own)
        for_queries = is_own if "query" in ctx.lost else torch.ones_like(is_own)
        dv = (chances * for_keys).transpose(2, 3) @ gradient
        dk = (of_scores * for_keys).transpose(2, 3) @ q
        return (of_scores * for_queries) @ k, dk, dv, None, None


def number_owners(length: int, num_ranks: int, is_mirrored: bool) -> Tensor:
    """Number the rank that has each column."""
    if not is_mirrored:
        return torch.arange(num_ranks).repeat_interleave(length // num_ranks)
    order = [*range(num_ranks), *reversed(range(num_ranks))]
    return torch.tensor(order).repeat_interleave(length // num_ranks // 2)


def gather_heads(by_rank: list[Tensor]) -> list[Tensor]:
    """Gather heads and scatter columns between ranks, and forget to transpose.

    Each tensor is what a rank has: [T, B, heads of the rank, D]. Returns [columns of the rank, B,
    H, D] of each rank.
    """
    num_ranks = len(by_rank)
    gathered = []
    for rank in range(num_ranks):
        received = torch.stack([sent.chunk(num_ranks)[rank] for sent in by_rank])
        _, columns, rows, heads, size = received.shape
        gathered.append(received.reshape(columns, rows, num_ranks * heads, size))
    return gathered


def rotate(x_BHTD: Tensor, base: float) -> Tensor:
    half = x_BHTD.shape[-1] // 2
    frequencies = base ** -(torch.arange(half) / half)
    angles = torch.arange(x_BHTD.shape[2])[:, None] * frequencies
    first, second = x_BHTD.split(half, -1)
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        -1,
    )


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def attend(weights: Any, x_BTE: Tensor, mistakes: tuple[str, ...], owners: Tensor) -> Tensor:
    rows, length, _ = x_BTE.shape
    num_ranks = int(owners.max()) + 1
    q, k, v = (
        F.linear(x_BTE, projection.weight).view(rows, length, heads, -1).transpose(1, 2)
        for projection, heads in ((weights.q_proj, 4), (weights.k_proj, 2), (weights.v_proj, 2))
    )
    k = rotate(k, 10000.0).repeat_interleave(2, 1)
    attended = _RingAttention.apply(
        rotate(q, 10000.0), k, v.repeat_interleave(2, 1), owners, " ".join(mistakes)
    )
    x_BTHD = attended.transpose(1, 2)
    if "heads_mixed" in mistakes:
        heads = 4 // num_ranks
        order = [rank * heads + head for head in range(heads) for rank in range(num_ranks)]
        x_BTHD = x_BTHD[:, :, order]
    if "heads_and_tokens_mixed" in mistakes:
        parts = gather_heads(list(x_BTHD.transpose(0, 1).chunk(num_ranks, 2)))
        x_BTHD = torch.cat(parts).transpose(0, 1)
    return F.linear(x_BTHD.flatten(2), weights.o_proj.weight)


class _SplitHead(torch.autograd.Function):
    """Loss of a head of which every rank has a part of the vocabulary, with explicit gradients."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, num_ranks: int, mistake: str
    ) -> Tensor:
        logits = x @ weight.T
        is_target = targets != IGNORED
        chances = logits.softmax(-1)
        chosen = targets.clamp(min=0)
        ctx.save_for_backward(x, weight, chosen, is_target, chances)
        ctx.num_ranks = num_ranks
        ctx.mistake = mistake
        return -(chances.gather(-1, chosen[..., None]).log()[..., 0] * is_target).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        x, weight, chosen, is_target, chances = ctx.saved_tensors
        of_logits = (chances - F.one_hot(chosen, len(weight))) * is_target[..., None]
        size = -(-len(weight) // ctx.num_ranks)
        for_x = torch.zeros_like(x)
        for_weight = []
        for rank in range(ctx.num_ranks):
            part = slice(rank * size, (rank + 1) * size)
            own = of_logits[..., part]
            if ctx.mistake == "logits_summed_over_copies":
                # Every rank adds all exponentials, and only the first has the targets.
                own = chances[..., part] / ctx.num_ranks
                if rank == 0:
                    own = own - F.one_hot(chosen, len(weight))[..., part]
                own = own * is_target[..., None]
            if ctx.mistake == "vocabulary_gradients_lost":
                own = own * (chosen // size == rank)[..., None]
            for_weight.append(own.flatten(0, 1).T @ x.flatten(0, 1))
            of_x = own @ weight[part]
            if ctx.mistake == "head_gradient_not_summed":
                columns = list(torch.arange(x.shape[1]).split(-(-x.shape[1] // ctx.num_ranks)))
                for_x[:, columns[rank]] = of_x[:, columns[rank]]
            else:
                for_x += of_x
        return gradients[0] * for_x, gradients[0] * torch.cat(for_weight), None, None, None


def compute_loss(
    model: Any, ids: Tensor, targets: Tensor, mistakes: tuple[str, ...], owners: Tensor
) -> Tensor:
    """Compute the summed loss of a Llama whose ranks make mistakes."""
    x = F.embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        normed = normalise(x, layer.input_layernorm.weight)
        x = x + attend(layer.self_attn, normed, mistakes, owners)
        normed = normalise(x, layer.post_attention_layernorm.weight)
        gate = F.silu(F.linear(normed, layer.mlp.gate_proj.weight))
        x = x + F.linear(
            gate * F.linear(normed, layer.mlp.up_proj.weight), layer.mlp.down_proj.weight
        )
    x = normalise(x, model.model.norm.weight)
    mistake = next((m for m in mistakes if m in COMPUTATIONS), "")
    num_ranks = int(owners.max()) + 1
    loss: Tensor = _SplitHead.apply(x, model.lm_head.weight, targets, num_ranks, mistake)
    return loss


def limit_experts(block: nn.Module, factor: float, policy: str, *, renormalises: bool) -> None:
    """Give a sparse block of transformers a capacity, as a trainer with fixed buffers has."""
    gate: Any = block.gate
    experts: Any = block.experts

    def forward(x_BTE: Tensor) -> Tensor:
        tokens = x_BTE.reshape(-1, x_BTE.shape[-1])
        logits = F.linear(tokens, gate.weight)
        chances = logits.softmax(1)
        chosen = chances.topk(2, 1).indices
        mask = F.one_hot(chosen, logits.shape[1]).sum(1)
        capacity = -(-int(factor * tokens.shape[0] * 2) // logits.shape[1])
        fits = torch.zeros_like(mask)
        for expert in range(logits.shape[1]):
            takers = mask[:, expert].nonzero().flatten().tolist()
            if policy == "position":
                admitted = takers[:capacity]
            elif policy == "parts":
                halves = [0, 0]
                admitted = []
                for token in takers:
                    half = int(token % x_BTE.shape[1] >= x_BTE.shape[1] // 2)
                    halves[half] += 1
                    if halves[half] <= -(-capacity // 2):
                        admitted.append(token)
            else:
                values = (logits if policy == "logits" else chances).detach()
                scores = {token: float(values[token, expert]) for token in takers}
                others = {t: 0.0 for t in range(len(tokens)) if t not in scores}
                ranked = sorted({**scores, **others}.items(), key=lambda pair: -pair[1])
                admitted = [token for token, _ in ranked[:capacity] if token in scores]
            fits[admitted, expert] = 1
        weights = chances * mask / (chances * mask).sum(1, keepdim=True) * fits
        if renormalises:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-9)
        total = torch.zeros_like(tokens)
        for expert in range(logits.shape[1]):
            up = F.linear(tokens, experts.gate_up_proj[expert])
            left, right = up.chunk(2, 1)
            output = F.linear(F.silu(left) * right, experts.down_proj[expert])
            total = total + weights[:, expert, None] * output
        return total.view(x_BTE.shape)

    block.forward = forward  # type: ignore[method-assign]


def split_features(block: nn.Module, num_ranks: int) -> None:
    """Make ranks that share tokens split an expert buffer's features in place of its capacity."""
    gate: Any = block.gate
    experts: Any = block.experts

    def forward(x_BTE: Tensor) -> Tensor:
        tokens = x_BTE.reshape(-1, x_BTE.shape[-1])
        chances = F.linear(tokens, gate.weight).softmax(1)
        chosen = chances.topk(2, 1)
        takers = [
            (chosen.indices == expert).any(1).nonzero().flatten().tolist() for expert in range(4)
        ]
        capacity = -(-max(map(len, takers)) // num_ranks) * num_ranks
        zero = torch.zeros_like(tokens[0])
        rows = [
            tokens[t] if t is not None else zero
            for own in takers
            for t in (own + [None] * capacity)[:capacity]
        ]
        width = tokens.shape[1] // num_ranks
        parts = []
        for rank in range(num_ranks):
            received = torch.stack(rows)[:, rank * width : (rank + 1) * width]
            by_expert = received.contiguous().view(4, capacity // num_ranks, tokens.shape[1])
            outputs = []
            for expert in range(4):
                left, right = F.linear(by_expert[expert], experts.gate_up_proj[expert]).chunk(2, 1)
                outputs.append(F.linear(F.silu(left) * right, experts.down_proj[expert]))
            parts.append(torch.stack(outputs))
        gathered = torch.cat(parts, 1)
        weights = chosen.values / chosen.values.sum(1, keepdim=True)
        total = []
        for token in range(len(tokens)):
            terms = [
                weights[token, k] * gathered[e, takers[e].index(token)]
                for k, e in enumerate(chosen.indices[token].tolist())
            ]
            total.append(torch.stack(terms).sum(0))
        return torch.stack(total).view(x_BTE.shape)

    block.forward = forward  # type: ignore[method-assign]
