"""`convert`: recipes from other systems' files, dropped and missing keys, and round trips through
`emit`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.config.recipe_loading import load_recipe, validate_recipe
from shardwright.convert.conversion import ConvertedRecipe, convert, emit
from shardwright.convert.emitted_config import EmitRequest
from shardwright.errors import ExitCode, InputError, RecipeError
from shardwright.plans import resolve_degrees

OVERRIDES = ["model.path=model", "data.sources=corpus.txt", "training.sequence_length=64"]


def convert_document(
    folder: Path, name: str, document: dict[str, Any], *overrides: str
) -> ConvertedRecipe:
    path = folder / name
    path.write_text(json.dumps(document) if path.suffix == ".json" else yaml.safe_dump(document))
    return convert(path, overrides=overrides)


@pytest.mark.parametrize(
    ("name", "document", "system"),
    [
        (
            "llamafactory.yaml",
            {
                "model_name_or_path": "meta-llama/Llama-3.2-1B",
                "stage": "sft",
                "finetuning_type": "lora",
                "cutoff_len": 2048,
                "gradient_accumulation_steps": 8,
                "bf16": True,
            },
            "LLaMA-Factory",
        ),
        ("nemo.yaml", {"step_scheduler": {"global_batch_size": 64}, "model": {}}, "NeMo Automodel"),
        ("tune.yaml", {"tokenizer": {}, "checkpointer": {}, "optimizer": {}}, "torchtune"),
        ("sft.yaml", {"model_name_or_path": "m", "bf16": True}, "TRL or Hugging Face's Trainer"),
        ("debug_model.toml", {"model": {"name": "llama3"}}, "a TOML file; those of torchtitan"),
    ],
)
def test_files_of_systems_that_are_not_read_are_refused_by_name(
    tmp_path: Path, name: str, document: dict[str, Any], system: str
) -> None:
    """`bf16: true` made a file of LLaMA-Factory one of DeepSpeed, with a nearly empty recipe."""
    with pytest.raises(InputError, match=system) as caught:
        convert_document(tmp_path, name, document)
    assert "recipes/first.yaml" in str(caught.value)


def test_values_of_wrong_types_are_refused_while_keys_are_missing(tmp_path: Path) -> None:
    """They were written, as long as the recipe lacked a key."""
    document = {"base_model": "./model", "sequence_len": "abc", "micro_batch_size": "x"}
    with pytest.raises(InputError) as caught:
        convert_document(tmp_path, "axolotl.yaml", document)
    message = str(caught.value)
    assert "training.sequence_length: not a whole number (got 'abc'" in message
    assert "training.micro_batch_size: not a whole number (got 'x'" in message
    assert "missing" not in message
    conversion = convert_document(
        tmp_path,
        "axolotl.yaml",
        document,
        "training.sequence_length=8",
        "training.micro_batch_size=1",
    )
    assert conversion.missing_keys == ("data.sources", "training.learning_rate")


def test_a_deepspeed_file_may_have_its_precision_alone(tmp_path: Path) -> None:
    conversion = convert_document(tmp_path, "ds.json", {"bf16": {"enabled": True}})
    assert conversion.system == "deepspeed"
    assert conversion.document["precision"] == {"kind": "bf16"}


def test_axolotls_offloaded_checkpointing_linear_targets_and_sharegpt_rows(tmp_path: Path) -> None:
    document = {
        "base_model": "./model",
        "datasets": [
            {
                "path": "./chats.jsonl",
                "type": "chat_template",
                "field_messages": "conversations",
                "message_property_mappings": {"role": "from", "content": "value"},
            }
        ],
        "sequence_len": 512,
        "micro_batch_size": 1,
        "max_steps": 10,
        "learning_rate": 1e-4,
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_modules": ["q_proj", "lm_head"],
        "lora_target_linear": True,
        "gradient_checkpointing": "offload",
    }
    conversion = convert_document(tmp_path, "axolotl.yaml", document)
    recipe = validate_recipe(conversion.document)
    assert (recipe.recompute, recipe.offload.activations) == ("full", "host")
    assert recipe.adapters is not None
    assert recipe.adapters.targets is None, "every projection, not q_proj alone"
    assert recipe.data.sources[0].records == "sharegpt"
    assert [(item.key, item.value) for item in conversion.dropped] == [
        ("lora_target_modules", ["lm_head"])
    ]
    changed = document | {"gradient_checkpointing": True, "lora_target_linear": False}
    recipe = validate_recipe(convert_document(tmp_path, "axolotl.yaml", changed).document)
    assert (recipe.recompute, recipe.offload.activations) == ("full", "none")
    assert recipe.adapters is not None
    assert recipe.adapters.targets == ("q_proj", "lm_head")
    changed |= {"activation_offloading": "disk"}
    recipe = validate_recipe(convert_document(tmp_path, "axolotl.yaml", changed).document)
    assert recipe.offload.activations == "disk"


def test_a_list_is_printed_once_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}}))
    line = "not carried: zero_optimization.overlap_comm"
    assert run(["convert", str(path)]) == ExitCode.DONE
    output = capsys.readouterr()
    assert (output.out.count(line), output.err.count(line)) == (1, 1)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(["convert", str(path)]) == ExitCode.DONE
    output = capsys.readouterr()
    assert (output.out.count(line), output.err.count(line)) == (1, 0)


def test_a_deepspeed_file_uses_deepspeeds_defaults(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    conversion = convert_document(tmp_path, "ds.json", document, *OVERRIDES, "training.max_steps=5")
    recipe = validate_recipe(conversion.document)
    assert recipe.training.max_grad_norm is None, "DeepSpeed does not clip by default"
    assert (recipe.optimizer.beta1, recipe.optimizer.beta2) == (0.9, 0.999)
    assert recipe.training.schedule == "constant"
    assert recipe.layout.zero_stage == 0
    assert recipe.precision.kind == "fp32"
    assert not conversion.dropped


def test_every_key_is_converted_or_reported(tmp_path: Path) -> None:
    """Each leaf of a large file becomes a key of the recipe, is dropped, or has no effect."""
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
    conversion = convert_document(tmp_path, "ds.json", document)
    dropped = {item.key for item in conversion.dropped}
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
    assert conversion.document["precision"] == {"kind": "fp16", "initial_loss_scale": 1024.0}
    assert set(conversion.missing_keys) == {
        "model.path",
        "data.sources",
        "training.sequence_length",
        "training.max_steps",
    }
    assert conversion.document["training"]["learning_rate"] == 1e-3


def test_auto_values_of_a_trainer_are_reported_as_missing(tmp_path: Path) -> None:
    """Files for Hugging Face's Trainer have such `auto` values."""
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
    conversion = convert_document(tmp_path, "ds.json", document)
    assert {"training.learning_rate", "training.max_steps", "training.micro_batch_size"} <= set(
        conversion.missing_keys
    )
    assert {item.key: item.why for item in conversion.dropped}["bf16.enabled"].endswith(
        "set precision.kind"
    )
    with_bf16 = convert_document(tmp_path, "ds.json", document | {"bf16": {"enabled": True}})
    assert with_bf16.document["precision"]["kind"] == "bf16"
    assert not {item.key for item in with_bf16.dropped} & {"bf16.enabled", "fp16.enabled"}


