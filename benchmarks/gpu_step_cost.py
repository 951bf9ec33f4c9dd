"""Cost of what surrounds a step: the training loop with each of its switches off, on one GPU.

    python -m benchmarks.gpu_step_cost cuda bf16 config.json 4096 2 step-cost.json

Each variant is a run of `sw.train` in a process of its own on random text. The rate is that at
which the loop starts steps, after the first ones: evaluations and checkpoints are not part of it.
`--more` runs the second set of variants. With rows of many lengths, padding counts as tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.gpu_turns import COUNTED_STEPS
from benchmarks.gpu_variants import parse_variant_arguments, run_variant
from benchmarks.pace import forget_graph_breaks

DEFAULT = "as by default"


class LoopVariant(NamedTuple):
    """A run of the training loop that differs from another one in one switch."""

    difference: str = ""
    switch: str = ""
    """The switch that differs, when it is on; "" for a run that others are compared with."""
    compared_with: str = DEFAULT
    is_off: bool = True
    """True if this run has the switch off, and the other one on."""
    settings: dict[str, Any] = {}  # noqa: RUF012
    """Sections of the recipe that it changes."""


_EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
}
"""Keys of config.json that make every feed-forward one of 16 experts."""
UNCOMPILED = {"model": {"compile": False}}
LORA = {"adapters": {"rank": 16}}
BUDGET = "recompute: a budget"
SELECTIVE = "recompute: selective"
LENGTHS = "rows of many lengths"
SEGMENTS = "segments that do not grow"
VARIANTS: dict[str, LoopVariant] = {
    DEFAULT: LoopVariant(),
    "model.compile: false": LoopVariant(
        "blocks run uncompiled", "model.compile: auto", settings=UNCOMPILED
    ),
    "the host waits for every step": LoopVariant(
        "its event is written when its update has ended", "events written one step later"
    ),
    "Python's own garbage collection": LoopVariant(
        "whenever enough objects have been allocated", "garbage collection at chosen steps"
    ),
}
MORE_VARIANTS: dict[str, LoopVariant] = {
    DEFAULT: LoopVariant(),
    "batches read between steps": LoopVariant(
        "by the thread that launches the step, into memory that is not pinned",
        "batches read ahead and pinned",
    ),
    SELECTIVE: LoopVariant(
        "of everything but products and attention",
        "recompute: selective",
        is_off=False,
        settings={"recompute": "selective"},
    ),
    BUDGET: LoopVariant(
        "what is kept is chosen within the memory of the selective run",
        "recompute: {budget_gib: N}, N of selective",
        SELECTIVE,
        is_off=False,
    ),
    LENGTHS: LoopVariant("a row per document, padded to the longest of its micro-batch"),
    "rows padded to one length": LoopVariant(
        "the same rows",
        "data.padding: longest",
        LENGTHS,
        settings={"data": {"padding": "max_length"}},
    ),
    f"{LENGTHS}, {SEGMENTS}": LoopVariant(
        "expandable_segments:False", "expandable_segments, set by train", LENGTHS
    ),
    "LoRA": LoopVariant("adapters of rank 16", settings=LORA),
    "LoRA, model.compile: false": LoopVariant(
        "blocks run uncompiled", "model.compile: auto", "LoRA", settings=LORA | UNCOMPILED
    ),
    "experts": LoopVariant("every feed-forward has 16 experts, 4 for each token"),
    "experts, model.compile: false": LoopVariant(
        "with their grouped products, uncompiled",
        "model.compile: auto",
        "experts",
        settings=UNCOMPILED,
    ),
}
"""Name -> variant. The first set needs the least time."""
WARM_UP_STEPS = 5


class _Measured(Exception):
    """Ends a run after its last measured step, before it saves."""


def main() -> int:
    """Return exit code 0, or 1 if no variant could run."""
    arguments = parse_variant_arguments(
        __doc__.split("\n\n")[0], [*VARIANTS, *MORE_VARIANTS], num_steps=60, has_sets=True
    )
    if arguments.variant is not None:
        print(json.dumps(measure_variant(arguments)))
        return 0
    chosen = MORE_VARIANTS if arguments.more else VARIANTS
    variants: list[dict[str, Any]] = []
    for name, variant in list(chosen.items())[: arguments.num_variants]:
        described = {
            "name": name,
            "difference": variant.difference,
            "switch": variant.switch,
            "compared_with": variant.compared_with if variant.switch else None,
            "is_off": variant.is_off,
        }
        variants.append(described | run_variant("benchmarks.gpu_step_cost", name))
        arguments.result.write_text(json.dumps({"variants": variants}, indent=1) + "\n")
    return int(all("failure" in row for row in variants))


def measure_variant(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with one variant; return the figures of a step and whether blocks were compiled."""
    forget_graph_breaks()
    import torch

    from benchmarks.gpu_step_figures import StepCounter, describe_step, measure_rates, read_peaks
    from shardwright.config import Recipe
    from shardwright.launch.allocator import ALLOCATOR_VARIABLE, use_expandable_segments
    from shardwright.training import loop
    from shardwright.training.run import train

    if arguments.variant.endswith(SEGMENTS):
        os.environ[ALLOCATOR_VARIABLE] = "expandable_segments:False"
    use_expandable_segments()  # before the first allocation
    device = torch.device(arguments.device)
    rates = measure_rates(device, arguments.precision)
    counter = StepCounter(device)
    starts: list[float] = []
    peaks: dict[str, int | None] = {}
    runs: list[Any] = []
    run_step = loop.TrainingLoop._run_step
    last_step = WARM_UP_STEPS + arguments.steps

    def record_start(self: Any) -> Any:
        if self.state.step < last_step:
            starts.append(time.perf_counter())
            return run_step(self)
        if not peaks:
            peaks.update(read_peaks(device))
            runs.append(self.context.validated_run)
        if not counter.begin_step():
            raise _Measured
        return run_step(self)

    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(loop.TrainingLoop, "_run_step", record_start),
        replace_part_of_loop(arguments.variant),
    ):
        folder = Path(name)
        recipe = Recipe.model_validate(
            build_recipe(folder, arguments, last_step + COUNTED_STEPS + 2)
        )
        with suppress(_Measured):
            train(recipe)
        plan = json.loads((folder / "run" / "plan.json").read_text())
    seconds = starts[-1] - starts[WARM_UP_STEPS]
    step_seconds = seconds / (len(starts) - 1 - WARM_UP_STEPS)
    return {
        **describe_step(runs[0], rates, step_seconds, peaks, counter.counts),
        "step_seconds": step_seconds,
        "compiled": plan["compile"],
    }


