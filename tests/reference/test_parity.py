"""Logits, loss and every gradient equal transformers' own, for every family, in float32.

transformers' weights reach our decoder through the file that `save_pretrained` writes, so names and
shapes are proven too.

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

from shardwright.architecture import MODEL_FAMILIES, read_config, shrink_model
from shardwright.model import Decoder
from shardwright.model.routing import ExpertRules
from tests.reference.cases import CASES, LONG, skip_unless_honoured

TOLERANCE = 1e-5


def build_theirs(config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Their model with every parameter moved off its initial value, so that no norm is 1 and no
    bias 0.
    """
    torch.manual_seed(seed)
    # "eager" experts are a plain loop; grouped products would refuse widths that ours takes.
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**copy.deepcopy(config)), **plain
    )
    theirs = theirs.float().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return theirs


def build_ours(
    config: dict[str, Any], theirs: PreTrainedModel, folder: Path, **options: Any
) -> Decoder:
    """Our decoder with their weights, read by name from their file."""
    theirs.save_pretrained(folder)
    ours = Decoder(read_config(config), **options)
    copy_weights(ours, load_file(folder / "model.safetensors"))
    return ours


def copy_weights(ours: Decoder, tensors: dict[str, Tensor]) -> None:
    """Fill every parameter from the file's tensors; the sets of names and the shapes must be
    equal.
    """
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


def gradients_by_file_name(theirs: PreTrainedModel, family: str) -> dict[str, Tensor]:
    """Their gradients under our names: in memory gpt_neox's head is `lm_head` since 5.20, and
    mixtral's experts are in `mlp`.
    """
    found = {}
    for name, parameter in theirs.named_parameters():
        if family == "gpt_neox" and name == "lm_head.weight":
            name = "embed_out.weight"
        if family == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        # An expert that no token chose has none in a loop over experts, and zeros in a product over
        # all.
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def distance(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||."""
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


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
    theirs = build_theirs(config)
    skip_unless_honoured(theirs, config)
    ours = build_ours(config, theirs, tmp_path, attention=attention)
    ids = torch.randint(0, config["vocab_size"], (2, LONG + 1))
    inputs_BT = ids[:, :-1]
    labels_BT = ids[:, 1:].clone()
    labels_BT[0, 3:9] = -100

    logits_BTV = theirs(inputs_BT, use_cache=False).logits
    assert distance(ours(inputs_BT), logits_BTV) < TOLERANCE

    loss = F.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    our_loss = ours(inputs_BT, labels_BT=labels_BT)
    our_loss.backward()
    assert our_loss.item() == pytest.approx(loss.item(), rel=TOLERANCE)

    expected = gradients_by_file_name(theirs, config["model_type"])
    found = {
        name: distance(p.grad, expected[name])
        for name, p in ours.named_parameters()
        if p.grad is not None
    }
    assert set(found) == set(expected)
    # A key's bias moves all scores of a query (nearly) alike: its gradient is what is left of a
    # cancellation. Rounding is therefore granted against the largest gradient too.
    largest = max(gradient.norm() for gradient in expected.values())
    worst = max(found, key=lambda name: found[name])
    for name, value in found.items():
        norm = expected[name].norm()
        assert value * norm < TOLERANCE * norm + 1e-8 * largest, (name, value, worst, found[worst])


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "olmoe"])
def test_balance_loss_of_one_row_and_one_layer(case: str, tmp_path: Path) -> None:
    """Theirs mixes rows and layers before it multiplies, ours multiplies first; with one of each
    they are the same number.
    """
    config = CASES[case] | {
        "num_hidden_layers": 1,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.3,
    }
    theirs = build_theirs(config)
    ours = build_ours(
        config, theirs, tmp_path, expert_rules=ExpertRules(balance_loss_coefficient=0.3)
    )
    ids_BT = torch.randint(0, config["vocab_size"], (1, LONG + 1))
    inputs_BT = ids_BT[:, :-1]
    labels_BT = ids_BT[:, 1:]
    output = theirs(inputs_BT, labels=labels_BT, shift_labels=labels_BT)
    output.loss.backward()
    (ours(inputs_BT, labels_BT=labels_BT, row_weight=1.0) / LONG).backward()
    expected = gradients_by_file_name(theirs, config["model_type"])
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert distance(parameter.grad, expected[name]) < TOLERANCE, name
    assert ours.shape.experts is not None
    table = ours.router_totals.pop_table(1, ours.shape.experts.num_experts, torch.device("cpu"))
    assert table[0, -2].item() == pytest.approx(output.aux_loss.item(), rel=TOLERANCE)


@pytest.mark.parametrize(
    "case",
    ["llama", "mistral-window", "gemma2", "smollm3", "gpt_neox", "gpt2", "mixtral", "deepseek_v3"],
)
def test_packed_documents(case: str, tmp_path: Path) -> None:
    """They recognise packed documents by positions that begin again; we are told."""
    config = CASES[case]
    theirs = build_theirs(config)
    ours = build_ours(config, theirs, tmp_path)
    ids_BT = torch.randint(0, config["vocab_size"], (1, LONG))
    lengths = torch.tensor([13, 4, LONG - 17])
    positions_BT = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    documents_BT = torch.repeat_interleave(torch.arange(3), lengths)[None]
    logits = theirs(ids_BT, position_ids=positions_BT, use_cache=False).logits
    assert (
        distance(ours(ids_BT, document_ids_BT=documents_BT, positions_BT=positions_BT), logits)
        < TOLERANCE
    )
    assert distance(ours(ids_BT, document_ids_BT=documents_BT), logits) < TOLERANCE


CUT = ["llama-wide-heads", "phi3-longrope-long", "gemma3_text-older", "smollm3", "gpt2", "gpt_neox"]
CUT_SPARSE = ["mixtral", "qwen3_moe-some-dense-normalised", "olmoe", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("case", CUT + CUT_SPARSE)
def test_a_cut_model_is_one_of_theirs(case: str, tmp_path: Path) -> None:
    config = shrink_model(
        read_config(CASES[case]), num_layers=2, hidden_size=32, vocab_size=50, sequence_length=20
    ).to_config()
    theirs = build_theirs(config)
    ids_BT = torch.randint(0, 50, (2, 20))
    assert (
        distance(
            build_ours(config, theirs, tmp_path)(ids_BT), theirs(ids_BT, use_cache=False).logits
        )
        < TOLERANCE
    )
