"""Logits, loss and every gradient equal those of transformers, for every family, in float32.

The weights reach our decoder through the file that `save_pretrained` writes, which checks names
and shapes as well.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwright.architecture import MODEL_FAMILIES, read_config
from shardwright.model import Decoder
from shardwright.model.routing import ExpertRules
from tests.reference.cases import CASES, LONG, skip_unless_supported

TOLERANCE = 1e-5


def build_hf_model(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Build transformers' model with all parameters changed, so no norm is 1 and no bias is 0."""
    torch.manual_seed(seed)
    # "eager" experts are a plain loop; grouped products refuse widths that ours supports.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    hf_model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**copy.deepcopy(config)), **plain
    )
    hf_model = hf_model.float().eval()
    with torch.no_grad():
        for parameter in hf_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return hf_model


def build_ours(
    config: dict[str, Any], hf_model: PreTrainedModel, folder: Path, **options: Any
) -> Decoder:
    """Build our decoder with the weights of `hf_model`, read by name from its file."""
    hf_model.save_pretrained(folder)
    ours = Decoder(read_config(config), **options)
    copy_weights(ours, load_file(folder / "model.safetensors"))
    return ours


def copy_weights(ours: Decoder, tensors: dict[str, Tensor]) -> None:
    """Copy the file's tensors into the parameters; names and shapes must be equal."""
    parameters = dict(ours.named_parameters())
    specs = ours.shape.list_parameters()
    pieces = {piece.name: piece.shape for spec in specs for piece in spec.file_slices}
    assert pieces == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert [spec.name for spec in specs] == list(parameters)
    with torch.no_grad():
        for spec in specs:
            for piece in spec.file_slices:
                box = tuple(slice(start, stop) for start, stop in piece.box)
                parameters[spec.name][box].copy_(tensors[piece.name])


def map_gradients_to_file_names(hf_model: PreTrainedModel, family: str) -> dict[str, Tensor]:
    """Return transformers' gradients under our names: in memory gpt_neox's head is `lm_head` since
    5.20, and mixtral's experts are in `mlp`.
    """
    gradients = {}
    for name, parameter in hf_model.named_parameters():
        if family == "gpt_neox" and name == "lm_head.weight":
            name = "embed_out.weight"
        if family == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        # Without tokens, an expert has no gradient in a loop over experts, and zeros in a product.
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return gradients


def compute_distance(ours: Tensor, expected: Tensor) -> float:
    """Return ||ours - expected|| / ||expected||."""
    return ((ours - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def test_every_family_has_a_case() -> None:
    assert {case["model_type"] for case in CASES.values()} == set(MODEL_FAMILIES)


EXPLICIT = ("llama", "mistral-window", "gpt2-inverse-layer-scale")


@pytest.mark.parametrize(
    ("case", "attention"),
    [*((case, "auto") for case in CASES), *((case, "explicit") for case in EXPLICIT)],
)
def test_logits_loss_and_gradients(
    case: str, attention: Literal["auto", "explicit"], tmp_path: Path
) -> None:
    config = CASES[case]
    hf_model = build_hf_model(config)
    skip_unless_supported(hf_model, config)
    ours = build_ours(config, hf_model, tmp_path, attention=attention)
    ids = torch.randint(0, config["vocab_size"], (2, LONG + 1))
    inputs_BT = ids[:, :-1]
    labels_BT = ids[:, 1:].clone()
    labels_BT[0, 3:9] = -100

    logits_BTV = hf_model(inputs_BT, use_cache=False).logits
    assert compute_distance(ours(inputs_BT), logits_BTV) < TOLERANCE

    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    our_loss = ours(inputs_BT, labels_BT=labels_BT)
    our_loss.backward()
    assert our_loss.item() == pytest.approx(loss.item(), rel=TOLERANCE)

    expected = map_gradients_to_file_names(hf_model, config["model_type"])
    distances = {
        name: compute_distance(p.grad, expected[name])
        for name, p in ours.named_parameters()
        if p.grad is not None
    }
    assert set(distances) == set(expected)
    # A key's bias changes all scores of a query (nearly) alike: its gradient is the rest of a
    # cancellation. The tolerance for rounding is therefore also relative to the largest gradient.
    largest = max(gradient.norm() for gradient in expected.values())
    worst = max(distances, key=lambda name: distances[name])
    for name, value in distances.items():
        norm = expected[name].norm()
        assert value * norm < TOLERANCE * norm + 1e-8 * largest, (
            name,
            value,
            worst,
            distances[worst],
        )


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "olmoe"])
def test_balance_loss_of_one_row_and_one_layer(case: str, tmp_path: Path) -> None:
    """transformers averages over rows and layers before the product, ours after it; with one row
    and one layer both are the same number.
    """
    config = CASES[case] | {
        "num_hidden_layers": 1,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.3,
    }
    hf_model = build_hf_model(config)
    ours = build_ours(
        config, hf_model, tmp_path, expert_rules=ExpertRules(balance_loss_coefficient=0.3)
    )
    ids_BT = torch.randint(0, config["vocab_size"], (1, LONG + 1))
    inputs_BT = ids_BT[:, :-1]
    labels_BT = ids_BT[:, 1:]
    output = hf_model(inputs_BT, labels=labels_BT, shift_labels=labels_BT)
    output.loss.backward()
    (ours(inputs_BT, labels_BT=labels_BT, row_weight=1.0) / LONG).backward()
    expected = map_gradients_to_file_names(hf_model, config["model_type"])
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert compute_distance(parameter.grad, expected[name]) < TOLERANCE, name
    assert ours.shape.experts is not None
    table = ours.router_totals.pop_table(1, ours.shape.experts.num_experts, torch.device("cpu"))
    assert table[0, -2].item() == pytest.approx(output.aux_loss.item(), rel=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    ["llama", "mistral-window", "gemma2", "smollm3", "gpt_neox", "gpt2", "mixtral", "deepseek_v3"],
)
def test_packed_documents(case: str, tmp_path: Path) -> None:
    """transformers infers packed documents from restarting positions; ours receives their ids."""
    config = CASES[case]
    hf_model = build_hf_model(config)
    ours = build_ours(config, hf_model, tmp_path)
    ids_BT = torch.randint(0, config["vocab_size"], (1, LONG))
    lengths = torch.tensor([13, 4, LONG - 17])
    positions_BT = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    documents_BT = torch.repeat_interleave(torch.arange(3), lengths)[None]
    logits = hf_model(ids_BT, position_ids=positions_BT, use_cache=False).logits
    assert (
        compute_distance(
            ours(ids_BT, document_ids_BT=documents_BT, positions_BT=positions_BT), logits
        )
        < TOLERANCE
    )
    assert compute_distance(ours(ids_BT, document_ids_BT=documents_BT), logits) < TOLERANCE
