"""Chosen results against selective recomputation at equal memory, on a CPU.

    python -m benchmarks.recompute --out docs/benchmarks/recompute-cpu.json

One process trains one random model; the kinds of recomputation take turns, step by step, so a slow
minute affects all of them. Times are the process's, which other processes affect little. The budget
is the memory that the planner predicts for `selective`. The
peak of live tensor bytes is counted in a step of its own, because counting slows the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conditions import format_rows, read_conditions
from shardwright.architecture import ModelShape, read_config
from shardwright.config.recipe import RecomputeKind, RecomputeSection
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.layout.saved_results import RecomputeChoice
from shardwright.model import Decoder
from shardwright.model.result_names import get_result_name
from shardwright.numerics.recompute import build_recompute_runner, build_saved_results_runner
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.recompute.choice import choose_recompute
from shardwright.units import GIB_BYTES

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
TOKENS = 512
ROWS = 1
KINDS: tuple[RecomputeKind, ...] = ("none", "selective", "full")
CHOSEN = "chosen"


def main() -> None:
    """Run the rounds, print the summary and write the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recompute", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    result = run(options.rounds)
    print(json.dumps(result["summary"], indent=1))
    if options.out is not None:
        options.out.write_text(format_rows(result) + "\n")


def run(num_rounds: int) -> dict[str, Any]:
    """Time all kinds in turn; return conditions, predictions, seconds and the summary."""
    shape = read_config(CONFIG)
    predictor, candidate = build_predictor(shape)
    predictions = {kind: predictor.predict(replace(candidate, recompute=kind)) for kind in KINDS}
    budget = predictions["selective"].memory.total / GIB_BYTES
    chosen, choice = choose_recompute(predictor, candidate, RecomputeSection(budget_gib=budget))
    predicted = dict(predictions) | {CHOSEN: predictor.predict(chosen)}
    torch.manual_seed(0)
    decoder = Decoder(shape)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ids_BT = torch.randint(0, shape.vocab_size, (ROWS, TOKENS))
    peaks = {}
    for kind in (*KINDS, CHOSEN):
        set_recompute(decoder, kind, choice)
        run_step(decoder, ids_BT)  # warm-up
        peaks[kind] = measure_peak(decoder, ids_BT)
    seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, CHOSEN)}
    for number in range(num_rounds):
        order = [*KINDS, CHOSEN]
        for kind in order if number % 2 else reversed(order):
            set_recompute(decoder, kind, choice)
            start = time.process_time()
            run_step(decoder, ids_BT)
            seconds[kind].append(time.process_time() - start)
    return {
        "conditions": read_conditions(),
        "config": CONFIG,
        "choice": choice.as_dict(),
        "seconds": seconds,
        "summary": {
            kind: {
                "median_seconds": statistics.median(seconds[kind]),
                "median_ratio_to_selective": statistics.median(
                    own / other
                    for own, other in zip(seconds[kind], seconds["selective"], strict=True)
                ),
                "peak_bytes": peaks[kind],
                "predicted_bytes": predicted[kind].memory.live,
                "predicted_ratio_to_selective": predicted[kind].time.step
                / predicted["selective"].time.step,
            }
            for kind in (*KINDS, CHOSEN)
        },
    }


def build_predictor(shape: ModelShape) -> tuple[Predictor, Candidate]:
    """Build the planner of the model on a CPU, and the step without recomputation."""
    cluster = parse_cluster("1xcpu")
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    candidate = Candidate(
        Layout(),
        TOKENS,
        ROWS,
        precision="fp32",
        has_fused_norms=False,
    )
    return Predictor(get_model_facts(shape), cluster, efficiency), candidate


def set_recompute(decoder: Decoder, kind: str, choice: RecomputeChoice) -> None:
    """Install a kind of recomputation, or the choice."""
    for name in KINDS:
        if kind == name:
            decoder.set_recompute(build_recompute_runner(name))
            return
    runners = {
        results: None if results is None else build_saved_results_runner(results, get_result_name)
        for results in choice.layers
    }
    for block in decoder.blocks:
        block.set_recompute(runners[choice.layers[block.layer_index]])


def run_step(decoder: Decoder, ids_BT: Tensor) -> None:
    """Run a forward and a backward pass."""
    decoder.zero_grad(set_to_none=True)
    decoder(ids_BT, labels_BT=ids_BT).backward()


class _LiveBytes(TorchDispatchMode):
    """Count the live bytes that operations allocated, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


def measure_peak(decoder: Decoder, ids_BT: Tensor) -> int:
    """Return the peak of the bytes that a step allocates besides weights: activations, gradients
    and temporaries."""
    decoder.zero_grad(set_to_none=True)
    gc.collect()
    with _LiveBytes() as live:
        decoder(ids_BT, labels_BT=ids_BT).backward()
    return live.peak


if __name__ == "__main__":
    main()
