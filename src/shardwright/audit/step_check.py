"""Checks of a recorded step after its gradients: loss, norm, clip and the optimizer's update.

The update is computed from the recorded gradients, so a wrong gradient is not reported twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.audit.evidence import Evidence
from shardwright.audit.loss_check import check_loss
from shardwright.audit.mistakes.candidates import classify_parameter, describe_subset
from shardwright.audit.mistakes.hypotheses import MistakeDiagnosis, find_max_norm
from shardwright.audit.record import StepRecord
from shardwright.audit.step_findings import StepChecks, StepFinding, compare_numbers

NORM_TOLERANCE = 1e-4
UPDATE_TOLERANCE = 1e-3
"""Allowed error of an update relative to its norm, in addition to the rounding of the
parameters."""
_ADAM_CLASSES = frozenset({"Adam", "AdamW"})
_UNSUPPORTED_OPTIONS = ("amsgrad", "maximize")


def check_step(evidence: Evidence) -> StepChecks:
    """Check data, replicas, loss, norm, clip and update."""
    checks = StepChecks([], [], [])
    _check_data(evidence, checks)
    _check_replicas(evidence, checks)
    is_finite = _check_finite(evidence, checks)
    num_diagnoses = len(checks.diagnoses)
    check_loss(evidence, checks)
    _check_norm(evidence, checks)
    _check_clip(evidence, checks)
    _check_updates(evidence, checks)
    if not is_finite:  # norms, factors and updates of nan fit any mistake
        del checks.diagnoses[num_diagnoses:]
    return checks


def _check_data(evidence: Evidence, checks: StepChecks) -> None:
    equal = [
        f"data ranks {one} and {other}"
        for other in range(len(evidence.data))
        for one in range(other)
        if len(evidence.data[one]) == len(evidence.data[other])
        and all(a.equals(b) for a, b in zip(evidence.data[one], evidence.data[other], strict=True))
    ]
    if len(evidence.data) > 1:
        subject = equal[0] if equal else "all data ranks differ"
        checks.findings.append(StepFinding("data", subject, float(len(equal)), 0.0))
    if equal:
        checks.diagnoses.append(MistakeDiagnosis(("same_data",), ", ".join(equal), 1.0, 0.0))


def _check_replicas(evidence: Evidence, checks: StepChecks) -> None:
    for kind in ("before", "after"):
        differing = [n for n in evidence.model.names if len(evidence.record.join(kind, n)) > 1]
        subject = describe_subset(differing, evidence.model.names) if differing else "all equal"
        quantity = f"replicas {kind} the step"
        checks.findings.append(StepFinding(quantity, subject, float(len(differing)), 0.0))
        if differing and not any(d.keys == ("replicas_differ",) for d in checks.diagnoses):
            checks.diagnoses.append(
                MistakeDiagnosis(("replicas_differ",), f"{subject}, {kind}", 1.0, 0.0)
            )


def _check_finite(evidence: Evidence, checks: StepChecks) -> bool:
    """Name an update by gradients that are not finite, where parameters were finite before.

    Returns:
        False if it is named.
    """
    broken = []
    for name in evidence.model.names:
        values = [evidence.record.join(kind, name) for kind in ("before", "after")]
        if not all(values):
            continue
        before, after = (bool(copies[0].isfinite().all()) for copies in values)
        if before and not after:
            broken.append(name)
    if broken:
        subject = describe_subset(broken, evidence.model.names)
        checks.diagnoses.append(MistakeDiagnosis(("not_finite_applied",), subject, math.inf, 0.0))
    return not broken


def _check_norm(evidence: Evidence, checks: StepChecks) -> None:
    record = evidence.record
    given = _find_reported_norm(record)
    squares = record.sum_squared_norms()
    if given is None or squares is None:
        reason = "not all parameters are recorded" if given is not None else "none was reported"
        checks.unchecked.append(f"gradient norm: {reason}")
        return
    # Copies that differ have been reported; their mean is the gradient that was meant.
    expected = math.sqrt(sum(squares.values()))
    if len(evidence.copies) > 1 and evidence.model.num_projections is None:
        expected = float(evidence.recorded.double().norm())
    error = compare_numbers(given, expected)
    allowed = max(NORM_TOLERANCE, _get_epsilon(evidence))
    checks.findings.append(StepFinding("gradient norm", "as reported", error, allowed))
    if error <= allowed:
        return
    for key, subject, square in _iterate_wrong_norms(record, squares):
        after = compare_numbers(given, math.sqrt(square))
        if after <= allowed:
            checks.diagnoses.append(MistakeDiagnosis((key,), subject, error, after))
            return


def _find_reported_norm(record: StepRecord) -> float | None:
    """Return the norm that the trainer reports, else the norm of its only clipping."""
    calls = record.values["clip_calls"]
    norm = calls[0]["norm"] if len(calls) == 1 else None
    norm = record.values.get("reported_gradient_norm", norm)
    return None if norm is None else float(norm)


def _iterate_wrong_norms(
    record: StepRecord, squares: Mapping[str, float]
) -> Iterator[tuple[str, str, float]]:
    """Yield mistakes of a norm, its subject and the square that they lead to.

    Args:
        record: The recorded step.
        squares: Square of each parameter's gradient.
    """
    own = [rank.values["squared_gradient_norms"] for rank in record.ranks]
    first = record.values["data_rank"]
    sharing = [o for o, r in zip(own, record.ranks, strict=True) if r.values["data_rank"] == first]
    kinds = sorted({classify_parameter(name) for name in squares})
    yield "norm_is_zero", "gradient norm", 0.0
    for kind in ("", *kinds):
        chosen = [name for name in squares if kind in ("", classify_parameter(name))]
        rest = sum(squares.values()) - sum(squares[name] for name in chosen)
        subject = f"gradient norm, {kind}" if kind else "gradient norm"
        for key, counted in (
            ("own_norm_reported", own[:1]),
            ("replicas_counted_in_norm", own),
            ("replicas_counted_in_norm", sharing),
        ):
            added = sum(each.get(name, 0.0) for each in counted for name in chosen)
            yield key, subject, max(0.0, rest + added)


def _get_epsilon(evidence: Evidence) -> float:
    names = evidence.model.names
    return max(torch.finfo(evidence.record.get_gradient_dtype(name)).eps for name in names)


def _check_clip(evidence: Evidence, checks: StepChecks) -> None:
    """Compare the factors between raw gradients and those that the optimizer got."""
    limit = find_max_norm(evidence)
    scales: dict[str, float] = {}
    for rank in evidence.record.ranks:
        scales |= rank.values["applied_scales"]
    squares = evidence.record.sum_squared_norms()
    if evidence.record.values["gradients_copied_at"] in ("optimizer step", "end of the step"):
        checks.unchecked.append(
            "clip: the gradients were copied when the optimizer stepped, after any clip; call "
            "after_backward before clipping"
        )
        return
    if not scales or squares is None:
        checks.unchecked.append("clip: the gradients that the optimizer got are not recorded")
        return
    norm = math.sqrt(sum(squares.values()))
    if len(evidence.copies) > 1 and evidence.model.num_projections is None:
        norm = float(evidence.recorded.double().norm())
    expected = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
    errors = {name: compare_numbers(scale, expected) for name, scale in scales.items()}
    worst = max(errors, key=lambda name: errors[name])
    allowed = max(1e-3, _get_epsilon(evidence))
    checks.findings.append(StepFinding("clip", worst, errors[worst], allowed))
    if errors[worst] <= allowed:
        return
    values = list(scales.values())
    is_uniform = max(values) - min(values) <= allowed * max(values)
    candidates = {
        "not_clipped": 1.0,
        "clip_unbounded": None if limit is None else limit / (norm + 1e-6),
        "clipped_twice": None if limit is None else expected * limit / (norm + 1e-6),
        "clipped_by_squared_norm": None if limit is None else min(1.0, limit / (norm**2 + 1e-6)),
    }
    for key, value in candidates.items():
        if value is not None and is_uniform and compare_numbers(values[0], value) <= allowed:
            after = compare_numbers(values[0], value)
            checks.diagnoses.append(MistakeDiagnosis((key,), "clip", errors[worst], after))
            return
    given = _find_reported_norm(evidence.record)
    if is_uniform and limit is not None and given is not None:
        by_reported = min(1.0, limit / (given + 1e-6))
        if compare_numbers(values[0], by_reported) <= allowed:
            return  # a wrong norm is the reason, and reported as such
    key = "all_scaled" if is_uniform else "clipped_per_group"
    subject = f"clip: factors from {min(values):.4g} to {max(values):.4g}"
    checks.diagnoses.append(MistakeDiagnosis((key,), subject, errors[worst], allowed))


def _check_updates(evidence: Evidence, checks: StepChecks) -> None:
    updates = _list_updates(evidence, checks)
    if not updates:
        return
    errors = {u.name: u.compute_error(u.predict()) for u in updates}
    worst = max(errors, key=lambda name: errors[name])
    checks.findings.append(StepFinding("update", worst, errors[worst], 1.0))
    wrong = [u for u in updates if errors[u.name] > 1.0]
    if not wrong:
        return
    subject = describe_subset([u.name for u in wrong], [u.name for u in updates])
    diagnosis = _diagnose_updates(evidence, wrong)
    if diagnosis is not None:
        key, after = diagnosis
        checks.diagnoses.append(MistakeDiagnosis((key,), subject, errors[worst], after))


def _diagnose_updates(evidence: Evidence, wrong: Sequence[_Update]) -> tuple[str, float] | None:
    """Name the mistake that reproduces every wrong update, and the error that is left."""
    if all(bool(torch.equal(u.before, u.after)) for u in wrong):
        return "parameter_not_updated", 0.0

    def measure(**changes: Any) -> float:
        return max(u.compute_error(u.predict(**changes)) for u in wrong)

    used_rates = [float(g["lr"]) for o in evidence.record.values["optimizers"] for g in o["groups"]]
    next_rates = evidence.record.values.get("next_learning_rates")
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("next_learning_rate", {"learning_rates": rates})
        for rates in (next_rates, used_rates)
        if rates
    ]
    decays = {
        float(group.get("weight_decay", 0.0))
        for optimizer in evidence.record.values["optimizers"]
        for group in optimizer["groups"]
    } | {0.0, 0.01, 0.1}
    attempts += [("decay_differs", {"weight_decay": decay}) for decay in sorted(decays)]
    attempts += [
        ("optimizer_state_lost", {"is_state_empty": True}),
        ("optimizer_state_stale", {"is_state_stale": True}),
    ]
    for key, changes in attempts:
        error = measure(**changes)
        if error <= 1.0:
            return key, error
    factors = [u.fit_learning_rate() for u in wrong]
    if max(factors) - min(factors) <= 1e-2 * abs(factors[0]):
        error = max(u.compute_error(u.predict(factor=factors[0])) for u in wrong)
        if error <= 1.0:
            return "other_learning_rate", error
    return None


@dataclass(frozen=True)
class _Update:
    """Update of one parameter by an optimizer whose rule is known; tensors in float64."""

    name: str
    kind: str
    group: Mapping[str, Any]
    group_index: int
    before: Tensor
    after: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]
    epsilon: float
    start_learning_rates: Sequence[float]
    """Learning rate of each group when the step began; empty if it is not recorded."""

    def predict(
        self,
        *,
        learning_rates: Sequence[float] = (),
        weight_decay: float | None = None,
        factor: float = 1.0,
        is_state_empty: bool = False,
        is_state_stale: bool = False,
    ) -> Tensor:
        """Compute the parameter after the step, as the group says or with a mistake."""
        rates = learning_rates or self.start_learning_rates
        rate = float(rates[self.group_index] if rates else self.group["lr"])
        rate *= factor
        decay = float(self.group.get("weight_decay", 0.0)) if weight_decay is None else weight_decay
        state = {} if is_state_empty else self.state
        is_decoupled = self.kind == "AdamW" or bool(self.group.get("decoupled_weight_decay"))
        gradient = self.gradient
        value = self.before
        if is_decoupled:
            value = value * (1 - rate * decay)
        else:
            gradient = gradient + decay * self.before
        if self.kind == "SGD":
            return value - rate * self._get_momentum(gradient, state, is_state_stale)
        return value - rate * self._get_adam_direction(gradient, state, is_state_stale)

    def _get_momentum(
        self, gradient: Tensor, state: Mapping[str, Tensor], is_stale: bool
    ) -> Tensor:
        momentum = float(self.group.get("momentum", 0.0))
        if momentum == 0.0:
            return gradient
        buffer = state.get("momentum_buffer")
        if buffer is None:
            return gradient * (1 + momentum if self.group.get("nesterov") else 1)
        if is_stale:
            return buffer.double()
        damped = (1 - float(self.group.get("dampening", 0.0))) * gradient
        buffer = momentum * buffer.double() + damped
        return gradient + momentum * buffer if self.group.get("nesterov") else buffer

    def _get_adam_direction(
        self, gradient: Tensor, state: Mapping[str, Tensor], is_stale: bool
    ) -> Tensor:
        beta1, beta2 = (float(beta) for beta in self.group["betas"])
        count = float(state["step"]) + 1 if "step" in state else 1.0
        zero = torch.zeros_like(gradient)
        mean = state.get("exp_avg", zero).double()
        square = state.get("exp_avg_sq", zero).double()
        if is_stale:
            count = max(1.0, count - 1)
        else:
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * gradient.square()
        root = (square / (1 - beta2**count)).sqrt() + float(self.group.get("eps", 1e-8))
        return mean / (1 - beta1**count) / root

    def compute_error(self, predicted: Tensor) -> float:
        """Return the error of the update as a multiple of what is allowed."""
        update = self.predict() - self.before
        # Rounding of the stored parameter, element by element.
        rounding = self.epsilon * self.after.abs() + 1e-12
        allowed = UPDATE_TOLERANCE * float(update.norm()) + float(rounding.norm())
        difference = float((predicted - self.after).norm())
        return math.inf if math.isnan(difference) else difference / allowed

    def fit_learning_rate(self) -> float:
        """Return the factor of the learning rate that explains the update best."""
        update = self.predict() - self.before
        square = float(update.square().sum())
        return float(((self.after - self.before) * update).sum()) / square if square else 1.0


def _list_updates(evidence: Evidence, checks: StepChecks) -> list[_Update]:
    """List the updates that can be computed; say which cannot."""
    record = evidence.record
    optimizers = [each for rank in record.ranks for each in rank.values["optimizers"]]
    if not optimizers or record.values["projections"] is not None:
        reason = (
            "gradients are projected"
            if optimizers
            else "no update by an optimizer of torch was seen"
        )
        checks.unchecked.append(f"update: {reason}")
        return []
    if not record.values["applied_scales"]:
        checks.unchecked.append("update: the gradients that the optimizer got are not recorded")
        return []
    updates: dict[str, _Update] = {}
    skipped = set()
    for optimizer in optimizers:
        kind = optimizer["base_class"]
        for name, index in optimizer["group_of"].items():
            if name in updates or not evidence.has_gradient.get(name):
                continue
            group = optimizer["groups"][index]
            is_known = kind in _ADAM_CLASSES or kind == "SGD"
            if not is_known or any(group.get(option) for option in _UNSUPPORTED_OPTIONS):
                skipped.add(optimizer["class"])
                continue
            info = record.parameter_info[name]
            scales = [
                rank.values["applied_scales"][name]
                for rank in record.ranks
                if name in rank.values["applied_scales"]
            ]
            raw = record.join("gradient", name)[0]
            updates[name] = _Update(
                name,
                kind,
                group,
                index,
                record.join("before", name)[0].double(),
                record.join("after", name)[0].double(),
                raw.double() * (scales[0] if scales else 1.0),
                record.read_state(name),
                torch.finfo(getattr(torch, info["dtype"])).eps,
                record.values.get("start_learning_rates") or (),
            )
    for kind in sorted(skipped):
        checks.unchecked.append(f"update: the rule of {kind} with these options is not known")
    return list(updates.values())
