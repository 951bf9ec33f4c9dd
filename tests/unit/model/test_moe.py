"""Mixture of experts: routing, grouped products, capacity, router losses, stacked experts in files
and initial values.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.architecture import ExpertShape, ModelShape, ParameterSpec, read_config
from shardwright.config.model import MoeSection
from shardwright.errors import ArchitectureError, RecipeError, WeightsError
from shardwright.model import Decoder
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.model.moe import MixtureOfExperts
from shardwright.model.products.grouped_matmul import gather_rows, multiply_grouped, scatter_rows
from shardwright.model.routing import (
    ExpertRules,
    choose_experts,
    mask_within_capacity,
    resolve_expert_rules,
)
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.recompute import build_recompute_runner
from tests.reference.cases import CASES

MIXTRAL = CASES["mixtral"]


def build(
    config: dict[str, Any], rules: ExpertRules | None = None, dtype: torch.dtype = torch.float64
) -> Decoder:
    shape = read_config(config)
    decoder = Decoder(shape, expert_rules=rules).to(dtype)
    specs = {spec.name: spec for spec in shape.list_parameters()}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initialise_parameter(specs[name], 0, dtype=dtype))
    return decoder


def list_mixtures(decoder: Decoder) -> list[MixtureOfExperts]:
    return [module for module in decoder.modules() if isinstance(module, MixtureOfExperts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("widths", [(16, 24), (6, 10)], ids=["aligned", "not-aligned"])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_equal_separate_products(
    dtype: torch.dtype, widths: tuple[int, int], counts: list[int], transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), widths[0], generator=generator).to(dtype).requires_grad_()
    size = (4, *widths[::-1]) if transposed else (4, *widths)
    weight = torch.randn(size, generator=generator).to(dtype).requires_grad_()
    out = multiply_grouped(x, weight, torch.tensor(counts), transposed=transposed)
    assert out.shape == (sum(counts), widths[1])
    gradient = torch.randn(out.shape, generator=generator).to(dtype)
    out.backward(gradient)
    rows = []
    start = 0
    for expert, count in enumerate(counts):
        matrix = weight.detach()[expert].T if transposed else weight.detach()[expert]
        part = x.detach()[start : start + count]
        gradient_part = gradient[start : start + count]
        rows.append(part @ matrix)
        assert x.grad is not None
        assert weight.grad is not None
        torch.testing.assert_close(x.grad[start : start + count], gradient_part @ matrix.T)
        torch.testing.assert_close(
            weight.grad[expert], gradient_part.T @ part if transposed else part.T @ gradient_part
        )
        start += count
    torch.testing.assert_close(out.detach(), torch.cat(rows))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("widths", [(16, 24), (6, 10)], ids=["aligned", "not-aligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_products_are_a_registered_operation_with_a_fake_kernel(
    dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    x = torch.randn(9, widths[0], dtype=dtype, requires_grad=True)
    weight = torch.randn(4, *widths[::-1], dtype=dtype, requires_grad=True)
    torch.library.opcheck(
        torch.ops.shardwright.grouped_product.default, (x, weight, torch.tensor([3, 0, 5, 1]), True)
    )


def test_rows_are_gathered_and_scattered_by_slot() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    slots = torch.tensor([9, 0, 4, 7, 1])  # of 10: two per row, half of them dropped
    assert torch.equal(gather_rows(x, slots, 2), x[slots // 2])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, slots, 2), x)
    assert torch.autograd.gradcheck(lambda y: scatter_rows(y, slots, 10), x)
    assert torch.equal(scatter_rows(x, slots, 10)[slots], x)


def test_rows_of_all_slots_move_once_each_way_with_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(12, generator=generator)
    x = torch.randn(6, 8, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(12, 8, generator=generator, dtype=torch.bfloat16)

    def move(has_gaps: bool) -> list[Tensor]:
        rows = gather_rows(x, slots, 2, has_gaps=has_gaps)
        placed = scatter_rows(rows * 3, slots, 12, has_gaps=has_gaps)
        return [placed.detach(), *torch.autograd.grad(placed, x, gradient)]

    operations: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, operation: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            operations.append(operation.name())
            return operation(*arguments, **(options or {}))

    with Recorder():
        found = move(has_gaps=False)
    assert all(map(torch.equal, found, move(has_gaps=True)))
    assert operations.count("aten::index_select") == 4
    assert "aten::index_copy" not in operations


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    """With eight experts in four groups, the best expert is not chosen: its group is not among the
    best two.
    """
    experts = ExpertShape(
        8, 3, 16, score="sigmoid", num_groups=4, groups_per_token=2, weight_scale=2.0
    )
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.7, 0.4, 0.1, 0.2]], dtype=torch.float64)
    chosen, weights, probabilities = choose_experts(experts, scores.logit(eps=1e-9), None)
    assert sorted(chosen[0].tolist()) == [2, 3, 4]
    assert weights.sum().item() == pytest.approx(2.0)
    assert probabilities.sum().item() == pytest.approx(1.0)
    bias = torch.zeros(8)
    bias[1] = 1.0  # raises the first group; its weight stays zero
    chosen, weights, _ = choose_experts(experts, scores.logit(eps=1e-9), bias)
    assert 1 in chosen[0].tolist()
    assert weights[0, chosen[0].tolist().index(1)].item() == pytest.approx(0.0, abs=1e-6)


def test_capacity_accepts_tokens_in_order_per_row() -> None:
    chosen = torch.tensor([[[0, 1], [0, 2], [0, 1], [0, 3]], [[3, 0], [3, 1], [2, 3], [1, 3]]])
    accepted = mask_within_capacity(chosen, 4, 1.0)  # 4 tokens x 2 / 4 experts: two of each row
    assert accepted.tolist() == [
        [[True, True], [True, True], [False, True], [False, True]],
        [[True, True], [True, True], [True, False], [True, False]],
    ]
    assert mask_within_capacity(chosen, 4, 2.0).all()


@pytest.mark.parametrize("case", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_outside_training_there_is_no_capacity_and_no_count(case: str) -> None:
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(2))
    plain = build(CASES[case])
    with_rules = build(CASES[case], ExpertRules(1.0, 1.0, 0.3))
    assert torch.equal(plain(ids), with_rules(ids))
    assert not with_rules.router_totals.pop_table(4, 8, torch.device("cpu")).any()
    assert not torch.equal(plain(ids), with_rules(ids, row_weight=1.0))


def test_router_losses_equal_a_computation_by_hand() -> None:
    """Balance and z-loss of every row and layer add to the gradient, not to the loss."""
    config = MIXTRAL | {"num_hidden_layers": 2}
    rules = ExpertRules(0.7, 0.3)
    row_weight = 0.125
    ids = torch.randint(0, 97, (3, 10), generator=torch.Generator().manual_seed(4))
    logits_by_layer: list[Tensor] = []
    decoder = build(config, rules)
    for mixture in list_mixtures(decoder):
        mixture.router.register_forward_hook(
            lambda _module, _arguments, logits: logits_by_layer.append(logits)
        )
    loss = decoder(ids, labels_BT=ids, row_weight=row_weight)
    total = loss
    balances = []
    zs = []
    for logits in logits_by_layer:
        for row in logits.unflatten(0, (3, 10)):
            probabilities = row.softmax(-1)
            shares = torch.zeros(4, dtype=row.dtype)
            for token in probabilities:
                shares[token.topk(2).indices] += 1 / 10
            balances.append(4 * (shares * probabilities.mean(0)).sum())
            zs.append(row.logsumexp(-1).square().mean())
            total = total + row_weight * (0.7 * balances[-1] + 0.3 * zs[-1]) / 2
    parameters = list(decoder.parameters())
    expected = torch.autograd.grad(total, parameters, retain_graph=True)
    # The graph above contains the router losses twice: by hand, and from `add_to_gradient`.
    plain = build(config)(ids, labels_BT=ids)
    assert loss.item() == plain.item()
    reference = build(config)
    plain_gradients = torch.autograd.grad(
        reference(ids, labels_BT=ids), list(reference.parameters())
    )
    gradients = torch.autograd.grad(loss, parameters)
    for with_both, plain_gradient, gradient in zip(
        expected, plain_gradients, gradients, strict=True
    ):
        torch.testing.assert_close(
            with_both - plain_gradient, 2 * (gradient - plain_gradient), rtol=1e-9, atol=1e-12
        )
    table = decoder.router_totals.pop_table(2, 4, torch.device("cpu"))
    assert table[:, :4].sum(1).tolist() == [60.0, 60.0]
    torch.testing.assert_close(table[:, 5], torch.stack(balances).detach().view(2, 3).sum(1))
    torch.testing.assert_close(table[:, 6], torch.stack(zs).detach().view(2, 3).sum(1))


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recompute_changes_no_gradient_and_counts_once(kind: Any) -> None:
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(5))
    rules = ExpertRules(0.5, 0.5, 0.7)
    tables = []
    gradients = []
    for runner in (None, build_recompute_runner(kind)):
        decoder = build(CASES["deepseek_v3"], rules)
        decoder.set_recompute(runner)
        decoder(ids, labels_BT=ids, row_weight=0.5).backward()
        tables.append(decoder.router_totals.pop_table(3, 8, torch.device("cpu")))
        gradients.append(
            [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]
        )
    assert torch.equal(*tables)
    assert tables[0][1:, :8].sum().item() == 2 * 2 * 12 * 3
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def test_rules_follow_the_model_and_the_recipe() -> None:
    mixtral = read_config(MIXTRAL)
    deepseek = read_config(CASES["deepseek_v3"])
    assert resolve_expert_rules(MoeSection(), mixtral) == ExpertRules(0.001, 0.0, None, 0.0)
    assert resolve_expert_rules(MoeSection(), deepseek) == ExpertRules(0.0, 0.0, None, 0.001)
    assert resolve_expert_rules(
        MoeSection(balance_loss_coefficient=0.0, capacity_factor=1.25), mixtral
    ) == ExpertRules(0.0, 0.0, 1.25)
    dense = read_config(CASES["llama"])
    assert resolve_expert_rules(MoeSection(), dense) is None
    for section, shape, field in (
        (MoeSection(capacity_factor=1.0), dense, "moe.capacity_factor"),
        (MoeSection(bias_update_rate=0.1), mixtral, "moe.bias_update_rate"),
    ):
        with pytest.raises(RecipeError) as caught:
            resolve_expert_rules(section, shape)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("case", "changes", "field"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("mixtral", {"num_experts": 8}, "num_local_experts"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("qwen3_moe", {"mlp_only_layers": "none"}, "mlp_only_layers"),
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("llama", {"num_local_experts": 4}, "num_local_experts"),
    ],
)
def test_unsupported_sparse_models_are_refused(
    case: str, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(ArchitectureError) as caught:
        read_config(CASES[case] | changes)
    assert caught.value.field == field


def list_stacks(shape: ModelShape) -> list[ParameterSpec]:
    return [spec for spec in shape.list_parameters() if spec.file_patterns]


def test_a_stack_has_the_initial_values_of_its_experts_in_any_slice() -> None:
    gate_up, down = list_stacks(
        read_config(MIXTRAL | {"intermediate_size": 300, "num_hidden_layers": 1})
    )
    for spec in (gate_up, down):
        whole = initialise_parameter(spec, 3, dtype=torch.float32)
        for piece in spec.file_slices:
            expert = initialise_parameter(
                ParameterSpec(piece.name, piece.shape, "up", 0, spec.init), 3, dtype=torch.float32
            )
            box = tuple(slice(start, stop) for start, stop in piece.box)
            assert torch.equal(whole[box][0], expert)
        for narrow in (
            [(1, 2), None, None],
            [(0, 4), (30, 15), (5, 9)],
            [(3, 1), (7, spec.shape[1] - 7), None],
            [(2, 0), None, None],
        ):
            expected = whole
            for dim, part in enumerate(narrow):
                expected = expected if part is None else expected.narrow(dim, *part)
            assert torch.equal(
                initialise_parameter(spec, 3, dtype=torch.float32, narrow=narrow), expected
            )


@pytest.mark.parametrize(
    "case", ["mixtral", "qwen3_moe-some-dense-normalised", "gpt_oss", "deepseek_v3"]
)
def test_stacks_are_written_and_read_expert_by_expert(case: str, tmp_path: Path) -> None:
    shape = read_config(CASES[case])
    generator = torch.Generator().manual_seed(1)
    tensors = {
        spec.name: torch.randn(spec.shape, generator=generator) for spec in shape.list_parameters()
    }
    write_hf_folder(
        tmp_path / "out", shape, tensors.__getitem__, dtype=torch.float32, max_shard_bytes=9000
    )
    weights = WeightsFolder(tmp_path / "out")
    weights.check(shape)
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name), tensor)
        if tensor.ndim == 3:
            narrow = [(1, 2), (3, tensor.shape[1] - 5), (2, 7)]
            expected = tensor[1:3, 3:-2, 2:9]
            assert torch.equal(
                weights.read(name, narrow=narrow, dtype=torch.float64), expected.double()
            )
            assert weights.read(name, narrow=[(0, 0), None, None]).shape == (0, *tensor.shape[1:])


@pytest.mark.parametrize(
    ("case", "dtype", "expected"),
    [
        ("deepseek_v3", torch.bfloat16, {"gate.weight", "gate.e_score_correction_bias"}),
        ("deepseek_v3", torch.float64, set()),
        ("gpt_oss", torch.bfloat16, set()),
        (
            "gpt_oss",
            torch.float16,
            {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"},
        ),
    ],
)
def test_tensors_that_transformers_reads_in_fp32_are_not_rounded(
    case: str, dtype: torch.dtype, expected: set[str], tmp_path: Path
) -> None:
    shape = read_config(CASES[case])
    tensors = {spec.name: torch.zeros(spec.shape) + math.pi for spec in shape.list_parameters()}
    write_hf_folder(tmp_path / "out", shape, tensors.__getitem__, dtype=dtype)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    in_fp32 = {name for name, tensor in saved.items() if tensor.dtype == torch.float32}
    assert {".".join(name.split(".")[-2:]) for name in in_fp32} == expected
    for name in in_fp32:
        assert torch.equal(saved[name], tensors[name])


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    shape = read_config(MIXTRAL)
    tensors = {
        piece.name: torch.zeros(piece.shape)
        for spec in shape.list_parameters()
        for piece in spec.file_slices
    }
    missing = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"1 missing: {missing}"):
        WeightsFolder(tmp_path).check(shape)
