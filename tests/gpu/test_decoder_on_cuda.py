"""The decoder: equality with transformers, flash kernels, loss in chunks, text.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.architecture import read_config
from shardwright.config.model import AttentionSetting
from shardwright.inference.generation import SamplingSettings, complete_prompt
from shardwright.model.decoder import Decoder
from shardwright.numerics.loss import chunked_cross_entropy
from tests.gpu.conftest import is_gpu, measure_peak_bytes


def build_pair(
    device: torch.device, config: dict[str, Any], compute: torch.dtype | None = None
) -> tuple[Any, Decoder]:
    """Build transformers' model and ours with the same fp32 weights, drawn on the CPU."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=torch.float32
    ).eval()
    loss_function = partial(chunked_cross_entropy, chunk_tokens=128)
    decoder = Decoder(read_config(config), loss_function=loss_function, compute_dtype=compute)
    weights = {
        name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"
    }
    decoder.load_state_dict(weights)
    return reference.to(device), decoder.to(device).eval()


def draw_tokens(device: torch.device, config: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    num_tokens = config["max_position_embeddings"] // 2
    return torch.randint(0, config["vocab_size"], (2, num_tokens), generator=generator).to(device)


def shift(ids_BT: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ids_BT[:, 1:], (0, 1), value=-100)


def compute_distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    reference = expected.detach().double()
    return float((ours.detach().double() - reference).norm() / reference.norm())


def test_float32_equals_transformers_in_logits_loss_and_every_gradient(
    device: torch.device, config: dict[str, Any]
) -> None:
    reference, decoder = build_pair(device, config)
    ids_BT = draw_tokens(device, config)
    expected = reference(input_ids=ids_BT, labels=ids_BT)
    assert compute_distance(decoder(ids_BT), expected.logits) < 1e-5

    labels_BT = shift(ids_BT)
    loss = decoder(ids_BT, labels_BT=labels_BT) / (labels_BT != -100).sum()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    loss.backward()
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        assert compute_distance(parameter.grad, gradients[name]) < 1e-4, name


def test_bf16_is_as_exact_as_autocast(device: torch.device, config: dict[str, Any]) -> None:
    reference, decoder = build_pair(device, config, torch.bfloat16)
    ids_BT = draw_tokens(device, config)
    exact = reference(input_ids=ids_BT).logits
    with torch.autocast(device.type, torch.bfloat16):
        autocast = reference(input_ids=ids_BT).logits
    ours = decoder(ids_BT)
    # bf16 has 8 bits; ours may be no further from fp32 than autocast's, with a small margin.
    assert compute_distance(ours, exact) < max(1.5 * compute_distance(autocast, exact), 2e-3)


def test_auto_attention_runs_a_fused_kernel_forward_and_backward(
    device: torch.device, config: dict[str, Any]
) -> None:
    _, decoder = build_pair(device, config, torch.bfloat16)
    ids_BT = draw_tokens(device, config)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        decoder(ids_BT, labels_BT=shift(ids_BT)).backward()
    operators = {
        event.key for event in recorded.key_averages() if "scaled_dot_product" in event.key
    }
    assert any("flash" in name or "cudnn" in name for name in operators), operators
    assert any("backward" in name for name in operators), operators
    assert not any("math" in name for name in operators), operators


def test_documents_do_not_attend_to_each_other(
    device: torch.device, config: dict[str, Any]
) -> None:
    _, decoder = build_pair(device, config)
    ids_BT = draw_tokens(device, config)[:1, :64]
    documents_BT = torch.tensor([[0] * 24 + [1] * 40], device=device)
    packed = decoder(ids_BT, document_ids_BT=documents_BT)
    assert compute_distance(packed[:, 24:], decoder(ids_BT[:, 24:])) < 1e-5


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_the_chosen_kernels_have_the_gradients_of_explicit_products(
    device: torch.device, config: dict[str, Any], family: str, is_packed: bool
) -> None:
    """bf16 against bf16: varlen, FlexAttention or, where neither is available, a fall-back.

    Every token has every expert: rounding would send some to others.
    """
    changes: dict[str, Any] = {"model_type": family, "sliding_window": 40, "pad_token_id": None}
    if family == "gpt_oss":
        changes |= {"num_local_experts": 4, "num_experts_per_tok": 4}
    if family == "gemma2":
        changes["query_pre_attn_scalar"] = config["head_dim"]
    shape = read_config(config | changes if family != "llama" else config)
    ids_BT = draw_tokens(device, config)
    documents_BT = (torch.arange(ids_BT.shape[1], device=device) >= 25).long().expand(2, -1)
    gradients = []
    settings: tuple[AttentionSetting, ...] = ("explicit", "auto")
    for attention in settings:
        torch.manual_seed(0)
        decoder = Decoder(shape, attention=attention, compute_dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.05)
        decoder.to(device)
        options = {"document_ids_BT": documents_BT} if is_packed else {}
        decoder(ids_BT, labels_BT=shift(ids_BT), **options).backward()
        found = [p.grad.flatten() for p in decoder.parameters() if p.grad is not None]
        gradients.append(torch.cat(found))
    assert compute_distance(gradients[1], gradients[0]) < 2e-2


def test_the_loss_never_allocates_all_logits(device: torch.device) -> None:
    tokens, width, vocabulary, chunk_tokens = (
        (8192, 64, 32_000, 512) if is_gpu(device) else (1024, 32, 2000, 64)
    )
    hidden_ND = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight_VD = torch.randn(vocabulary, width, device=device, requires_grad=True)
    labels_N = torch.randint(0, vocabulary, (tokens,), device=device)

    def differentiate() -> None:
        chunked_cross_entropy(
            hidden_ND, weight_VD, None, labels_N, chunk_tokens=chunk_tokens
        ).backward()

    whole_logits_bytes = tokens * vocabulary * 4
    assert measure_peak_bytes(device, differentiate) < whole_logits_bytes / 3


class NumberTokenizer:
    """Tokenizer whose text is the ids in decimal."""

    eos_id = None
    unknown_id = None
    prefix_ids = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(str(token) for token in ids)


def test_greedy_text_with_a_cache_equals_that_without(
    device: torch.device, config: dict[str, Any]
) -> None:
    _, decoder = build_pair(device, config)
    completion = complete_prompt(
        decoder,
        NumberTokenizer(config["vocab_size"]),
        "5 6 7",
        SamplingSettings(temperature=0.0),
        max_new_tokens=12,
    )
    ids = [5, 6, 7]
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(decoder(torch.tensor([ids], device=device))[0, -1].argmax()))
    assert list(completion.new_ids) == ids[3:]
