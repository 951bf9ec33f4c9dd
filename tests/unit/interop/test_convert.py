"""`convert`: what other systems' files say as a recipe, what they do not, and the way back of what
we write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.config.recipe_loading import load_recipe, validate_recipe
from shardwright.convert.conversion import ConvertedRecipe, convert
from shardwright.convert.emit import emit
from shardwright.convert.emitted_config import EmitRequest
from shardwright.errors import ExitCode, InputError
from shardwright.plan import resolve_plan

GIVEN = ["model.path=model", "data.sources=corpus.txt", "training.sequence_length=64"]


def converted(
    folder: Path, name: str, document: dict[str, Any], *overrides: str
) -> ConvertedRecipe:
    path = folder / name
    path.write_text(json.dumps(document) if path.suffix == ".json" else yaml.safe_dump(document))
    return convert(path, overrides=overrides)


def test_a_deepspeed_file_keeps_deepspeeds_defaults(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    found = converted(tmp_path, "ds.json", document, *GIVEN, "training.max_steps=5")
    recipe = validate_recipe(found.document)
    assert recipe.training.max_grad_norm is None, "DeepSpeed clips nothing unless told"
    assert (recipe.optimizer.beta1, recipe.optimizer.beta2) == (0.9, 0.999)
    assert recipe.training.schedule == "constant"
    assert recipe.layout.zero_stage == 0
    assert recipe.precision.kind == "fp32"
    assert not found.dropped


def test_every_key_is_carried_or_named(tmp_path: Path) -> None:
    """Nothing disappears: each leaf of a rich file is a key of the recipe, a dropped one, or one
    that says nothing.
    """
    document = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "stage3_prefetch_bucket_size": 5,
            "zero_hpz_partition_size": 8,
        },
        "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 2},
        "scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 0.1}},
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}},
        "curriculum_learning": {"enabled": True},
    }
    found = converted(tmp_path, "ds.json", document)
    dropped = {item.key for item in found.dropped}
    assert dropped == {
        "train_batch_size",
        "zero_optimization.offload_param",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.zero_hpz_partition_size",
        "fp16.hysteresis",
        "scheduler.type",
        "scheduler.params.cycle_max_lr",
        "optimizer.type",
        "optimizer.params.max_coeff",
        "curriculum_learning.enabled",
    }
    assert found.document["precision"] == {"kind": "fp16", "initial_loss_scale": 1024.0}
    assert set(found.missing_keys) == {
        "model.path",
        "data.sources",
        "training.sequence_length",
        "training.max_steps",
    }
    assert found.document["training"]["learning_rate"] == 1e-3


def test_what_a_trainer_would_fill_in_is_asked_for(tmp_path: Path) -> None:
    """As the files for Hugging Face's Trainer are written."""
    document = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_type": "linear"},
        },
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    found = converted(tmp_path, "ds.json", document)
    assert {"training.learning_rate", "training.max_steps", "training.micro_batch_size"} <= set(
        found.missing_keys
    )
    assert {item.key: item.why for item in found.dropped}["bf16.enabled"].endswith(
        "set precision.kind"
    )
    said = converted(tmp_path, "ds.json", document | {"bf16": {"enabled": True}})
    assert said.document["precision"]["kind"] == "bf16"
    assert not {item.key for item in said.dropped} & {"bf16.enabled", "fp16.enabled"}


