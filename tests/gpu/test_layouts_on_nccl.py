"""Runs of two and four GPUs over NCCL: every parallelism has the losses of one GPU, and resumes.

NCCL's buffers are smaller than the messages, so that a send completes only when it is received.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.config import Recipe
from shardwright.model.mlp import FeedForward
from shardwright.model.moe import MixtureOfExperts
from shardwright.model.parallel_hooks import ParallelHooks
from shardwright.model.routing import Routing, count_tokens
from shardwright.parallel.experts.expert_parallel import TokenDispatcher
from shardwright.parallel.experts.padded_exchange import PaddedExchange
from shardwright.parallel.experts.token_exchange import TokenExchange
from shardwright.parallel.pipelined.products import PipelinedProducts
from shardwright.parallel.tensor_parallel import TensorParallel
from shardwright.schedule import PIPELINE_SCHEDULES
from shardwright.training.run import train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEVICE = "cuda"
OVERLAPS: tuple[Literal["none", "chunked", "fused"], ...] = ("none", "chunked", "fused")
ROWS = 8
"""Rows of a step, which the layouts divide into micro-batches of one row."""
NUM_STEPS = 6
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
EXPERT_CONFIG = CONFIG | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
DENSE_LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    *({"dp_shard": 2, "zero_stage": stage} for stage in (1, 2, 3)),
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 2, "async_tensor_parallel": "chunked"},
    {"tp": 2, "sequence_parallel": False, "async_tensor_parallel": "chunked"},
    {"tp": 2, "async_tensor_parallel": "fused"},
    *({"cp": 2, "cp_method": method} for method in ("ring", "all_gather", "ulysses")),
    *({"pp": ranks, "schedule": name} for ranks in (2, 4) for name in PIPELINE_SCHEDULES),
    {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    {"dp_shard": 2, "tp": 2, "zero_stage": 3},
    {"dp_shard": 2, "pp": 2, "zero_stage": 3, "schedule": "zb_h1"},
    {"tp": 2, "pp": 2, "schedule": "zbv"},
    {"pp": 2, "cp": 2, "cp_method": "ring", "schedule": "1f1b"},
]
EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2, "ep": 2, "zero_stage": 3},
    {"dp_shard": 2, "ep": 2, "zero_stage": 3, "expert_dispatch": "halves"},
    {"dp_shard": 2, "ep": 2, "zero_stage": 3, "expert_dispatch": "once_per_rank"},
    {"dp_shard": 2, "ep": 2, "zero_stage": 3, "expert_dispatch": "padded"},
    {"dp_shard": 4, "ep": 2, "zero_stage": 1},
    {"dp_shard": 2, "ep": 2, "tp": 2, "zero_stage": 2},
    {"dp_shard": 2, "ep": 2, "pp": 2, "zero_stage": 2},
]


def count_ranks(layout: dict[str, Any]) -> int:
    ranks = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp"):
        ranks *= layout.get(axis, 1)
    return ranks


def name_layout(layout: dict[str, Any]) -> str:
    return "-".join(f"{key}={setting}" for key, setting in layout.items())


def build_recipe(
    folder: Path, config: dict[str, Any], layout: dict[str, Any], num_steps: int = NUM_STEPS
) -> Recipe:
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    data_ranks = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    return Recipe.model_validate(
        {
            "model": {"config": config},
            "tokenizer": {"kind": "character"},
            "data": {
                "sources": [str(text)],
                "validation_fraction": 0.1,
                "validation_split": "tail",
                "cache_dir": str(folder / "cache"),
            },
            "training": {
                "sequence_length": 128,
                "micro_batch_size": 1,
                "gradient_accumulation_steps": ROWS // data_ranks,
                "max_steps": num_steps,
                "learning_rate": 1e-3,
                "schedule": "constant",
            },
            "layout": layout,
            "precision": "fp32",
            "checkpoint": {"every_steps": NUM_STEPS // 2},
            "run": {"dir": str(folder / "run"), "device": DEVICE},
        }
    )


def train_recipe(recipe: Recipe, layout: dict[str, Any], *, resume: bool = False) -> float:
    """Train a recipe on the ranks of a layout; return the validation loss."""
    summary = train(recipe, num_ranks=count_ranks(layout), resume=resume)
    assert summary is not None
    assert summary["status"] == "completed"
    loss: float = summary["validation_loss"]
    return loss


@pytest.fixture(autouse=True)
def _use_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hidden state has 128 KiB."""
    monkeypatch.setenv("NCCL_BUFFSIZE", str(2**16))
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", "1")


