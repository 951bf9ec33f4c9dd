"""Speed of switches that need two GPUs, on against off; the page of `make gpu` shows the times."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.config import Recipe
from shardwright.telemetry.event_log import StepEvent, read_events
from shardwright.training.run import train

pytestmark = pytest.mark.timeout(600)

DEVICE = "cuda"
NUM_STEPS = 16
NUM_WARM_UP_STEPS = 6
LENGTH = 2048
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
}
SWITCHES: dict[str, dict[str, dict[str, Any]]] = {
    "layout.cp_split": {
        split: {"layout": {"cp": 2, "cp_method": "ring", "cp_split": split}}
        for split in ("zigzag", "work")
    },
    "model.compile with zb_h1": {
        name: {"layout": {"pp": 2, "schedule": "zb_h1"}, "model": {"compile": name == "true"}}
        for name in ("false", "true")
    },
    "precision.working_weights with offloaded shards": {
        str(is_on).lower(): {
            "offload": {"parameters": "host", "optimizer": "host"},
            "precision": {"kind": "bf16", "working_weights": is_on},
        }
        for is_on in (False, True)
    },
    "gathers at zero_stage 3": {
        "in bf16": {},
        **{
            f"in 8 bits, {recipe}": {"precision": {"kind": "fp8", "fp8": {"recipe": recipe}}}
            for recipe in ("blockwise", "rowwise_with_gw_hp")
        },
    },
}
"""Switch -> value -> sections of the recipe. The first value is that without the switch."""


def write_documents(file: Path) -> None:
    """Write documents of very different lengths, which share rows."""
    drawn = random.Random(0)
    with file.open("w") as lines:
        for _ in range(400):
            text = "".join(drawn.choices("abcdefgh", k=int(2 ** drawn.uniform(4, 10.9))))
            lines.write(json.dumps({"text": text}) + "\n")


def build_recipe(folder: Path, changes: dict[str, Any]) -> Recipe:
    write_documents(folder / "documents.jsonl")
    layout = changes.get("layout", {"dp_shard": 2, "zero_stage": 3})
    return Recipe.model_validate(
        {
            "model": {"config": CONFIG, **changes.get("model", {"compile": False})},
            "tokenizer": {"kind": "character"},
            "data": {
                "sources": [str(folder / "documents.jsonl")],
                "packing": "documents",
                "cache_dir": str(folder / "cache"),
            },
            "training": {
                "sequence_length": LENGTH,
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 4,
                "max_steps": NUM_STEPS,
                "learning_rate": 1e-4,
                "schedule": "constant",
            },
            "layout": layout,
            "offload": changes.get("offload", {}),
            "precision": changes.get("precision", "bf16"),
            "run": {"dir": str(folder / "run"), "device": DEVICE},
        }
    )


def measure_recipe(folder: Path, changes: dict[str, Any]) -> tuple[float, float]:
    """Train on two ranks; return the median seconds of a step, and the first loss."""
    folder.mkdir()
    recipe = build_recipe(folder, changes)
    summary = train(recipe, num_ranks=2)
    assert summary is not None
    assert summary["status"] == "completed"
    events = read_events(folder / "run").events
    steps = [event for event in events if isinstance(event, StepEvent)]
    assert len(steps) == NUM_STEPS
    timed = [step.step_seconds for step in steps[NUM_WARM_UP_STEPS:]]
    return statistics.median(timed), steps[0].loss


@pytest.mark.parametrize("switch", SWITCHES)
def test_recipes_of_a_switch_differ_in_it_only(switch: str, tmp_path: Path) -> None:
    """Needs no GPU."""
    first, *others = (build_recipe(tmp_path, each) for each in SWITCHES[switch].values())
    for other in others:
        changed = [name for name in type(first).model_fields if is_changed(name, first, other)]
        assert len(changed) == 1


def is_changed(section: str, first: Recipe, second: Recipe) -> bool:
    return bool(getattr(first, section) != getattr(second, section))


@pytest.mark.gpu
@pytest.mark.parametrize("switch", SWITCHES)
def test_speed_of_a_switch(
    switch: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Both sides have the first loss of the other within the precision of their products."""
    skip_without_gpus(2)
    expected: float | None = None
    for number, (value, changes) in enumerate(SWITCHES[switch].items()):
        seconds, loss = measure_recipe(tmp_path / str(number), changes)
        expected = loss if expected is None else expected
        record_property(f"{switch}: {value}", f"{seconds * 1e3:.3f} ms")
        assert loss == pytest.approx(expected, rel=1e-2)


def skip_without_gpus(number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} CUDA devices; torch finds {torch.cuda.device_count()}")


def measure_splits(rank: int, folder: Path) -> None:
    """Time new groups of both ranks until their first sum has ended, made in two ways."""
    torch.cuda.set_device(rank)
    store = f"file://{folder / 'store'}"
    device = torch.device("cuda", rank)
    options: dict[str, Any] = {"rank": rank, "world_size": 2, "device_id": device}
    dist.init_process_group("nccl", init_method=store, **options)
    makers: dict[str, Callable[[], Any]] = {
        "new_group": partial(dist.new_group, [0, 1]),
        "split_group": partial(dist.split_group, split_ranks=[[0, 1]]),
    }
    ones = torch.ones(1, device=device)
    results: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(5):
        for name, make in makers.items():
            dist.barrier()
            torch.cuda.synchronize()
            start_seconds = time.perf_counter()
            total = ones.clone()
            dist.all_reduce(total, group=make())
            assert float(total) == 2.0
            results[name].append(time.perf_counter() - start_seconds)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


@pytest.mark.gpu
def test_time_of_a_split_against_a_new_group(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    skip_without_gpus(2)
    torch.multiprocessing.spawn(measure_splits, (tmp_path,), nprocs=2)
    for name, seconds in json.loads((tmp_path / "results.json").read_text()).items():
        record_property(f"process groups: {name}", f"{statistics.median(seconds) * 1e3:.3f} ms")
