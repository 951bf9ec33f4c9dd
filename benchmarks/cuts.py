"""Step time and memory of every cut on two CPU ranks, beside one process, ZeRO-3 and what the
planner predicts.

    python -m benchmarks.cuts                       everything (half an hour on two quiet cores)
    python -m benchmarks.cuts --group 'dense bf16'  these only (a model and a precision); repeatable
    python -m benchmarks.cuts --predict             measure nothing: predict anew what the JSON holds, and write the page again
    python -m benchmarks.cuts --publish             into docs/benchmarks as well
    python -m benchmarks.cuts --name cuts-predicted by another name: of a busy machine, say, whose speeds nobody should quote

All layouts of a model do the same work: the same global batch and tokens, one thread a rank. Those
of one precision are timed in turn, round by round, so that what slows the machine slows them alike;
a layout whose first loss differs from one process's is an error, not a row. Times are medians over
rounds. Right before, the rates that the planner asks for are measured on the same two ranks: they
stand beside the rows, so that `benchmarks.fit_cpu` and `--predict` need no machine. Rows of groups
that are not measured stay what they were. For pipelines every action is timed on every rank, and
the medians are put through the same schedule: `of its schedule` is the utilisation that was
measured over the one that the schedule gives with these times.
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

from benchmarks.allocated import allocated_by, held_bytes
from benchmarks.conditions import read_conditions
from benchmarks.cut_cases import ENTRIES, GLOBAL_BATCH, MICRO_BATCHES, MODELS, TOKENS, Entry
from benchmarks.cut_page import page
from benchmarks.predicted import measured_profile, predicted_step, ranks_of
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
from shardwright.train.step import StepTimes, accumulate_gradients, update_parameters
from shardwright.verify.rank_pool import RankPool

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
FIRST_LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}


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
    shape = entry.shape
    layout = entry.layout
    with torch.device("meta"):
        loss = partial(chunked_cross_entropy, chunk_tokens=TOKENS)
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
    _built[entry] = Built(
        model, optimizer, _micro_batches(entry, data_rank), StepTimes(torch.device("cpu"))
    )
    return float(step(entry)["loss"])


def _micro_batches(entry: Entry, data_rank: int) -> list[MicroBatch]:
    batch = entry.batch
    rows = torch.randint(
        0,
        entry.shape.vocab_size,
        (GLOBAL_BATCH, TOKENS + 1),
        generator=torch.Generator().manual_seed(0),
    )
    micro_batches = []
    for number in range(batch.gradient_accumulation_steps):
        first = (number * batch.data_ranks + data_rank) * batch.micro_batch_size
        rows_BT = rows[first : first + batch.micro_batch_size]
        positions_BT = torch.arange(TOKENS).expand(len(rows_BT), TOKENS)
        samples_B = torch.arange(first, first + len(rows_BT))
        micro_batches.append(
            MicroBatch(
                rows_BT[:, :-1].contiguous(),
                rows_BT[:, 1:].contiguous(),
                positions_BT,
                None,
                samples_B,
                rows_BT.shape[0] * TOKENS,
            )
        )
    return micro_batches


def step(entry: Entry) -> dict[str, Any]:
    """One optimizer step: its loss, seconds in all and by part, and of a pipeline's actions."""
    built = _built[entry]
    actions = {}
    if built.model.pipeline is not None:
        built.model.pipeline.action_observer = lambda action, began, ended: actions.__setitem__(
            str(action), (began, ended)
        )
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    loss = _take_step(built)
    seconds = time.perf_counter() - began
    return {"loss": loss, "seconds": seconds, "parts": built.times.seconds(), "actions": actions}


def _take_step(built: Built) -> float:
    loss = accumulate_gradients(built.model, built.micro_batches, seed=0, step=0, times=built.times)
    update_parameters(
        built.model, built.optimizer, learning_rate=1e-4, max_grad_norm=1.0, times=built.times
    )
    return float(loss.mean())


def peak_bytes(entry: Entry) -> int:
    """The most bytes of tensors that a step holds on this rank."""
    built = _built[entry]
    if built.model.pipeline is not None:
        built.model.pipeline.action_observer = None
    return held_bytes(built.model, built.optimizer) + allocated_by(lambda: _take_step(built))


def utilisation(entry: Entry, rounds: list[list[dict[str, Any]]]) -> dict[str, float]:
    """A pipeline's measured utilisation, and what its schedule gives with the medians of the same
    actions.

    Args:
        rounds: per round, per rank, what `step` gave.
    """
    layout = entry.layout
    schedule = load_schedule(layout.schedule, layout.pp, MICRO_BATCHES, layout.virtual_stages)
    measured = []
    ideal = []
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
    return {
        "measured": median(measured),
        "of_schedule": ideal[0],
        "share": median(measured) / ideal[0],
    }


