"""Models of transformers behind the decoder's interface: shapes, refusals, split documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, OPTPreTrainedModel

from shardwright.architecture import (
    HFClassInit,
    HFShape,
    NormalInit,
    OnesInit,
    ZerosInit,
    read_config,
)
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.model import ModelSection
from shardwright.errors import ArchitectureError, LayoutError, RecipeError, WeightsError
from shardwright.inference.export import build_probe_ids, check_with_transformers
from shardwright.layout import Layout
from shardwright.model.document_rows import split_documents
from shardwright.model.hf.hf_decoder import build_decoder
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.model.hf.hf_module import load_hf_folder
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.model.pointwise import operators
from shardwright.model.pointwise.operators import differentiate_token_losses
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import chunked_cross_entropy
from shardwright.numerics.chunked_loss import ChunkedLoss
from shardwright.placement import place_model
from tests.unit.model.hf_models import HF_CONFIGS, SPARSE_HF_CONFIG


def read_shape(family: str, **changes: Any) -> HFShape:
    config = HF_CONFIGS[family] | changes
    shape = read_model_shape(config, ModelSection(config=config, dropout="off"))
    assert isinstance(shape, HFShape)
    return shape


def compute_loss(*arguments: Any, **options: Any) -> Tensor:
    return chunked_cross_entropy(*arguments, chunk_tokens=5, **options)


def save_model(family: str, folder: Path) -> Any:
    """Save and return a model of transformers with its own initial values."""
    torch.manual_seed(0)
    config = {key: value for key, value in HF_CONFIGS[family].items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config)).eval()
    # save_pretrained would import every library that may wrap the model.
    save_file(
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        folder / "model.safetensors",
    )
    model.config.to_json_file(folder / "config.json", use_diff=False)
    return model


@pytest.mark.parametrize(
    ("width", "dtype", "kind"),
    [
        (16, torch.float32, "grouped_mm"),
        (16, torch.float64, "eager"),
        (18, torch.float32, "eager"),
        (20, torch.bfloat16, "eager"),
    ],
    ids=str,
)
def test_experts_of_any_size_and_dtype_are_multiplied(
    width: int, dtype: torch.dtype, kind: str
) -> None:
    """torch's grouped product raises for fp64, and for rows of other than 16 bytes."""
    config = SPARSE_HF_CONFIG | {"moe_intermediate_size": width}
    shape = read_model_shape(config, ModelSection(config=config, dropout="off"))
    decoder = build_decoder(shape, compute_dtype=dtype).to_empty(device="cpu").to(dtype)
    assert decoder.hf_module.config._experts_implementation == kind
    changes = {key: value for key, value in config.items() if key != "model_type"}
    hf_model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen2_moe", **changes), dtype=dtype, experts_implementation="eager"
    )
    parameters = dict(hf_model.named_parameters())
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(parameters[name])
        ids_BT = torch.randint(0, 61, (2, 12))
        logits_BTV = decoder(ids_BT)
        expected_BTV = hf_model.eval()(ids_BT).logits
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(logits_BTV, expected_BTV, atol=tolerance)


def test_a_folder_with_experts_of_any_size_is_checked(tmp_path: Path) -> None:
    """Exports compare logits with transformers' for experts of 10 features too."""
    config = {
        "model_type": "mixtral",
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 10,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    shape = read_config(config)
    decoder = build_decoder(shape)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.3)
    tensors = dict(decoder.named_parameters())
    write_hf_folder(tmp_path / "out", shape, tensors.__getitem__, dtype=torch.float32)
    ids_BT = build_probe_ids(61, 12)
    with torch.no_grad():
        check_with_transformers(tmp_path / "out", decoder(ids_BT))


def test_tensors_that_transformers_renames_are_refused(tmp_path: Path) -> None:
    """Files of sparse classes have a tensor for each expert; the class has stacks of them."""
    changes = {key: value for key, value in SPARSE_HF_CONFIG.items() if key != "model_type"}
    hf_model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **changes))
    hf_model.save_pretrained(tmp_path / "files")
    hf_model.save_pretrained(tmp_path / "class", save_original_format=False)
    shape = read_model_shape(
        tmp_path / "files", ModelSection(path=str(tmp_path / "files"), dropout="off")
    )
    with pytest.raises(WeightsError, match="save_original_format=False"):
        WeightsFolder(tmp_path / "files").check(shape)
    WeightsFolder(tmp_path / "class").check(shape)


