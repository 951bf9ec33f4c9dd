"""Adapters against peft: the same files give the same function and gradients, in both
directions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardwright.architecture import AdapterShape, ModelShape, NormalInit, read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.architecture.peft_folder import PEFT_CONFIG_NAME, read_peft_folder
from shardwright.config.adapter_section import AdapterSection
from shardwright.errors import WeightsError
from shardwright.inference.adapter_export import check_with_peft
from shardwright.inference.export import build_probe_ids
from shardwright.model import Decoder
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.hf.peft_folder import PeftFolder, join_experts, write_peft_folder
from shardwright.model.lora import initialise_adapter
from tests.reference.cases import CASES

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

SMALL = CASES["llama-padding-row"]
KINDS = [
    ("llama-padding-row", AdapterSection(kind="lora", rank=3, alpha=5.0)),
    (
        "llama-padding-row",
        AdapterSection(kind="dora", rank=4, targets=("q_proj", "model.layers.1.mlp.*")),
    ),
    ("gpt2", AdapterSection(kind="dora", rank=2)),
    ("mixtral", AdapterSection(kind="rslora", rank=4, alpha=2.0)),
    ("gpt_oss", AdapterSection(kind="lora", rank=4, targets=("experts.down_proj", "o_proj"))),
]


def make_values(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Return every parameter of a model, with adapters changed from their initial values."""
    values: dict[str, Tensor] = {}

    def read(name: str, bounds: Any) -> Tensor:
        return values[name][tuple(slice(start, start + length) for start, length in bounds)]

    for spec in shape.list_parameters():
        in_out = spec.adapted_matrix is not None and shape.is_in_out(spec.adapted_matrix)
        drawn = replace(spec, init=NormalInit(0.1)) if spec.adapter_part == "lora_B" else spec
        values[spec.name] = initialise_adapter(
            drawn, seed, None, dtype=torch.float32, read_matrix=read, in_out=in_out
        )
        if spec.adapter_part == "lora_magnitude_vector":
            values[spec.name] *= 1.0 + 0.3 * torch.rand(
                spec.shape, generator=torch.Generator().manual_seed(1)
            )
    return values


def build_decoder(shape: ModelShape, values: dict[str, Tensor]) -> Decoder:
    """Build our decoder with these values."""
    decoder = Decoder(shape)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(values[name])
    return decoder


def test_the_check_of_an_export_reads_experts_of_any_size(tmp_path: Path) -> None:
    """torch's grouped product has no experts of 30 features, and transformers takes it."""
    shape = add_adapters(read_config(CASES["mixtral-window-narrow"]), AdapterSection(rank=3))
    values = make_values(shape)
    write_hf_folder(tmp_path / "base", shape.base_shape, values.__getitem__, dtype=torch.float32)
    write_peft_folder(tmp_path / "adapters", shape, values.__getitem__, base=str(tmp_path / "base"))
    with torch.no_grad():
        logits_BTV = build_decoder(shape, values)(build_probe_ids(shape.vocab_size, 16))
    check_with_peft(tmp_path / "adapters", logits_BTV)