@pytest.fixture(scope="module")
def one_gpu_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Validation loss after `NUM_STEPS` on one GPU, by model."""
    skip_without_gpus(1)
    return {
        config["model_type"]: train_recipe(
            build_recipe(tmp_path_factory.mktemp("one"), config, {}), {}
        )
        for config in (CONFIG, EXPERT_CONFIG)
    }


def skip_without_gpus(number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} CUDA devices; torch finds {torch.cuda.device_count()}")


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        *((CONFIG, layout) for layout in DENSE_LAYOUTS),
        *((EXPERT_CONFIG, layout) for layout in EXPERT_LAYOUTS),
    ],
    ids=lambda given: name_layout(given) if "model_type" not in given else given["model_type"],
)
def test_losses_equal_those_of_one_gpu(
    config: dict[str, Any],
    layout: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    skip_without_gpus(count_ranks(layout))
    expected = request.getfixturevalue("one_gpu_losses")[config["model_type"]]
    loss = train_recipe(build_recipe(tmp_path, config, layout), layout)
    assert loss == pytest.approx(expected, rel=1e-4)


def measure_feed_forward(rank: int, folder: Path) -> None:
    """Time a feed-forward layer of the Llama-3-8B shape on two ranks, and compare gradients."""
    torch.cuda.set_device(rank)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    sizes = {"hidden_size": 4096, "intermediate_size": 14336 // 2, "vocab_size": 64}
    torch.manual_seed(rank)
    layer = FeedForward(read_config(CONFIG | sizes)).to("cuda", torch.bfloat16)
    x = torch.randn(1, 4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected: Tensor | None = None
    results = {}
    for overlap, is_compiled in product(OVERLAPS, (False, True)):
        pipeline = None if overlap == "none" else PipelinedProducts(group, overlap, True)
        compute: Callable[[Tensor], Tensor] = partial(
            layer, tensor_parallel=TensorParallel(group, True, pipeline)
        )
        if is_compiled:
            compute = torch.compile(compute, fullgraph=True)

        def step(compute: Callable[[Tensor], Tensor] = compute) -> Tensor:
            inputs = [x, *layer.parameters()]
            return torch.autograd.grad(compute(x).float().square().sum(), inputs)[0]

        gradient = step()
        expected = gradient if expected is None else expected
        distance = float((gradient - expected).abs().max() / expected.abs().max())
        name = f"{overlap}, compiled" if is_compiled else overlap
        results[name] = (time_steps(step), distance)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def time_steps(step: Callable[[], Tensor]) -> float:
    """Measure the mean milliseconds of 20 steps that all ranks begin together."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    dist.barrier()
    events[0].record()
    for _ in range(20):
        step()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 20


def measure_experts(rank: int, folder: Path) -> None:
    """Time a sparse layer of the Mixtral-8x7B shape on two ranks, and compare gradients."""
    torch.cuda.set_device(rank)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=2)
    sizes = {"hidden_size": 4096, "moe_intermediate_size": 14336, "num_experts": 8}
    torch.manual_seed(rank)
    with torch.device("cuda"):
        layer = MixtureOfExperts(read_config(EXPERT_CONFIG | sizes | {"vocab_size": 64}))
        for stack in (layer.experts.gate_up, layer.experts.down):
            own = torch.empty_like(stack.weight.chunk(2)[rank], dtype=torch.bfloat16)
            stack.weight = torch.nn.Parameter(torch.nn.init.normal_(own, std=0.02))
        x_ND = torch.randn(8192, 4096, dtype=torch.bfloat16, requires_grad=True)
        routing = Routing(torch.rand(8192, 8).topk(2).indices, torch.full((8192, 2), 0.5))
    results = {}
    expected: Tensor | None = None
    group = dist.group.WORLD
    assert group is not None
    dispatchers = [TokenDispatcher(group, None, 1, num_parts) for num_parts in (1, 2)]
    padded = PaddedExchange(dispatchers[0], layer.shape, 8192, 1.25)
    hooks_by_name = {
        "whole": ParallelHooks(expert=dispatchers[0]),
        "halves": ParallelHooks(expert=dispatchers[1]),
        "once_per_rank": ParallelHooks(token_exchange=TokenExchange(group, layer.shape)),
        "padded": ParallelHooks(token_exchange=padded),
    }

    def step() -> Tensor:
        exchange = layer.parallel_hooks.token_exchange
        choices = routing.experts_NK
        places = exchange and exchange.place_rows(choices, count_tokens(choices, 8))
        output, _ = layer.run_experts(x_ND, replace(routing, places=places), None)
        weights = [layer.experts.gate_up.weight, layer.experts.down.weight]
        return torch.autograd.grad(output.float().square().sum(), [x_ND, *weights])[0]

    for name, layer.parallel_hooks in hooks_by_name.items():
        gradient = step()
        expected = gradient if expected is None else expected
        distance = float((gradient - expected).abs().max() / expected.abs().max())
        results[name] = (time_steps(step), distance)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("option", "measure"),
    [("async_tensor_parallel", measure_feed_forward), ("expert_dispatch", measure_experts)],
)
def test_speed_of_overlapped_communication(
    option: str,
    measure: Callable[[int, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """The page of `make gpu` shows the times: 8,192 tokens, forward and backward pass."""
    skip_without_gpus(2)
    monkeypatch.delenv("NCCL_BUFFSIZE")
    monkeypatch.delenv("NCCL_MAX_P2P_NCHANNELS")
    torch.multiprocessing.spawn(measure, (tmp_path,), nprocs=2)
    results = json.loads((tmp_path / "results.json").read_text())
    for value, (milliseconds, distance) in results.items():
        record_property(f"{option}: {value}", f"{milliseconds:.3f} ms")
        assert distance < 0.02


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"dp_shard": 2, "zero_stage": 3}, {"pp": 2, "schedule": "1f1b"}),
        ({"pp": 4, "schedule": "1f1b"}, {"dp_shard": 2, "tp": 2, "zero_stage": 3}),
    ],
    ids=name_layout,
)
def test_a_run_resumes_under_another_layout(
    first: dict[str, Any],
    second: dict[str, Any],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    skip_without_gpus(max(count_ranks(first), count_ranks(second)))
    expected = request.getfixturevalue("one_gpu_losses")[CONFIG["model_type"]]
    train_recipe(build_recipe(tmp_path, CONFIG, first, NUM_STEPS // 2), first)
    resumed = train_recipe(build_recipe(tmp_path, CONFIG, second), second, resume=True)
    assert resumed == pytest.approx(expected, rel=1e-4)