@pytest.mark.parametrize("family", sorted(HF_CONFIGS))
def test_losses_of_packed_documents_equal_those_of_separate_ones(
    family: str, tmp_path: Path
) -> None:
    hf_model = save_model(family, tmp_path)
    shape = read_model_shape(tmp_path, ModelSection(path=str(tmp_path), dropout="off"))
    folder = WeightsFolder(tmp_path)
    folder.check(shape)
    with torch.device("meta"):
        decoder = build_decoder(shape, loss_function=compute_loss)
    decoder = decoder.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(folder.read(name))
    ids_BT = torch.randint(0, 61, (2, 12))
    documents_BT = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 12])
    labels_BT = ids_BT.roll(-1, 1)
    labels_BT[0, [4, 8, 11]] = -100
    labels_BT[0, 9:] = -100  # the third document has no labels
    expected = torch.zeros(())
    for row, columns in ((0, slice(0, 5)), (0, slice(5, 9)), (1, slice(0, 12))):
        logits_SV = hf_model(ids_BT[row : row + 1, columns]).logits[0]
        expected = expected + F.cross_entropy(
            logits_SV, labels_BT[row, columns], reduction="sum", ignore_index=-100
        )
    with torch.no_grad():
        loss = decoder(ids_BT, document_ids_BT=documents_BT, labels_BT=labels_BT)
        whole_BTV = decoder(ids_BT, document_ids_BT=documents_BT)
    torch.testing.assert_close(loss, expected.detach(), rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(
        whole_BTV[0, 5:9], hf_model(ids_BT[:1, 5:9]).logits[0].detach(), rtol=1e-4, atol=1e-5
    )


# peft uses an old name of transformers.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    hf_model = save_model("opt", tmp_path)
    peft: Any = get_peft_model(
        hf_model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "fc1"])
    ).eval()
    section = AdapterSection(rank=2, alpha=4.0, targets=("q_proj", "fc1"))
    shape = add_adapters(
        read_model_shape(tmp_path, ModelSection(path=str(tmp_path), dropout="off")), section
    )
    with torch.device("meta"):
        decoder = build_decoder(shape, loss_function=compute_loss)
    decoder = decoder.to_empty(device="cpu")
    named = {
        name.replace(".default", "").replace("base_model.model.", ""): p
        for name, p in peft.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            value = named.get(name, named.get(name.replace(".weight", ".base_layer.weight")))
            value = named[name.replace(".bias", ".base_layer.bias")] if value is None else value
            if "lora_B" in name:
                value.normal_()
            parameter.copy_(value)
    assert {name.split(".")[-2] for name, p in decoder.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    ids_BT = torch.randint(0, 61, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(decoder(ids_BT), peft(ids_BT).logits, rtol=1e-4, atol=1e-5)
        with decoder.without_adapters(), peft.disable_adapter():
            torch.testing.assert_close(decoder(ids_BT), peft(ids_BT).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "section", "message"),
    [
        ("opt", AdapterSection(kind="dora"), "adapters.kind"),
        ("opt", AdapterSection(dropout=0.1), "adapters.dropout"),
        ("opt", AdapterSection(quantize="nf4"), "adapters.quantize"),
        # Mamba's class multiplies with this matrix itself.
        ("mamba", AdapterSection(targets=("dt_proj",)), "adapters.targets"),
    ],
    ids=str,
)
def test_adapters_that_a_class_cannot_have_are_refused(
    family: str, section: AdapterSection, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        add_adapters(read_shape(family), section)


def test_the_shape_of_a_class_is_read() -> None:
    shape = read_shape("opt")
    by_name = {spec.name: spec for spec in shape.list_parameters()}
    assert shape.tied_names == {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    assert "lm_head.weight" not in by_name
    assert by_name["model.decoder.embed_tokens.weight"].init == NormalInit(0.02, 0)
    assert by_name["model.decoder.layers.1.fc1.bias"].init == ZerosInit()
    assert by_name["model.decoder.layers.1.final_layer_norm.weight"].init == OnesInit()
    assert by_name["model.decoder.layers.1.fc1.weight"].layer == 1
    assert by_name["model.decoder.final_layer_norm.weight"].layer is None
    assert {
        s.name.split(".")[-1]
        for s in read_shape("mamba").list_parameters()
        if isinstance(s.init, HFClassInit)
    } == {"A_log", "D"}
    assert read_shape("phi").has_plain_head
    assert not read_shape("cohere").has_plain_head  # it scales the logits


@pytest.mark.parametrize(
    ("config", "section", "message"),
    [
        ({"model_type": "no_such_model"}, {}, "neither our decoder nor transformers supports"),
        (
            HF_CONFIGS["opt"] | {"dropout": 0.1},
            {},
            r"model.dropout: .*dropout: 0.1.*model.dropout: off",
        ),
        (HF_CONFIGS["opt"] | {"layerdrop": 0.1}, {}, "layerdrop: 0.1"),
        (
            {"model_type": "bert", "vocab_size": 61, "hidden_size": 12, "num_attention_heads": 2},
            {},
            "is_decoder: must be true",
        ),
        ({"model_type": "bart"}, {}, "is_encoder_decoder"),
        (
            {"model_type": "gemma3", "text_config": {}},
            {},
            r"text_config: .*\(got model_type: gemma3_text\)",
        ),
        (
            HF_CONFIGS["opt"] | {"quantization_config": {"quant_method": "bitsandbytes"}},
            {},
            "quantization_config",
        ),
        (
            HF_CONFIGS["phi"] | {"hidden_act": "no_such_activation"},
            {},
            "transformers cannot build it",
        ),
        ({"model_type": ["llama"]}, {}, "this model family is not supported"),
    ],
    ids=str,
)
def test_models_that_cannot_be_trained_exactly_are_refused(
    config: dict[str, Any], section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArchitectureError, match=message):
        read_model_shape(config, ModelSection(config=config, **section))


def test_code_in_the_folder_needs_trust_remote_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}'
    )
    (tmp_path / "own.py").write_text("raise RuntimeError('this must not run')")
    with pytest.raises(
        ArchitectureError, match=r"model.trust_remote_code: this model is defined by Python code"
    ):
        read_model_shape(tmp_path, ModelSection(path=str(tmp_path)))


def test_code_in_the_folder_defines_the_class_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from transformers import OPTConfig, OPTForCausalLM\n"
        "class OwnConfig(OPTConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(OPTForCausalLM):\n    config_class = OwnConfig\n"
    )
    maps = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(
        json.dumps(HF_CONFIGS["opt"] | {"model_type": "own", "auto_map": maps})
    )
    shape = read_model_shape(
        folder, ModelSection(path=str(folder), trust_remote_code=True, dropout="off")
    )
    assert isinstance(shape, HFShape)
    assert shape.class_name == "OwnForCausalLM"
    specs = {spec.name: spec for spec in shape.list_parameters()}
    write_hf_folder(
        tmp_path / "out",
        shape,
        lambda name: initialise_parameter(specs[name], 0, dtype=torch.float32),
        dtype=torch.float32,
    )
    model, loading = load_hf_folder(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert not any(loading.values())


def test_the_class_decides_which_parameters_16_bit_folders_store_in_fp32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shardwright")
    assert not any(spec.fp32_folders for spec in read_shape("opt").list_parameters())
    assert "is cast" not in caplog.text
    monkeypatch.setattr(OPTPreTrainedModel, "_keep_in_fp32_modules", ["*.fc1"])
    monkeypatch.setattr(OPTPreTrainedModel, "_keep_in_fp32_modules_strict", ["final_layer_norm"])
    folders = {
        spec.name.removeprefix("model.decoder."): spec.fp32_folders
        for spec in read_shape("opt").list_parameters()
        if spec.fp32_folders
    }
    strict = ("bf16", "fp16")
    assert {
        name: folder for name, folder in folders.items() if not name.startswith("layers.1")
    } == {
        "layers.0.fc1.weight": ("fp16",),
        "layers.0.fc1.bias": ("fp16",),
        "layers.0.final_layer_norm.weight": strict,
        "layers.0.final_layer_norm.bias": strict,
        "final_layer_norm.weight": strict,
        "final_layer_norm.bias": strict,
    }
    assert "in bf16 also model.decoder.final_layer_norm.weight is cast" in caplog.text


@pytest.mark.parametrize("degree", ["tp", "pp", "cp", "ep"])
def test_degrees_that_need_our_decoder_are_refused(degree: str) -> None:
    dp_shard = 2 if degree == "ep" else 1
    layout = Layout(**{degree: 2, "dp_shard": dp_shard, "zero_stage": 3 if dp_shard > 1 else 0})
    with pytest.raises(
        LayoutError,
        match=rf"layout.{degree}: opt runs through transformers' own OPTForCausalLM; "
        "shardwright does not know",
    ):
        place_model(read_shape("opt"), layout, 16)


def test_documents_without_supervision_are_omitted_except_one_row() -> None:
    documents_BT = torch.tensor([[0, 0, 1, 1, 1, 2]])
    labels_BT = torch.tensor([[-100, -100, 5, 6, -100, -100]])
    packing = split_documents(documents_BT, labels_BT)
    assert packing.scatter_to_rows(torch.arange(6)[None], 0).tolist() == [[2, 3, 4]]
    assert packing.scatter_to_rows(labels_BT, -100).tolist() == [[5, 6, -100]]
    unsupervised = split_documents(documents_BT, torch.full((1, 6), -100))
    assert unsupervised.scatter_to_rows(torch.arange(6)[None], 9).tolist() == [[0, 1]]
    whole = split_documents(documents_BT, None)
    assert whole.scatter_to_rows(torch.arange(6)[None], 9).tolist() == [
        [0, 1, 9],
        [2, 3, 4],
        [5, 9, 9],
    ]
    assert whole.gather_from_rows(
        whole.scatter_to_rows(torch.arange(6)[None], 9)[..., None]
    ).flatten().tolist() == list(range(6))


@pytest.mark.parametrize("family", ["bloom", "phi"])
def test_a_compiled_loss_has_the_gradients_of_separate_passes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def count_calls(*arguments: Any) -> Tensor:
        calls.append(arguments)
        losses: Tensor = differentiate_token_losses(*arguments)
        return losses

    monkeypatch.setattr(operators, "choose_compile_options", lambda: {"backend": "eager"})
    monkeypatch.setattr(operators, "compiled_formulas", {})
    shape = read_shape(family)
    ids_BT = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for fused_losses in (None, count_calls):
        with torch.device("meta"):
            decoder = build_decoder(shape, loss_function=ChunkedLoss(5, fused_losses))
        decoder = decoder.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        loss = decoder(ids_BT, labels_BT=ids_BT)
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in decoder.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert len(calls) == (0 if family == "phi" else 5), "a head with a bias takes separate passes"
