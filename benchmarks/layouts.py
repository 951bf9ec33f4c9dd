"""Step time and memory of every layout on two CPU ranks, compared with one process, ZeRO-3 and the
planner's predictions.

    python -m benchmarks.layouts                       everything (half an hour on two idle cores)
    python -m benchmarks.layouts --group 'dense bf16'  one model and precision only; repeatable
    python -m benchmarks.layouts --predict             measure nothing: predict the JSON's rows and
                                                       write the page again
    python -m benchmarks.layouts --publish             write to docs/benchmarks as well
    python -m benchmarks.layouts --name NAME           other file names, for example for a busy
                                                       machine whose speeds must not be quoted

All layouts of a model do the same work: the same global batch and tokens, one thread per rank. The
layouts of one precision are timed in turn, round by round, so that other load slows them alike. A
layout whose first loss differs from that of one process is an error, not a row. Times are medians
over rounds. Right before, the rates that the planner needs are measured on the same two ranks and
stored with the rows, so that `benchmarks.fit_cpu` and `--predict` need no machine. Rows of groups
that are not measured stay unchanged. For pipelines every action is timed on every rank, and the
medians are simulated with the same schedule: `share` is the measured utilisation over the one of
the simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.allocated import count_resident_bytes, measure_allocated_bytes
from benchmarks.conditions import format_rows, read_conditions
from benchmarks.layout_cases import ENTRIES, MICRO_BATCHES, Entry
from benchmarks.layout_page import render_page
from benchmarks.predicted import build_cpu_cluster, measure_profile, predict_step
from shardwright.config.training import OptimizerSection
from shardwright.data.loader import MicroBatch
from shardwright.hardware.measured_profile import MeasuredProfile, read_profile
from shardwright.layout import Layout, RankGrid
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import chunked_cross_entropy
from shardwright.numerics.precision import resolve_dtypes
from shardwright.optim import build_optimizer
from shardwright.parallel import ParallelModel, apply_layout, build_mesh
from shardwright.schedule import Action, load_schedule, simulate
from shardwright.training.metrics.step_times import StepTimes
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification.rank_pool import RankPool

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
FIRST_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


@dataclass
class BuiltLayout:
    """Model, optimizer and data of one layout on this rank."""

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    micro_batches: list[MicroBatch]
    times: StepTimes


_layouts: dict[Entry, BuiltLayout] = {}
"""Models of this worker process by entry, reused in all rounds."""


def build_layout(entry: Entry) -> float:
    """Build a layout on this rank, run one step and return its loss."""
    torch.set_num_threads(1)
    shape = entry.shape
    layout = entry.layout
    with torch.device("meta"):
        loss = partial(chunked_cross_entropy, chunk_tokens=entry.batch.sequence_length)
        decoder = Decoder(
            shape, loss_function=loss, compute_dtype=resolve_dtypes(entry.plan.precision).compute
        )
    specs = {spec.name: spec for spec in shape.list_parameters()}
    model = apply_layout(
        decoder,
        entry.plan,
        build_mesh(layout, "cpu"),
        torch.device("cpu"),
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 0, dtype=torch.float32, narrow=narrow
        ),
    )
    optimizer = build_optimizer(
        model.named_parameters(), OptimizerSection(), learning_rate=1e-4, weight_decay=0.1
    )
    data_rank = RankGrid(layout).data_rank(dist.get_rank() if dist.is_initialized() else 0)
    _layouts[entry] = BuiltLayout(
        model, optimizer, _make_micro_batches(entry, data_rank), StepTimes(torch.device("cpu"))
    )
    return float(run_step(entry)["loss"])


def _make_micro_batches(entry: Entry, data_rank: int) -> list[MicroBatch]:
    batch = entry.batch
    num_tokens = batch.sequence_length
    rows = torch.randint(
        0,
        entry.shape.vocab_size,
        (batch.global_batch_size, num_tokens + 1),
        generator=torch.Generator().manual_seed(0),
    )
    micro_batches = []
    for number in range(batch.gradient_accumulation_steps):
        first = (number * batch.data_ranks + data_rank) * batch.micro_batch_size
        rows_BT = rows[first : first + batch.micro_batch_size]
        positions_BT = torch.arange(num_tokens).expand(len(rows_BT), num_tokens)
        samples_B = torch.arange(first, first + len(rows_BT))
        micro_batches.append(
            MicroBatch(
                rows_BT[:, :-1].contiguous(),
                rows_BT[:, 1:].contiguous(),
                positions_BT,
                None,
                samples_B,
                rows_BT.shape[0] * num_tokens,
            )
        )
    return micro_batches


def run_step(entry: Entry) -> dict[str, Any]:
    """Run one optimizer step; return loss, seconds in total and by part, and action spans."""
    layout_state = _layouts[entry]
    actions = {}
    if layout_state.model.pipeline is not None:
        layout_state.model.pipeline.action_observer = lambda action, start, end: (
            actions.__setitem__(str(action), (start, end))
        )
    # Gathers that the last update began belong to this step: its forward pass makes them.
    layout_state.model.invalidate_weights()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    loss = _run_step(layout_state)
    seconds = time.perf_counter() - start
    return {
        "loss": loss,
        "seconds": seconds,
        "parts": layout_state.times.seconds(),
        "actions": actions,
    }


def _run_step(layout_state: BuiltLayout) -> float:
    loss = accumulate_gradients(
        layout_state.model, layout_state.micro_batches, seed=0, step=0, times=layout_state.times
    )
    update_parameters(
        layout_state.model,
        layout_state.optimizer,
        learning_rate=1e-4,
        max_grad_norm=1.0,
        times=layout_state.times,
    )
    return float(loss.mean())


def measure_peak_bytes(entry: Entry) -> int:
    """Return the peak bytes of tensors of a step on this rank."""
    layout_state = _layouts[entry]
    if layout_state.model.pipeline is not None:
        layout_state.model.pipeline.action_observer = None
    return count_resident_bytes(
        layout_state.model, layout_state.optimizer
    ) + measure_allocated_bytes(lambda: _run_step(layout_state))


def compute_utilisation(entry: Entry, rounds: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Return a pipeline's measured utilisation, and that of its schedule simulated with the medians
    of the same actions.

    Args:
        rounds: results of `run_step` per round and rank.
    """
    layout = entry.layout
    schedule = load_schedule(layout.schedule, layout.pp, MICRO_BATCHES, layout.virtual_stages)
    measured = []
    medians: dict[Action, float] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            spans = [by_rank[rank]["actions"][str(action)] for by_rank in rounds]
            medians[action] = median(end - start for start, end in spans)
    for by_rank in rounds:
        spans = [span for reply in by_rank for span in reply["actions"].values()]
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        measured.append(sum(end - start for start, end in spans) / (layout.pp * whole))
    of_schedule = simulate(schedule, medians).utilisation
    return {
        "measured": median(measured),
        "of_schedule": of_schedule,
        "share": median(measured) / of_schedule,
    }


