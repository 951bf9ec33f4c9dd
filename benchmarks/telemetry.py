"""Cost of measuring every rank: the same steps with and without it, in turn, on two CPU ranks.

    python -m benchmarks.telemetry [--publish]

With: marks around every wait, the row that all ranks gather, the `step` and `ranks` events, log.txt
and the terminal's line, at every step (the default of run.log_every_steps, and its maximum).
Without: the step alone. Both run on the same model in the same processes, in alternating order, so
that other load affects both. The times of whole steps vary by more than the cost; therefore its two
parts are also timed separately: marks (the time of one mark, times the waits of a step), and
logging (from the synchronisation of all ranks to the last line written). The share is that of both
in the fastest step; above 1% the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.conditions import read_conditions
from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import ChunkedLoss, resolve_dtypes
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.comm_timing import time_wait, use_timer
from shardwright.plans import BatchPlan, build_plan
from shardwright.telemetry.event_logger import EventLogger, open_event_logger
from shardwright.telemetry.meter import measure_throughput
from shardwright.training.metrics.profiling import StepProfiler
from shardwright.training.metrics.rank_metrics import RankMetrics, RankStepTimes
from shardwright.training.metrics.step_times import StepTimes
from shardwright.training.rank_sync import RankSync
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.training.training_state import TrainingState
from shardwright.verification.rank_pool import RankPool

LAYOUTS = {
    "zero_stage 3": Layout(dp_shard=2, zero_stage=3),
    "tp 2": Layout(tp=2),
    "pp 2": Layout(pp=2),
    "dp 2": Layout(dp_replicate=2),
}
VOCABULARY = 512
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
SEQUENCE = 256
ROWS = 2
MICRO_BATCHES = 4
WARM_UP_STEPS = 1
SERIES = ("with", "without", "with_processor", "without_processor", "logging")
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "telemetry.md"


class StepResult(NamedTuple):
    """Loss and gradient norm that an event of a step reports."""

    loss: float
    gradient_norm: float


def build_model(layout: Layout) -> ParallelModel:
    """Build a small Llama with a layout."""
    shape = read_config(CONFIG)
    precision = PrecisionSection(kind="fp32")
    with torch.device("meta"):
        decoder = Decoder(
            shape,
            loss_function=ChunkedLoss(256),
            compute_dtype=resolve_dtypes(precision).compute,
        )
    specs = {spec.name: spec for spec in shape.list_parameters()}
    plan = build_plan(
        shape, layout, BatchPlan(SEQUENCE, ROWS, MICRO_BATCHES, layout.data_ranks), precision
    )
    return apply_layout(
        decoder,
        plan,
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 3, dtype=torch.float32, narrow=narrow
        ),
    )


def make_batch(seed: int) -> MicroBatch:
    """Make a micro-batch of random ids."""
    random = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE), generator=random)
    positions_BT = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    return MicroBatch(
        ids_BT, ids_BT.roll(-1, 1), positions_BT, None, torch.arange(ROWS), ROWS * SEQUENCE
    )


@dataclass
class Comparison:
    """One layout's model, and the seconds of its steps with and without measuring."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    rank_metrics: RankMetrics
    rank_sync: RankSync
    event_logger: EventLogger
    plain: StepTimes
    batches: list[MicroBatch]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in SERIES})

    def step(self, times: StepTimes) -> StepResult:
        """Run the part that both kinds of step share."""
        loss = accumulate_gradients(self.model, self.batches, seed=0, step=0, times=times)
        updated = update_parameters(
            self.model, self.optimizer, learning_rate=1e-4, max_grad_norm=1.0, times=times
        )
        return StepResult(loss.mean(), updated.gradient_norm)

    def run_measured(self, number: int) -> None:
        """Run a step as the training loop does."""
        start_seconds = time.perf_counter()
        processor = time.process_time()
        with self.rank_metrics.measure_step():
            numbers = self.step(self.rank_metrics.step_times)
        logging_start = time.perf_counter()
        own_times = self.rank_metrics.finish_step(self.rank_metrics.end_step(start_seconds, 0.0))
        logging_seconds = time.perf_counter() - logging_start
        synchronised = self.rank_sync.synchronise_step(
            should_stop=False,
            step_seconds=own_times.step_seconds,
            own_seconds=own_times.own_seconds,
        )
        # Here all ranks are synchronised: the following time is that of logging, without delays of
        # other ranks.
        logging_start = time.perf_counter()
        log_step(self.event_logger, number, numbers, own_times, synchronised.memory_bytes)
        self.rank_metrics.log_events(
            self.event_logger, number, own_times, log_every_steps=1, total_steps=10**9
        )
        logging_seconds += time.perf_counter() - logging_start
        self._record_pairs("with", start_seconds, processor)
        self.seconds["logging"].append(logging_seconds)

    def run_unmeasured(self) -> None:
        """Run the step alone, with the synchronisation of ranks that every step needs."""
        start_seconds = time.perf_counter()
        processor = time.process_time()
        self.step(self.plain)
        self.rank_sync.synchronise_step(should_stop=False)
        self._record_pairs("without", start_seconds, processor)

    def _record_pairs(self, kind: str, start_seconds: float, processor: float) -> None:
        self.seconds[kind].append(time.perf_counter() - start_seconds)
        self.seconds[f"{kind}_processor"].append(time.process_time() - processor)


