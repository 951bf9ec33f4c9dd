"""Step time of every cut on two CPU ranks beside one process and ZeRO-3, and how near pipelines come to their schedules.

    python -m benchmarks.cuts                 everything (about ten minutes on two quiet cores)
    python -m benchmarks.cuts --only tp=2     layouts that contain these words; repeatable
    python -m benchmarks.cuts --publish       into docs/benchmarks as well

All layouts do the same work: the same model, global batch and tokens, one thread a rank. They are timed in turn, round by round, so
that what slows the machine slows them alike; a layout whose first loss differs from one process's is an error, not a row. Times are
medians over rounds. For pipelines every action is timed on every rank, and the medians are put through the same schedule:
`of its schedule` is the utilisation that was measured over the one that the schedule gives with these times.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.conditions import read_conditions
from shardwright.architecture import ModelShape, read_config
from shardwright.config.layout import LayoutSection
from shardwright.config.load import parse_layout
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout, RankGrid, resolve_layout
from shardwright.model import Decoder
from shardwright.model.init import initialise
from shardwright.numerics import chunked_cross_entropy
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.plan import BatchPlan, Plan
from shardwright.schedule import Action, load_schedule, simulate
from shardwright.train.step import StepTimes, accumulate_gradients, update
from shardwright.verify.pool import RankPool

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
TOKENS, GLOBAL_BATCH, MICRO_BATCHES = 512, 8, 8
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": TOKENS,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 1024, **_COMMON},
    "moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        **_COMMON,
    },
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev")
LAYOUTS: tuple[tuple[str, str], ...] = (
    ("dense", ""),
    ("dense", "dp_replicate=2"),
    ("dense", "dp_shard=2,zero_stage=3"),
    ("dense", "tp=2"),
    ("dense", "tp=2,sequence_parallel=false"),
    *(("dense", f"pp=2,schedule={schedule}") for schedule in SCHEDULES),
    ("dense", "cp=2,cp_method=ring"),
    ("dense", "cp=2,cp_method=all_gather"),
    ("dense", "cp=2,cp_method=ulysses"),
    ("moe", ""),
    ("moe", "dp_shard=2,zero_stage=3"),
    ("moe", "dp_shard=2,ep=2,zero_stage=3"),
)


@dataclass(frozen=True)
class Entry:
    """One layout of one model."""

    model: str
    layout: Layout

    @property
    def shape(self) -> ModelShape:
        """The model's."""
        return read_config(MODELS[self.model])

    @property
    def batch(self) -> BatchPlan:
        """Rows of a micro-batch are one; a pipeline's micro-batches are the accumulation."""
        data_ranks = self.layout.data_ranks
        return BatchPlan(TOKENS, GLOBAL_BATCH // MICRO_BATCHES, MICRO_BATCHES // data_ranks, data_ranks)

    def __str__(self) -> str:
        return f"{self.model} {'one process' if self.layout.world_size == 1 else self.layout}"


@dataclass
class Built:
    """A model on this rank, ready to step."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    micro_batches: list[MicroBatch]
    times: StepTimes


_built: dict[Entry, Built] = {}
"""Of this worker process: kept between rounds."""


def build(entry: Entry) -> float:
    """Build a layout on this rank and take one step; its loss."""
    torch.set_num_threads(1)
    shape, layout = entry.shape, entry.layout
    with torch.device("meta"):
        loss = partial(chunked_cross_entropy, chunk_tokens=TOKENS)
        decoder = Decoder(shape, loss_function=loss, compute_dtype=torch.float32)
    specs = {spec.name: spec for spec in shape.parameters()}
    model = apply_layout(
        decoder,
        Plan(layout, entry.batch, PrecisionSection()),
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        fill=lambda name, narrow: initialise(specs[name], 0, dtype=torch.float32, narrow=narrow),
    )
    optimizer = build_optimizer(model.named_parameters(), OptimizerSection(), learning_rate=1e-4, weight_decay=0.1)
    data_rank = RankGrid(layout).data_rank(dist.get_rank() if dist.is_initialized() else 0)
    _built[entry] = Built(model, optimizer, _micro_batches(entry, data_rank), StepTimes(torch.device("cpu")))
    return float(step(entry)["loss"])


def _micro_batches(entry: Entry, data_rank: int) -> list[MicroBatch]:
    batch = entry.batch
    rows = torch.randint(0, _COMMON["vocab_size"], (GLOBAL_BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    micro_batches = []
    for number in range(batch.gradient_accumulation_steps):
        first = (number * batch.data_ranks + data_rank) * batch.micro_batch_size
        rows_BT = rows[first : first + batch.micro_batch_size]
        positions_BT = torch.arange(TOKENS).expand(len(rows_BT), TOKENS)
        samples_B = torch.arange(first, first + len(rows_BT))
        micro_batches.append(
            MicroBatch(
                rows_BT[:, :-1].contiguous(), rows_BT[:, 1:].contiguous(), positions_BT, None, samples_B, rows_BT.shape[0] * TOKENS
            )
        )
    return micro_batches


def step(entry: Entry) -> dict[str, Any]:
    """One optimizer step: its loss, seconds in all and by part, and of a pipeline's actions."""
    built, actions = _built[entry], {}
    if built.model.pipeline is not None:
        built.model.pipeline.observe = lambda action, began, ended: actions.__setitem__(str(action), (began, ended))
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    loss = accumulate_gradients(built.model, built.micro_batches, seed=0, step=0, times=built.times)
    update(built.model, built.optimizer, learning_rate=1e-4, max_grad_norm=1.0, times=built.times)
    seconds = time.perf_counter() - began
    return {"loss": loss.mean(), "seconds": seconds, "parts": built.times.seconds(), "actions": actions}


def utilisation(entry: Entry, rounds: list[list[dict[str, Any]]]) -> dict[str, float]:
    """A pipeline's measured utilisation, and what its schedule gives with the medians of the same actions.

    Args:
        rounds: per round, per rank, what `step` gave.
    """
    layout = entry.layout
    schedule = load_schedule(layout.schedule, layout.pp, MICRO_BATCHES, layout.virtual_stages)
    measured, ideal = [], []
    medians: dict[Action, float] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            spans = [by_rank[rank]["actions"][str(action)] for by_rank in rounds]
            medians[action] = median(ended - began for began, ended in spans)
    for by_rank in rounds:
        spans = [span for told in by_rank for span in told["actions"].values()]
        whole = max(ended for _, ended in spans) - min(began for began, _ in spans)
        measured.append(sum(ended - began for began, ended in spans) / (layout.pp * whole))
    ideal.append(simulate(schedule, medians).utilisation)
    return {"measured": median(measured), "of_schedule": ideal[0], "share": median(measured) / ideal[0]}


def measure(entries: list[Entry], num_rounds: int) -> list[dict[str, Any]]:
    """Time every layout in turn.

    Raises:
        RuntimeError: a layout computes another loss than one process.
    """
    told: dict[Entry, list[list[dict[str, Any]]]] = {entry: [] for entry in entries}
    with RankPool(timeout_seconds=300.0) as pool:
        first_losses: dict[str, float] = {}
        for entry in entries:
            loss = pool.run(entry.layout.world_size, build, entry)[0]
            expected = first_losses.setdefault(entry.model, loss)
            if abs(loss - expected) > 1e-5 * expected:
                raise RuntimeError(f"{entry}: first loss {loss}, one process has {expected}: not the same work")
        for number in range(num_rounds):
            for entry in entries:
                told[entry].append(pool.run(entry.layout.world_size, step, entry))
            print(f"round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return [summarise(entry, rounds) for entry, rounds in told.items()]


def summarise(entry: Entry, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds; a step takes as long as its slowest rank."""
    row: dict[str, Any] = {
        "model": entry.model,
        "layout": "one process" if entry.layout.world_size == 1 else str(entry.layout),
        "seconds": median(max(told["seconds"] for told in by_rank) for by_rank in rounds),
        "parts": {part: median(by_rank[0]["parts"][part] for by_rank in rounds) for part in rounds[0][0]["parts"]},
    }
    if entry.layout.pp > 1:
        row["utilisation"] = utilisation(entry, rounds)
    return row


def page(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    conditions = result["conditions"]
    base = {row["model"]: row["seconds"] for row in result["rows"] if row["layout"] == "one process"}
    zero = {row["model"]: row["seconds"] for row in result["rows"] if row["layout"].startswith("dp_shard=2,zero_stage=3")}
    parts = list(result["rows"][0]["parts"])
    lines = [
        "# Every cut on two CPU ranks",
        "",
        f"{conditions['date']}, {conditions['processor']}, {conditions['cores']} cores, torch {conditions['packages']['torch']}, "
        f"one thread a rank, float32, {result['rounds']} rounds in turn, medians. Global batch {GLOBAL_BATCH} x {TOKENS} tokens in "
        f"{MICRO_BATCHES} micro-batches; 8 layers, 384 wide. Every row does the same work and begins at the same loss.",
        "`python -m benchmarks.cuts --publish` makes this page.",
        "",
        "| model | layout | seconds a step | speed-up over one process | over ZeRO-3 | " + " | ".join(parts) + " |",
        "|---|---|---|---|---|" + "---|" * len(parts),
    ]
    for row in result["rows"]:
        shares = " | ".join(f"{row['parts'][part]:.2f}" for part in parts)
        speed = base[row["model"]] / row["seconds"] if row["model"] in base else float("nan")
        over = zero[row["model"]] / row["seconds"] if row["model"] in zero else float("nan")
        lines.append(f"| {row['model']} | {row['layout']} | {row['seconds']:.2f} | {speed:.2f} | {over:.2f} | {shares} |")
    lines += ["", "Parts are seconds on rank 0.", "", "## Pipelines beside their schedules", ""]
    lines += ["| schedule | measured utilisation | its schedule's with these times | share |", "|---|---|---|---|"]
    for row in result["rows"]:
        if found := row.get("utilisation"):
            lines.append(f"| {row['layout']} | {found['measured']:.1%} | {found['of_schedule']:.1%} | {found['share']:.1%} |")
    notes = DOCS / "cuts-two-ranks.notes.md"
    if notes.exists():
        lines += ["", notes.read_text(encoding="utf-8").rstrip()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code 0 when every layout gave a row."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuts", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="layouts that contain these words; repeatable")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--publish", action="store_true", help="write into docs/benchmarks as well")
    arguments = parser.parse_args()
    entries = [Entry(model, resolve_layout(LayoutSection(**parse_layout(text)), 2 if text else 1)) for model, text in LAYOUTS]
    if arguments.only:
        entries = [entry for entry in entries if any(words in str(entry) for words in (*arguments.only, "one process"))]
    result = {
        "schema_version": 1,
        "conditions": read_conditions(),
        "rounds": arguments.rounds,
        "rows": measure(entries, arguments.rounds),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for folder in (arguments.out, *((DOCS,) if arguments.publish else ())):
        (folder / "cuts-two-ranks.json").write_text(json.dumps(result, indent=1) + "\n")
        (folder / "cuts-two-ranks.md").write_text(page(result))
    print(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
