"""4-bit matrices: bytes of bitsandbytes, rows of any length, products that save no dequantised
matrix.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from shardwright.architecture import read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.architecture.nf4_layout import compute_row_bytes, count_columns
from shardwright.config.adapter_section import AdapterSection
from shardwright.errors import LayoutError, RecipeError
from shardwright.layout import Layout
from shardwright.model.products import nf4
from shardwright.model.products.grouped_matmul import multiply_grouped
from shardwright.model.products.product import ProductRule, multiply, multiply_by_expert
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.numerics.function_compiler import FunctionCompiler
from shardwright.placement import place_model

BITSANDBYTES = (
    "1ff1ff2ee2ee2ed3dd3dc4cc4bb4bb5aa5aa6996996886887887777777777777"
    "7777777777777766666666665555555444444333333222222211111111000000"
)
"""`make_two_blocks` quantised by bitsandbytes 0.50.2 on a CPU: quantize_4bit(x, blocksize=64,
quant_type="nf4").
"""

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 64,
}  # fmt: skip


def make_two_blocks() -> Tensor:
    values = torch.linspace(-1.0, 1.0, 128).view(2, 64).square() * torch.tensor([[1.0], [-0.3]])
    values[0, ::3] *= -0.7
    return values


def test_codes_and_scales_are_those_of_bitsandbytes() -> None:
    packed = nf4.pack(make_two_blocks())
    assert packed[:, :32].flatten().numpy().tobytes().hex() == BITSANDBYTES
    assert packed[:, 32:].contiguous().view(torch.float32).flatten().tolist() == [
        0.9687519669532776,
        0.30000001192092896,
    ]


@pytest.mark.parametrize("shape", [(5, 3), (1, 1)])
@pytest.mark.parametrize("columns", [1, 27, 64, 65, 130])
def test_a_row_of_any_length_is_rounded_to_the_nearest_values(
    columns: int, shape: tuple[int, ...]
) -> None:
    values = torch.randn(*shape, columns, generator=torch.Generator().manual_seed(1))
    packed = nf4.pack(values)
    assert packed.shape == (*shape, compute_row_bytes(columns))
    unpacked = nf4.unpack(packed, columns, torch.float32)
    table = torch.tensor(nf4.NF4_VALUES)
    for start in range(0, columns, nf4.BLOCK_ELEMENTS):
        block = values[..., start : start + nf4.BLOCK_ELEMENTS]
        unpacked_block = unpacked[..., start : start + nf4.BLOCK_ELEMENTS]
        scale = block.abs().amax(-1, keepdim=True)
        nearest = table[(block / scale)[..., None].sub(table).abs().argmin(-1)] * scale
        assert torch.equal(unpacked_block, nearest)
    assert torch.equal(nf4.pack(unpacked), packed)  # packing is idempotent


def test_zeros_stay_zeros() -> None:
    assert torch.equal(
        nf4.unpack(nf4.pack(torch.zeros(2, 64)), 64, torch.float32), torch.zeros(2, 64)
    )


def test_rows_are_packed_and_unpacked_in_chunks() -> None:
    values = torch.randn(10, 96, generator=torch.Generator().manual_seed(2))
    whole = nf4.pack(values)
    unpacked = nf4.unpack(whole, 96, torch.float64)
    with mock.patch.object(nf4, "_MAX_CHUNK_ELEMENTS", 200):
        assert torch.equal(nf4.pack(values), whole)
        assert torch.equal(nf4.unpack(whole, 96, torch.float64), unpacked)


def test_the_product_equals_that_of_the_dequantised_matrix_and_saves_packed_bytes() -> None:
    generator = torch.Generator().manual_seed(3)
    packed = nf4.pack(torch.randn(32, 128, generator=generator))
    x = torch.randn(7, 128, generator=generator, requires_grad=True)
    weight = nf4.unpack(packed, 128, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        out = multiply(x, packed, None, ProductRule(128))
    assert torch.equal(out, x @ weight.T)
    assert [tensor.dtype for tensor in saved] == [torch.uint8]
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * (x @ weight.T) @ weight)


def test_the_product_of_experts_equals_that_of_dequantised_matrices() -> None:
    generator = torch.Generator().manual_seed(4)
    packed = nf4.pack(torch.randn(3, 16, 64, generator=generator))
    counts = torch.tensor([4, 0, 5])
    x = torch.randn(9, 64, generator=generator, requires_grad=True)
    weight = nf4.unpack(packed, 64, torch.float32)
    packed_out = multiply_by_expert(x, packed, counts, ProductRule(64))
    plain_out = multiply_grouped(x, weight, counts, transposed=True)
    assert torch.equal(packed_out, plain_out)
    packed_gradient, plain_gradient = (
        torch.autograd.grad(out.square().sum(), x)[0] for out in (packed_out, plain_out)
    )
    torch.testing.assert_close(packed_gradient, plain_gradient)


def test_columns_are_counted_for_whole_and_sharded_rows() -> None:
    assert count_columns(compute_row_bytes(192), 192) == 192
    assert count_columns(compute_row_bytes(192) // 3, 192) == 64


def test_a_shard_boundary_inside_a_block_is_refused_with_the_degrees_that_work() -> None:
    shape = add_adapters(read_config(LLAMA), AdapterSection(quantize="nf4"))
    with pytest.raises(
        LayoutError, match=r"down_proj.*rows of 192.*2 ranks.*blocks of 64"
    ) as caught:
        place_model(shape, Layout(tp=2), 16)
    assert caught.value.allowed == "1"
    wide = add_adapters(
        read_config(LLAMA | {"intermediate_size": 256}), AdapterSection(quantize="nf4")
    )
    place_model(wide, Layout(tp=4), 16)


def test_transposed_matrices_are_refused() -> None:
    gpt2 = read_config(
        {
            "model_type": "gpt2",
            "vocab_size": 64,
            "n_embd": 64,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 64,
        }
    )
    with pytest.raises(RecipeError, match=r"is stored \[in, out\]"):
        add_adapters(gpt2, AdapterSection(quantize="nf4"))


def test_the_table_is_built_once_per_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy to a GPU would make the host wait at every product."""
    monkeypatch.setattr(nf4, "_byte_tables", {})
    packed = nf4.pack(make_two_blocks())
    with mock.patch.object(nf4, "_build_byte_table", wraps=nf4._build_byte_table) as build:
        with torch.inference_mode():
            first = nf4.unpack(packed, 64, torch.float32)
        second = nf4.unpack(packed, 64, torch.float32)
    assert build.call_count == 1
    assert torch.equal(first, second)
    (table,) = nf4._byte_tables.values()
    assert not table.is_inference()