def log_step(
    event_logger: EventLogger,
    number: int,
    numbers: StepResult,
    own_times: RankStepTimes,
    memory_bytes: tuple[int, ...],
) -> None:
    """Log a step event with all fields of a dense model."""
    tokens = SEQUENCE * ROWS * MICRO_BATCHES
    rates = measure_throughput(
        tokens,
        own_times.step_seconds,
        world_size=2,
        flops_per_token=1e7,
        matmul_flops_per_second=1e11,
    )
    event_logger.log(
        "step",
        step=number,
        loss=numbers.loss,
        gradient_norm=numbers.gradient_norm,
        learning_rate=1e-4,
        tokens=tokens,
        supervised_tokens=tokens,
        samples_seen=number * ROWS * MICRO_BATCHES,
        step_seconds=own_times.step_seconds,
        tokens_per_second=rates.tokens_per_second,
        model_flops_per_second=rates.model_flops_per_second,
        mfu=rates.mfu,
        memory_bytes=memory_bytes,
        waiting_seconds=own_times.part_seconds.get("waiting"),
        loss_scale=None,
        **{
            f"{part}_seconds": own_times.part_seconds[part]
            for part in ("data", "forward", "backward", "reduction", "optimizer")
        },
    )


def compare(layout: Layout, pairs: int) -> dict[str, list[float]]:
    """Run steps with and without measuring; return their seconds in order."""
    torch.set_num_threads(1)
    model = build_model(layout)
    optimizer = torch.optim.AdamW([parameter for _, parameter in model.named_parameters()], lr=1e-4)
    ranks = RankEnvironment(dist.get_rank(), dist.get_world_size())
    device = torch.device("cpu")
    rank_sync = RankSync(ranks, device)
    batches = [make_batch(number) for number in range(MICRO_BATCHES)]
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w", encoding="utf-8") as terminal:
        folder = Path(name)
        profiler = StepProfiler(folder, (), device, ranks.rank)
        meter = RankMetrics(
            TrainingState(model, optimizer, None), device, rank_sync, MICRO_BATCHES, profiler
        )
        # Rank 0 logs as in a run: the event file, log.txt and lines on the terminal.
        with open_event_logger(folder, rank=ranks.rank, stream=terminal) as event_logger:
            comparison = Comparison(
                model, optimizer, meter, rank_sync, event_logger, StepTimes(device), batches
            )
            for number in range(pairs + WARM_UP_STEPS):
                if number == WARM_UP_STEPS:
                    for row in comparison.seconds.values():
                        row.clear()
                for kind in ("with", "without") if number % 2 else ("without", "with"):
                    rank_sync.barrier()
                    comparison.run_measured(
                        number + 10
                    ) if kind == "with" else comparison.run_unmeasured()
        waits = float(len(meter._timers[0][1]._spans))
    return comparison.seconds | {"waits": [waits], "mark_seconds": [time_marks(model)]}


