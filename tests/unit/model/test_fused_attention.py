"""Varlen and FlexAttention against eager attention; their masks are built once per pass.

torch refuses FlexAttention's backward pass on a CPU, although its uncompiled form, which stores all
scores, computes it. The tests remove that check. Varlen has no CPU kernel: its calls are recorded
and computed plainly.

Legend: B sequences, T tokens, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from shardwright.architecture import MODEL_FAMILIES, read_config
from shardwright.architecture.attention_kernel import KernelSupport, get_attended_value_dim
from shardwright.errors import RecipeError
from shardwright.model import Decoder, KeyValueCache, forward_context
from shardwright.model.attention import fused_attention
from shardwright.model.attention.fused_attention import (
    AttentionSettings,
    LayerKernel,
    VarlenFunction,
    attend_fused,
    build_block_mask,
)
from shardwright.numerics.recompute import build_recompute_runner
from tests.compiled_graphs import GraphCounter
from tests.plain_varlen import PlainVarlen
from tests.reference.cases import CASES, LONG

LENGTHS = (11, 1, 20, LONG - 32)
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    # Tracing reads `.grad` of a block's input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> PlainVarlen:
    """Make both kernels available on the CPU; return the recorder of varlen's calls.

    Uncompiled FlexAttention is traced; traces of earlier tests count as recompilations.
    """
    torch._dynamo.reset()
    recorder = PlainVarlen()
    monkeypatch.setattr(forward_context, "find_kernel_support", lambda *_: KernelSupport())
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(fused_attention, "varlen_function", VarlenFunction(recorder, {}))
    return recorder


def build(case: str, attention: Any, dtype: torch.dtype = torch.float64) -> Decoder:
    decoder = Decoder(read_config(CASES[case]), attention=attention)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder.to(dtype)


def compute_gradients(
    decoder: Decoder, *, is_packed: bool, first: int = LENGTHS[0]
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss and the gradients of a step; the first document has `first` tokens."""
    decoder.zero_grad()
    ids_BT = torch.randint(
        0, decoder.shape.vocab_size, (2, LONG), generator=torch.Generator().manual_seed(1)
    )
    documents_BT = None
    if is_packed:
        # The rows' documents end at different places.
        lengths = torch.tensor([first, *LENGTHS[1:-1], LONG - first - sum(LENGTHS[1:-1])])
        ids = torch.tensor([3, 0, 7, 1])
        rows = [torch.repeat_interleave(ids, each) for each in (lengths, lengths.flip(0))]
        documents_BT = torch.stack(rows)
    loss = decoder(ids_BT, labels_BT=ids_BT.roll(-1, 1), document_ids_BT=documents_BT)
    loss.backward()
    return loss.detach(), [p.grad for p in decoder.parameters() if p.grad is not None]


def assert_equal_gradients(
    first: tuple[Tensor, list[Tensor]], second: tuple[Tensor, list[Tensor]], tolerance: float
) -> None:
    torch.testing.assert_close(first[0], second[0], rtol=tolerance, atol=0)
    scale = max(gradient.norm() for gradient in second[1])
    for got, want in zip(first[1], second[1], strict=True):
        assert (got - want).norm() <= tolerance * scale


SHORT_CASES = {
    "llama", "mistral-window", "qwen2-window-from-layer-1", "qwen3-biases-window",
    "phi3-window-partial", "gemma2", "gemma3_text-newer", "olmo2", "granite",
    "smollm3-untied-listed", "gpt2", "gpt_neox", "mixtral-window-narrow",
    "qwen3_moe-some-dense-normalised", "olmoe", "gpt_oss", "deepseek_v3",
}  # fmt: skip
"""One case of each family. The others are long."""


def has_varlen(case: str) -> bool:
    """Return True if varlen computes the case's attention: torch's needs values as wide as keys."""
    shape = read_config(CASES[case])
    has_equal_widths = get_attended_value_dim(shape) == shape.head_dim
    return has_equal_widths and not (shape.attention_sinks or shape.attention_soft_cap)


def list_cases(cases: Iterable[str]) -> list[Any]:
    return [
        pytest.param(case, marks=() if case in SHORT_CASES else pytest.mark.long) for case in cases
    ]


def test_a_case_of_every_family_is_short() -> None:
    families = [CASES[case]["model_type"] for case in SHORT_CASES]
    assert sorted(families) == sorted(MODEL_FAMILIES)


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("case", list_cases(CASES))
def test_flex_attention_equals_explicit_products(case: str, is_packed: bool) -> None:
    expected = compute_gradients(build(case, "explicit"), is_packed=is_packed)
    got = compute_gradients(build(case, "flex"), is_packed=is_packed)
    assert_equal_gradients(got, expected, 1e-12)


