"""The decoder: names, documents, cache, precision, recomputation, compilation.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwright.architecture import read_config
from shardwright.architecture.frozen_names import match_frozen
from shardwright.model import Decoder, DropoutKey, KeyValueCache
from tests.reference.cases import CASES, LONG

SOME_CASES = (
    "llama",
    "mistral-window",
    "phi3-longrope-long",
    "gemma2",
    "gemma3_text-newer",
    "olmo2",
    "smollm3",
    "gpt2",
    "gpt_neox",
)


def build(case: str | dict[str, Any], **options: Any) -> Decoder:
    """Build a decoder with random weights, so that no zero or one hides a mistake."""
    decoder = Decoder(read_config(CASES[case] if isinstance(case, str) else case), **options)
    randomise(decoder)
    return decoder


def randomise(decoder: Decoder) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def draw_tokens(decoder: Decoder, rows: int = 2, length: int = LONG) -> Tensor:
    return torch.randint(
        0, decoder.shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_the_shape_in_order(case: str) -> None:
    with torch.device("meta"):
        decoder = Decoder(read_config(CASES[case]))
    listed = [(spec.name, spec.shape) for spec in decoder.shape.list_parameters()]
    assert [
        (name, tuple(parameter.shape)) for name, parameter in decoder.named_parameters()
    ] == listed
    assert list(decoder.state_dict()) == [name for name, _ in listed]  # no buffers
    decoder.load_state_dict(decoder.state_dict())
    assert all(parameter.is_meta for parameter in decoder.parameters())
    for absent, owner in decoder.shape.tied_names.items():
        assert absent not in dict(listed)
        assert owner in dict(listed)


@pytest.mark.parametrize("case", SOME_CASES)
def test_packed_documents_equal_separate_rows(case: str) -> None:
    decoder = build(case)
    ids_BT = draw_tokens(decoder, rows=1)
    lengths = (11, 1, 20, LONG - 32)
    separate = torch.cat([decoder(part) for part in ids_BT.split(lengths, dim=1)], dim=1)
    documents_BT = torch.repeat_interleave(torch.tensor([3, 0, 7, 1]), torch.tensor(lengths))[None]
    torch.testing.assert_close(
        decoder(ids_BT, document_ids_BT=documents_BT), separate, rtol=1e-4, atol=1e-5
    )
    positions_BT = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = decoder(ids_BT, document_ids_BT=documents_BT, positions_BT=positions_BT)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(decoder(ids_BT), separate, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("case", SOME_CASES)
@torch.no_grad()
def test_cached_steps_equal_one_forward_pass(case: str) -> None:
    decoder = build(case)
    ids_BT = draw_tokens(decoder)
    cache = KeyValueCache(decoder.shape, 2, LONG, dtype=torch.float32, device="cpu")
    steps = [
        decoder(part, cache=cache) for part in ids_BT.split([9, 1, 1, 5, LONG - 18, 1, 1], dim=1)
    ]
    assert cache.num_tokens == LONG
    torch.testing.assert_close(torch.cat(steps, dim=1), decoder(ids_BT), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_full_cache_is_an_error() -> None:
    decoder = build("llama")
    cache = KeyValueCache(decoder.shape, 2, 4, dtype=torch.float32, device="cpu")
    with pytest.raises(AssertionError, match="fewer tokens"):
        decoder(draw_tokens(decoder, length=5), cache=cache)


@pytest.mark.parametrize("case", SOME_CASES)
def test_logits_do_not_depend_on_later_tokens(case: str) -> None:
    decoder = build(case)
    ids_BT = draw_tokens(decoder)
    other_BT = ids_BT.clone()
    other_BT[:, 20:] = (other_BT[:, 20:] + 1) % decoder.shape.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(
            decoder(ids_BT)[:, :20], decoder(other_BT)[:, :20], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("case", SOME_CASES)
def test_fused_and_explicit_attention_agree_in_float64(case: str) -> None:
    """Both compute the same function: in fp64 they agree to 1e-12."""
    losses = []
    gradients = []
    for attention in ("auto", "explicit"):
        decoder = build(case, attention=attention).double()
        ids_BT = draw_tokens(decoder)
        loss = decoder(ids_BT, labels_BT=ids_BT.roll(-1, 1))
        assert loss.dtype == torch.float64
        loss.backward()
        losses.append(loss)
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    scale = max(gradient.norm() for gradient in gradients[0])
    for first, second in zip(*gradients, strict=True):
        assert (first - second).norm() <= 1e-12 * scale


def test_loss_is_the_sum_over_supervised_tokens() -> None:
    decoder = build("granite")
    ids_BT = draw_tokens(decoder)
    labels_BT = ids_BT.roll(-1, 1)
    labels_BT[:, 5:] = -100
    log_likelihood = decoder(ids_BT)[:, :5].log_softmax(-1).gather(-1, labels_BT[:, :5, None]).sum()
    torch.testing.assert_close(decoder(ids_BT, labels_BT=labels_BT), -log_likelihood)


def test_loss_function_receives_the_properties_of_the_head() -> None:
    received: dict[str, Any] = {}

    def record(
        hidden_ND: Tensor, weight_VD: Tensor, bias: Tensor | None, labels_N: Tensor, **options: Any
    ) -> Tensor:
        received.update(
            options,
            hidden=hidden_ND.shape,
            weight=weight_VD.shape,
            bias=bias,
            labels=labels_N.shape,
        )
        return hidden_ND.sum()

    decoder = build(CASES["gemma2"], loss_function=record)
    ids_BT = draw_tokens(decoder)
    decoder(ids_BT, labels_BT=ids_BT)
    assert received == {
        "logit_scale": 1.0,
        "soft_cap": 30.0,
        "hidden": (2 * LONG, 48),
        "weight": (97, 48),
        "bias": None,
        "labels": (2 * LONG,),
    }


@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_bf16_compute_keeps_fp32_weights(case: str) -> None:
    decoder = build(case, compute_dtype=torch.bfloat16)
    exact = build(case)
    ids_BT = draw_tokens(decoder)
    hidden = decoder.compute_hidden(ids_BT)
    expected = exact.compute_hidden(ids_BT)
    assert hidden.dtype == torch.bfloat16
    assert (hidden - expected).norm() < 0.03 * expected.norm()
    loss = decoder(ids_BT, labels_BT=ids_BT)
    assert loss.dtype == torch.float32
    loss.backward()
    assert {
        parameter.grad.dtype for parameter in decoder.parameters() if parameter.grad is not None
    } == {torch.float32}
    # Weights gathered in bf16, as FSDP2 does, compute the same bits.
    gathered = build(case, compute_dtype=torch.bfloat16).to(torch.bfloat16)
    assert torch.equal(gathered.compute_hidden(ids_BT), hidden)


def test_blocks_run_through_the_recompute_hook() -> None:
    decoder = build("gpt2-inverse-layer-scale")
    ids_BT = draw_tokens(decoder)
    key = DropoutKey(seed=1, step=2, sample_indices_B=torch.tensor([5, 9]))
    plain = compute_gradients(decoder, ids_BT, key)
    calls = []

    def recompute(function: Any, *arguments: Any) -> Tensor:
        calls.append(function)
        return torch.utils.checkpoint.checkpoint(
            function, *arguments, use_reentrant=False, preserve_rng_state=False
        )

    decoder.set_recompute(recompute)
    for gradient, expected in zip(compute_gradients(decoder, ids_BT, key), plain, strict=True):
        assert torch.equal(gradient, expected)
    assert len(calls) == decoder.shape.num_layers
    decoder.set_recompute(None)
    compute_gradients(decoder, ids_BT, key)
    assert len(calls) == decoder.shape.num_layers


def compute_gradients(
    decoder: Decoder, ids_BT: Tensor, dropout: DropoutKey | None = None
) -> list[Tensor]:
    decoder.zero_grad()
    decoder(ids_BT, labels_BT=ids_BT.roll(-1, 1), dropout=dropout).backward()
    return [
        parameter.grad.clone() for parameter in decoder.parameters() if parameter.grad is not None
    ]


# Tracing reads `.grad` of the block's input, which gives a warning.
ignore_tracing_warning = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@ignore_tracing_warning
def test_compiled_blocks_compute_the_same_gradients() -> None:
    decoder = build(CASES["gemma2"] | {"num_hidden_layers": 2})
    ids_BT = draw_tokens(decoder)
    plain = compute_gradients(decoder, ids_BT)
    names = [name for name, _ in decoder.named_parameters()]
    decoder.compile_blocks(backend="aot_eager", fullgraph=True)
    compiled = compute_gradients(decoder, ids_BT)
    assert [name for name, _ in decoder.named_parameters()] == names
    largest = max(gradient.norm() for gradient in plain)
    for gradient, expected in zip(compiled, plain, strict=True):
        assert (gradient - expected).norm() <= 1e-5 * expected.norm() + 1e-7 * largest


@ignore_tracing_warning
@pytest.mark.parametrize("has_dropout", [False, True])
def test_blocks_of_a_kind_share_one_graph(has_dropout: bool) -> None:
    """A graph per layer would cost minutes, and beyond the compiler's limit fall back to eager."""
    decoder = build(CASES["gpt2"] | {"n_layer": 10, "resid_pdrop": 0.1, "attn_pdrop": 0.1})
    ids_BT = draw_tokens(decoder)
    torch._dynamo.reset()
    compiled = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    decoder.compile_blocks(backend=count, fullgraph=True)
    key = DropoutKey(0, 0, torch.tensor([0, 1])) if has_dropout else None
    decoder(ids_BT, labels_BT=ids_BT, dropout=key)
    # One for the first block, whose input needs no gradient, and one for the rest.
    assert len(compiled) <= 2