def time_marks(model: ParallelModel, count: int = 20_000) -> float:
    """Return the additional seconds of marking one wait."""

    def time_calls() -> float:
        start_seconds = time.perf_counter()
        for _ in range(count):
            with time_wait("data"):
                pass
        return (time.perf_counter() - start_seconds) / count

    unmarked = min(time_calls() for _ in range(3))
    waits = model.build_comm_timer()
    with use_timer(waits):
        best = float("inf")
        for _ in range(3):
            waits.reset()
            best = min(best, time_calls())
    return best - unmarked


def summarise(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Compute a layout's row of the result: seconds of a step, and shares of it."""

    def compute_overheads(key: str) -> list[float]:
        pairs = zip(seconds[f"with{key}"], seconds[f"without{key}"], strict=True)
        return [a / b - 1 for a, b in pairs]

    low, middle, high = statistics.quantiles(compute_overheads(""), n=4)
    fastest = min(seconds["without"])
    marks = seconds["waits"][0] * seconds["mark_seconds"][0]
    logging_seconds = statistics.median(seconds["logging"])
    return {
        "step_seconds": statistics.median(seconds["without"]),
        "fastest_step_seconds": fastest,
        "overhead_median": middle,
        "overhead_quartiles": [low, high],
        "overhead_processor_median": statistics.median(compute_overheads("_processor")),
        "waits_per_step": int(seconds["waits"][0]),
        "mark_seconds": seconds["mark_seconds"][0],
        "telling_seconds": logging_seconds,
        "share": (marks + logging_seconds) / fastest,
    }


def render(result: dict[str, Any]) -> str:
    """Render the page: the table and the notes of telemetry.notes.md."""
    lines = [
        "# Cost of measuring every rank",
        "",
        *__doc__.split("\n\n", 1)[1].split("\n\n", 1)[1].strip().splitlines(),
        "",
        "| layout | step, ms | waits | marks, µs | logging, µs | **share of the step** "
        "| whole steps | their processor time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in result["layouts"].items():
        low, high = row["overhead_quartiles"]
        lines.append(
            f"| {name} | {row['step_seconds'] * 1e3:.0f} | {row['waits_per_step']} | "
            f"{row['waits_per_step'] * row['mark_seconds'] * 1e6:.0f} | "
            f"{row['telling_seconds'] * 1e6:.0f} | **{row['share']:.2%}** | "
            f"{row['overhead_median']:+.1%} ({low:+.1%} to {high:+.1%}) | "
            f"{row['overhead_processor_median']:+.1%} |"
        )
    conditions = result["conditions"]
    lines += [
        "",
        f"{result['pairs']} pairs of steps, {SEQUENCE * ROWS * MICRO_BATCHES:,} tokens each, fp32, "
        "one thread each, every step logged (`run.log_every_steps: 1`): medians. "
        "Whole steps: the median pair and the quartiles of all.",
        f"Made {conditions['date']} by `python -m benchmarks.telemetry --publish`: "
        f"{conditions['cores']} cores ({conditions['processor']}), Python {conditions['python']}, "
        f"torch {conditions['packages']['torch']}, commit {conditions['commit']}; "
        f"load before {conditions['load_before']:.1f}.",
        "",
    ]
    return "\n".join(lines) + PAGE.with_suffix(".notes.md").read_text(encoding="utf-8")


def main() -> int:
    """Compare every layout; return 1 if measuring takes more than 1% of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/telemetry.md")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load = os.getloadavg()[0]
    rows = {}
    with RankPool(timeout_seconds=600.0) as pool:
        for name in options.layouts:
            rows[name] = summarise(pool.run(2, compare, LAYOUTS[name], options.pairs)[0])
            print(name, json.dumps(rows[name]))
    if options.publish:
        result = {
            "conditions": read_conditions() | {"load_before": load},
            "pairs": options.pairs,
            "layouts": rows,
        }
        PAGE.write_text(render(result), encoding="utf-8")
    return int(any(row["share"] > 0.01 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
