"""Predicted and measured tokens/s of real conversations on two CPU ranks.

    python -m benchmarks.data_rows --data sft/ --out docs/benchmarks/data_rows.json

For every packing, layout and assignment of rows of a file, the first steps of the run are
measured, each several times; of a step the fastest repetition on the slowest rank counts. The rates
that the planner needs are measured before all of a file's steps and after them, and the faster ones
count, or the mean of times that are means. Both predictions are compared: that with the rows of the
data, and that with full rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.conditions import format_rows, read_conditions
from benchmarks.predicted import build_cpu_cluster, combine_profiles, measure_profile
from shardwright.architecture import ModelShape
from shardwright.config.recipe_loading import parse_layout, validate_recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.hardware import MeasuredProfile
from shardwright.layout import Layout, RankGrid
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import build_plan_candidate
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.training_rows import predict_rows
from shardwright.training.checks.row_lengths import read_training_rows
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification.rank_pool import RankPool

LAYOUTS = {
    "DDP 2": "dp_replicate=2",
    "ZeRO-3 over 2": "dp_shard=2,zero_stage=3",
    "tp 2": "tp=2",
    "pp 2": "pp=2",
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
NUM_STEPS = 4
NUM_REPETITIONS = 5
_RATE_LENGTHS = (1.0, 0.5, 0.25)
"""Lengths of the rows for which rates are measured, as shares of the full length."""


def main() -> None:
    """Measure all cases, print one line each, and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data_rows", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the .jsonl files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files", nargs="*", help="stems of the files; default all")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--packings", nargs="*", default=["none", "documents"])
    parser.add_argument("--assignments", nargs="*", default=["length", "work"])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, RankPool(timeout_seconds=900.0) as pool:
        folder = Path(name)
        for source in sorted(options.data.glob("*.jsonl")):
            if options.files and source.stem not in options.files:
                continue
            records = folder / source.name
            write_completions(source, records)
            cases: list[tuple[dict[str, Any], dict[str, Any]]] = []
            for packing, layout, assignment in product(
                options.packings, options.layouts, options.assignments
            ):
                document = build_recipe(records, packing, options.sequence_length, folder)
                document["layout"] = parse_layout(LAYOUTS[layout])
                document["data"]["assignment"] = assignment
                row = {"file": source.stem, "packing": packing, "layout": layout}
                cases.append((row | {"assignment": assignment}, document))
            before = measure_rates([document for _, document in cases])
            seconds = [measure_steps(document, pool) for _, document in cases]
            after = measure_rates([document for _, document in cases])
            combined = combine_profiles(before, after)
            for (row, document), step_seconds in zip(cases, seconds, strict=True):
                earlier = predict_case(document, before)["rows_tokens_per_second"]
                row |= predict_case(document, combined)
                row["measured_tokens_per_second"] = (
                    row["tokens_per_step"] * NUM_STEPS / step_seconds
                )
                rows.append(row | {"rows_tokens_per_second_with_rates_before": earlier})
                print(describe(rows[-1]), flush=True)
                content = {"conditions": read_conditions(), "rows": rows}
                options.out.write_text(format_rows(content) + "\n", encoding="utf-8")


def describe(row: dict[str, Any]) -> str:
    """Return one line about a case."""
    measured = row["measured_tokens_per_second"]
    rows_error, full_error, before_error = (
        f"{row[key] / measured - 1:+.1%}"
        for key in (
            "rows_tokens_per_second",
            "full_tokens_per_second",
            "rows_tokens_per_second_with_rates_before",
        )
    )
    return (
        f"{row['file']:14} {row['packing']:10} {row['layout']:14} {row['assignment']:6} "
        f"measured {measured:7.0f} tok/s, "
        f"predicted with the rows {rows_error} ({before_error} with the rates before), "
        f"with full rows {full_error}"
    )


