"""Dropout masks: right rate, independent, and functions of the token alone.

Legend: B sequences, T tokens, D features, H heads, S keys.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

from shardwright.architecture import read_config
from shardwright.hashing import combine_bits
from shardwright.model import Decoder, DropoutKey
from shardwright.model.dropout import Dropout, DropoutSite
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.rehearsal.live_memory import LiveMemoryTracker
from tests.reference.cases import CASES


def make_dropout(
    rows: int = 4, tokens: int = 64, *, seed: int = 0, step: int = 0, first: int = 0
) -> Dropout:
    key = DropoutKey(seed, step, torch.arange(first, first + rows))
    return Dropout.from_key(key, torch.arange(tokens), torch.device("cpu"))


def draw_mask(
    masks: Dropout,
    rate: float = 0.5,
    site: DropoutSite = DropoutSite.FEED_FORWARD,
    layer: int = 0,
    width: int = 128,
) -> Tensor:
    rows, tokens = masks.keys_BT.shape
    return (
        masks.select_layer(layer).drop(torch.ones(rows, tokens, width), rate, site) != 0
    ).double()


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate_and_expectation(rate: float) -> None:
    ones = torch.ones(8, 256, 256)
    dropped = make_dropout(8, 256).drop(ones, rate, DropoutSite.EMBEDDING)
    count = ones.numel()
    assert abs((dropped != 0).double().mean() - (1 - rate)) < 5 * (rate * (1 - rate) / count) ** 0.5
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / (1 - rate)).item()}
    assert abs(dropped.double().mean() - 1) < 5 * (rate / (1 - rate) / count) ** 0.5


def test_attention_keep_rate() -> None:
    ones = torch.ones(4, 3, 64, 64)
    share = (make_dropout().drop_attention(ones, 0.2) != 0).double().mean()
    assert abs(share - 0.8) < 5 * (0.2 * 0.8 / ones.numel()) ** 0.5


def measure_agreement(a: Tensor, b: Tensor) -> float:
    """Return by how many standard deviations two fair 0-1 tensors agree more often than chance."""
    return abs(((a == b).double().mean() - 0.5) * 2 * a.numel() ** 0.5).item()


def test_masks_of_different_sites_are_independent() -> None:
    base = draw_mask(make_dropout())
    assert measure_agreement(base, draw_mask(make_dropout(seed=1))) < 5
    assert measure_agreement(base, draw_mask(make_dropout(seed=2**32))) < 5
    assert measure_agreement(base, draw_mask(make_dropout(step=1))) < 5
    assert measure_agreement(base, draw_mask(make_dropout(step=2**32))) < 5
    assert measure_agreement(base, draw_mask(make_dropout(first=2**32))) < 5
    assert measure_agreement(base, draw_mask(make_dropout(), layer=1)) < 5
    assert (
        measure_agreement(
            base,
            (
                make_dropout().drop(torch.ones(4, 64, 128), 0.5, DropoutSite.FEED_FORWARD) != 0
            ).double(),
        )
        < 5
    )
    assert measure_agreement(base, draw_mask(make_dropout(), site=DropoutSite.ATTENTION_OUT)) < 5
    # Neighbouring samples, tokens and features, near and far.
    assert measure_agreement(base[:-1], base[1:]) < 5
    for shift in (1, 2, 8, 32):
        assert measure_agreement(base[:, :-shift], base[:, shift:]) < 5
        assert measure_agreement(base[..., :-shift], base[..., shift:]) < 5


def test_all_features_and_tokens_are_dropped_equally_often() -> None:
    masks = draw_mask(make_dropout(16, 256), width=64)
    for dims, count in (((0, 1), 16 * 256), ((0, 2), 16 * 64), ((1, 2), 256 * 64)):
        deviations = (masks.mean(dims) - 0.5).abs() / (0.25 / count) ** 0.5
        assert deviations.max() < 5


def test_heads_and_keys_are_independent() -> None:
    weights = (make_dropout().drop_attention(torch.ones(4, 4, 64, 64), 0.5) != 0).double()
    assert measure_agreement(weights[:, :-1], weights[:, 1:]) < 5
    assert measure_agreement(weights[..., :-1], weights[..., 1:]) < 5
    assert measure_agreement(weights, weights.transpose(-1, -2)) < 6


def test_any_split_of_the_batch_has_the_same_masks() -> None:
    shape = read_config(CASES["gpt2"])
    decoder = Decoder(shape).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    ids_BT = torch.randint(0, shape.vocab_size, (6, 17), generator=generator)
    samples_B = torch.tensor([10, 3, 2**40, 11, 0, 7])

    def loss(rows: list[int], step: int = 3) -> Tensor:
        key = DropoutKey(5, step, samples_B[rows])
        total: Tensor = decoder(ids_BT[rows], labels_BT=ids_BT[rows], dropout=key)
        return total

    whole = loss([0, 1, 2, 3, 4, 5])
    split = loss([4, 1]) + loss([0]) + loss([5, 3, 2])
    torch.testing.assert_close(whole, split, rtol=1e-12, atol=0)
    assert not torch.isclose(whole, loss([0, 1, 2, 3, 4, 5], step=4), rtol=1e-6)
    assert not torch.isclose(whole, decoder(ids_BT, labels_BT=ids_BT), rtol=1e-6)


def test_torch_generators_do_not_advance() -> None:
    before = torch.get_rng_state()
    draw_mask(make_dropout())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("llama", {"attention_dropout": 0.3}),
        ("phi3", {"resid_pdrop": 0.3}),
        ("gpt2", {"embd_pdrop": 0.3, "attn_pdrop": 0.0, "resid_pdrop": 0.0}),
        ("gpt2", {"embd_pdrop": 0.0, "attn_pdrop": 0.3, "resid_pdrop": 0.0}),
        ("gpt2", {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.3}),
        ("gpt_neox", {"hidden_dropout": 0.3}),
        ("gpt_neox", {"attention_dropout": 0.3}),
    ],
)
def test_every_rate_has_an_effect_only_with_a_key(
    case: str, fields: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0} if case == "gpt2" else {}
    with_rate = Decoder(read_config(CASES[case] | fields))
    without_rate = Decoder(read_config(CASES[case] | off))
    with torch.no_grad():
        for parameter, copy in zip(with_rate.parameters(), without_rate.parameters(), strict=True):
            copy.copy_(parameter.normal_(std=0.2))
    ids_BT = torch.arange(12)[None]
    key = DropoutKey(0, 0, torch.tensor([0]))
    assert torch.equal(with_rate(ids_BT), without_rate(ids_BT))
    assert not torch.allclose(with_rate(ids_BT, dropout=key), without_rate(ids_BT), rtol=1e-2)
    monkeypatch.setattr(Dropout, "from_key", None)  # nothing is hashed where nothing is dropped
    assert torch.equal(without_rate(ids_BT, dropout=key), without_rate(ids_BT))


def test_a_shard_of_heads_and_keys_has_the_mask_of_the_whole() -> None:
    ones = torch.ones(4, 6, 64, 64)
    whole = make_dropout().drop_attention(ones, 0.3)
    places = torch.tensor([3, 60, 17])
    part = make_dropout().drop_attention(
        ones[:, 2:5, :, :3], 0.3, first_head=2, key_indices_S=places
    )
    assert torch.equal(part, whole[:, 2:5][..., places])
    later = make_dropout().drop_attention(
        ones[:, 2:5, :, :3], 0.3, first_head=3, key_indices_S=places
    )
    assert not torch.equal(later, part)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's imports
@pytest.mark.skipif(
    find_compiler_obstacle(torch.device("cpu")) is not None, reason="no C++ compiler"
)
def test_code_compiled_for_a_cpu_has_the_same_masks() -> None:
    torch._dynamo.reset()
    keys_BT = make_dropout(2, 12).keys_BT

    def drop(keys_BT: Tensor) -> Tensor:
        return Dropout(keys_BT).drop_attention(torch.ones(2, 2, 12, 12), 0.1)

    compiled: Any = torch.compile(drop)
    torch.testing.assert_close(compiled(keys_BT), drop(keys_BT))


@pytest.mark.parametrize("observes_frames", [False, True])
def test_hashes_of_a_mask_take_one_temporary_tensor(observes_frames: bool) -> None:
    """Callers keep the arguments of their calls alive while torch.compile observes frames."""
    keys = torch.arange(64, dtype=torch.int32)[:, None]
    numbers = torch.arange(32, dtype=torch.int32)
    # False: torch.compile's function evaluates frames, and compiles none.
    callback = eval_frame.set_eval_frame(False if observes_frames else None)
    try:
        with LiveMemoryTracker() as live:
            hashed = combine_bits(keys, numbers)
    finally:
        eval_frame.set_eval_frame(callback)
    assert live.peak_bytes <= 2 * hashed.nbytes + numbers.nbytes