def test_adam_with_l2_regularisation_is_dropped(tmp_path: Path) -> None:
    params = {"lr": 1e-4, "adam_w_mode": False, "weight_decay": 0.1}
    conversion = convert_document(
        tmp_path,
        "ds.json",
        {"zero_optimization": {}, "optimizer": {"type": "Adam", "params": params}},
    )
    assert [item.key for item in conversion.dropped] == ["optimizer.params.adam_w_mode"]
    no_decay = {
        "zero_optimization": {},
        "optimizer": {"type": "Adam", "params": params | {"weight_decay": 0.0}},
    }
    assert not convert_document(tmp_path, "ds.json", no_decay).dropped


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"zero_stage": 0}),
    (4, {"zero_stage": 1}),
    (4, {"zero_stage": 3, "tp": 2}),
]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_deepspeed_survives_a_round_trip(
    tmp_path: Path, world_size: int, layout: dict[str, Any], schedule: str
) -> None:
    document: dict[str, Any] = {
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
    recipe = validate_recipe(document)
    layout_and_batch = resolve_degrees(recipe, world_size)
    path = tmp_path / "ds.json"
    path.write_text(emit("deepspeed", EmitRequest(recipe, *layout_and_batch)).text)
    overrides = [*OVERRIDES, "training.max_steps=100"]
    conversion = convert(path, overrides=overrides)
    assert not conversion.dropped
    converted_recipe = validate_recipe(conversion.document)
    assert resolve_degrees(converted_recipe, world_size) == layout_and_batch
    assert converted_recipe.precision == recipe.precision
    assert converted_recipe.optimizer == recipe.optimizer
    assert converted_recipe.training.model_dump(
        exclude={"global_batch_size"}
    ) == recipe.training.model_dump(exclude={"global_batch_size"})


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, {"zero_stage": 0}),
        (4, {"zero_stage": 2}),
        (16, {"zero_stage": 3, "dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}),
    ],
)
def test_accelerate_survives_a_round_trip(
    tmp_path: Path, world_size: int, layout: dict[str, Any]
) -> None:
    training = {"sequence_length": 64, "max_steps": 9, "learning_rate": 1e-3, "micro_batch_size": 2}
    document = {
        "model": {"path": "model"},
        "data": {"sources": "corpus.txt"},
        "training": training,
        "layout": layout,
        "precision": "bf16",
    }
    recipe = validate_recipe(document | {"recompute": "full" if layout["zero_stage"] else "none"})
    resolved_layout, batch = resolve_degrees(recipe, world_size)
    path = tmp_path / "accelerate.yaml"
    path.write_text(emit("accelerate", EmitRequest(recipe, resolved_layout, batch)).text)
    extra = [
        "training.max_steps=9",
        "training.learning_rate=1e-3",
        "training.micro_batch_size=2",
        "layout.cp_method=auto",
    ]
    converted_recipe = validate_recipe(convert(path, overrides=[*OVERRIDES, *extra]).document)
    assert resolve_degrees(converted_recipe, world_size)[0] == resolved_layout
    assert (converted_recipe.precision, converted_recipe.recompute) == (
        recipe.precision,
        recipe.recompute,
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


def test_an_axolotl_file_becomes_a_recipe(tmp_path: Path) -> None:
    conversion = convert_document(tmp_path, "axolotl.yml", AXOLOTL)
    recipe = validate_recipe(conversion.document)
    assert not conversion.missing_keys
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
    assert {item.key for item in conversion.dropped} == {
        "warmup_ratio",
        "saves_per_epoch",
        "deepspeed",
        "special_tokens.pad_token",
    }
    assert any("Hub" in remark for remark in conversion.remarks)


def test_a_folder_that_exists_is_no_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = AXOLOTL | {"base_model": "models/llama"}
    remark = "models/llama looks like a Hugging Face Hub name"
    assert remark in str(convert_document(tmp_path, "absent.yml", changed).remarks)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    assert remark not in str(convert_document(tmp_path, "present.yml", changed).remarks)


def test_axolotls_settings_that_are_our_defaults_are_not_reported(tmp_path: Path) -> None:
    entry: dict[str, Any] = {
        "path": "chats.jsonl",
        "type": "chat_template",
        "message_property_mappings": {"role": "role", "content": "content"},
        "roles_to_train": ["assistant"],
        "train_on_eos": "turn",
    }
    document: dict[str, Any] = {"base_model": "x", "datasets": [entry]}
    assert not [
        item.key
        for item in convert_document(tmp_path, "axolotl.yml", document).dropped
        if item.key.startswith("datasets")
    ]
    entry |= {"roles_to_train": ["user"], "train_on_eos": "last"}
    dropped = {item.key for item in convert_document(tmp_path, "axolotl.yml", document).dropped}
    assert {"datasets.0.roles_to_train", "datasets.0.train_on_eos"} <= dropped


def test_axolotls_preference_training_is_converted_or_reported(tmp_path: Path) -> None:
    """Preference training must never become supervised training on the responses."""
    pairs = AXOLOTL | {
        "datasets": [{"path": "./pairs.jsonl", "type": "chat_template.default"}],
        "sample_packing": False,
    }
    conversion = convert_document(tmp_path, "dpo.yml", pairs | {"rl": "dpo", "rl_beta": 0.3})
    recipe = validate_recipe(conversion.document)
    assert recipe.preference is not None
    assert (recipe.preference.kind, recipe.preference.beta) == ("dpo", 0.3)
    assert [(source.path, source.records) for source in recipe.data.sources] == [
        ("./pairs.jsonl", "auto")
    ]
    other = convert_document(tmp_path, "kto.yml", pairs | {"rl": "kto"})
    assert other.missing_keys == ("preference.kind",)
    assert "rl" in {item.key for item in other.dropped}


@pytest.mark.parametrize(
    ("words", "stage", "is_dropped"),
    [(["full_shard", "auto_wrap"], 3, False), (["shard_grad_op", "offload"], 2, True)],
)
def test_axolotls_older_keys_are_converted(
    tmp_path: Path, words: list[str], stage: int, is_dropped: bool
) -> None:
    document = {key: value for key, value in AXOLOTL.items() if key != "deepspeed"}
    document |= {"fsdp": words, "optimizer": "paged_adamw_8bit", "neftune_noise_alpha": 5}
    conversion = convert_document(tmp_path, "old.yml", document)
    recipe = validate_recipe(conversion.document)
    assert (
        recipe.layout.zero_stage,
        recipe.optimizer.name,
        recipe.training.neftune_noise_alpha,
    ) == (stage, "adamw_8bit", 5)
    assert ("fsdp" in {item.key for item in conversion.dropped}) == is_dropped


def test_a_value_in_place_of_a_section_is_reported(tmp_path: Path) -> None:
    conversion = convert_document(
        tmp_path, "ds.json", {"train_batch_size": 4, "zero_optimization": True}
    )
    assert [item.key for item in conversion.dropped] == ["zero_optimization"]


def test_invalid_values_are_left_for_recipe_validation(tmp_path: Path) -> None:
    conversion = convert_document(
        tmp_path,
        "ds.json",
        {"train_batch_size": 8, "fp16": {"enabled": True, "initial_scale_power": 99999}},
    )
    assert conversion.document["precision"]["initial_loss_scale"] == 99999
    with pytest.raises(RecipeError, match=r"data\.sources\.0\.path: not a text"):
        convert_document(tmp_path, "axolotl.yaml", {"base_model": "x", "datasets": [{"path": []}]})


def test_deepspeed_files_set_the_tier_of_parameters(tmp_path: Path) -> None:
    section = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"},
    }
    conversion = convert_document(tmp_path, "ds.json", {"zero_optimization": section})
    expected = {"optimizer": "disk", "parameters": "disk", "dir": "/scratch"}
    assert conversion.document["offload"] == expected