def test_adam_whose_decay_is_in_the_gradient_is_not_ours(tmp_path: Path) -> None:
    params = {"lr": 1e-4, "adam_w_mode": False, "weight_decay": 0.1}
    found = converted(
        tmp_path,
        "ds.json",
        {"zero_optimization": {}, "optimizer": {"type": "Adam", "params": params}},
    )
    assert [item.key for item in found.dropped] == ["optimizer.params.adam_w_mode"]
    without = {
        "zero_optimization": {},
        "optimizer": {"type": "Adam", "params": params | {"weight_decay": 0.0}},
    }
    assert not converted(tmp_path, "ds.json", without).dropped


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"zero_stage": 0}),
    (4, {"zero_stage": 1}),
    (4, {"zero_stage": 3, "tp": 2}),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_deepspeed_goes_round(
    tmp_path: Path, world_size: int, layout: dict[str, Any], schedule: str
) -> None:
    told: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"sources": "corpus.txt"},
        "training": {
            "sequence_length": 64,
            "max_steps": 100,
            "learning_rate": 1e-3,
            "micro_batch_size": 2,
            "warmup_steps": 10,
        }
        | {
            "gradient_accumulation_steps": 4,
            "weight_decay": 0.1,
            "schedule": schedule,
            "max_grad_norm": 0.5,
        },
        "optimizer": {"beta2": 0.98, "eps": 1e-7},
        "precision": "bf16",
        "layout": layout,
    }
    recipe = validate_recipe(told)
    plan = resolve_plan(recipe, world_size)
    path = tmp_path / "ds.json"
    path.write_text(emit("deepspeed", EmitRequest(recipe, plan)).text)
    overrides = [*GIVEN, "training.max_steps=100"]
    found = convert(path, overrides=overrides)
    assert not found.dropped
    back = validate_recipe(found.document)
    again = resolve_plan(back, world_size)
    assert again.batch == plan.batch
    assert (again.layout, again.precision) == (plan.layout, plan.precision)
    assert back.optimizer == recipe.optimizer
    assert back.training.model_dump(exclude={"global_batch_size"}) == recipe.training.model_dump(
        exclude={"global_batch_size"}
    )


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, {"zero_stage": 0}),
        (4, {"zero_stage": 2}),
        (16, {"zero_stage": 3, "dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}),
    ],
)
def test_accelerate_goes_round(tmp_path: Path, world_size: int, layout: dict[str, Any]) -> None:
    training = {"sequence_length": 64, "max_steps": 9, "learning_rate": 1e-3, "micro_batch_size": 2}
    told = {
        "model": {"path": "model"},
        "data": {"sources": "corpus.txt"},
        "training": training,
        "layout": layout,
        "precision": "bf16",
    }
    recipe = validate_recipe(told | {"recompute": "full" if layout["zero_stage"] else "none"})
    plan = resolve_plan(recipe, world_size)
    path = tmp_path / "accelerate.yaml"
    path.write_text(emit("accelerate", EmitRequest(recipe, plan)).text)
    extra = [
        "training.max_steps=9",
        "training.learning_rate=1e-3",
        "training.micro_batch_size=2",
        "layout.cp_method=auto",
    ]
    back = validate_recipe(convert(path, overrides=[*GIVEN, *extra]).document)
    again = resolve_plan(back, world_size)
    assert (again.layout, again.precision, again.recompute) == (
        plan.layout,
        plan.precision,
        plan.recompute,
    )


AXOLOTL: dict[str, Any] = {
    "base_model": "./llama",
    "datasets": [
        {"path": "./alpaca.jsonl", "type": "alpaca", "ds_type": "json"},
        {"path": "owner/name", "type": "chat_template"},
    ],
    "sequence_len": 2048,
    "sample_packing": True,
    "val_set_size": 0.05,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-4,
    "warmup_ratio": 0.1,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "saves_per_epoch": 1,
    "tf32": False,
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
    "deepspeed": "deepspeed_configs/zero3_bf16.json",
    "special_tokens": {"pad_token": "<pad>"},
}


def test_an_axolotl_file(tmp_path: Path) -> None:
    found = converted(tmp_path, "axolotl.yml", AXOLOTL)
    recipe = validate_recipe(found.document)
    assert not found.missing_keys
    assert recipe.model.path == "./llama"
    assert [(source.path, source.records) for source in recipe.data.sources] == [
        ("./alpaca.jsonl", "alpaca"),
        ("owner/name", "messages"),
    ]
    assert recipe.adapters is not None
    assert (recipe.adapters.rank, recipe.adapters.alpha, recipe.adapters.targets) == (
        32,
        16,
        ("q_proj", "v_proj"),
    )
    assert recipe.adapters.quantize == "nf4"
    assert (recipe.recompute, recipe.layout.zero_stage, recipe.precision.kind) == (
        "full",
        3,
        "bf16",
    )
    assert recipe.optimizer.beta2 == 0.999
    assert {item.key for item in found.dropped} == {
        "warmup_ratio",
        "saves_per_epoch",
        "deepspeed",
        "special_tokens.pad_token",
    }
    assert any("Hub" in remark for remark in found.remarks)


def test_axolotls_preferences_are_learned_or_asked_for(tmp_path: Path) -> None:
    """A file that learns preferences never becomes a recipe that learns the responses token by
    token.
    """
    pairs = AXOLOTL | {
        "datasets": [{"path": "./pairs.jsonl", "type": "chat_template.default"}],
        "sample_packing": False,
    }
    found = converted(tmp_path, "dpo.yml", pairs | {"rl": "dpo", "rl_beta": 0.3})
    recipe = validate_recipe(found.document)
    assert recipe.preference is not None
    assert (recipe.preference.kind, recipe.preference.beta) == ("dpo", 0.3)
    assert [(source.path, source.records) for source in recipe.data.sources] == [
        ("./pairs.jsonl", "auto")
    ]
    other = converted(tmp_path, "kto.yml", pairs | {"rl": "kto"})
    assert other.missing_keys == ("preference.kind",)
    assert "rl" in {item.key for item in other.dropped}