def measure(
    entries: list[Entry], num_rounds: int, first_losses: dict[str, float]
) -> list[dict[str, Any]]:
    """Time every layout of a group in turn, then measure its memory.

    Args:
        first_losses: first losses of earlier groups by kind of work; this group's are added.

    Raises:
        RuntimeError: the loss of a layout differs from that of one process.
    """
    rounds_by_entry: dict[Entry, list[list[dict[str, Any]]]] = {entry: [] for entry in entries}
    with RankPool(timeout_seconds=300.0) as pool:
        for entry in entries:
            loss = pool.run(entry.layout.world_size, build_layout, entry)[0]
            expected = first_losses.setdefault(entry.forward_work, loss)
            if abs(loss - expected) > FIRST_LOSS_TOLERANCE[entry.precision] * expected:
                raise RuntimeError(
                    f"{entry}: first loss {loss}, others have {expected}: not the same work"
                )
        for number in range(num_rounds):
            for entry in entries:
                rounds_by_entry[entry].append(pool.run(entry.layout.world_size, run_step, entry))
            print(
                f"{entries[0].group}: round {number + 1} of {num_rounds}",
                file=sys.stderr,
                flush=True,
            )
        peaks = {
            entry: max(pool.run(entry.layout.world_size, measure_peak_bytes, entry))
            for entry in entries
        }
    return [
        summarise(entry, rounds) | {"memory_bytes": peaks[entry]}
        for entry, rounds in rounds_by_entry.items()
    ]