def run_and_differentiate(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the logits; the gradients are those of their sum with fixed weights."""
    output = model(ids_BT)
    logits_BTV: Tensor = output if isinstance(output, Tensor) else output.logits
    weights = torch.rand(logits_BTV.shape, generator=torch.Generator().manual_seed(2))
    (logits_BTV * weights).sum().backward()
    return logits_BTV.detach()


def are_close(got: Tensor, expected: Tensor) -> bool:
    return float((got - expected).norm() / expected.norm()) < 2e-5


@pytest.mark.parametrize(
    ("name", "section"), KINDS, ids=lambda value: value if isinstance(value, str) else value.kind
)
def test_peft_computes_the_same_from_our_files(
    name: str, section: AdapterSection, tmp_path: Path
) -> None:
    shape = add_adapters(read_config(CASES[name]), section)
    values = make_values(shape)
    write_hf_folder(tmp_path / "base", shape.base_shape, values.__getitem__, dtype=torch.float32)
    write_peft_folder(tmp_path / "adapters", shape, values.__getitem__, base=str(tmp_path / "base"))

    ours = build_decoder(shape, values)
    ids_BT = build_probe_ids(shape.vocab_size, 16)
    logits_BTV = run_and_differentiate(ours, ids_BT)
    peft_model = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapters", is_trainable=True, dtype=torch.float32
    )
    assert are_close(run_and_differentiate(peft_model.eval(), ids_BT), logits_BTV)

    # The gradients of peft under the names in our files.
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    specs = {spec.name: spec for spec in shape.list_parameters() if spec.adapter_part is not None}
    assert set(gradients) == set(specs)
    expected_gradients = {
        n.replace(".default", ""): p.grad
        for n, p in peft_model.named_parameters()
        if p.requires_grad
    }
    named = PeftFolder(tmp_path / "adapters", shape)._names
    assert len(expected_gradients) == len(specs)
    for part, spec in specs.items():
        gradient = gradients[part]
        expected = expected_gradients[
            named[part].name + (".weight" if spec.adapter_part == "lora_magnitude_vector" else "")
        ]
        assert are_close(
            join_experts(spec, gradient) if gradient.ndim == 3 else gradient, expected
        ), part

    assert read_peft_folder(tmp_path / "adapters", shape.base_shape) == shape.adapters
    reread = PeftFolder(tmp_path / "adapters", shape)
    for part, spec in specs.items():
        assert torch.equal(
            reread.read(part, [(0, size) for size in spec.shape], torch.float32), values[part]
        )


def test_a_wrong_scale_is_detected(tmp_path: Path) -> None:
    shape = add_adapters(read_config(SMALL), AdapterSection(kind="rslora", rank=4))
    values = make_values(shape)
    write_hf_folder(tmp_path / "base", shape.base_shape, values.__getitem__, dtype=torch.float32)
    write_peft_folder(tmp_path / "adapters", shape, values.__getitem__, base=str(tmp_path / "base"))
    peft_model = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapters", dtype=torch.float32
    )
    ids_BT = build_probe_ids(shape.vocab_size, 16)
    with torch.no_grad():
        expected_BTV = peft_model.eval()(ids_BT).logits
        assert are_close(build_decoder(shape, values)(ids_BT), expected_BTV)
        with patch.object(AdapterShape, "scale", 2.0):  # alpha / rank, as if it were lora
            assert not are_close(build_decoder(shape, values)(ids_BT), expected_BTV)


def test_our_adapters_start_from_files_of_peft(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = read_config(CASES["qwen3_moe"])
    write_hf_folder(tmp_path / "base", shape, make_values(shape).__getitem__, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj"],
    )
    torch.manual_seed(3)
    peft_model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    peft_model.save_pretrained(tmp_path / "adapters")

    adapted = add_adapters(shape, AdapterSection(path=str(tmp_path / "adapters")))
    assert adapted.adapters is not None
    assert (adapted.adapters.kind, adapted.adapters.rank) == ("rslora", 4)
    folder = PeftFolder(tmp_path / "adapters", adapted)
    values = make_values(adapted)
    for spec in adapted.list_parameters():
        if spec.adapter_part is not None:
            values[spec.name] = folder.read(
                spec.name, [(0, size) for size in spec.shape], torch.float32
            )
    ids_BT = build_probe_ids(shape.vocab_size, 16)
    with torch.no_grad():
        assert are_close(build_decoder(adapted, values)(ids_BT), peft_model.eval()(ids_BT).logits)

    part = next(
        spec
        for spec in adapted.list_parameters()
        if spec.adapter_part == "lora_B" and len(spec.shape) == 3
    )
    bounds = [(1, 2), (3, 5), (0, 4)]
    slices = tuple(slice(start, start + length) for start, length in bounds)
    assert torch.equal(folder.read(part.name, bounds, torch.float32), values[part.name][slices])

    expect_refusal = partial(
        pytest.raises, WeightsError, match="changes the adapter's output and is not supported"
    )
    path = tmp_path / "adapters" / PEFT_CONFIG_NAME
    content = json.loads(path.read_text())
    for changed in (
        {"init_lora_weights": "pissa"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
    ):
        path.write_text(json.dumps(content | changed))
        with expect_refusal():
            read_peft_folder(path.parent, shape)
    path.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match="surplus"):
        read_peft_folder(path.parent, replace(shape, layers=shape.layers[:1]))
