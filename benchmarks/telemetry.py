"""What measuring every rank costs a step: the same steps with and without it, turn by turn, on two
CPU ranks.

    python -m benchmarks.telemetry [--publish]

With: marks around every wait, the row that all ranks gather, the `step` and `ranks` events, log.txt
and the terminal's line, at every step (the default of run.log_every_steps, and the most there is).
Without: the step alone. Both go through the same model in the same processes, in changing order, so
that what else the machine does falls on both. Whole steps scatter by more than the cost; so its two
parts are timed by themselves as well: a mark (the time of one, times the waits of a step), and the
telling (from the moment when all ranks are together to the last line written). The share is theirs
of the fastest step; above 1% it ends with 1.
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
from functools import partial
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
from shardwright.numerics import chunked_cross_entropy, resolve_dtypes
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.comm_timing import time_wait, use_timer
from shardwright.plan import BatchPlan, Plan
from shardwright.telemetry.event_logger import EventLogger, open_event_logger
from shardwright.telemetry.meter import measure_throughput
from shardwright.train.profiling import StepProfiler
from shardwright.train.rank_metrics import RankMetrics, RankStepTimes
from shardwright.train.rank_sync import RankSync
from shardwright.train.setup import TrainingState
from shardwright.train.step import StepTimes, accumulate_gradients, update_parameters
from shardwright.verify.rank_pool import RankPool

LAYOUTS = {
    "zero_stage 3": Layout(dp_shard=2, zero_stage=3),
    "tp 2": Layout(tp=2),
    "pp 2": Layout(pp=2),
    "dp 2": Layout(dp_replicate=2),
}
VOCABULARY = 512
CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
}  # fmt: skip
SEQUENCE = 256
ROWS = 2
MICRO_BATCHES = 4
WARM = 1
SERIES = ("with", "without", "with_processor", "without_processor", "telling")
RESULT = Path(__file__).parent.parent / "docs" / "benchmarks" / "telemetry.json"


class Numbers(NamedTuple):
    """What a step gave."""

    loss: float
    gradient_norm: float


def build(layout: Layout) -> ParallelModel:
    """A small llama, cut."""
    shape = read_config(CONFIG)
    precision = PrecisionSection(kind="fp32")
    with torch.device("meta"):
        decoder = Decoder(
            shape,
            loss_function=partial(chunked_cross_entropy, chunk_tokens=256),
            compute_dtype=resolve_dtypes(precision).compute,
        )
    specs = {spec.name: spec for spec in shape.list_parameters()}
    plan = Plan(layout, BatchPlan(SEQUENCE, ROWS, MICRO_BATCHES, layout.data_ranks), precision)
    fill = lambda name, narrow: initialise_parameter(
        specs[name], 3, dtype=torch.float32, narrow=narrow
    )
    return apply_layout(
        decoder, plan, build_mesh(layout, "cpu"), torch.device("cpu"), read_slice=fill
    )


def batch(seed: int) -> MicroBatch:
    """Random ids."""
    random = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE), generator=random)
    positions_BT = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    return MicroBatch(
        ids_BT, ids_BT.roll(-1, 1), positions_BT, None, torch.arange(ROWS), ROWS * SEQUENCE
    )


@dataclass
class Race:
    """One layout's model, and what a step of it takes with and without measuring."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    rank_metrics: RankMetrics
    meeting: RankSync
    event_logger: EventLogger
    plain: StepTimes
    batches: list[MicroBatch]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {key: [] for key in SERIES})

    def step(self, times: StepTimes) -> Numbers:
        """What both do."""
        loss = accumulate_gradients(self.model, self.batches, seed=0, step=0, times=times)
        updated = update_parameters(
            self.model, self.optimizer, learning_rate=1e-4, max_grad_norm=1.0, times=times
        )
        return Numbers(loss.mean(), updated.gradient_norm)

    def measured(self, number: int) -> None:
        """A step as the training loop takes it."""
        began = time.perf_counter()
        processor = time.process_time()
        with self.rank_metrics.measure_step():
            done = self.step(self.rank_metrics.step_times)
        reading = time.perf_counter()
        mine = self.rank_metrics.finish_step(began, 0.0)
        telling = time.perf_counter() - reading
        minutes = self.meeting.synchronise_step(
            should_stop=False, step_seconds=mine.step_seconds, own_seconds=mine.own_seconds
        )
        # From here on all ranks are together: what follows is the telling's time, and nobody else's
        # delay.
        reading = time.perf_counter()
        tell_step(self.event_logger, number, done, mine, minutes.memory_bytes)
        self.rank_metrics.log_events(
            self.event_logger, number, mine, log_every_steps=1, total_steps=10**9
        )
        telling += time.perf_counter() - reading
        self._record_pairs("with", began, processor)
        self.seconds["telling"].append(telling)

    def unmeasured(self) -> None:
        """The step alone, with the meeting that ranks hold anyway."""
        began = time.perf_counter()
        processor = time.process_time()
        self.step(self.plain)
        self.meeting.synchronise_step(should_stop=False)
        self._record_pairs("without", began, processor)

    def _record_pairs(self, kind: str, began: float, processor: float) -> None:
        self.seconds[kind].append(time.perf_counter() - began)
        self.seconds[f"{kind}_processor"].append(time.process_time() - processor)


