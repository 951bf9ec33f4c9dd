"""Context parallelism on two CPU ranks: each method compared with one process and with ZeRO 3, and
the parts of a step's time.

    python -m benchmarks.context     rows of 4096 tokens, a Llama of 29M parameters, fp32
    python -m benchmarks.context --tokens 8192 --window 512

Every contender trains on the same rows: context ranks share one row, each of ZeRO's ranks has one
of two rows, one process uses both cores. All are timed in turn (A B C A B C ...) by one process
pool, so that other load slows them alike. `waiting` is the time within forward and backward for
which a rank waits for keys, values, their gradients or exchanged heads: exposed communication.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.case import LLAMA_29M, make_tokens, shift_labels
from benchmarks.conditions import read_conditions
from shardwright.architecture import read_config
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout, RankGrid
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import ChunkedLoss
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.context import ring_attention, ulysses
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.metrics.step_times import StepTimes
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification.rank_pool import RankPool

LAYOUTS = {
    "one process, two threads": Layout(),
    "one process, one thread": Layout(),
    "zero 3": Layout(dp_shard=2, zero_stage=3),
    "ring": Layout(cp=2, cp_method="ring"),
    "all_gather": Layout(cp=2, cp_method="all_gather"),
    "ulysses": Layout(cp=2, cp_method="ulysses"),
}
PARTS = ("forward", "backward", "reduction", "optimizer", "waiting")

_models: dict[str, tuple[ParallelModel, torch.optim.Optimizer]] = {}
"""Models of this worker by contender, built in the first round and used in all."""


def main() -> None:
    """Time all contenders, print a table and write the numbers to `--out`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.context", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a row")
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="timed steps of each contender, after one warm-up step",
    )
    parser.add_argument(
        "--window", type=int, default=None, help="a sliding window in every layer, in tokens"
    )
    parser.add_argument(
        "--kv-heads", type=int, default=4, help="key-value heads for the model's 8 query heads"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for context-two-ranks.json")
    arguments = parser.parse_args()
    config = LLAMA_29M | {
        "num_key_value_heads": arguments.kv_heads,
        "max_position_embeddings": arguments.tokens,
    }
    if arguments.window is not None:
        config |= {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": arguments.window,
        }
    rows = compare(config, arguments.tokens, arguments.rounds)
    print(render_table(rows))
    if arguments.out is not None:
        result = {
            "tokens": arguments.tokens,
            "window": arguments.window,
            "config": config,
            "rows": rows,
        }
        result["conditions"] = read_conditions()
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "context-two-ranks.json").write_text(json.dumps(result, indent=1) + "\n")


def compare(config: dict[str, Any], num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return medians over rounds: seconds of a step and its parts on the slowest rank, tokens
    per second over all ranks.
    """
    rounds_by_name: dict[str, list[list[dict[str, float]]]] = {name: [] for name in LAYOUTS}
    with RankPool(timeout_seconds=600.0) as pool:
        for number in range(num_rounds + 1):
            for name, layout in LAYOUTS.items():
                by_rank = pool.run(layout.world_size, time_step, name, config, num_tokens, number)
                if number > 0:
                    rounds_by_name[name].append(by_rank)
    rows = []
    for name, rounds in rounds_by_name.items():
        slowest = [max(by_rank, key=lambda times: times["step"]) for by_rank in rounds]
        times = {part: median(step[part] for step in slowest) for part in ("step", *PARTS)}
        spread = [min(step["step"] for step in slowest), max(step["step"] for step in slowest)]
        tokens_per_second = LAYOUTS[name].data_ranks * num_tokens / times["step"]
        losses = {step["loss"] for step in rounds[-1]}
        rows.append(
            {
                "name": name,
                "tokens_per_second": tokens_per_second,
                "seconds": times,
                "range": spread,
                "loss": max(losses),
            }
        )
    return rows


def render_table(rows: list[dict[str, Any]]) -> str:
    """Return a table in Markdown."""
    lines = [
        "| contender | tokens/s | step, s (range) | " + " | ".join(PARTS) + " |",
        "|---|" + "---:|" * (2 + len(PARTS)),
    ]
    for row in rows:
        low, high = row["range"]
        parts = " | ".join(f"{row['seconds'][part]:.3f}" for part in PARTS)
        step = f"{row['seconds']['step']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(f"| {row['name']} | {row['tokens_per_second']:,.0f} | {step} | {parts} |")
    return "\n".join(lines)


def time_step(name: str, config: dict[str, Any], num_tokens: int, number: int) -> dict[str, float]:
    """Time one training step on this rank by part; the first call builds the model."""
    torch.set_num_threads(2 if name.endswith("two threads") else 1)
    layout = LAYOUTS[name]
    model, optimizer = _models.get(name) or _models.setdefault(
        name, build(config, layout, num_tokens)
    )
    data_rank = 0 if model.mesh is None else RankGrid(layout).data_rank(model.mesh.rank)
    tokens = make_tokens(config["vocab_size"], num_tokens, 16)
    ids_BT = tokens[[(number * layout.data_ranks + data_rank) % len(tokens)]]
    labels_BT = shift_labels(ids_BT)
    batch = MicroBatch(
        ids_BT,
        labels_BT,
        torch.arange(num_tokens)[None],
        None,
        torch.zeros(1, dtype=torch.int64),
        num_tokens - 1,
    )
    times = StepTimes(torch.device("cpu"))
    start_seconds = time.perf_counter()
    with time_waiting() as read_waiting_seconds:
        loss = accumulate_gradients(model, [batch], seed=0, step=number, times=times)
    update_parameters(model, optimizer, learning_rate=1e-4, max_grad_norm=1.0, times=times)
    return times.seconds() | {
        "step": time.perf_counter() - start_seconds,
        "waiting": read_waiting_seconds(),
        "loss": loss.mean(),
    }


def build(
    config: dict[str, Any], layout: Layout, num_tokens: int
) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """Build a model from random weights, and its optimizer."""
    shape = read_config(config)
    precision = PrecisionSection(kind="fp32")
    with torch.device("meta"):
        decoder = Decoder(shape, loss_function=ChunkedLoss(1024))
    specs = {spec.name: spec for spec in shape.list_parameters()}
    model = apply_layout(
        decoder,
        build_plan(shape, layout, BatchPlan(num_tokens, 1, 1, layout.data_ranks), precision),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 0, dtype=torch.float32, narrow=narrow
        ),
    )
    section = OptimizerSection(name="adamw")
    return model, build_optimizer(
        model.named_parameters(), section, learning_rate=1e-4, weight_decay=0.1
    )


@contextmanager
def time_waiting() -> Iterator[Callable[[], float]]:
    """Measure the seconds that this rank waits for data of other context ranks."""
    total = 0.0

    def time_function(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal total
            start_seconds = time.perf_counter()
            result = function(*arguments)
            total += time.perf_counter() - start_seconds
            return result

        return call

    with (
        patch.object(
            ring_attention._RingPass, "wait", time_function(ring_attention._RingPass.wait)
        ),
        patch.object(
            ring_attention._KeyValueGather,
            "wait",
            time_function(ring_attention._KeyValueGather.wait),
        ),
        patch.object(
            ring_attention, "_scatter_gradients", time_function(ring_attention._scatter_gradients)
        ),
        patch.object(ulysses, "_all_to_all", time_function(ulysses._all_to_all)),
    ):
        yield lambda: total


if __name__ == "__main__":
    main()