@pytest.mark.parametrize(
    ("case", "attention", "message"),
    [
        ("llama", "auto", "sdpa (causal order)"),
        ("llama", "explicit", "as configured"),
        ("gemma2", "auto", "a soft cap (50)"),
        ("mistral-window", "auto", "a window of 7 tokens"),
        ("gpt2", "auto", "no kernel has our dropout by token"),
    ],
)
def test_the_attention_implementation_is_logged_once(
    case: str, attention: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="shardwright"):
        decoder = build(case, attention=attention)
        for _ in range(2):
            decoder(draw_tokens(decoder), dropout=DropoutKey(0, 0, torch.tensor([0, 1])))
    assert [message in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("patterns", "num_forward_blocks"),
    [
        ((), 0),
        (("*_proj.weight",), 0),
        (("model.layers.1.mlp.*", "lm_head.*"), 0),
        (("model.embed_tokens.*", "model.layers.0.*"), 1),
        (("model.embed_tokens.*", "model.layers.*"), 3),
    ],
)
def test_flops_beside_frozen_weights_are_those_of_the_products(
    patterns: tuple[str, ...], num_forward_blocks: int
) -> None:
    """Products as torch counts them; attention loses two thirds without a backward pass."""
    decoder = build("llama")
    shape = decoder.shape
    frozen = match_frozen(patterns, shape)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name not in frozen)
    ids_BT = draw_tokens(decoder, length=8)
    with FlopCounterMode(display=False) as counter:
        decoder(ids_BT).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operator, count in counts.items() if "mm" in str(operator))
    # Attention is linear in the mean number of keys: 1 for one token, 2 for three.
    one, two = (shape.count_flops_per_token(length, frozen) for length in (1, 3))
    assert 2 * one - two == products / ids_BT.numel()
    whole = 6.0 * (shape.query_width + shape.value_width)
    num_whole_blocks = shape.num_layers - num_forward_blocks
    assert two - one == num_whole_blocks * whole + num_forward_blocks * whole / 3