def test_an_accelerate_file_with_fsdp1_becomes_a_recipe(tmp_path: Path) -> None:
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
    conversion = convert_document(
        tmp_path, "accelerate.yaml", document | {"num_processes": 8, "main_process_ip": "10.0.0.1"}
    )
    assert conversion.document["layout"] == {"zero_stage": 2}
    assert conversion.document["offload"] == {"optimizer": "host", "parameters": "host"}
    assert {"fsdp_config.fsdp_use_orig_params", "main_process_ip"} == {
        item.key for item in conversion.dropped
    }


def test_unknown_values_are_reported(tmp_path: Path) -> None:
    section = {"fsdp_sharding_strategy": "SHARD_SOMEHOW"}
    degrees = {"parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "pigeon"}
    document = {
        "distributed_type": "FSDP",
        "fsdp_config": section,
        "parallelism_config": degrees,
        "mixed_precision": "fp8",
    }
    dropped = {item.key for item in convert_document(tmp_path, "accelerate.yaml", document).dropped}
    strategy_key = "parallelism_config.parallelism_config_cp_comm_strategy"
    assert dropped == {"fsdp_config.fsdp_sharding_strategy", strategy_key, "mixed_precision"}
    document = {
        "fp16": {"enabled": True, "initial_scale_power": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    dropped = {item.key for item in convert_document(tmp_path, "ds.json", document).dropped}
    assert dropped == {"fp16.initial_scale_power", "optimizer.params.lr"}
    document = AXOLOTL | {
        "val_set_size": 200,
        "optimizer": "lion",
        "lr_scheduler": "rex",
        "warmup_ratio": None,
    }
    dropped = {item.key for item in convert_document(tmp_path, "axolotl.yml", document).dropped}
    assert dropped >= {"val_set_size", "optimizer", "lr_scheduler"}


def test_the_written_recipe_lists_missing_keys(
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
    document = capsys.readouterr().err
    assert "not carried: zero_optimization.overlap_comm" in document
    missing_line = next(line for line in document.splitlines() if line.startswith("missing keys: "))
    assert "training.learning_rate" in missing_line
    text = out.read_text()
    assert "# to fill in: training.sequence_length" in text
    with pytest.raises(InputError, match="missing key"):
        load_recipe(out)
    more_overrides = ["training.learning_rate=1e-3", "training.max_steps=3"]
    words = [word for change in [*OVERRIDES, *more_overrides] for word in ("--set", change)]
    assert (
        run(["convert", str(path), "--out", str(out), "--overwrite", *words, "--json"])
        == ExitCode.DONE
    )
    assert json.loads(capsys.readouterr().out)["needed"] == []
    assert load_recipe(out).layout.zero_stage == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", None, "no such file"),
        ("a.json", "{", "not valid JSON: Expecting property name"),
        ("a.json", "[" * 100_000, "not valid JSON"),
        ("a.yaml", "- 1", "must be a mapping (got list; allowed: a JSON file of DeepSpeed"),
        ("a.yaml", "colour: blue", "the keys do not match those of any known system"),
    ],
)
def test_wrong_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert run(["convert", str(path)]) == ExitCode.WRONG_INPUT
    assert message in capsys.readouterr().err


def test_an_invalid_value_in_the_file_is_refused(tmp_path: Path) -> None:
    document = {
        "train_micro_batch_size_per_gpu": -1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    with pytest.raises(InputError, match="micro_batch_size"):
        convert_document(tmp_path, "ds.json", document, *OVERRIDES, "training.max_steps=3")


@pytest.mark.parametrize(
    ("system", "document", "field", "allowed"),
    [
        ("axolotl", {"optimizer": {"type": "AdamW"}}, "optimizer", "text"),
        ("axolotl", {"lr_scheduler": ["cosine"]}, "lr_scheduler", "text"),
        ("axolotl", {"max_steps": "abc"}, "max_steps", "a number"),
        ("axolotl", {"max_steps": 9, "warmup_ratio": "abc"}, "warmup_ratio", "a number"),
        ("axolotl", {"cosine_min_lr_ratio": True}, "cosine_min_lr_ratio", "a number"),
        ("deepspeed", {"scheduler": {"type": [1]}}, "scheduler.type", "text"),
        (
            "deepspeed",
            {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": "x"}}},
            "scheduler.params.cos_min_ratio",
            "a number",
        ),
        (
            "deepspeed",
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}},
            "optimizer.params.betas",
            "two numbers",
        ),
        (
            "accelerate",
            {"distributed_type": "DEEPSPEED", "deepspeed_config": "ds.json"},
            "deepspeed_config",
            "a mapping",
        ),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(
    tmp_path: Path, system: str, document: dict[str, Any], field: str, allowed: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        convert(path, system)
    assert (caught.value.field, caught.value.allowed) == (field, allowed)


def test_an_offload_device_of_a_wrong_type_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": ["cpu"]}}}))
    assert "offload" not in convert(path).document


def test_accelerates_no_may_have_no_quotes(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: NO\nmixed_precision: no\n")
    document = convert(path).document
    assert document["precision"] == {"kind": "fp32"}
    assert document["layout"] == {"zero_stage": 0}