def tell_step(
    speaker: EventLogger,
    number: int,
    done: Numbers,
    mine: RankStepTimes,
    memory_bytes: tuple[int, ...],
) -> None:
    """The event of a step with every field that a dense model's has."""
    tokens = SEQUENCE * ROWS * MICRO_BATCHES
    rates = measure_throughput(
        tokens, mine.step_seconds, world_size=2, flops_per_token=1e7, matmul_flops_per_second=1e11
    )
    speaker.log(
        "step",
        step=number,
        loss=done.loss,
        gradient_norm=done.gradient_norm,
        learning_rate=1e-4,
        tokens=tokens,
        supervised_tokens=tokens,
        samples_seen=number * ROWS * MICRO_BATCHES,
        step_seconds=mine.step_seconds,
        tokens_per_second=rates.tokens_per_second,
        model_flops_per_second=rates.model_flops_per_second,
        mfu=rates.mfu,
        memory_bytes=memory_bytes,
        waiting_seconds=mine.part_seconds.get("waiting"),
        loss_scale=None,
        **{
            f"{part}_seconds": mine.part_seconds[part]
            for part in ("data", "forward", "backward", "reduction", "optimizer")
        },
    )


def race(layout: Layout, pairs: int) -> dict[str, list[float]]:
    """Seconds of steps with and without measuring, in the order in which they came."""
    torch.set_num_threads(1)
    model = build(layout)
    optimizer = torch.optim.AdamW([parameter for _, parameter in model.named_parameters()], lr=1e-4)
    ranks = RankEnvironment(dist.get_rank(), dist.get_world_size())
    device = torch.device("cpu")
    meeting = RankSync(ranks, device)
    batches = [batch(number) for number in range(MICRO_BATCHES)]
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w", encoding="utf-8") as terminal:
        folder = Path(name)
        profiled = StepProfiler(folder, (), device, ranks.rank)
        meter = RankMetrics(
            TrainingState(model, optimizer, None), device, meeting, MICRO_BATCHES, profiled
        )
        # Rank 0 speaks as in a run: the event file, log.txt and lines on the terminal.
        with open_event_logger(folder, rank=ranks.rank, stream=terminal) as speaker:
            lap = Race(model, optimizer, meter, meeting, speaker, StepTimes(device), batches)
            for number in range(pairs + WARM):
                if number == WARM:
                    for row in lap.seconds.values():
                        row.clear()
                for kind in ("with", "without") if number % 2 else ("without", "with"):
                    meeting.barrier()
                    lap.measured(number + 10) if kind == "with" else lap.unmeasured()
        waits = float(len(meter._comm_timer._spans))
    return lap.seconds | {"waits": [waits], "mark_seconds": [time_marks(model)]}


