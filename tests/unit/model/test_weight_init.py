"""Initial weights: a function of name and seed, computed for any slice."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from shardwright.architecture import NormalInit, OnesInit, ParameterInit, ParameterSpec, ZerosInit
from shardwright.model.weight_init import initialise_parameter

PINNED_HEAD = [-0.023732613772153854, -0.010585802607238293, 0.013895044103264809]
PINNED_DIGEST = "fc00f34fc06b2783b30b8b37e7fad2fbf895c87a6480bdc761f0e5216b4ee38a"


def make_spec(
    shape: tuple[int, ...],
    name: str = "model.layers.0.mlp.up_proj.weight",
    init: ParameterInit | None = None,
) -> ParameterSpec:
    return ParameterSpec(name, shape, role="up", layer=0, init=init or NormalInit(0.02))


def initialise(
    shape: tuple[int, ...], *, seed: int = 1, name: str = "w", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return initialise_parameter(make_spec(shape, name), seed, dtype=dtype)


def test_initial_values_are_the_pinned_ones() -> None:
    """A seed must give the same weights in every release: do not regenerate these numbers."""
    weight = initialise((700, 300), seed=20)
    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    assert weight[0, :3].tolist() == pytest.approx(PINNED_HEAD, abs=0)
    assert digest == PINNED_DIGEST


def test_initial_values_are_equal_in_another_process() -> None:
    code = (
        "import hashlib, torch; from shardwright.architecture import *;"
        "from shardwright.model.weight_init import initialise_parameter;"
        "spec = ParameterSpec('w', (300, 40), 'up', 0, NormalInit(0.02));"
        "w = initialise_parameter(spec, 5, dtype=torch.float32);"
        "print(hashlib.sha256(w.numpy().tobytes()).hexdigest())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert printed == hashlib.sha256(initialise((300, 40), seed=5).numpy().tobytes()).hexdigest()


def test_initial_values_depend_on_name_and_seed() -> None:
    weight = initialise((300, 300))
    assert torch.equal(weight, initialise((300, 300)))
    assert not torch.equal(weight, initialise((300, 300), seed=2))
    assert not torch.equal(weight, initialise((300, 300), name="v"))


def test_moments_and_independence_of_tiles() -> None:
    weight = initialise((1024, 1024)).double() / 0.02
    assert abs(weight.mean()) < 5e-3
    assert abs(weight.std() - 1) < 5e-3
    assert abs((weight**4).mean() - 3) < 0.05
    tiles = weight.unfold(0, 256, 256).unfold(1, 256, 256).reshape(16, -1)
    correlation = np.corrcoef(tiles.numpy()) - np.eye(16)
    assert np.abs(correlation).max() < 0.02


def test_dtypes_are_casts_of_float32() -> None:
    weight = initialise((40, 500))
    assert torch.equal(initialise((40, 500), dtype=torch.float64), weight.double())
    assert torch.equal(initialise((40, 500), dtype=torch.bfloat16), weight.bfloat16())
    assert torch.equal(initialise((40, 500), dtype=torch.float16), weight.half())


def test_initial_values_do_not_depend_on_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with_one_thread = initialise((1500, 700))
        torch.set_num_threads(4)
        assert torch.equal(initialise((1500, 700)), with_one_thread)
    finally:
        torch.set_num_threads(before)


@st.composite
def draw_slice(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int] | None]]:
    shape = draw(
        st.sampled_from(
            [(7,), (600,), (5, 9), (300, 20), (257, 513), (3, 300, 260), (2, 2, 30, 270)]
        )
    )
    narrow: list[tuple[int, int] | None] = []
    for size in shape:
        start = draw(st.integers(0, size))
        narrow.append(draw(st.sampled_from([None, (start, draw(st.integers(0, size - start)))])))
    return shape, narrow


@settings(max_examples=60, deadline=None)
@given(draw_slice())
def test_a_slice_equals_the_slice_of_the_whole(
    case: tuple[tuple[int, ...], list[tuple[int, int] | None]],
) -> None:
    shape, narrow = case
    whole = initialise(shape)
    for dim, part in enumerate(narrow):
        if part is not None:
            whole = whole.narrow(dim, *part)
    assert torch.equal(
        initialise_parameter(make_spec(shape, "w"), 1, dtype=torch.float32, narrow=narrow), whole
    )


def test_a_slice_draws_only_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row shard and a column shard draw 8 of 64 tiles each."""
    counters: list[int] = []
    philox = np.random.Philox

    def count_draws(*, key: int, counter: int) -> np.random.Philox:
        counters.append(counter >> 128)
        return philox(key=key, counter=counter)

    monkeypatch.setattr(np.random, "Philox", count_draws)
    for narrow in ([(512, 256), None], [None, (512, 256)]):
        counters.clear()
        initialise_parameter(make_spec((2048, 2048)), 1, dtype=torch.float32, narrow=narrow)
        assert len(counters) == len(set(counters)) == 8


def test_constants_and_padding_row() -> None:
    assert torch.equal(
        initialise_parameter(make_spec((5,), init=OnesInit()), 1, dtype=torch.bfloat16),
        torch.ones(5, dtype=torch.bfloat16),
    )
    assert torch.equal(
        initialise_parameter(make_spec((5,), init=ZerosInit()), 1, dtype=torch.float64),
        torch.zeros(5, dtype=torch.float64),
    )
    padded_spec = make_spec((6, 4), init=NormalInit(0.02, zero_row=3))
    weight = initialise_parameter(padded_spec, 1, dtype=torch.float32)
    assert weight[3].count_nonzero() == 0
    assert weight[[0, 1, 2, 4, 5]].count_nonzero() == 20
    for narrow in ([(2, 2), None], [(0, 3), None], [(3, 0), None], [None, (1, 2)]):
        (start, length) = narrow[0] or (0, 6)
        (left, width) = narrow[1] or (0, 4)
        expected = weight[start : start + length, left : left + width]
        assert torch.equal(
            initialise_parameter(padded_spec, 1, dtype=torch.float32, narrow=narrow), expected
        )


def test_meta_device_draws_nothing() -> None:
    weight = initialise_parameter(
        make_spec((1 << 20, 1 << 20)),
        1,
        dtype=torch.bfloat16,
        device="meta",
        narrow=[(0, 512), None],
    )
    assert weight.is_meta
    assert weight.shape == (512, 1 << 20)
