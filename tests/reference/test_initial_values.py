"""Initial values: each family's own scheme, measured on models that transformers initialises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.architecture import MODEL_FAMILIES, NormalInit, OnesInit, read_config
from tests.reference.cases import CASES

_WIDER = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 211}
_WIDER_GPT2 = {"n_embd": 64, "n_layer": 2, "vocab_size": 211}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", sorted(MODEL_FAMILIES))
def test_every_parameter_starts_as_in_transformers(
    family: str, padded: bool, tmp_path: Path
) -> None:
    case = next(case for case in CASES.values() if case["model_type"] == family)
    config = case | (_WIDER_GPT2 if family == "gpt2" else _WIDER) | {"initializer_range": 0.05}
    if padded:
        config["pad_token_id"] = 3
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    hf_tensors = load_file(tmp_path / "model.safetensors")
    specs = read_config(config).list_parameters()
    pieces = [(spec, piece.name) for spec in specs for piece in spec.file_slices]
    assert {name for _, name in pieces} == set(hf_tensors)
    for spec, name in pieces:
        tensor = hf_tensors[name]
        if not isinstance(spec.init, NormalInit):
            assert torch.equal(
                tensor, torch.full_like(tensor, float(isinstance(spec.init, OnesInit)))
            ), spec.name
            continue
        zero_rows = [row for row in range(len(tensor)) if not tensor[row].any()]
        assert zero_rows == ([] if spec.init.zero_row is None else [spec.init.zero_row]), spec.name
        values = tensor[tensor != 0]
        # Five standard errors of a normal sample's deviation and mean.
        assert abs(values.std().item() / spec.init.std - 1) < 5 / (2 * values.numel()) ** 0.5, (
            spec.name
        )
        assert abs(values.mean().item()) < 5 * spec.init.std / values.numel() ** 0.5, spec.name
