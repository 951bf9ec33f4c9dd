"""What measuring every rank costs a step: the same steps with and without it, turn by turn, on two CPU ranks.

    python -m benchmarks.telemetry [--publish]

With: marks around every wait, the row that all ranks gather, and the `ranks` event on rank 0, at every step (the default of
run.log_every_steps, and the most there is). Without: the step alone. Both go through the same model in the same processes, in
changing order, so that what else the machine does falls on both. The marks are also timed by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.conditions import read_conditions
from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import MicroBatch
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.init import initialise
from shardwright.numerics import chunked_cross_entropy, dtypes
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.parallel.waiting import measuring, waiting
from shardwright.plan import BatchPlan, Plan
from shardwright.telemetry.events import EventWriter
from shardwright.telemetry.speaker import Speaker
from shardwright.train.measuring import RankMeter
from shardwright.train.meeting import Meeting
from shardwright.train.profiling import ProfiledSteps
from shardwright.train.ranks import RankEnvironment
from shardwright.train.setup import TrainState
from shardwright.train.step import StepTimes, accumulate_gradients, update
from shardwright.verify.pool import RankPool

LAYOUTS = {
    "zero_stage 3": Layout(dp_shard=2, zero_stage=3),
    "tp 2": Layout(tp=2),
    "pp 2": Layout(pp=2),
    "dp 2": Layout(dp_replicate=2),
}
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
}  # fmt: skip
SEQUENCE, ROWS, MICRO_BATCHES, WARM = 256, 2, 4, 1
RESULT = Path(__file__).parent.parent / "docs" / "benchmarks" / "telemetry.json"


def build(layout: Layout) -> ParallelModel:
    """A small llama, cut."""
    shape, precision = read_config(CONFIG), PrecisionSection(kind="fp32")
    with torch.device("meta"):
        decoder = Decoder(
            shape, loss_function=partial(chunked_cross_entropy, chunk_tokens=256), compute_dtype=dtypes(precision).compute
        )
    specs = {spec.name: spec for spec in shape.parameters()}
    plan = Plan(layout, BatchPlan(SEQUENCE, ROWS, MICRO_BATCHES, layout.data_ranks), precision)
    fill = lambda name, narrow: initialise(specs[name], 3, dtype=torch.float32, narrow=narrow)  # noqa: E731
    return apply_layout(decoder, plan, build_mesh(layout, "cpu"), torch.device("cpu"), fill=fill)


def batch(seed: int) -> MicroBatch:
    """Random ids."""
    random = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, CONFIG["vocab_size"], (ROWS, SEQUENCE), generator=random)
    positions_BT = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE)
    return MicroBatch(ids_BT, ids_BT.roll(-1, 1), positions_BT, None, torch.arange(ROWS), ROWS * SEQUENCE)


def race(layout: Layout, pairs: int) -> dict[str, list[float]]:
    """Seconds of steps with and without measuring, in the order in which they came."""
    torch.set_num_threads(1)
    model = build(layout)
    optimizer = torch.optim.AdamW([parameter for _, parameter in model.named_parameters()], lr=1e-4)
    ranks = RankEnvironment(dist.get_rank(), dist.get_world_size())
    meeting, device = Meeting(ranks, torch.device("cpu")), torch.device("cpu")
    state = TrainState(model, optimizer, None)
    batches = [batch(number) for number in range(MICRO_BATCHES)]
    seconds: dict[str, list[float]] = {"with": [], "without": [], "with_processor": [], "without_processor": []}
    with tempfile.TemporaryDirectory() as folder:
        meter = RankMeter(state, device, meeting, MICRO_BATCHES, ProfiledSteps(Path(folder), (), device, ranks.rank))
        speaker = Speaker(EventWriter(folder) if ranks.speaks else None, [])
        plain = StepTimes(device)

        def step(times: StepTimes) -> None:
            loss = accumulate_gradients(model, batches, seed=0, step=0, times=times)
            update(model, optimizer, learning_rate=1e-4, max_grad_norm=1.0, times=times)
            loss.mean()

        for number in range(pairs + WARM):
            for kind in ("with", "without") if number % 2 else ("without", "with"):
                meeting.wait()
                began, processor = time.perf_counter(), time.process_time()
                if kind == "with":
                    with meter.step():
                        step(meter.times)
                    mine = meter.read(began, 0.0)
                    meeting.hold(stop=False, step_seconds=mine.step_seconds, own_seconds=mine.own_seconds)
                    meter.tell(speaker, number + 10, mine, log_every_steps=1, total_steps=10**9)
                else:
                    step(plain)
                    plain.seconds()
                    meeting.hold(stop=False)
                if number >= WARM:
                    seconds[kind].append(time.perf_counter() - began)
                    seconds[f"{kind}_processor"].append(time.process_time() - processor)
        waits = len(meter._waits._spans)
        speaker.close()
    return seconds | {"waits": [float(waits)], "mark_seconds": [time_marks(model)]}


def time_marks(model: ParallelModel, count: int = 20_000) -> float:
    """Seconds that marking one wait takes, beyond what an unmarked one does."""

    def spend() -> float:
        began = time.perf_counter()
        for _ in range(count):
            with waiting("data"):
                pass
        return (time.perf_counter() - began) / count

    unmarked = min(spend() for _ in range(3))
    waits = model.waits()
    with measuring(waits):
        best = float("inf")
        for _ in range(3):
            waits.start()
            best = min(best, spend())
    return best - unmarked


def main() -> int:
    """Race every layout; returns 1 where measuring takes more than a hundredth of a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--publish", action="store_true", help="write docs/benchmarks/telemetry.json")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = {}
    with RankPool(timeout_seconds=600.0) as pool:
        for name in given.layouts:
            layout = LAYOUTS[name]
            found = pool.run(2, race, layout, given.pairs)[0]
            ratios = [a / b - 1 for a, b in zip(found["with"], found["without"], strict=True)]
            quarter = statistics.quantiles(ratios, n=4)
            step, fastest = statistics.median(found["without"]), min(found["without"])
            rows[name] = {
                "step_seconds": step, "overhead_median": quarter[1], "overhead_quartiles": [quarter[0], quarter[2]],
                "overhead_fastest": min(found["with"]) / min(found["without"]) - 1, "overhead_processor_median": statistics.median(
                    a / b - 1 for a, b in zip(found["with_processor"], found["without_processor"], strict=True)
                ),
                "processor_seconds": statistics.median(found["without_processor"]), "waits_per_step": found["waits"][0],
                "mark_seconds": found["mark_seconds"][0], "marks_share": found["waits"][0] * found["mark_seconds"][0] / fastest,
            }  # fmt: skip
            print(name, json.dumps(rows[name]))
    if given.publish:
        told = {"conditions": read_conditions() | {"load": os.getloadavg()[0]}, "pairs": given.pairs, "layouts": rows}
        RESULT.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return int(any(row["marks_share"] > 0.01 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
