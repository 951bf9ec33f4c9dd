"""`plan --emit`: degrees, batch and optimizer in other systems' keys; a note on each setting that
they cannot express.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.config.recipe_loading import validate_recipe
from shardwright.convert.conversion import CONFIG_WRITERS, emit
from shardwright.convert.emitted_config import EmitRequest, EmittedConfig
from shardwright.errors import ExitCode
from shardwright.plans import resolve_degrees
from tests.unit.convert.argument_names import MEGATRON_CORE, MEGATRON_TRAINING, TORCHTITAN

ROOT = Path(__file__).parents[3]
TRAINING = {
    "sequence_length": 64,
    "max_steps": 100,
    "learning_rate": 1e-3,
    "min_learning_rate": 1e-4,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "warmup_steps": 10,
    "weight_decay": 0.1,
}


def make_request(world_size: int, layout: dict[str, Any], **sections: Any) -> EmitRequest:
    document: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": "corpus.txt"},
        "layout": layout,
    }
    document["precision"] = "fp32"
    document["training"] = TRAINING | sections.pop("training", {})
    recipe = validate_recipe(document | sections)
    return EmitRequest(recipe, *resolve_degrees(recipe, world_size))


def parse_arguments(emitted: EmittedConfig) -> dict[str, str]:
    lines = [
        line.removeprefix("--") for line in emitted.text.splitlines() if not line.startswith("#")
    ]
    return {
        name: value for name, _, value in (line.replace("=", " ").partition(" ") for line in lines)
    }


REQUESTS = [
    make_request(1, {}),
    make_request(
        4,
        {"zero_stage": 0},
        precision="bf16",
        recompute="full",
        model={"config": {"model_type": "llama"}, "compile": True},
    ),
    make_request(
        8,
        {"dp_replicate": 2, "dp_shard": 4, "zero_stage": 1},
        precision="fp16",
        optimizer={"name": "sgd", "momentum": 0.9},
    ),
    make_request(
        16, {"tp": 2, "cp": 2, "zero_stage": 3, "sequence_parallel": False}, recompute="selective"
    ),
    make_request(
        8,
        {"pp": 4, "schedule": "interleaved_1f1b", "zero_stage": 2},
        training={"schedule": "warmup_stable_decay"},
    ),
    make_request(
        8,
        {"pp": 4, "schedule": "zb_h1", "ep": 2, "zero_stage": 3},
        training={"schedule": "linear", "max_grad_norm": None},
    ),
    make_request(
        2,
        {"zero_stage": 3},
        training={"schedule": "constant", "min_learning_rate": 0.0},
        moe={"z_loss_coefficient": 0.001},
    ),
]


@pytest.mark.parametrize("case", REQUESTS, ids=lambda case: str(case.layout))
def test_emitted_arguments_exist_in_the_other_systems(case: EmitRequest) -> None:
    assert set(parse_arguments(emit("torchtitan", case))) <= TORCHTITAN
    assert set(parse_arguments(emit("megatron", case))) <= MEGATRON_CORE | MEGATRON_TRAINING


def test_every_degree_is_emitted_or_noted() -> None:
    """A degree is a key of the other system, or a note if it has none."""
    request = make_request(
        64, {"dp_replicate": 2, "dp_shard": 4, "tp": 2, "pp": 2, "cp": 2, "ep": 2, "zero_stage": 3}
    )
    titan = parse_arguments(emit("torchtitan", request))
    for degree, value in (
        ("tensor", "2"),
        ("pipeline", "2"),
        ("context", "2"),
        ("expert", "2"),
        ("data", None),
    ):
        if value is not None:
            assert titan[f"parallelism.{degree}-parallel-degree"] == value
    assert (
        titan["parallelism.data-parallel-replicate-degree"],
        titan["parallelism.data-parallel-shard-degree"],
    ) == ("2", "4")
    assert titan["training.local-batch-size"] == "8", (
        "torchtitan counts a pipeline's micro-batches as one local batch"
    )
    megatron = parse_arguments(emit("megatron", request))
    assert [
        megatron[f"{axis}-size"]
        for axis in ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    ] == ["2"] * 3
    assert megatron["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert megatron["num-distributed-optimizer-instances"] == "2"
    accelerate = emit("accelerate", request)
    degrees = yaml.safe_load(accelerate.text)["parallelism_config"]
    assert [
        degrees[f"parallelism_config_{axis}_size"]
        for axis in ("dp_replicate", "dp_shard", "tp", "cp")
    ] == [2, 4, 2, 2]
    deepspeed = emit("deepspeed", request)
    emitted = json.loads(deepspeed.text)
    assert emitted["zero_optimization"]["mics_shard_size"] == 8
    assert emitted["tensor_parallel"] == {"autotp_size": 2}
    for notes, noted_keys in (
        (accelerate.notes, ("layout.pp", "layout.ep")),
        (deepspeed.notes, ("layout.pp", "layout.cp", "layout.ep")),
    ):
        assert all(any(note.startswith(key) for note in notes) for key in noted_keys)


@pytest.mark.parametrize("system", CONFIG_WRITERS)
def test_settings_that_cannot_be_expressed_are_noted_in_the_file(system: str) -> None:
    emitted = emit(
        system,
        make_request(
            8,
            {"pp": 2, "schedule": "zb_h1", "zero_stage": 1},
            precision="fp64",
            elastic={"max_restarts": 1},
        ),
    )
    assert any("elastic" in note for note in emitted.notes)
    assert any("fp64" in note for note in emitted.notes)
    if system == "deepspeed":
        assert json.loads(emitted.text)["_not_expressed"] == list(emitted.notes)
    else:
        comments = [
            line for line in emitted.text.splitlines() if line.startswith("# not expressed: ")
        ]
        assert comments == [f"# not expressed: {note}" for note in emitted.notes]


def test_the_learning_rate_is_scaled_with_the_batch() -> None:
    scaled = make_request(
        4, {"zero_stage": 0}, training={"batch_scaling": "linear", "base_batch_size": 8}
    )
    assert scaled.batch.global_batch_size == 32
    assert float(parse_arguments(emit("megatron", scaled))["lr"]) == pytest.approx(4e-3)
    emitted = json.loads(emit("deepspeed", scaled).text)
    assert emitted["optimizer"]["params"]["lr"] == pytest.approx(4e-3)
    assert emitted["scheduler"]["params"]["cos_min_ratio"] == pytest.approx(0.1)


def test_torchtitans_own_parser_accepts_the_arguments() -> None:
    tyro = pytest.importorskip("tyro")
    configs = pytest.importorskip("torchtitan.config.configs")
    schedulers = pytest.importorskip("torchtitan.components.optimizer.lr_scheduler")
    sections = {
        "parallelism": configs.ParallelismConfig,
        "training": configs.TrainingConfig,
        "compile": configs.CompileConfig,
        "debug": configs.DebugConfig,
        "lr-scheduler": schedulers.LRSchedulersContainer.Config,
    }
    for case in REQUESTS:
        arguments = parse_arguments(emit("torchtitan", case))
        assert {name.partition(".")[0] for name in arguments} <= sections.keys()
        for section, config in sections.items():
            section_arguments = {
                name.partition(".")[2]: value
                for name, value in arguments.items()
                if name.startswith(f"{section}.")
            }
            parsed = tyro.cli(
                config,
                args=[
                    f"--{name}" + (f"={value}" if value else "")
                    for name, value in section_arguments.items()
                ],
            )
            if section == "parallelism":
                assert parsed.tensor_parallel_degree == case.layout.tp


def test_megatrons_own_classes_have_the_fields() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    known = {
        name.replace("_", "-")
        for config in (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        for name in config.__dataclass_fields__
    }
    assert known >= MEGATRON_CORE


def test_plan_writes_the_chosen_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ds.json"
    words = ["plan", str(ROOT / "recipes" / "llama3-8b.yaml"), "--cluster", "8xH100-80GB", "--json"]
    assert run([*words, "--emit", "deepspeed", "--out", str(out)]) == ExitCode.DONE
    captured = capsys.readouterr()
    output = json.loads(captured.out)
    emitted = json.loads(out.read_text())
    assert emitted["zero_optimization"]["stage"] == output["chosen"]["layout"]["zero_stage"]
    assert emitted["train_micro_batch_size_per_gpu"] == output["chosen"]["micro_batch_size"]
    assert emitted["train_batch_size"] == 512
    assert output["emitted"]["notes"]
    assert all(f"not expressed: {note}" in captured.err for note in output["emitted"]["notes"])


def test_settings_from_the_command_line_are_noted_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "plan",
        str(ROOT / "recipes" / "llama3-8b.yaml"),
        "--cluster",
        "8xH100-80GB",
        "--lora",
        "16",
        "--precision",
        "fp32",
    ]
    assert run([*words, "--emit", "deepspeed"]) == ExitCode.DONE
    captured = capsys.readouterr()
    assert "adapters: not carried" in captured.err
    assert "bf16" not in json.loads(captured.out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--emit", "deepsped"], "Did you mean `deepspeed`?"),
        (["--out", "x"], "no configuration to write"),
        (["--emit", "megatron", "--precision", "fp8"], "are not converted"),
    ],
)
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    recipe = str(ROOT / "recipes" / "llama3-8b.yaml")
    assert run(["plan", recipe, "--cluster", "8xH100-80GB", *words]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err
