"""Experts on CUDA: grouped products equal a loop; a sparse decoder gives the same result as on the
CPU, and the same bits twice.

Shapes: E experts, M rows, D in, F out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.model import Decoder
from shardwright.model.products.grouped_matmul import multiply_grouped, repeat_by_expert
from shardwright.model.routing import ExpertRules
from shardwright.model.weight_init import initialise_parameter

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **_SIZES, "num_local_experts": 8},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_SIZES,
        "head_dim": 32,
        "num_local_experts": 8,
        "sliding_window": 32,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SIZES,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 0,
    },
}


@pytest.mark.parametrize("num_padded", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_biases_are_summed_in_fp32(
    device: torch.device, dtype: torch.dtype, num_padded: int
) -> None:
    counts = [900, 0, 127]
    bias_EF = torch.randn(3, 48).to(device, dtype).requires_grad_()
    all_counts = torch.tensor([*counts, *([num_padded] if num_padded else [])], device=device)
    out_MF = repeat_by_expert(bias_EF, all_counts, sum(counts) + num_padded)
    expected_MF = torch.cat(
        [row.expand(count, -1) for row, count in zip(bias_EF.detach(), counts, strict=True)]
    )
    assert torch.equal(out_MF[: sum(counts)], expected_MF)
    assert not out_MF[sum(counts) :].any()
    gradient_MF = torch.randn(sum(counts) + num_padded, 48).to(device, dtype)
    gradient_MF[sum(counts) :] = torch.nan
    out_MF.backward(gradient_MF)
    assert bias_EF.grad is not None
    rows = gradient_MF.double()[: sum(counts)].split(counts)
    exact_EF = torch.stack([each.sum(0) for each in rows])
    error = (bias_EF.grad.double() - exact_EF).norm() / exact_EF.norm()
    # Sums that are rounded to bf16 at each addition are 3e-2 off.
    assert error < {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float64: 1e-14}[dtype]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float64, 1e-12)]
)
@pytest.mark.parametrize("counts", [[100, 0, 27, 129], [0, 0, 0, 0], [1, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products(
    device: torch.device, dtype: torch.dtype, tolerance: float, counts: list[int], transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x_MD = torch.randn(sum(counts), 64, generator=generator).to(device, dtype).requires_grad_()
    size = (4, 96, 64) if transposed else (4, 64, 96)
    weight = torch.randn(size, generator=generator).to(device, dtype).requires_grad_()
    out_MF = multiply_grouped(
        x_MD, weight, torch.tensor(counts, device=device), transposed=transposed
    )
    out_MF.square().sum().backward()
    wide_x = x_MD.detach().double().requires_grad_()
    wide = weight.detach().double().requires_grad_()
    matrices = wide.transpose(1, 2) if transposed else wide
    expected_MF = torch.cat(
        [
            rows @ matrix
            for rows, matrix in zip(wide_x.split(counts), matrices.unbind(0), strict=True)
        ]
    )
    expected_MF.square().sum().backward()
    for got, expected in (
        (out_MF, expected_MF),
        (x_MD.grad, wide_x.grad),
        (weight.grad, wide.grad),
    ):
        assert got is not None
        assert expected is not None
        assert (got.double() - expected).norm() <= tolerance * expected.norm().clamp(min=1e-30)


def differentiate(
    config: dict[str, Any], device: torch.device
) -> tuple[float, dict[str, torch.Tensor]]:
    shape = read_config(config)
    decoder = Decoder(shape, attention="explicit", expert_rules=ExpertRules(0.1, 0.1, 1.2))
    specs = {spec.name: spec for spec in shape.list_parameters()}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initialise_parameter(specs[name], 0, dtype=torch.float32) * 3)
    decoder.to(device)
    ids_BT = torch.randint(
        0, shape.vocab_size, (2, 96), generator=torch.Generator().manual_seed(1)
    ).to(device)
    loss = decoder(ids_BT, labels_BT=ids_BT, row_weight=0.5) / ids_BT.numel()
    loss.backward()
    return loss.item(), {
        name: p.grad.cpu() for name, p in decoder.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("family", MODELS)
def test_a_sparse_decoder_equals_that_of_the_cpu_and_is_deterministic(
    device: torch.device, family: str
) -> None:
    loss, gradients = differentiate(MODELS[family], device)
    again, repeated = differentiate(MODELS[family], device)
    expected, reference = differentiate(MODELS[family], torch.device("cpu"))
    assert loss == again
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        if not name.endswith(("bias", "embed_tokens.weight")):  # atomics add rows in any order
            assert torch.equal(gradient, repeated[name]), name
        assert (gradient - reference[name]).norm() <= 1e-4 * reference[name].norm(), name
