"""Sparse models whose trainers name and stack experts as their Hugging Face folder does, or as our
decoder does, and buffers that belong to a model's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.architecture import read_config
from shardwright.audit import Recorder
from shardwright.audit.check import AuditReport, check_recorded_step
from shardwright.audit.errors import AuditInputError
from shardwright.audit.page import render_audit
from shardwright.audit.reference import ReferenceModel
from shardwright.model import Decoder
from shardwright.report.page_shell import PICTURE_SIZES

VOCABULARY = 29
NUM_EXPERTS = 4
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": COMMON
    | {"model_type": "mixtral", "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2},
    "qwen3_moe": COMMON
    | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 12,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "deepseek_v3": COMMON
    | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 12,
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
}
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
"""Module, and the matrices gate, up and down of an expert in a folder."""

NamedGradients = dict[str, tuple[Tensor, Tensor]]
"""Value and gradient of each parameter by name."""


class NamedTensors:
    """Parameters with gradients and no forward pass, as a trainer of another framework has."""

    def __init__(self, tensors: NamedGradients) -> None:
        self.parameters = {}
        for name, (value, gradient) in tensors.items():
            self.parameters[name] = nn.Parameter(value.detach().clone())
            self.parameters[name].grad = gradient.clone()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.parameters.items()


def build_ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(2))


def build_model(family: str) -> nn.Module:
    torch.manual_seed(0)
    content = dict(CONFIGS[family])
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.copy_(torch.tensor([0.9, 0.4, -0.3, -0.6]))
    return model


def split_experts(family: str, tensors: NamedGradients) -> NamedGradients:
    """Rename and split the class's stacks of experts by hand, as the family's folders do."""
    block, *matrices = EXPERT_NAMES[family]
    found = {}
    for name, pair in tensors.items():
        renamed = name.replace(".mlp.", f".{block}.")
        start = renamed.partition("experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert in range(NUM_EXPERTS):
                halves = [tensor[expert].chunk(2) for tensor in pair]
                for part in (0, 1):
                    expert_name = f"{start}experts.{expert}.{matrices[part]}.weight"
                    found[expert_name] = (halves[0][part], halves[1][part])
        elif name.endswith("experts.down_proj"):
            for expert in range(NUM_EXPERTS):
                expert_name = f"{start}experts.{expert}.{matrices[2]}.weight"
                found[expert_name] = (pair[0][expert], pair[1][expert])
        else:
            found[renamed] = pair
    return found


def compute_class_gradients(family: str) -> NamedGradients:
    model = build_model(family)
    ids = build_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    return {
        name: (p.detach(), torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters()
    }


def record(folder: Path, family: str, tensors: NamedGradients, **options: Any) -> None:
    model = NamedTensors(tensors)
    recorder = Recorder(folder, config=CONFIGS[family], **options)
    ids = build_ids()
    recorder.before_step(model, {"input_ids": ids, "labels": ids})
    recorder.after_backward(model)
    recorder.after_step(model)


def halve(tensors: NamedGradients, is_wrong: Callable[[str], bool]) -> NamedGradients:
    return {
        name: (value, gradient * (0.5 if is_wrong(name) else 1.0))
        for name, (value, gradient) in tensors.items()
    }


def assert_passes(folder: Path, **options: Any) -> AuditReport:
    report = check_recorded_step(folder, **options)
    assert report.passed, report.worst_parameters[0]
    return report


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_under_the_names_of_a_folder_are_compared_one_by_one(
    tmp_path: Path, family: str
) -> None:
    tensors = split_experts(family, compute_class_gradients(family))
    record(tmp_path / "right", family, tensors)
    report = assert_passes(tmp_path / "right")
    names = {result.name for result in report.parameters}
    block, gate, *_ = EXPERT_NAMES[family]
    assert f"model.layers.1.{block}.experts.3.{gate}.weight" in names

    record(tmp_path / "wrong", family, halve(tensors, lambda name: ".experts." in name))
    report = check_recorded_step(tmp_path / "wrong")
    assert report.diagnoses[0].keys == ("some_scaled",)
    assert report.diagnoses[0].subject == "all experts: factor 0.5"

    wrong_name = f"model.layers.0.{block}.experts.2.{gate}.weight"
    record(tmp_path / "one", family, halve(tensors, lambda name: name == wrong_name))
    report = check_recorded_step(tmp_path / "one")
    assert [result.name for result in report.parameters if not result.passed] == [wrong_name]
    heat_map = render_audit(report)
    assert f"<title>{wrong_name}: 5.0" in heat_map, "of all experts the worst is shown"
    assert heat_map.count(f".experts.{gate}</text>") == len(PICTURE_SIZES), "one column each"


@pytest.mark.parametrize("is_split", [False, True])
def test_experts_summed_with_other_experts_are_named(tmp_path: Path, is_split: bool) -> None:
    """Two ranks have two experts each, and sum expert gradients by their local numbers."""
    tensors = compute_class_gradients("mixtral")
    mixed = {
        name: (value, (gradient + gradient.roll(NUM_EXPERTS // 2, 0)))
        if ".experts." in name
        else (value, gradient)
        for name, (value, gradient) in tensors.items()
    }
    if is_split:
        mixed = split_experts("mixtral", mixed)
    for rank in range(2):
        record(tmp_path, "mixtral", mixed, rank=rank, world_size=2, data_rank=0)
    report = check_recorded_step(tmp_path)
    assert report.diagnoses[0].keys == ("experts_mixed",)
    assert report.diagnoses[0].subject == "all experts"


def test_projections_of_single_experts_are_compared(tmp_path: Path) -> None:
    tensors = split_experts("mixtral", compute_class_gradients("mixtral"))
    record(tmp_path / "right", "mixtral", tensors, projections=64)
    assert_passes(tmp_path / "right")
    wrong = halve(tensors, lambda name: ".experts.1." in name)
    record(tmp_path / "wrong", "mixtral", wrong, projections=64)
    report = check_recorded_step(tmp_path / "wrong")
    assert all(".experts.1." in r.name for r in report.parameters if not r.passed)
    assert report.diagnoses[0].keys == ("some_scaled",)


@pytest.mark.parametrize("family", CONFIGS)
def test_both_references_audit_our_decoder_s_names(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = read_config(CONFIGS[family])
    torch.manual_seed(1)
    decoder = Decoder(shape, attention="explicit", compute_dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    ids = build_ids()
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    compute = ReferenceModel.compute_decoder_gradient
    own = []
    monkeypatch.setattr(
        ReferenceModel,
        "compute_decoder_gradient",
        lambda *arguments: own.append(compute(*arguments)) or own[-1],
    )
    recorder = Recorder(tmp_path, config=CONFIGS[family], are_labels_shifted=True)
    with recorder.record_step(decoder):
        (decoder(ids, labels_BT=labels) / int((labels != -100).sum())).backward()
    assert_passes(tmp_path)
    assert own, "our decoder was not asked"
    assert own[0] is not None, "our decoder does not check the reference"


def test_a_buffer_of_the_model_s_state_is_recorded(tmp_path: Path) -> None:
    model = build_model("deepseek_v3")
    ids = build_ids()
    with Recorder(tmp_path).record_step(model):
        model(input_ids=ids, labels=ids).loss.backward()
    assert_passes(tmp_path)


def test_some_experts_are_checked_with_the_folder_of_the_model(tmp_path: Path) -> None:
    model: Any = build_model("mixtral")
    model.save_pretrained(tmp_path / "model")
    tensors = split_experts("mixtral", compute_class_gradients("mixtral"))
    record(tmp_path / "audit", "mixtral", tensors, parameters="*.experts.2.*")
    with pytest.raises(AuditInputError, match="not recorded, such as"):
        check_recorded_step(tmp_path / "audit")
    report = assert_passes(tmp_path / "audit", model_path=tmp_path / "model")
    assert len(report.parameters) == 3 * 2

    changed = {name: (1.5 * value, gradient) for name, (value, gradient) in tensors.items()}
    record(tmp_path / "other", "mixtral", changed, parameters="*.experts.2.*")
    with pytest.raises(AuditInputError, match="are not those of this model"):
        check_recorded_step(tmp_path / "other", model_path=tmp_path / "model")
