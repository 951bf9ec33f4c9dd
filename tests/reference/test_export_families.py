"""transformers loads the folders that we write, and the reverse: every family, tied and untied,
bit for bit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shardwright.architecture import ModelShape, read_config
from shardwright.architecture.families import MODEL_FAMILIES
from shardwright.architecture.parameter_spec import FolderPrecision
from shardwright.errors import ArchitectureError
from shardwright.inference import model_source
from shardwright.model.decoder import Decoder
from shardwright.model.hf.exported_tensors import FOLDER_DTYPES
from shardwright.model.hf.hf_folder import HF_CLASS_NAMES, write_hf_folder
from shardwright.model.hf.hf_weights import WeightsFolder

COMMON: dict[str, Any] = {
    "vocab_size": 43,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "qwen3": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 10,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_nextn_predict_layers": 0,
    },
    "gpt2": {
        "n_embd": 24,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "vocab_size": 43,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_neox": {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    | {"hidden_size": 32},
}
CASES = [(family, tied) for family in sorted(MODEL_FAMILIES) for tied in (False, True)]


def build_hf_config(family: str, tied: bool) -> PreTrainedConfig:
    fields = SPECIAL[family] if family in ("gpt2", "gpt_neox") else COMMON | SPECIAL.get(family, {})
    return AutoConfig.for_model(family, **fields, tie_word_embeddings=tied)


def make_hf_model(family: str, tied: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build transformers' model with every parameter changed, norms and biases too, so that a swap
    of two is detected.
    """
    model = AutoModelForCausalLM.from_config(
        build_hf_config(family, tied), dtype=dtype, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (
            *model.parameters(),
            *(buffer for name, buffer in model.named_buffers() if name.endswith("bias")),
        ):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1)
    return model.eval()


def load_decoder(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[ModelShape, WeightsFolder, Decoder]:
    shape = read_config(folder)
    weights = WeightsFolder(folder)
    weights.check(shape)
    decoder = Decoder(shape).to(dtype)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(weights.read(name, dtype=dtype))
    return shape, weights, decoder


def load_hf_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load with `from_pretrained`, without missing and without unexpected tensors."""
    # Older versions run gemma2 with a kernel without soft caps.
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def make_ids() -> torch.Tensor:
    return torch.randint(
        0, COMMON["vocab_size"], (2, 19), generator=torch.Generator().manual_seed(5)
    )


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_round_trip_is_bit_equal(tmp_path: Path, family: str, tied: bool) -> None:
    """save_pretrained -> our reader -> our writer -> from_pretrained; bf16 in several files if
    tied, fp32 in one file if not.
    """
    dtype = torch.bfloat16 if tied else torch.float32
    hf_model = make_hf_model(family, tied, dtype)
    hf_model.save_pretrained(tmp_path / "hf", max_shard_size=10_000)
    shape, weights, _ = load_decoder(tmp_path / "hf", dtype)
    write_hf_folder(
        tmp_path / "ours",
        shape,
        weights.read,
        dtype=dtype,
        max_shard_bytes=20_000 if tied else 10**9,
    )
    reloaded = load_hf_model(tmp_path / "ours", dtype)
    assert type(reloaded).__name__ == type(hf_model).__name__ == HF_CLASS_NAMES[family]
    expected = hf_model.state_dict()
    got = reloaded.state_dict()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    source = model_source.open_model_source(tmp_path / "ours")
    loaded = model_source.load_decoder(source, device=torch.device("cpu"), dtype=dtype)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.float(), weights.read(name).float()), name
    with torch.no_grad():
        assert torch.equal(reloaded(make_ids()).logits, hf_model(make_ids()).logits)
    assert {
        key: value for key, value in reloaded.config.to_dict().items() if key != "_name_or_path"
    } == {key: value for key, value in hf_model.config.to_dict().items() if key != "_name_or_path"}


@pytest.mark.parametrize("family", sorted(MODEL_FAMILIES))
@pytest.mark.parametrize(("precision", "dtype"), FOLDER_DTYPES.items())
def test_folders_store_in_fp32_all_that_transformers_reads_in_fp32(
    family: str, precision: FolderPrecision, dtype: torch.dtype
) -> None:
    """Older versions keep fewer parameters in fp32 than ours, never more."""
    with torch.device("meta"):
        hf_model = AutoModelForCausalLM.from_config(build_hf_config(family, False))
    plan = hf_model._get_dtype_plan(dtype)
    fp32_names = {
        name for name in hf_model.state_dict() if any(re.search(pattern, name) for pattern in plan)
    }
    shape = read_config(hf_model.config.to_dict())
    assert fp32_names <= {
        spec.name for spec in shape.list_parameters() if precision in spec.fp32_folders
    }


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_our_own_config_is_enough(tmp_path: Path, family: str, tied: bool) -> None:
    """transformers must use our defaults for the fields that a recipe's config leaves out."""
    fields = SPECIAL[family] if family in ("gpt2", "gpt_neox") else COMMON | SPECIAL.get(family, {})
    shape = read_config({"model_type": family, **fields, "tie_word_embeddings": tied})
    generator = torch.Generator().manual_seed(1)
    tensors = {
        spec.name: torch.randn(spec.shape, generator=generator) * 0.1
        for spec in shape.list_parameters()
    }
    write_hf_folder(tmp_path / "out", shape, tensors.__getitem__, dtype=torch.float32)
    hf_model = load_hf_model(tmp_path / "out", torch.float32)
    decoder = Decoder(shape)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(tensors[name])
        torch.testing.assert_close(
            decoder(make_ids()), hf_model(make_ids()).logits, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox", "llama"])
def test_a_base_model_without_its_head(tmp_path: Path, family: str) -> None:
    """transformers' base class saves names without their root; with tied weights that is a whole
    model, like the published gpt2.
    """
    hf_model = make_hf_model(family, True)
    hf_model.base_model.save_pretrained(tmp_path)
    _, _, decoder = load_decoder(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            decoder(make_ids()), hf_model(make_ids()).logits, rtol=1e-5, atol=1e-5
        )


# deepseek_v3's heads consist of parts; a head_dim next to them is refused.
@pytest.mark.parametrize(
    "family", sorted(set(MODEL_FAMILIES) - {"gpt2", "gpt_neox", "deepseek_v3"})
)
def test_widths_that_transformers_would_not_load_are_refused_before_training(family: str) -> None:
    """Some families' classes refuse a width that is not a multiple of the heads, even with head_dim
    given; others accept it.
    """
    fields = {**COMMON, **SPECIAL.get(family, {}), "hidden_size": 26, "head_dim": 8}
    try:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
    except StrictDataclassClassValidationError:
        with pytest.raises(ArchitectureError):
            read_config({"model_type": family, **fields})
    else:
        read_config({"model_type": family, **fields})
