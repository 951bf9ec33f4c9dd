"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.training import TrainingSection
from shardwright.optim import compute_learning_rate

PEAK = 1e-3
MINIMUM = 1e-4


def make_section(**changes: Any) -> TrainingSection:
    minimum = 0.0 if changes.get("schedule") == "constant" else MINIMUM
    return TrainingSection(
        **(
            {
                "sequence_length": 8,
                "max_steps": 100,
                "learning_rate": PEAK,
                "min_learning_rate": minimum,
            }
            | changes
        )
    )


def list_learning_rates(training: TrainingSection, total_steps: int) -> list[float]:
    return [
        compute_learning_rate(step, training, total_steps, 1) for step in range(total_steps + 2)
    ]


def compute_nanogpt_rate(step: int) -> float:
    """Compute get_lr of nanoGPT's train.py (github.com/karpathy/nanoGPT) with the values of its
    character-level recipe on a CPU.
    """
    learning_rate = 1e-3
    min_lr = 1e-4
    warmup_iters = 100
    lr_decay_iters = 2000
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if step > lr_decay_iters:
        return min_lr
    decay_ratio = (step - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


def test_cosine_equals_nanogpts() -> None:
    training = make_section(schedule="cosine", warmup_steps=100, max_steps=2000)
    assert [compute_learning_rate(step, training, 2000, 12) for step in range(2100)] == [
        compute_nanogpt_rate(step) for step in range(2100)
    ]


def test_linear_decreases_by_equal_steps() -> None:
    values = list_learning_rates(
        make_section(schedule="linear", warmup_steps=0, min_learning_rate=0.0), 4
    )
    assert values == pytest.approx([PEAK, 0.75 * PEAK, 0.5 * PEAK, 0.25 * PEAK, 0.0, 0.0])


def test_constant_stays_at_the_peak() -> None:
    assert set(list_learning_rates(make_section(schedule="constant", warmup_steps=3), 20)[3:]) == {
        PEAK
    }


def test_warmup_stable_decay_is_constant_and_then_decreases_to_the_minimum() -> None:
    values = list_learning_rates(
        make_section(schedule="warmup_stable_decay", warmup_steps=5, decay_steps=20), 100
    )
    assert values[5:81] == [PEAK] * 76
    assert values[90] == pytest.approx((PEAK + MINIMUM) / 2)
    assert values[100] == MINIMUM


def test_warmup_stable_decay_decays_over_a_tenth_by_default() -> None:
    values = list_learning_rates(make_section(schedule="warmup_stable_decay"), 50)
    assert values[45] == PEAK
    assert values[46] < PEAK


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_batch_scaling_multiplies_the_whole_curve(rule: str, factor: float) -> None:
    training = make_section(
        schedule="cosine",
        warmup_steps=10,
        batch_scaling=rule,
        base_batch_size=None if rule == "none" else 8,
    )
    for step in (0, 9, 10, 55, 99, 100):
        base = compute_learning_rate(
            step, make_section(schedule="cosine", warmup_steps=10), 100, 32
        )
        assert compute_learning_rate(step, training, 100, 32) == pytest.approx(factor * base)
        assert compute_learning_rate(step, training, 100, 8) == pytest.approx(base)


KINDS = st.sampled_from(["constant", "linear", "cosine", "warmup_stable_decay"])


@given(
    kind=KINDS,
    warmup=st.integers(0, 60),
    after=st.integers(1, 90),
    decay=st.none() | st.integers(1, 150),
)
def test_every_schedule_rises_to_the_peak_and_decreases_to_the_minimum_without_jumps(
    kind: str, warmup: int, after: int, decay: int | None
) -> None:
    total = warmup + after
    decay = decay if kind == "warmup_stable_decay" else None
    values = list_learning_rates(
        make_section(schedule=kind, warmup_steps=warmup, decay_steps=decay), total
    )
    rising = values[: warmup + 1]
    falling = values[warmup:]
    assert rising == sorted(rising)
    assert rising[-1] == pytest.approx(PEAK)
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == (PEAK if kind == "constant" else MINIMUM)
    # A cosine is steepest halfway: pi / 2 times as steep as a straight line.
    length = min(after, decay or max(1, total // 10)) if kind == "warmup_stable_decay" else after
    steepest = max(PEAK / (warmup + 1), math.pi / 2 * (PEAK - MINIMUM) / length) * (1 + 1e-9)
    assert all(abs(later - earlier) <= steepest for earlier, later in pairwise(values))


@given(total=st.integers(1, 40), beyond=st.integers(0, 20))
def test_a_warmup_longer_than_the_run_never_decreases(total: int, beyond: int) -> None:
    values = list_learning_rates(make_section(warmup_steps=total + beyond), total)[:total]
    assert values == sorted(values)
    assert values[-1] < PEAK


@given(kind=KINDS, resume_step=st.integers(0, 99))
def test_resuming_needs_only_the_step(kind: str, resume_step: int) -> None:
    training = make_section(schedule=kind, warmup_steps=7)
    before = [compute_learning_rate(step, training, 100, 1) for step in range(resume_step)]
    after = [compute_learning_rate(step, training, 100, 1) for step in range(resume_step, 100)]
    assert before + after == list_learning_rates(training, 100)[:100]
