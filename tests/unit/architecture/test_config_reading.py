"""Reading of config.json; refusals name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.architecture import INERT_FIELDS, MODEL_FAMILIES, OFF_FIELDS, read_config
from shardwright.errors import ArchitectureError
from tests.reference.cases import CASES

LLAMA = CASES["llama"]


def test_reads_a_folder_a_file_and_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == read_config(LLAMA)


@pytest.mark.parametrize("case", CASES)
def test_config_is_written_back_as_read(case: str) -> None:
    shape = read_config(CASES[case])
    assert shape.to_config() == CASES[case]
    shape.to_config()["hidden_size"] = 0  # changes a copy, not the shape
    assert read_config(shape.to_config()) == shape


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match=r"cannot be read.*nowhere"):
        read_config(tmp_path / "nowhere")


def test_broken_json_is_our_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArchitectureError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ArchitectureError, match="must be a mapping"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "remedy"),
    [
        ("gemma3", "gemma3_text"),
        ("lama", "Did you mean `llama`"),
        (None, "one of these"),
        ("bert", "one of"),
        ("jamba", "state-space layers"),
        (["llama"], "Did you mean `llama`"),
    ],
)
def test_other_families_are_refused(family: Any, remedy: str) -> None:
    with pytest.raises(ArchitectureError, match=remedy) as caught:
        read_config({**LLAMA, "model_type": family})
    assert caught.value.field == "model_type"
    assert all(known in str(caught.value.allowed) for known in MODEL_FAMILIES)


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("llama", "clip_qkv", 8.0),
        ("llama", "head_dimm", 16),
        ("llama", "sliding_window", 4),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "num_local_experts", 8),
        ("llama", "hidden_act", "quick_gelu"),
        ("llama", "hidden_size", None),
        ("llama", "hidden_size", 48.0),
        ("llama", "hidden_size", True),
        ("llama", "vocab_size", 0),
        ("llama", "num_key_value_heads", 3),
        ("llama", "attention_dropout", 1.0),
        ("llama", "attention_bias", "yes"),
        ("llama", "rms_norm_eps", -1e-6),
        ("llama", "pad_token_id", 97),
        ("llama", "initializer_range", 0.0),
        ("qwen2", "attention_bias", True),
        ("qwen2", "use_mrope", True),
        ("qwen2", "layer_types", ["full_attention"]),
        ("qwen2", "layer_types", ["chunked_attention"] * 3),
        ("qwen2", "layer_types", ["sliding_attention"] * 3),
        ("mistral-window", "layer_types", ["full_attention"] * 3),
        ("phi3", "embd_pdrop", 0.1),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma3_text-older", "attn_logit_softcapping", 50.0),
        ("smollm3", "no_rope_layers", [1, 0]),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "hidden_size", 48),
        ("gpt_neox", "num_key_value_heads", 2),
    ],
)
def test_unsupported_features_are_refused_by_name(case: str, field: str, value: Any) -> None:
    with pytest.raises(ArchitectureError) as caught:
        read_config({**CASES[case], field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("field", sorted(INERT_FIELDS - {"model_type", "pad_token_id"}))
def test_inert_fields_change_nothing(field: str) -> None:
    assert read_config({**LLAMA, field: "anything"}) == read_config(LLAMA)


@pytest.mark.parametrize("family", sorted(MODEL_FAMILIES))
def test_features_that_are_off_change_nothing(family: str) -> None:
    plain = next(case for case in CASES.values() if case["model_type"] == family)
    for field, values in OFF_FIELDS.items():
        # A family's own field has its own defaults: null there need not mean off.
        if field in plain or field in (
            "layer_types",
            "head_dim",
            "sliding_window",
            "attn_logit_softcapping",
        ):
            continue
        if field in ("final_logit_softcapping", "attention_bias", "partial_rotary_factor"):
            continue
        if field in ("num_experts", "num_local_experts") and read_config(plain).experts is not None:
            continue  # two spellings of one number
        for value in values:
            assert read_config({**plain, field: value}) == read_config(plain), (field, value)


def test_a_missing_size_is_an_error() -> None:
    for field in (
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "max_position_embeddings",
        "vocab_size",
    ):
        config = {name: value for name, value in LLAMA.items() if name != field}
        with pytest.raises(ArchitectureError, match="missing") as caught:
            read_config(config)
        assert caught.value.field == field


def drop_fields(case: str, *fields: str) -> dict[str, Any]:
    return {name: value for name, value in CASES[case].items() if name not in fields}


def test_key_heads_default_to_query_heads_only_where_transformers_does_so() -> None:
    assert read_config(drop_fields("llama", "num_key_value_heads")).num_kv_heads == 4
    assert read_config({**CASES["mistral-window"], "num_key_value_heads": None}).num_kv_heads == 4
    for case in ("mistral-window", "qwen2", "qwen3", "gemma2", "smollm3"):
        with pytest.raises(ArchitectureError, match="missing") as caught:
            read_config(drop_fields(case, "num_key_value_heads"))
        assert caught.value.field == "num_key_value_heads"


@pytest.mark.parametrize(
    ("case", "row"),
    [("llama", None), ("gemma2", 0), ("olmo2", 1), ("gpt2", None), ("gpt_neox", None)],
)
def test_the_familys_padding_token_is_the_default(case: str, row: int | None) -> None:
    shape = read_config(drop_fields(case, "pad_token_id"))
    assert shape.padding_row == row
    assert "pad_token_id" not in shape.to_config()


@pytest.mark.parametrize(("case", "row"), [("smollm3", 128004), ("phi3", 32000)])
def test_a_padding_token_outside_a_small_vocabulary_is_written_back_as_null(
    case: str, row: int
) -> None:
    config = drop_fields(case, "pad_token_id")
    assert read_config(config | {"vocab_size": 130_000}).padding_row == row
    shape = read_config(config)
    assert shape.padding_row is None
    assert shape.to_config() == config | {"pad_token_id": None}


def test_width_must_be_divisible_by_heads() -> None:
    with pytest.raises(ArchitectureError, match="multiple of 4"):
        read_config({**LLAMA, "hidden_size": 50})


def test_sequences_beyond_the_positions_are_refused() -> None:
    shape = read_config(LLAMA)
    shape.check_sequence_length(64)
    with pytest.raises(ArchitectureError, match="at most 64") as caught:
        shape.check_sequence_length(65)
    assert caught.value.field == "training.sequence_length"


def test_older_and_newer_spellings_agree() -> None:
    older = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "torch_dtype": "bfloat16",
    }
    newer = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        "dtype": "bfloat16",
    }
    assert read_config(LLAMA | older) == read_config(LLAMA | newer)


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"type": "ntk"}, "rope_scaling.rope_type"),
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "linear", "factor": 2.0, "extra": 1}, "rope_scaling.extra"),
        ({"type": "linear", "factor": 0}, "rope_scaling.factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            "rope_scaling.high_freq_factor",
        ),
        (
            {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 6},
            "rope_scaling.short_factor",
        ),
        (
            {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [0.0] * 6},
            "rope_scaling.long_factor",
        ),
        ("linear", "rope_scaling"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling.full_attention"),
    ],
)
def test_wrong_rope_scaling_is_refused(rope: Any, field: str) -> None:
    with pytest.raises(ArchitectureError) as caught:
        read_config({**LLAMA, "rope_scaling": rope})
    assert caught.value.field == field


def test_two_spellings_that_contradict_are_refused() -> None:
    both = {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 4.0},
    }
    with pytest.raises(ArchitectureError, match="contradict"):
        read_config(LLAMA | both)


def test_windows_by_family() -> None:
    def list_windows(case: str) -> list[int | None]:
        return [layer.window for layer in read_config(CASES[case]).layers]

    assert list_windows("mistral-window") == [7, 7, 7]
    assert list_windows("qwen2-window-from-layer-1") == [None, 5, 5]
    assert list_windows("gemma2") == [6, None, 6, None]
    assert [layer.rope for layer in read_config(CASES["smollm3"]).layers] == [0, None, 0, None]
    # Absent is not null: Mistral's class default is a window of 4096.
    absent = {
        name: value for name, value in CASES["mistral-window"].items() if name != "sliding_window"
    }
    assert {layer.window for layer in read_config(absent).layers} == {4096}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 2**62),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 10**400),
    ],
)
def test_numbers_beyond_any_model_are_refused(field: str, value: float) -> None:
    """A billion layers would need a billion descriptions."""
    with pytest.raises(ArchitectureError) as caught:
        read_config(LLAMA | {field: value})
    assert caught.value.field == field
