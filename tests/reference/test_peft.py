"""Adapters against peft: the same files mean the same function and the same gradients, both
ways.
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
from shardwright.inference.export import build_probe_ids
from shardwright.model import Decoder
from shardwright.model.hf_folder import write_hf_folder
from shardwright.model.lora import initialise_adapter
from shardwright.model.peft_folder import PeftFolder, join_experts, write_peft_folder
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


def values_of(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter of a model, its adapters away from their start."""
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


def decoder_of(shape: ModelShape, values: dict[str, Tensor]) -> Decoder:
    """Our decoder with these values."""
    decoder = Decoder(shape)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(values[name])
    return decoder


def differentiated(model: Any, ids_BT: Tensor) -> Tensor:
    """Logits; the gradients are those of a sum of them with fixed weights."""
    found = model(ids_BT)
    logits_BTV: Tensor = found if isinstance(found, Tensor) else found.logits
    weights = torch.rand(logits_BTV.shape, generator=torch.Generator().manual_seed(2))
    (logits_BTV * weights).sum().backward()
    return logits_BTV.detach()


def close(got: Tensor, wanted: Tensor) -> bool:
    return float((got - wanted).norm() / wanted.norm()) < 2e-5


@pytest.mark.parametrize(
    ("name", "section"), KINDS, ids=lambda value: value if isinstance(value, str) else value.kind
)
def test_what_we_write_peft_computes(name: str, section: AdapterSection, tmp_path: Path) -> None:
    shape = add_adapters(read_config(CASES[name]), section)
    values = values_of(shape)
    write_hf_folder(tmp_path / "base", shape.base_shape, values.__getitem__, dtype=torch.float32)
    write_peft_folder(tmp_path / "adapters", shape, values.__getitem__, base=str(tmp_path / "base"))

    ours = decoder_of(shape, values)
    ids_BT = build_probe_ids(shape.vocab_size, 16)
    logits_BTV = differentiated(ours, ids_BT)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapters", is_trainable=True, dtype=torch.float32
    )
    assert close(differentiated(theirs.eval(), ids_BT), logits_BTV)

    # Their gradients under the names of the files, in which ours are written.
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    specs = {spec.name: spec for spec in shape.list_parameters() if spec.adapter_part is not None}
    assert set(gradients) == set(specs)
    of_theirs = {
        n.replace(".default", ""): p.grad for n, p in theirs.named_parameters() if p.requires_grad
    }
    named = PeftFolder(tmp_path / "adapters", shape)._names
    assert len(of_theirs) == len(specs)
    for part, spec in specs.items():
        gradient = gradients[part]
        wanted = of_theirs[
            named[part].name + (".weight" if spec.adapter_part == "lora_magnitude_vector" else "")
        ]
        assert close(join_experts(spec, gradient) if gradient.ndim == 3 else gradient, wanted), part

    assert read_peft_folder(tmp_path / "adapters", shape.base_shape) == shape.adapters
    again = PeftFolder(tmp_path / "adapters", shape)
    for part, spec in specs.items():
        assert torch.equal(
            again.read(part, [(0, size) for size in spec.shape], torch.float32), values[part]
        )


def test_a_wrong_scale_shows(tmp_path: Path) -> None:
    shape = add_adapters(read_config(SMALL), AdapterSection(kind="rslora", rank=4))
    values = values_of(shape)
    write_hf_folder(tmp_path / "base", shape.base_shape, values.__getitem__, dtype=torch.float32)
    write_peft_folder(tmp_path / "adapters", shape, values.__getitem__, base=str(tmp_path / "base"))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(
        tmp_path / "adapters", dtype=torch.float32
    )
    ids_BT = build_probe_ids(shape.vocab_size, 16)
    with torch.no_grad():
        wanted_BTV = theirs.eval()(ids_BT).logits
        assert close(decoder_of(shape, values)(ids_BT), wanted_BTV)
        with patch.object(AdapterShape, "scale", 2.0):  # alpha / rank, as if it were lora
            assert not close(decoder_of(shape, values)(ids_BT), wanted_BTV)


def test_what_peft_writes_we_begin_with(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = read_config(CASES["qwen3_moe"])
    write_hf_folder(tmp_path / "base", shape, values_of(shape).__getitem__, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj"],
    )
    torch.manual_seed(3)
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    theirs.save_pretrained(tmp_path / "adapters")

    adapted = add_adapters(shape, AdapterSection(path=str(tmp_path / "adapters")))
    assert adapted.adapters is not None
    assert (adapted.adapters.kind, adapted.adapters.rank) == ("rslora", 4)
    folder = PeftFolder(tmp_path / "adapters", adapted)
    values = values_of(adapted)
    for spec in adapted.list_parameters():
        if spec.adapter_part is not None:
            values[spec.name] = folder.read(
                spec.name, [(0, size) for size in spec.shape], torch.float32
            )
    ids_BT = build_probe_ids(shape.vocab_size, 16)
    with torch.no_grad():
        assert close(decoder_of(adapted, values)(ids_BT), theirs.eval()(ids_BT).logits)

    part = next(
        spec
        for spec in adapted.list_parameters()
        if spec.adapter_part == "lora_B" and len(spec.shape) == 3
    )
    bounds = [(1, 2), (3, 5), (0, 4)]
    inside = tuple(slice(start, start + length) for start, length in bounds)
    assert torch.equal(folder.read(part.name, bounds, torch.float32), values[part.name][inside])

    refuses = partial(
        pytest.raises, WeightsError, match="changes the adapter's output and is not supported"
    )
    path = tmp_path / "adapters" / PEFT_CONFIG_NAME
    told = json.loads(path.read_text())
    for changed in (
        {"init_lora_weights": "pissa"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 2}},
    ):
        path.write_text(json.dumps(told | changed))
        with refuses():
            read_peft_folder(path.parent, shape)
    path.write_text(json.dumps(told))
    with pytest.raises(WeightsError, match="surplus"):
        read_peft_folder(path.parent, replace(shape, layers=shape.layers[:1]))