@pytest.mark.parametrize("is_packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("case", list_cases(filter(has_varlen, CASES)))
def test_varlen_equals_explicit_products(case: str, is_packed: bool, kernels: PlainVarlen) -> None:
    expected = compute_gradients(build(case, "explicit"), is_packed=is_packed)
    decoder = build(case, "varlen")
    got = compute_gradients(decoder, is_packed=is_packed)
    assert_equal_gradients(got, expected, 1e-12)
    assert len(kernels.calls) == decoder.shape.num_layers
    last = LENGTHS[-1]
    starts = [0, 11, 12, 32, LONG, LONG + last, LONG + last + 20, LONG + last + 21]
    bounds = [*(starts if is_packed else [0, LONG]), 2 * LONG]
    assert [call["bounds"] for call in kernels.calls] == [bounds] * len(kernels.calls)
    if decoder.shape.latent is None:
        assert {call["kv_heads"] for call in kernels.calls} == {decoder.shape.num_kv_heads}
    windows = [layer.window for layer in decoder.shape.layers]
    assert [call["window"] for call in kernels.calls] == [
        (-1 if window is None else window - 1, 0) for window in windows
    ]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
def test_varlen_takes_no_kernel_but_flash_attention(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 chooses among the kernels that are allowed, and prefers cuDNN's."""
    monkeypatch.setattr(fused_attention, "TORCH_CHOOSES_VARLEN_KERNEL", True)
    flags: Any = torch._C  # torch's own choice reads these, and the compiler traces no others

    def attend(query: Tensor, *_: Any, **__: Any) -> Tensor:
        is_flash_alone = flags._get_flash_sdp_enabled() and not flags._get_cudnn_sdp_enabled()
        return query if is_flash_alone else 2 * query

    decoder = build("llama", "varlen")
    losses = []
    for function in (attend, lambda query, *_, **__: query):
        monkeypatch.setattr(fused_attention, "varlen_function", VarlenFunction(function, {}))
        if is_compiled:
            torch._dynamo.reset()
            decoder.compile_blocks(backend="eager", fullgraph=True)
        losses.append(compute_gradients(decoder, is_packed=True)[0])
    assert losses[0] == losses[1]
    assert torch.backends.cuda.cudnn_sdp_enabled()  # allowed again for other attention


def test_the_number_of_documents_and_their_length_take_few_values() -> None:
    """Compiled code sees powers of two, whatever the documents of a batch are."""
    seen = set()
    for number in range(33, 65):
        ids_BT = np.minimum(np.arange(256) // 2, number - 1)[None]
        bounds = fused_attention.build_document_bounds(1, 256, ids_BT, torch.device("cpu"))
        seen.add((len(bounds.bounds_R), bounds.max_tokens))
        assert bounds.bounds_R.diff().max() <= bounds.max_tokens
    assert seen == {(65, 256)}


@pytest.mark.parametrize("window", [None, 1, 70, 128, 150, 300])
def test_block_masks_are_those_of_the_dense_mask(window: int | None) -> None:
    """The blocks of 2 rows of 300 tokens, whose documents end in and at ends of blocks."""
    ids_BT = torch.zeros(2, 300, dtype=torch.int64)
    ids_BT[0, 128:] = 1
    ids_BT[1, 40:] = 4
    ids_BT[1, 290:] = 2
    for documents_BT in (None, ids_BT):
        mask = build_block_mask(window, 300, documents_BT, torch.device("cpu"))
        rows = None if documents_BT is None else 2
        dense = flex.create_block_mask(mask.mask_mod, rows, None, 300, 300, device="cpu")
        for name in ("kv_num_blocks", "full_kv_num_blocks"):
            got = getattr(mask, name)
            want = getattr(dense, name)
            # Blocks at a row's end count as partial there, since tokens beyond it are invisible.
            assert torch.equal(got[..., :-1], want[..., :-1]), name
        assert torch.equal(mask.to_dense(), dense.to_dense())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_flex_over_several_blocks(
    dtype: torch.dtype, has_sinks: bool, soft_cap: float | None
) -> None:
    generator = torch.Generator().manual_seed(2)
    num_heads = 4
    num_tokens = 300
    window = 150

    def draw(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    q_BHTE, k_BKTE, v_BKTE = (draw(2, heads, num_tokens, 8) for heads in (num_heads, 2, 2))
    sinks_H = draw(num_heads) if has_sinks else None
    ids_BT = (torch.arange(num_tokens) >= 130).long().expand(2, -1)
    mask = build_block_mask(window, num_tokens, ids_BT, torch.device("cpu"))
    settings = AttentionSettings(0.4, window, soft_cap, 0.0, sinks_H)
    out = attend_fused(q_BHTE, k_BKTE, v_BKTE, LayerKernel("flex", block_mask=mask), settings)

    k, v = (part.repeat_interleave(2, dim=1) for part in (k_BKTE, v_BKTE))
    scores = q_BHTE @ k.mT * 0.4
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    places = torch.arange(num_tokens)
    distance = places[:, None] - places
    visible = (distance >= 0) & (distance < window) & (ids_BT[0][:, None] == ids_BT[0])
    exponentials = scores.exp().masked_fill(~visible, 0.0)
    total = exponentials.sum(-1, keepdim=True)
    if sinks_H is not None:
        total = total + sinks_H.exp()[:, None, None]
    expected = exponentials / total @ v

    inputs = [part for part in (q_BHTE, k_BKTE, v_BKTE, sinks_H) if part is not None]
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(
        torch.autograd.grad(out, inputs, direction),
        torch.autograd.grad(expected, inputs, direction),
        strict=True,
    ):
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_gives_the_same_gradients(kind: Any) -> None:
    expected = compute_gradients(build("gpt_oss", "flex"), is_packed=True)
    decoder = build("gpt_oss", "flex")
    decoder.set_recompute(build_recompute_runner(kind))
    assert_equal_gradients(compute_gradients(decoder, is_packed=True), expected, 1e-15)


def test_flex_in_compiled_blocks_has_one_graph_per_kind_whatever_the_documents() -> None:
    decoder = build("gemma2", "flex", torch.float32)
    assert len({layer.window for layer in decoder.shape.layers}) == 2
    expected = [compute_gradients(decoder, is_packed=True, first=first) for first in (9, 14)]
    expected = [(loss, [each.clone() for each in gradients]) for loss, gradients in expected]
    counter = GraphCounter()
    counter.compile(decoder)
    for number, first in enumerate((9, 14)):
        got = compute_gradients(decoder, is_packed=True, first=first)
        assert_equal_gradients(got, expected[number], 1e-5)
    assert counter.counts == (2, 2)


@pytest.mark.parametrize(
    ("case", "attention", "num_built"),
    [
        ("gemma2", "auto", {"build_block_mask": 2}),  # windows and whole rows
        ("gemma3_text-newer", "auto", {"build_document_bounds": 1}),
        ("gemma3_text-newer", "sdpa", {"build_attention_mask": 2}),
    ],
)
def test_masks_are_built_once_per_pass(
    case: str, attention: Any, num_built: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[str, int] = {}
    for name in ("build_block_mask", "build_document_bounds", "build_attention_mask"):
        original = getattr(forward_context, name)

        def count(*arguments: Any, name: str = name, original: Any = original) -> Any:
            built[name] = built.get(name, 0) + 1
            return original(*arguments)

        monkeypatch.setattr(forward_context, name, count)
    decoder = build(case, attention)
    assert decoder.shape.num_layers > 2
    compute_gradients(decoder, is_packed=True)
    assert built == num_built


def test_flex_gets_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        shapes.append((q.shape[1], k.shape[1], v.shape[1], options["enable_gqa"]))
        return flex.flex_attention(q, k, v, **options)

    monkeypatch.setattr(fused_attention, "flex_replacement", record)
    decoder = build("gemma2", "auto")
    compute_gradients(decoder, is_packed=False)
    shape = decoder.shape
    assert shape.num_kv_heads < shape.num_heads
    assert set(shapes) == {(shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, True)}


def test_the_choice_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    decoder = build("gemma2", "auto")
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for _ in range(2):
            compute_gradients(decoder, is_packed=True)
    lines = [line for line in caplog.messages if line.startswith("attention:")]
    assert len(lines) == 1
    assert lines[0].startswith("attention: flex (packed documents")
    assert "a soft cap (50)" in lines[0]


def test_the_fall_back_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = KernelSupport("none here", "it needs the package triton")
    monkeypatch.setattr(forward_context, "find_kernel_support", lambda *_: missing)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        compute_gradients(build("gpt_oss", "auto"), is_packed=False)
    assert "explicit (" in caplog.text
    assert "flex: it needs the package triton" in caplog.text


def test_a_cpu_has_neither_kernel() -> None:
    support = fused_attention.find_kernel_support(torch.device("cpu"), torch.float32, 8, 8)
    assert "cpu" in str(support.missing_varlen)
    assert torch.__version__ in str(support.missing_flex)


def test_values_wider_than_keys_have_no_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flash attention checks that all widths are equal. Narrower values are padded."""
    monkeypatch.setattr(forward_context, "find_kernel_support", fused_attention.find_kernel_support)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    config = CASES["deepseek_v3"] | {"qk_nope_head_dim": 12}
    for value_dim, has_varlen in ((8, True), (16, True), (24, False)):
        shape = read_config(config | {"v_head_dim": value_dim})
        choices = forward_context.choose_layer_kernels(
            shape,
            "auto",
            torch.device("cuda"),
            torch.bfloat16,
            num_keys=LONG,
            is_packed=True,
            has_dropout=False,
        )
        assert (choices[None].kernel == "varlen") == has_varlen
        assert ("not 24 and 16 features" in choices[None].reason) != has_varlen


def test_a_requested_kernel_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_context, "find_kernel_support", fused_attention.find_kernel_support)
    with pytest.raises(RecipeError, match="no backward pass of FlexAttention on cpu"):
        compute_gradients(build("llama", "flex"), is_packed=False)


@torch.no_grad()
def test_generation_has_its_own_kernels() -> None:
    decoder = build("gpt_oss", "flex")
    cache = KeyValueCache(decoder.shape, 1, 8, dtype=torch.float64, device="cpu")
    ids_BT = torch.arange(8)[None]
    steps = [decoder(part, cache=cache) for part in ids_BT.split([5, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), decoder(ids_BT), rtol=1e-9, atol=1e-12)
