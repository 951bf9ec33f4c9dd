"""Folders with 8-bit weights: transformers reads the values that we wrote, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.architecture import ModelShape, read_config
from shardwright.cli.main import run as shardwright
from shardwright.errors import CheckFailed, ExitCode, InputError
from shardwright.inference.export import check_tensors, export_hf_folder, select_quantisation
from shardwright.inference.model_source import ModelSource, open_model_source
from shardwright.model.hf.fp8_weights import FP8Weights, select_fp8_weights
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.hf.hf_module import load_hf_folder
from shardwright.model.products import fp8
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.model.weight_init import initialise_parameter

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 43,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [1],
}
MODELS = {"dense": LLAMA, "tied": LLAMA | {"tie_word_embeddings": True}, "experts": MOE}


def write_plain_folder(path: Path, config: dict[str, Any]) -> tuple[ModelShape, dict[str, Tensor]]:
    shape = read_config(config)
    weights = {
        spec.name: initialise_parameter(spec, 0, dtype=torch.bfloat16)
        for spec in shape.list_parameters()
    }
    write_hf_folder(path, shape, weights.__getitem__)
    return shape, weights


def round_parameter(
    shape: ModelShape, quantisation: FP8Weights, name: str, values: Tensor
) -> Tensor:
    rounded = values.float()
    (spec,) = (spec for spec in shape.list_parameters() if spec.name == name)
    for piece in spec.file_slices:
        if piece.name in quantisation.names:
            box = tuple(slice(*bounds) for bounds in piece.box)
            part = rounded[box]
            rounded[box] = quantisation.round(part.reshape(piece.shape)).view_as(part)
    return rounded


def find_in_transformers(state: dict[str, Tensor], name: str) -> Tensor:
    """Find a parameter; transformers' stacks of experts are named and ordered as ours."""
    aliases = {name, name.removesuffix(".weight")}
    (key,) = aliases & set(state)
    return state[key]


def require_reader(weight_format: str) -> None:
    if weight_format == "fp8-row":
        pytest.importorskip("compressed_tensors")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weight_format", ["fp8-block", "fp8-row"])
def test_transformers_reads_our_values(weight_format: str, model: str, tmp_path: Path) -> None:
    require_reader(weight_format)
    shape, weights = write_plain_folder(tmp_path / "plain", MODELS[model])
    source = open_model_source(tmp_path / "plain")
    exclude = ("model.layers.1.mlp.down_proj.weight",)
    quantisation = select_quantisation(source, weight_format, exclude)
    assert quantisation is not None
    export_hf_folder(
        source, tmp_path / "out", dtype=torch.bfloat16, quantisation=quantisation, check=True
    )
    loaded, report = load_hf_folder(tmp_path / "out")
    assert not any(report.values())
    state = loaded.state_dict()
    num_changed = 0
    for name, values in weights.items():
        expected = round_parameter(shape, quantisation, name, values)
        got = find_in_transformers(state, name)
        assert torch.equal(got, expected), name
        num_changed += not torch.equal(expected, values.float())
    assert num_changed == len({spec for spec in quantisation.names if "experts" not in spec}) + (
        2 if model == "experts" else 0
    )


@pytest.mark.parametrize(
    ("weight_format", "recipe"), [("fp8-block", "blockwise"), ("fp8-row", "rowwise")]
)
def test_codes_are_those_that_training_multiplies(
    weight_format: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight's operand of the output product has the stored bytes."""
    shape, weights = write_plain_folder(tmp_path / "plain", LLAMA)
    write_hf_folder(
        tmp_path / "out",
        shape,
        weights.__getitem__,
        quantisation=select_fp8_weights(shape, weight_format),
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    captured: list[fp8.QuantisedMatrix] = []
    quantise = fp8.quantise

    def capture(*arguments: Any) -> fp8.QuantisedMatrix:
        captured.append(quantise(*arguments))
        return captured[-1]

    monkeypatch.setattr(fp8, "quantise", capture)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        captured.clear()
        ScaledProducts(fp8.RECIPES[recipe]).compute_output(torch.ones(128, 256), weights[name])
        _, operand = captured
        assert torch.equal(operand.codes.view(torch.uint8), stored[name].view(torch.uint8))
        suffix = "_scale_inv" if weight_format == "fp8-block" else "_scale"
        assert torch.equal(1.0 / operand.multipliers, stored[name + suffix])


@pytest.mark.parametrize("weight_format", ["fp8-block", "fp8-row"])
def test_the_read_back_compares_every_byte(weight_format: str, tmp_path: Path) -> None:
    """Without transformers, a different scale, code or name is detected."""
    write_plain_folder(tmp_path / "plain", LLAMA)
    source = open_model_source(tmp_path / "plain")
    quantisation = select_quantisation(source, weight_format, ())
    assert quantisation is not None

    def export(written_from: ModelSource, out: str) -> Path:
        export_hf_folder(
            written_from,
            tmp_path / out,
            dtype=torch.bfloat16,
            quantisation=quantisation,
            check=False,
        )
        return tmp_path / out

    stored = load_file(export(source, "good") / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scales = quantisation.name_scales(name)
    assert stored[scales].dtype == torch.float32
    check_tensors(tmp_path / "good", source, torch.bfloat16, quantisation)
    doubled = stored[name].view(torch.uint8).clone()
    doubled[3, 5] ^= 1
    for changed in (
        {scales: stored[scales] * 2},
        {name: doubled.view(torch.float8_e4m3fn)},
        {scales: stored[scales].bfloat16()},
        {"model.norm.scale": stored[scales].clone()},
    ):
        save_file(stored | changed, tmp_path / "good" / "model.safetensors")
        with pytest.raises(CheckFailed):
            check_tensors(tmp_path / "good", source, torch.bfloat16, quantisation)


def test_a_missing_reader_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plain_folder(tmp_path / "plain", LLAMA)
    source = open_model_source(tmp_path / "plain")
    quantisation = select_quantisation(source, "fp8-row", ())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"compressed-tensors.*--no-check"):
        export_hf_folder(source, tmp_path / "out", dtype=torch.bfloat16, quantisation=quantisation)
    assert not (tmp_path / "out").exists()


def test_the_verb_writes_a_checked_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plain_folder(tmp_path / "plain", LLAMA)
    words = ["export", str(tmp_path / "plain"), "--out", str(tmp_path / "out"), "--json"]
    assert shardwright([*words, "--quantise", "fp8-block"]) == ExitCode.DONE
    captured = capsys.readouterr()
    assert json.loads(captured.out)["quantised"] == "fp8-block"
    assert "bf16 and fp8-block" in captured.err
    assert "logits agree" in captured.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    assert config["modules_to_not_convert"] == ["lm_head"]
