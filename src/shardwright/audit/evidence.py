"""Recorded gradients of a step next to the reference's, and the rounding error to expect.

Shapes: R data ranks, M micro-batches of a rank, P numbers of all compared gradients.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.audit.batch_reading import BatchReading
from shardwright.audit.mistakes.weightings import (
    BatchCounts,
    compute_objective_weights,
    compute_router_weights,
)
from shardwright.audit.record import StepRecord
from shardwright.audit.recorded_batch import RecordedBatch
from shardwright.audit.reference import ReferenceModel
from shardwright.config.data import IGNORED_LABEL

FLOORS = {"float32": 2e-5, "float64": 1e-9}
"""Smallest allowed relative error of a gradient, by the precision in which it is recorded."""
_SAFETY_FACTOR = 4.0
"""Allowed error as a multiple of the largest error of simulated rounding."""
_NUM_SAMPLES = 3
_TINY_SHARE = 1e-6
"""A parameter whose gradient is a smaller share of the global norm is compared with that norm."""


@dataclass
class Evidence:
    """Everything that a hypothesis may look at."""

    record: StepRecord
    model: ReferenceModel
    data: list[list[RecordedBatch]]
    objective: str
    reading: BatchReading
    copies: list[Tensor]
    """Recorded gradients [P]: one if all ranks that have copies agree, else one per copy."""
    has_gradient: dict[str, bool]
    relative_errors: dict[str, float] = field(default_factory=dict)
    """Relative error to expect of each parameter's gradient, from rounding."""
    _pieces: dict[BatchReading, Tensor] = field(default_factory=dict)
    _losses: dict[BatchReading, Tensor] = field(default_factory=dict)
    _counts: dict[BatchReading, BatchCounts] = field(default_factory=dict)
    _router_pieces: dict[bool, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def recorded(self) -> Tensor:
        """Recorded gradient [P]; the mean of its copies."""
        return self.copies[0] if len(self.copies) == 1 else torch.stack(self.copies).mean(0)

    def compute_pieces(self, reading: BatchReading) -> Tensor:
        """Return the gradient of every micro-batch's summed loss, [R, M, P]."""
        if reading not in self._pieces:
            num_batches = max(map(len, self.data))
            shape = (len(self.data), num_batches)
            pieces = torch.zeros(*shape, self.model.num_values, dtype=self.model.dtype)
            numbers = torch.zeros(5, *shape, dtype=torch.float64)
            for rank, batches in enumerate(self.data):
                for index, batch in enumerate(batches):
                    piece = self.model.compute_piece(batch, reading)
                    pieces[rank, index] = piece.gradient
                    labels = int((batch.labels != IGNORED_LABEL).sum())
                    numbers[:, rank, index] = torch.tensor(
                        [piece.loss_sum, piece.num_terms, labels, piece.num_tokens, 1.0],
                        dtype=torch.float64,
                    )
            self._pieces[reading] = pieces
            self._losses[reading] = numbers[0]
            self._counts[reading] = BatchCounts(*numbers[1:])
        return self._pieces[reading]

    def compute_losses(self, reading: BatchReading) -> Tensor:
        """Return the summed loss of every micro-batch, [R, M]."""
        self.compute_pieces(reading)
        return self._losses[reading]

    def count(self, reading: BatchReading) -> BatchCounts:
        """Count the tokens of every micro-batch."""
        self.compute_pieces(reading)
        return self._counts[reading]

    def forget(self, reading: BatchReading) -> None:
        """Free the gradients of a reading that is not needed again."""
        for values in (self._pieces, self._losses, self._counts):
            values.pop(reading, None)

    @property
    def has_router_loss(self) -> bool:
        """True if the trainer adds an auxiliary loss of the routers."""
        return self.model.router_coefficient != 0.0

    def compute_router_pieces(self, *, counts_padding: bool = False) -> tuple[Tensor, Tensor]:
        """Return the routers' loss of every micro-batch, [R, M], and its gradient, [R, M, P]."""
        if counts_padding not in self._router_pieces:
            shape = (len(self.data), max(map(len, self.data)))
            losses = torch.zeros(*shape, dtype=torch.float64)
            gradients = torch.zeros(*shape, self.model.num_values, dtype=self.model.dtype)
            for rank, batches in enumerate(self.data):
                for index, batch in enumerate(batches):
                    piece = self.model.compute_router_piece(
                        batch, self.reading, counts_padding=counts_padding
                    )
                    losses[rank, index] = piece.loss
                    gradients[rank, index] = piece.gradient
            self._router_pieces[counts_padding] = (losses, gradients)
        return self._router_pieces[counts_padding]

    def combine(
        self, reading: BatchReading, weights: Tensor, router_factors: Tensor | float = 1.0
    ) -> Tensor:
        """Sum the gradients of all micro-batches with weights [R, M]; return [P].

        Args:
            reading: How the rows are read.
            weights: Weights of the micro-batches' summed losses.
            router_factors: Weights of the routers' losses, relative to their mean over
                micro-batches; [R, M] or one number.
        """
        dtype = self.model.dtype
        total = torch.einsum("rm,rmp->p", weights.to(dtype), self.compute_pieces(reading))
        if self.has_router_loss:
            factors = router_factors * compute_router_weights(self.count(reading))
            _, gradients = self.compute_router_pieces()
            total += torch.einsum("rm,rmp->p", factors.to(dtype), gradients)
        return total

    def weight_pieces(self, reading: BatchReading, weights: Tensor) -> Tensor:
        """Return each micro-batch's part of a step's gradient with weights [R, M]; [R, M, P]."""
        dtype = self.model.dtype
        parts = weights.to(dtype)[..., None] * self.compute_pieces(reading)
        if self.has_router_loss:
            factors = compute_router_weights(self.count(reading)).to(dtype)
            parts += factors[..., None] * self.compute_router_pieces()[1]
        return parts

    def compute_expected_loss(self) -> float:
        """Return the loss that the objective defines, with the routers' auxiliary loss."""
        counts = self.count(self.reading)
        weights = compute_objective_weights(self.objective, counts)
        loss = float((weights * self.compute_losses(self.reading)).sum())
        if self.has_router_loss:
            loss += float((compute_router_weights(counts) * self.compute_router_pieces()[0]).sum())
        return loss

    def compute_expected(self) -> Tensor:
        """Return the gradient that the objective defines, [P]."""
        counts = self.count(self.reading)
        return self.combine(self.reading, compute_objective_weights(self.objective, counts))

    def estimate_rounding(self) -> None:
        """Set `relative_errors` by repeating the computation with simulated rounding.

        Every weight and every module's output and its gradient change by random relative amounts
        of the size of a rounding error in the precision of the run.
        """
        info = self.record.parameter_info
        expected = self.compute_expected()
        total = float(expected.norm())
        compute_dtype = self.record.values["compute_dtype"]
        deviations = dict.fromkeys(self.model.names, 0.0)
        dtypes = {info[name]["dtype"] for name in self.model.names} | {compute_dtype} - {None}
        epsilon = max(torch.finfo(getattr(torch, str(dtype))).eps for dtype in dtypes)
        is_low = epsilon > 1e-6
        samples = _NUM_SAMPLES if is_low else 1
        counts = self.count(self.reading)
        weights = compute_objective_weights(self.objective, counts)
        router_weights = compute_router_weights(counts)
        for sample in range(samples):
            changed = torch.zeros_like(expected)
            for rank, batches in enumerate(self.data):
                for index, batch in enumerate(batches):
                    seed = 1000 * sample + 97 * rank + index
                    piece = self.model.compute_piece(batch, self.reading, epsilon, seed)
                    changed += float(weights[rank, index]) * piece.gradient
                    if self.has_router_loss:
                        router = self.model.compute_router_piece(batch, self.reading, epsilon, seed)
                        changed += float(router_weights[rank, index]) * router.gradient
            for name, part in self.model.slices.items():
                deviation = float((changed[part] - expected[part]).norm())
                deviations[name] = max(deviations[name], deviation)
        num_terms = sum(map(len, self.data))
        for name, part in self.model.slices.items():
            norm = max(float(expected[part].norm()), _TINY_SHARE * total)
            dtype = self.record.get_gradient_dtype(name)
            storage = torch.finfo(dtype).eps * math.sqrt(num_terms)
            is_double = dtype == self.model.dtype == torch.float64 and not is_low
            self.relative_errors[name] = max(
                FLOORS["float64" if is_double else "float32"],
                _SAFETY_FACTOR * deviations[name] / norm if norm else 0.0,
                storage,
            )

    def find_layer(self, name: str) -> int | None:
        """Return the number of a parameter's layer; None outside of the layers."""
        match = re.search(r"\.(\d+)\.", name)
        return int(match[1]) if match else None

    def compute_errors(self, recorded: Tensor, expected: Tensor) -> dict[str, float]:
        """Return the relative error of each parameter of two vectors [P]."""
        sizes = [part.stop - part.start for part in self.model.slices.values()]
        norms, differences = (
            torch.stack(torch._foreach_norm(vector.split(sizes))).tolist()
            for vector in (expected, recorded - expected)
        )
        smallest_scale = _TINY_SHARE * float(expected.norm())
        errors = {}
        for name, norm, difference in zip(self.model.slices, norms, differences, strict=True):
            scale = max(norm, smallest_scale)
            if math.isnan(difference) or (scale == 0.0 and difference > 0.0):
                errors[name] = math.inf
            else:
                errors[name] = difference / scale if scale else 0.0
        return errors

    def list_wrong(self, recorded: Tensor, expected: Tensor) -> list[str]:
        """List the parameters whose error is larger than rounding explains."""
        return [
            name
            for name, error in self.compute_errors(recorded, expected).items()
            if error > self.relative_errors[name]
        ]

    def compute_residual(self, recorded: Tensor, expected: Tensor) -> float:
        """Return the norm of the difference over that of the recorded gradient."""
        scale = float(recorded.norm()) or float(expected.norm()) or 1.0
        return float((recorded - expected).norm()) / scale


def gather_evidence(record: StepRecord, model: ReferenceModel, objective: str) -> Evidence:
    """Join the recorded gradients and compute the reference."""
    kind = "gradient" if model.num_projections is None else "projection"
    joined = {name: record.join(kind, name) for name in model.names}
    num_copies = max((len(copies) for copies in joined.values()), default=1) or 1
    vectors = [torch.zeros(model.num_values, dtype=model.dtype) for _ in range(num_copies)]
    for name, copies in joined.items():
        for number, vector in enumerate(vectors):
            if copies:
                value = copies[number % len(copies)]
                vector[model.slices[name]] = value.flatten().to(model.dtype)
    reading = BatchReading(label_offset=0 if record.values["are_labels_shifted"] else 1)
    evidence = Evidence(
        record,
        model,
        record.read_data(),
        objective,
        reading,
        vectors,
        {name: bool(copies) for name, copies in joined.items()},
    )
    evidence.estimate_rounding()
    return evidence