def measure(
    entries: list[Entry], num_rounds: int, first_losses: dict[str, float]
) -> list[dict[str, Any]]:
    """Time every layout of a group in turn, then take its memory.

    Args:
        first_losses: by kind of work, of groups before; gets those of this one.

    Raises:
        RuntimeError: a layout computes another loss than one process.
    """
    told: dict[Entry, list[list[dict[str, Any]]]] = {entry: [] for entry in entries}
    with RankPool(timeout_seconds=300.0) as pool:
        for entry in entries:
            loss = pool.run(entry.layout.world_size, build, entry)[0]
            expected = first_losses.setdefault(entry.forward_work, loss)
            if abs(loss - expected) > FIRST_LOSS_TOLERANCE[entry.precision] * expected:
                raise RuntimeError(
                    f"{entry}: first loss {loss}, others have {expected}: not the same work"
                )
        for number in range(num_rounds):
            for entry in entries:
                told[entry].append(pool.run(entry.layout.world_size, step, entry))
            print(
                f"{entries[0].group}: round {number + 1} of {num_rounds}",
                file=sys.stderr,
                flush=True,
            )
        peaks = {
            entry: max(pool.run(entry.layout.world_size, peak_bytes, entry)) for entry in entries
        }
    return [
        summarise(entry, rounds) | {"memory_bytes": peaks[entry]} for entry, rounds in told.items()
    ]


def summarise(entry: Entry, rounds: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over rounds; a step takes as long as its slowest rank."""
    steps = [max(told["seconds"] for told in by_rank) for by_rank in rounds]
    row: dict[str, Any] = {
        "name": str(entry),
        "work": entry.forward_work,
        "model": entry.model,
        "layout": entry.layout_name,
        "precision": entry.precision,
        "recompute": entry.recompute,
        "seconds": median(steps),
        "range": [min(steps), max(steps)],
        "parts": {
            part: median(by_rank[0]["parts"][part] for by_rank in rounds)
            for part in rounds[0][0]["parts"]
        },
    }
    if entry.layout.pp > 1:
        row["utilisation"] = utilisation(entry, rounds)
    return row


def measure_group(group: str, num_rounds: int, first_losses: dict[str, float]) -> dict[str, Any]:
    """Rates first, then the rows of one group, under the conditions of this moment."""
    entries = [entry for entry in ENTRIES if entry.group == group]
    load = os.getloadavg()[0]
    profile = measured_profile(
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
    return dict(json.loads(json.dumps(measured)))  # as it is read back


def predict_rows(groups: dict[str, Any]) -> None:
    """Put beside each row what the planner predicts with its group's profile, and what of the
    catalogue's CPU alone.
    """
    entries = {str(entry): entry for entry in ENTRIES}
    for group in groups.values():
        if group["profile"] is None:
            continue
        profile: MeasuredProfile = read_profile(group["profile"])
        for row in group["rows"]:
            entry = entries[row["name"]]
            for key, rates in (("predicted", profile), ("predicted_by_catalogue", None)):
                row[key] = predicted_step(
                    entry.shape, entry.candidate, ranks_of(entry.layout.world_size, rates)
                )


def main() -> int:
    """Exit code 0 when every layout gave a row, 2 for a group that does not exist."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuts", description=__doc__.split("\n\n")[0]
    )
    names = list(dict.fromkeys(entry.group for entry in ENTRIES))
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        help=f"of {', '.join(names)}; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--predict", action="store_true", help="measure nothing; predict the rows of the JSON anew"
    )
    parser.add_argument(
        "--name", default="cuts-two-ranks", help="of the JSON and the page (default cuts-two-ranks)"
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
        groups[name] = measure_group(name, arguments.has_divisibility_rule, first_losses)
        write(groups, files)
    if not groups:
        print(f"nothing is measured yet: no {' or '.join(map(str, files))}", file=sys.stderr)
        return 2
    print(write(groups, files))
    return 0


def write(groups: dict[str, Any], files: list[Path]) -> str:
    """Each JSON file and its page, predictions made anew; the page. Groups stand in the order of
    `ENTRIES`.
    """
    predict_rows(groups)
    names = [name for name in dict.fromkeys(entry.group for entry in ENTRIES) if name in groups]
    result = {
        "schema_version": 2,
        "name": files[0].stem,
        "models": MODELS,
        "groups": {name: groups[name] for name in names},
    }
    notes = DOCS / f"{files[0].stem}.notes.md"
    told = page(result, notes.read_text(encoding="utf-8") if notes.exists() else "")
    for path in files:
        path.write_text(json.dumps(result, indent=1) + "\n")
        path.with_suffix(".md").write_text(told)
    return told


if __name__ == "__main__":
    sys.exit(main())