def test_one_compiled_pass_has_the_bits_of_the_separate_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cpu")
    if obstacle := find_compiler_obstacle(device):
        pytest.skip(obstacle)
    monkeypatch.setattr(nf4, "_fused_unpack", {})
    torch._dynamo.reset()
    counters.clear()
    _, sources = run_and_get_code(
        nf4.compile_unpack, device, torch.bfloat16, FunctionCompiler(device)
    )
    assert len(nf4._fused_unpack) == 1
    generator = torch.Generator().manual_seed(5)
    for shape in [(16, 128), (300, 320), (3, 8, 64), (3, 8, 192), (1, 128), (9, 100)]:
        packed = nf4.pack(torch.randn(shape, generator=generator))
        for part in (packed, packed[1:]):  # FSDP's shards start anywhere
            found = nf4.unpack(part, shape[-1], torch.bfloat16)
            expected = nf4._unpack_separately(part, shape[-1], torch.bfloat16)
            assert torch.equal(found, expected), shape
    # One graph, and in it one kernel, for all shapes.
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(source.count("async_compile.cpp_pybinding(") for source in sources) == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_in_compiled_code_the_table_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4, "_byte_tables", {})
    packed = nf4.pack(torch.randn(8, 64, generator=torch.Generator().manual_seed(6)))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(7), requires_grad=True)

    def multiply_twice(x: Tensor) -> Tensor:
        return multiply(x, packed, None, ProductRule(64)).sum()

    expected = torch.autograd.grad(multiply_twice(x), x)[0]
    monkeypatch.setattr(nf4, "_byte_tables", {})
    compiled = torch.compile(multiply_twice, backend="aot_eager", fullgraph=True)
    with mock.patch.object(nf4, "_build_byte_table", wraps=nf4._build_byte_table) as build:
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(compiled(x), x)[0], expected)
    assert build.call_count == 1