@pytest.mark.parametrize(
    ("words", "stage", "named"),
    [(["full_shard", "auto_wrap"], 3, False), (["shard_grad_op", "offload"], 2, True)],
)
def test_axolotls_older_words(tmp_path: Path, words: list[str], stage: int, named: bool) -> None:
    told = {key: value for key, value in AXOLOTL.items() if key != "deepspeed"}
    told |= {"fsdp": words, "optimizer": "paged_adamw_8bit", "neftune_noise_alpha": 5}
    found = converted(tmp_path, "old.yml", told)
    recipe = validate_recipe(found.document)
    assert (
        recipe.layout.zero_stage,
        recipe.optimizer.name,
        recipe.training.neftune_noise_alpha,
    ) == (stage, "adamw_8bit", 5)
    assert ("fsdp" in {item.key for item in found.dropped}) == named


def test_a_value_in_place_of_a_section_is_named(tmp_path: Path) -> None:
    found = converted(tmp_path, "ds.json", {"train_batch_size": 4, "zero_optimization": True})
    assert [item.key for item in found.dropped] == ["zero_optimization"]


def test_values_of_odd_sizes_are_carried_for_the_recipe_to_judge(tmp_path: Path) -> None:
    found = converted(
        tmp_path,
        "ds.json",
        {"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 99999}},
    )
    assert found.document["precision"]["initial_loss_scale"] == 99999
    found = converted(tmp_path, "axolotl.yaml", {"base_model": "x", "datasets": [{"path": []}]})
    assert "data.sources" in found.missing_keys or found.document["data"]["sources"] == [
        {"path": None}
    ]


def test_an_accelerate_file_of_the_first_fsdp(tmp_path: Path) -> None:
    section = {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_offload_params": True,
        "fsdp_use_orig_params": True,
    }
    document = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": section,
        "mixed_precision": "fp16",
    }
    found = converted(
        tmp_path, "accelerate.yaml", document | {"num_processes": 8, "main_process_ip": "10.0.0.1"}
    )
    assert found.document["layout"] == {"zero_stage": 2}
    assert {
        "fsdp_config.fsdp_offload_params",
        "fsdp_config.fsdp_use_orig_params",
        "main_process_ip",
    } == {i.key for i in found.dropped}


def test_words_that_are_not_known_are_named(tmp_path: Path) -> None:
    section = {"fsdp_sharding_strategy": "SHARD_SOMEHOW"}
    degrees = {"parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "pigeon"}
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": section,
        "parallelism_config": degrees,
        "mixed_precision": "fp8",
    }
    dropped = {item.key for item in converted(tmp_path, "accelerate.yaml", document).dropped}
    cut = "parallelism_config.parallelism_config_cp_comm_strategy"
    assert dropped == {"fsdp_config.fsdp_sharding_strategy", cut, "mixed_precision"}
    told = {
        "fp16": {"enabled": True, "initial_scale_power": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    dropped = {item.key for item in converted(tmp_path, "ds.json", told).dropped}
    assert dropped == {"fp16.initial_scale_power", "optimizer.params.lr"}
    told = AXOLOTL | {
        "val_set_size": 200,
        "optimizer": "lion",
        "lr_scheduler": "rex",
        "warmup_ratio": None,
    }
    dropped = {item.key for item in converted(tmp_path, "axolotl.yml", told).dropped}
    assert dropped >= {"val_set_size", "optimizer", "lr_scheduler"}


def test_the_written_recipe_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    out = tmp_path / "recipe.yaml"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 2, "overlap_comm": True},
            }
        )
    )
    assert run(["convert", str(path), "--out", str(out)]) == ExitCode.DONE
    told = capsys.readouterr().err
    assert "not carried: zero_optimization.overlap_comm" in told
    needed = next(line for line in told.splitlines() if line.startswith("missing keys: "))
    assert "training.learning_rate" in needed
    text = out.read_text()
    assert "# to fill in: training.sequence_length" in text
    with pytest.raises(InputError, match="missing key"):
        load_recipe(out)
    rest = ["training.learning_rate=1e-3", "training.max_steps=3"]
    words = [word for change in [*GIVEN, *rest] for word in ("--set", change)]
    assert run(["convert", str(path), "--out", str(out), *words, "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["needed"] == []
    assert load_recipe(out).layout.zero_stage == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", None, "no such file"),
        ("a.json", "{", "not valid JSON: Expecting property name"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.yaml", "- 1", "a configuration must be a mapping"),
        ("a.yaml", "colour: blue", "the keys match no known system"),
    ],
)
def test_wrong_input_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert run(["convert", str(path)]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err


def test_a_contradiction_in_the_file_is_told(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": -1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    with pytest.raises(InputError, match="micro_batch_size"):
        converted(tmp_path, "ds.json", document, *GIVEN, "training.max_steps=3")