def summarise(entry: Entry, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Compute medians over rounds; a step takes as long as its slowest rank."""
    steps = [max(reply["seconds"] for reply in by_rank) for by_rank in rounds]
    row: dict[str, Any] = {
        "name": str(entry),
        "work": entry.forward_work,
        "layout": entry.layout_name,
        "recompute": entry.recompute,
        "seconds": median(steps),
        "parts": {
            part: median(by_rank[0]["parts"][part] for by_rank in rounds)
            for part in rounds[0][0]["parts"]
        },
    }
    if entry.layout.pp > 1:
        row["utilisation"] = compute_utilisation(entry, rounds)
    return row


def measure_group(group: str, num_rounds: int, first_losses: dict[str, float]) -> dict[str, Any]:
    """Measure rates, then the rows of one group; record the conditions."""
    entries = [entry for entry in ENTRIES if entry.group == group]
    load = os.getloadavg()[0]
    profile = measure_profile(
        [(entry.shape, entry.candidate) for entry in entries], Layout(dp_replicate=2)
    )
    rows = measure(entries, num_rounds, first_losses)
    conditions = read_conditions() | {
        "rounds": num_rounds,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    measured: dict[str, Any] = {
        "conditions": conditions,
        "profile": None if profile is None else profile.as_dict(),
        "rows": rows,
    }
    measured["first_loss"] = first_losses[entries[0].forward_work]
    return dict(json.loads(json.dumps(measured)))  # as read from the file


def predict_rows(groups: dict[str, Any]) -> None:
    """Add to each row the planner's predictions with its group's profile and with the catalogue's
    CPU alone.
    """
    entries = {str(entry): entry for entry in ENTRIES}
    for group in groups.values():
        if group["profile"] is None:
            continue
        profile: MeasuredProfile = read_profile(group["profile"])
        for row in group["rows"]:
            entry = entries[row["name"]]
            for key, rates, figures in (
                ("predicted", profile, ("step_seconds", "memory_bytes")),
                ("predicted_by_catalogue", None, ("step_seconds",)),
            ):
                cluster = build_cpu_cluster(entry.layout.world_size, rates)
                found = predict_step(entry.shape, entry.candidate, cluster)
                row[key] = {figure: found[figure] for figure in figures}


def main() -> int:
    """Return exit code 0 if every layout has a row, 2 for an unknown group."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layouts", description=__doc__.split("\n\n")[0]
    )
    names = list(dict.fromkeys(entry.group for entry in ENTRIES))
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        help=f"group to measure, of {', '.join(names)}; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--predict", action="store_true", help="measure nothing; predict the rows of the JSON again"
    )
    parser.add_argument(
        "--name",
        default="layouts-two-ranks",
        help="name of the JSON and the page (default layouts-two-ranks)",
    )
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--publish", action="store_true", help="write into docs/benchmarks as well")
    arguments = parser.parse_args()
    if unknown := set(arguments.group) - set(names):
        print(f"No group {', '.join(unknown)}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    folders = [arguments.out, *((DOCS,) if arguments.publish else ())]
    files = [folder / f"{arguments.name}.json" for folder in folders]
    known = next((path for path in reversed(files) if path.exists()), None)
    groups: dict[str, Any] = (
        {} if known is None else json.loads(known.read_text()).get("groups", {})
    )
    first_losses = {group["rows"][0]["work"]: group["first_loss"] for group in groups.values()}
    for name in [] if arguments.predict else arguments.group or names:
        groups[name] = measure_group(name, arguments.rounds, first_losses)
        write(groups, files)
    if not groups:
        print(f"no measurements: no {' or '.join(map(str, files))}", file=sys.stderr)
        return 2
    print(write(groups, files))
    return 0


def write(groups: dict[str, Any], files: list[Path]) -> str:
    """Predict all rows, write each JSON file and its page, and return the page.

    Groups have the order of `ENTRIES`.
    """
    predict_rows(groups)
    names = [name for name in dict.fromkeys(entry.group for entry in ENTRIES) if name in groups]
    result = {
        "schema_version": 2,
        "name": files[0].stem,
        "groups": {name: groups[name] for name in names},
    }
    notes = DOCS / f"{files[0].stem}.notes.md"
    page = render_page(result, notes.read_text(encoding="utf-8") if notes.exists() else "")
    for path in files:
        path.write_text(format_rows(result) + "\n")
        path.with_suffix(".md").write_text(page)
    return page


if __name__ == "__main__":
    sys.exit(main())
