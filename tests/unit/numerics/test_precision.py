"""Dtypes of a precision, and the loss scale."""

from __future__ import annotations

import json

import pytest
import torch

from shardwright.config.training import PrecisionSection
from shardwright.errors import NonFiniteError
from shardwright.numerics.precision import LossScaler, PrecisionDtypes, resolve_dtypes


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            PrecisionSection(kind="fp32"),
            PrecisionDtypes(torch.float32, torch.float32, torch.float32),
        ),
        (
            PrecisionSection(kind="bf16"),
            PrecisionDtypes(torch.float32, torch.bfloat16, torch.float32),
        ),
        (
            PrecisionSection(kind="bf16", reduce_dtype="bf16"),
            PrecisionDtypes(torch.float32, torch.bfloat16, torch.bfloat16),
        ),
        (
            PrecisionSection(kind="fp16"),
            PrecisionDtypes(torch.float32, torch.float16, torch.float32),
        ),
        (
            PrecisionSection(kind="fp64"),
            PrecisionDtypes(torch.float64, torch.float64, torch.float64),
        ),
    ],
)
def test_master_weights_and_sums_are_wide(
    section: PrecisionSection, expected: PrecisionDtypes
) -> None:
    assert resolve_dtypes(section) == expected


def test_scale_doubles_after_enough_finite_steps_and_halves_on_a_bad_one() -> None:
    scaler = LossScaler(
        PrecisionSection(kind="fp16", initial_loss_scale=8, loss_scale_growth_steps=3)
    )
    for _ in range(2):
        scaler.update(False)
    assert scaler.scale == 8
    scaler.update(True)
    assert scaler.scale == 4
    for _ in range(3):  # the bad step reset the count
        assert scaler.scale == 4
        scaler.update(False)
    assert scaler.scale == 8


def test_a_run_that_never_becomes_finite_ends_with_an_error() -> None:
    scaler = LossScaler(PrecisionSection(kind="fp16"))
    for _ in range(40):  # 2^16 down to 2^-24, the smallest
        scaler.update(True)
    with pytest.raises(NonFiniteError, match="diverged"):
        scaler.update(True)


def test_scale_stops_growing_before_it_overflows() -> None:
    scaler = LossScaler(PrecisionSection(kind="fp16", loss_scale_growth_steps=1))
    for _ in range(500):
        scaler.update(False)
    assert scaler.scale == LossScaler.MAX_SCALE


def test_state_survives_a_round_trip_through_json() -> None:
    section = PrecisionSection(kind="fp16", loss_scale_growth_steps=3)
    scaler = LossScaler(section)
    for is_bad in (False, True, False, False):
        scaler.update(is_bad)
    resumed = LossScaler(section)
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    for is_bad in (False, False, True, False):
        resumed.update(is_bad)
        scaler.update(is_bad)
        assert resumed.state_dict() == scaler.state_dict()
