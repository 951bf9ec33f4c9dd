"""A llama block on our tensor-parallel ranks against the same block under torch's own
`parallelize_module`.

The reference is independent: it shares no module, collective or placement with our code.
docs/decisions/0035-tensor-parallel-without-dtensor.md reports the times of `step_seconds`.

Legend: B sequences, T tokens, S tokens of a rank's residual stream, D hidden, H heads, E
head_dim.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.forward_context import build_forward_context
from shardwright.model.weight_init import initialise_parameter
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plans import BatchPlan, build_plan
from tests.multiprocess.pool import RankPool

HEADS = 4
KV_HEADS = 2
TOKENS = 32
BATCH = 2
PREFIX = "model.layers.0."


def build_config(width: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
    }


class PlainAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = width // HEADS
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            self.add_module(name, nn.Linear(width, heads * self.head_dim, bias=False))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        half = self.head_dim // 2
        frequencies = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(q.shape[2], dtype=torch.float64), frequencies).to(q.dtype)
        q, k = (rotate(part, angles) for part in (q, k))
        out_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out_BHTE.transpose(1, 2).flatten(2))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat(
        [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1
    )


class PlainMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class PlainBlock(nn.Module):
    """Decoder block in plain PyTorch, with the parameter names of the files."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(width, eps=1e-5) for _ in range(2)
        )
        self.self_attn = PlainAttention(width)
        self.mlp = PlainMLP(width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD))
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


def build_reference(width: int, dtype: torch.dtype) -> PlainBlock:
    """Initialise weights by name and seed, then shard them by torch, with sequence parallelism."""
    block = PlainBlock(width).to(dtype)
    specs = {spec.name: spec for spec in read_config(build_config(width)).list_parameters()}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            parameter.copy_(initialise_parameter(specs[PREFIX + name], 3, dtype=dtype))
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
    }
    for module, wide, narrow in (
        ("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj"),
        ("mlp", ("gate_proj", "up_proj"), "down_proj"),
    ):
        plan[module] = PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        )
        plan |= {f"{module}.{name}": ColwiseParallel() for name in wide}
        plan[f"{module}.{narrow}"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(block, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return block


def build_ours(width: int, dtype: torch.dtype) -> ParallelModel:
    shape = read_config(build_config(width))
    layout = Layout(tp=dist.get_world_size())
    with torch.device("meta"):
        decoder = Decoder(shape, compute_dtype=dtype)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    return apply_layout(
        decoder,
        build_plan(
            shape,
            layout,
            BatchPlan(TOKENS, BATCH, 1, 1),
            PrecisionSection(kind="fp64" if dtype == torch.float64 else "fp32"),
        ),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 3, dtype=dtype, narrow=narrow
        ),
    )


def run_ours(model: ParallelModel, x_BSD: Tensor, num_tokens: int) -> Tensor:
    positions_BT = torch.arange(num_tokens)[None]
    context = build_forward_context(
        model.decoder.shape,
        x_BSD,
        positions_BT,
        None,
        None,
        num_tokens=num_tokens,
        dropout=None,
        cache=None,
        tensor_parallel=model.decoder.parallel_hooks.tensor,
    )
    out_BSD: Tensor = model.decoder.blocks[0](x_BSD, context)
    return out_BSD


def draw_inputs(width: int, num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens of the residual stream and of the gradient of the output."""
    random = torch.Generator().manual_seed(1)
    both = (torch.randn(BATCH, num_tokens, width, generator=random, dtype=dtype) for _ in range(2))
    x_BSD, gradient_BSD = (
        whole.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for whole in both
    )
    return x_BSD.requires_grad_(), gradient_BSD


def compare() -> dict[str, float]:
    """Return distances between torch and us: output, gradient of the input, gradient of every
    parameter.
    """
    width = 32
    dtype = torch.float64
    reference = build_reference(width, dtype)
    ours = build_ours(width, dtype)
    results = []
    for run in (reference, lambda x_BSD: run_ours(ours, x_BSD, TOKENS)):
        x_BSD, gradient_BSD = draw_inputs(width, TOKENS, dtype)
        out_BSD = run(x_BSD)
        out_BSD.backward(gradient_BSD)
        results.append((out_BSD.detach(), x_BSD.grad))
    ours.finish_gradients()
    pairs = {"output": (results[0][0], results[1][0]), "input": (results[0][1], results[1][1])}
    for name, parameter in reference.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        pairs[name] = (gradient.full_tensor(), ours.gather_gradient(PREFIX + name))
    return {
        name: float((a - b).norm() / a.norm())
        for name, (a, b) in pairs.items()
        if a is not None and b is not None
    }


def step_seconds(width: int, num_tokens: int, repeats: int) -> dict[str, list[float]]:
    """Return seconds of forward and backward of one block in float32, torch and ours in turn,
    after one warm-up step each.
    """
    reference = build_reference(width, torch.float32)
    ours = build_ours(width, torch.float32)
    seconds: dict[str, list[float]] = {"torch": [], "ours": []}
    for _ in range(repeats + 1):
        for name, run in (
            ("torch", reference),
            ("ours", lambda x_BSD: run_ours(ours, x_BSD, num_tokens)),
        ):
            x_BSD, gradient_BSD = draw_inputs(width, num_tokens, torch.float32)
            dist.barrier()
            start = time.perf_counter()
            run(x_BSD).backward(gradient_BSD)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: sorted(values[1:]) for name, values in seconds.items()}


def test_a_block_equals_that_of_torch(ranks: RankPool) -> None:
    for distances in ranks.run(2, compare):
        assert len(distances) == 2 + 9
        assert max(distances.values()) < 1e-12, distances