def time_marks(model: ParallelModel, count: int = 20_000) -> float:
    """Seconds that marking one wait takes, beyond what an unmarked one does."""

    def spend() -> float:
        began = time.perf_counter()
        for _ in range(count):
            with time_wait("data"):
                pass
        return (time.perf_counter() - began) / count

    unmarked = min(spend() for _ in range(3))
    waits = model.build_comm_timer()
    with use_timer(waits):
        best = float("inf")
        for _ in range(3):
            waits.reset()
            best = min(best, spend())
    return best - unmarked


def sum_up(found: dict[str, list[float]]) -> dict[str, Any]:
    """A layout's row of the result: seconds of a step, and shares of it."""
    over = lambda key: [
        a / b - 1 for a, b in zip(found[f"with{key}"], found[f"without{key}"], strict=True)
    ]
    low, middle, high = statistics.quantiles(over(""), n=4)
    fastest = min(found["without"])
    marks = found["waits"][0] * found["mark_seconds"][0]
    telling = statistics.median(found["telling"])
    return {
        "step_seconds": statistics.median(found["without"]),
        "fastest_step_seconds": fastest,
        "overhead_median": middle,
        "overhead_quartiles": [low, high],
        "overhead_processor_median": statistics.median(over("_processor")),
        "waits_per_step": int(found["waits"][0]),
        "mark_seconds": found["mark_seconds"][0],
        "telling_seconds": telling,
        "share": (marks + telling) / fastest,
    }


def render(told: dict[str, Any]) -> str:
    """The page: the table, and what stands in telemetry.notes.md."""
    lines = [
        "# What measuring every rank costs", "",
        *__doc__.split("\n\n", 1)[1].split("\n\n", 1)[1].strip().splitlines(), "",
        "| layout | step, ms | waits | marks, µs | telling, µs | **share of the step** | whole steps | their processor time |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in told["layouts"].items():
        low, high = row["overhead_quartiles"]
        lines.append(
            f"| {name} | {row['step_seconds'] * 1e3:.0f} | {row['waits_per_step']} | "
            f"{row['waits_per_step'] * row['mark_seconds'] * 1e6:.0f} | {row['telling_seconds'] * 1e6:.0f} | "
            f"**{row['share']:.2%}** | {row['overhead_median']:+.1%} ({low:+.1%} to {high:+.1%}) | "
            f"{row['overhead_processor_median']:+.1%} |"
        )
    conditions = told["conditions"]
    lines += [
        "",
        f"{told['pairs']} pairs of steps, {SEQUENCE * ROWS * MICRO_BATCHES:,} tokens each, fp32, one thread each, every step told "
        "(`run.log_every_steps: 1`): medians. Whole steps: the median pair and the quartiles of all.",
        f"Made {conditions['date']} by `python -m benchmarks.telemetry --publish`: {conditions['cores']} cores "
        f"({conditions['processor']}), Python {conditions['python']}, torch {conditions['packages']['torch']}, commit "
        f"{conditions['commit']}; load before {conditions['load_before']:.1f}.",
        "",
    ]  # fmt: skip
    return "\n".join(lines) + RESULT.with_suffix(".notes.md").read_text(encoding="utf-8")


def main() -> int:
    """Race every layout; returns 1 where measuring takes more than a hundredth of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks/telemetry.{json,md}"
    )
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load = os.getloadavg()[0]
    rows = {}
    with RankPool(timeout_seconds=600.0) as pool:
        for name in given.layouts:
            rows[name] = sum_up(pool.run(2, race, LAYOUTS[name], given.num_pairs)[0])
            print(name, json.dumps(rows[name]))
    if given.publish:
        told = {
            "conditions": read_conditions() | {"load_before": load},
            "pairs": given.num_pairs,
            "layouts": rows,
        }
        RESULT.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        RESULT.with_suffix(".md").write_text(render(told), encoding="utf-8")
    return int(any(row["share"] > 0.01 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