def write_completions(source: Path, target: Path) -> None:
    """Write conversations as prompts and completions, which need no chat template."""
    with source.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as out:
        for line in lines:
            record = json.loads(line)
            if "question" in record:
                texts = [record["question"], record["answer"]]
            else:
                texts = [
                    "".join(part["value"] for part in turn["content"])
                    for turn in record["messages"]
                ]
            prompt = "\n".join(texts[:-1]) + "\n"
            out.write(json.dumps({"prompt": prompt, "completion": texts[-1]}) + "\n")


def build_recipe(records: Path, packing: str, sequence_length: int, folder: Path) -> dict[str, Any]:
    """Build the recipe of a case."""
    return {
        "model": {"config": CONFIG},
        "tokenizer": {"kind": "bpe", "vocab_size": 1024},
        "data": {
            "sources": str(records),
            "packing": packing,
            "cache_dir": str(folder / "cache"),
        },
        "precision": "fp32",
        "training": {
            "sequence_length": sequence_length,
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "learning_rate": 1e-3,
            "max_steps": NUM_STEPS,
        },
        "run": {"device": "cpu"},
    }


def measure_steps(document: dict[str, Any], pool: RankPool) -> float:
    """Measure the seconds of all steps of a case."""
    return sum(max(ranks) for ranks in zip(*pool.run(2, time_steps, document), strict=True))


def measure_rates(documents: Sequence[dict[str, Any]]) -> MeasuredProfile:
    """Measure the rates for rows of several lengths that the predictions of cases need."""
    found = measure_profile(
        [run for document in documents for run in list_rate_runs(document)],
        Layout(dp_replicate=2),
    )
    assert found is not None, "the rates could not be measured"
    return found


def predict_case(document: dict[str, Any], profile: MeasuredProfile) -> dict[str, Any]:
    """Predict the tokens per second of a case with measured rates."""
    run = validate_run(validate_recipe(document), 2)
    candidate = build_plan_candidate(run.recipe, run.plan)
    batch_size = run.plan.batch.global_batch_size
    rows = read_training_rows(run.recipe, run.shape, run.data, batch_size)
    rows = replace(rows, documents=rows.documents[: NUM_STEPS * batch_size])
    cluster = build_cpu_cluster(2, profile)
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    predictor = Predictor(get_model_facts(run.shape), cluster, efficiency)
    real = predict_rows(predictor, candidate, rows)
    full = predictor.predict(candidate)
    assert real.step_tokens is not None
    return {
        "tokens_per_step": real.step_tokens,
        "rows_tokens_per_second": real.tokens_per_second,
        "full_tokens_per_second": full.tokens_per_second,
        "imbalance_share": real.time.imbalance / real.time.step,
    }


def list_rate_runs(document: dict[str, Any]) -> list[tuple[ModelShape, Candidate]]:
    """List the runs for which rates are measured: rows of several lengths."""
    run = validate_run(validate_recipe(document), 2)
    candidate = build_plan_candidate(run.recipe, run.plan)
    length = candidate.sequence_length
    return [
        (run.shape, replace(candidate, sequence_length=int(share * length)))
        for share in _RATE_LENGTHS
    ]


def time_steps(document: dict[str, Any]) -> list[float]:
    """Return the seconds of every step on this rank: the fewest of several repetitions."""
    run = validate_run(validate_recipe(document), dist.get_world_size())
    state = build_state(run, torch.device("cpu"))
    order = SampleOrder(run.recipe.seed, len(run.data.train))
    rank = RankGrid(run.plan.layout).data_rank(dist.get_rank())
    seconds = [float("inf")] * NUM_STEPS
    for _ in range(NUM_REPETITIONS):
        for step in range(NUM_STEPS):
            batches = read_step_micro_batches(run.data.train, order, run.plan.batch, step, rank)
            dist.barrier()
            start = time.perf_counter()
            accumulate_gradients(state.model, batches, seed=0, step=step)
            update_parameters(state.model, state.optimizer, learning_rate=0.0, max_grad_norm=1.0)
            seconds[step] = min(seconds[step], time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
