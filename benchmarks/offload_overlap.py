"""Share of the transfers of offloaded states that a step hides, on a CPU.

    python -m benchmarks.offload_overlap --folder /scratch --out overlap.json

One process has the same model three times, with its moments in memory, on disk, and on disk with
updates that end before the next forward pass, and trains them by turns, a few steps each. So all
meet the same load of other processes. A step on disk is compared with the longer one of the step in
memory and of its transfers. With `--no-clipping` the second model's updates run in the backward
pass, and the third one's behind the next forward pass.

Steps are computed in bf16, or in fp32 on a processor that emulates bf16. There a step of 256 tokens
would take 20 seconds, and the default run half an hour. Each turn is reported when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.case import Case, Precision
from benchmarks.conditions import format_rows, read_conditions
from benchmarks.offload import MODELS, start_shardwright, write_weights
from shardwright.numerics.bf16 import choose_precision

_NUM_TOKENS: dict[str, int] = {"bf16": 256, "fp32": 64}
"""Tokens of a step that takes one thread about half a second."""
_MAX_SEQUENCE_LENGTH = 256
_NUM_STEPS = 5
"""Steps of a turn. The first one is not counted: it meets the end of another model's turn."""


def main() -> None:
    """Measure every size of batch and buffer, and write the numbers."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload_overlap", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to use")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--model", choices=MODELS, default="29m")
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens per step")
    parser.add_argument("--precision", choices=get_args(Precision), help="default: the faster one")
    parser.add_argument("--buffer-mib", type=int, nargs="+", default=[64])
    parser.add_argument("--no-clipping", action="store_true", help="updates in the backward pass")
    options = parser.parse_args()
    weights = options.folder / f"weights-{options.model}"
    if not weights.exists():
        write_weights(weights, options.model)
    precision = options.precision or choose_precision(torch.device("cpu")).kind
    runs = []
    for tokens in options.tokens or [_NUM_TOKENS[precision]]:
        for buffer_mib in options.buffer_mib:
            length = min(tokens, _MAX_SEQUENCE_LENGTH)
            case = Case("overlap", 0, precision, str(weights), 1, length, tokens // length)
            run = measure_turns(
                case,
                options.folder,
                buffer_mib * 2**20,
                options.turns,
                is_clipped=not options.no_clipping,
            )
            runs.append({"tokens_per_step": tokens, "buffer_mib": buffer_mib} | run)
            print(json.dumps(runs[-1]["summary"] | {"tokens": tokens, "mib": buffer_mib}))
    conditions = read_conditions() | {"load": os.getloadavg()}
    if options.out is not None:
        result = {"conditions": conditions, "config": MODELS[options.model]}
        result |= {"precision": precision, "runs": runs}
        options.out.write_text(format_rows(result) + "\n")


def measure_turns(
    case: Case, folder: Path, buffer_bytes: int, num_turns: int, *, is_clipped: bool
) -> dict[str, Any]:
    """Train the models by turns; return the median step of each turn, and the ratios."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        start = partial(start_shardwright, case, Path(scratch), is_clipped=is_clipped)
        resident, describe_resident = start("")
        offloaded, describe = start("disk", buffer_bytes, can_skip=is_clipped)
        waiting, close_waiting = start("disk", buffer_bytes, overlaps_forward=not is_clipped)
        turns: list[dict[str, float]] = []
        for turn in range(num_turns + 1):
            steps = range(turn * _NUM_STEPS, (turn + 1) * _NUM_STEPS)
            # Neither always runs right after the model in memory, when the disk has rested.
            order = [("offloaded", offloaded), ("waiting", waiting)][:: (-1) ** turn]
            turns.append({})
            for name, run_step in [("resident", resident), *order]:
                turns[-1] |= _time_steps(name, run_step, steps)
            print(f"turn {turn} of {num_turns}:", _list_seconds(turns[-1]), file=sys.stderr)
        del turns[0]
        description = describe()
        close_waiting()
        update_seconds = statistics.median(describe_resident()["update_seconds"])
    transfers = description["transfers"]
    moved_seconds = statistics.median(
        max(step["reading_seconds"], step["writing_seconds"]) for step in transfers
    )
    moved_bytes = statistics.median(step["written_bytes"] for step in transfers)
    for figures in turns:
        longer_seconds = max(figures["resident_seconds"], moved_seconds)
        figures["ratio"] = figures["offloaded_seconds"] / longer_seconds
        figures["ratio_without_overlap"] = figures["waiting_seconds"] / longer_seconds
    summary = {key: statistics.median(figures[key] for figures in turns) for key in turns[0]}
    summary |= {
        "update_seconds": update_seconds,
        "transfer_seconds": moved_seconds,
        "disk_wait_seconds": statistics.median(step["waiting_seconds"] for step in transfers),
        "written_bytes": moved_bytes,
        "state_bytes": 8 * description["num_parameters"],
    }
    return {"is_clipped": is_clipped, "turns": turns, "summary": summary}


def _list_seconds(figures: dict[str, float]) -> str:
    names = ("resident", "offloaded", "waiting")
    return ", ".join(f"{name} {figures[f'{name}_seconds']:.3f} s" for name in names)


def _time_steps(name: str, run_step: Callable[[int], float], steps: range) -> dict[str, float]:
    """Return the median step, and the mean of what its threads computed and waited for a core."""
    seconds = []
    for step in steps:
        if step == steps[1]:
            before = _read_threads()
        start_seconds = time.perf_counter()
        run_step(step)
        seconds.append(time.perf_counter() - start_seconds)
    used = _read_threads()
    return {f"{name}_seconds": statistics.median(seconds[1:])} | {
        f"{name}_{key}_seconds": (used[key] - before[key]) / (_NUM_STEPS - 1) for key in used
    }


def _read_threads() -> dict[str, float]:
    """Return seconds of processor time, and of waiting for a core, of this and the stores' threads.

    The kernel counts both in nanoseconds. On a virtual machine it also counts, in hundredths of a
    second, how long the host ran something else on this machine's cores: `stolen`.
    """
    stores = [t.native_id for t in threading.enumerate() if t.name.startswith("offload-")]
    used: dict[str, float] = {}
    for name, threads in (("training", [threading.get_native_id()]), ("transfer", stores)):
        stats = [Path(f"/proc/self/task/{thread}/schedstat").read_text() for thread in threads]
        used[f"{name}_processor"] = sum(int(stat.split()[0]) for stat in stats) / 1e9
        used[f"{name}_queueing"] = sum(int(stat.split()[1]) for stat in stats) / 1e9
    total = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    used["stolen"] = int(total[8]) / os.sysconf("SC_CLK_TCK")
    return used


if __name__ == "__main__":
    main()