def replace_part_of_loop(variant: str) -> AbstractContextManager[object]:
    """Replace, within the context, the part of the training loop that a variant switches off."""
    from shardwright.training import loop

    if variant == "the host waits for every step":
        return patch.object(loop.TrainingLoop, "_may_finish_later", lambda *_: False)
    if variant == "Python's own garbage collection":
        return patch.object(loop, "GarbageCollection", PythonCollection)
    if variant == "batches read between steps":
        return patch.object(loop, "BatchPrefetcher", DirectReader)
    return nullcontext()


class PythonCollection:
    """Context in which Python's garbage collector works as it does elsewhere."""

    def __enter__(self) -> PythonCollection:
        return self

    def collect_if_due(self, step: int) -> None:
        """Collect nothing."""

    def __exit__(self, *_: object) -> None:
        pass


class DirectReader:
    """Reader of a step's micro-batches when the step needs them."""

    def __init__(self, read_micro_batches: Callable[[int], list[Any]], _device: object) -> None:
        self._read_micro_batches = read_micro_batches

    def __enter__(self) -> DirectReader:
        return self

    def read(self, step: int, _next_step: int | None) -> list[Any]:
        """Return the micro-batches of a data step."""
        return self._read_micro_batches(step)

    def __exit__(self, *_: object) -> None:
        pass


def build_recipe(folder: Path, arguments: argparse.Namespace, max_steps: int) -> dict[str, Any]:
    """Return a recipe that trains on random letters, without validation or intermediate saves."""
    config = json.loads(arguments.config.read_text())
    if arguments.variant.startswith("experts"):
        config |= _EXPERTS | {"moe_intermediate_size": config["intermediate_size"] // 8}
    recipe: dict[str, Any] = {
        "model": {"config": config, "compile": "auto"},
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(write_letters(folder, arguments))},
        "precision": arguments.precision,
        "training": {
            "sequence_length": arguments.length,
            "micro_batch_size": arguments.rows,
            "max_steps": max_steps,
            "learning_rate": 1e-4,
        },
        "watchdog": {"enabled": False},
        "run": {"dir": str(folder / "run"), "device": arguments.device},
    }
    recipe["data"] |= {"cache_dir": str(folder / "cache")}
    if has_many_lengths(arguments.variant):
        recipe["data"] |= {"packing": "none"}
    if arguments.variant == BUDGET:
        recipe["recompute"] = {"budget_gib": read_selective_bytes(arguments.result) / 2**30}
    for section, changes in (VARIANTS | MORE_VARIANTS)[arguments.variant].settings.items():
        is_whole = not isinstance(changes, dict)
        recipe[section] = changes if is_whole else recipe.get(section, {}) | changes
    return recipe


def has_many_lengths(variant: str) -> bool:
    """True if a variant trains on documents of many lengths, one in a row."""
    return LENGTHS in (variant.partition(",")[0], (VARIANTS | MORE_VARIANTS)[variant].compared_with)


def write_letters(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write random letters as one text, or as documents of random lengths; return the file."""
    drawn = random.Random(0)
    length: int = arguments.length
    if not has_many_lengths(arguments.variant):
        letters = drawn.choices("abcdefghijklmnopqrstuvwxyz", k=8 * length)
        file = folder / "corpus.txt"
        file.write_text("".join(letters) * arguments.rows)
        return file
    file = folder / "corpus.jsonl"
    with file.open("w") as lines:
        for _ in range(32 * arguments.rows):
            letters = drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(8, length - 2))
            lines.write(json.dumps({"text": "".join(letters)}) + "\n")
    return file


def read_selective_bytes(result: Path) -> float:
    """Read the predicted bytes of the selective run, which this process's parent has written.

    Raises:
        LookupError: It has failed, or nothing is predicted on this device.
    """
    rows = json.loads(result.read_text())["variants"]
    (row,) = (row for row in rows if row["name"] == SELECTIVE)
    if not row.get("predicted"):
        raise LookupError(f"no predicted memory of the run with {SELECTIVE}")
    return float(row["predicted"]["reserved_bytes"])


if __name__ == "__main__":
    sys.exit(main())
