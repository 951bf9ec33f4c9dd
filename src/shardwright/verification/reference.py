"""Reference of a verification: plain code on one process that uses nothing of the engine.

One batch, full logits, autograd and textbook updates.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from shardwright.architecture import HFClassInit, HFShape, ModelShape, NormalInit, ParameterSpec
from shardwright.config.data import IGNORED_LABEL
from shardwright.config.low_precision import LowPrecisionSection
from shardwright.config.offload import NOT_OFFLOADED, OffloadSection
from shardwright.config.training import OptimizerSection, PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder, DropoutKey
from shardwright.model.hf.hf_decoder import Float64Mode, HFDecoder
from shardwright.model.lora import initialise_adapter
from shardwright.model.products.nf4 import read_dequantised_slice, read_packed_slice
from shardwright.model.weight_init import DimRanges, initialise_parameter
from shardwright.parallel.low_precision import install_low_precision, set_rounding_step
from shardwright.placement import has_micro_batch_scales
from shardwright.placement.compilation import SEPARATE_FUNCTIONS, PointwiseChoice
from shardwright.plans import BatchPlan, Plan, balance_work, build_plan, pad_to_longest_row
from shardwright.verification.cases import VerificationCase, VerificationDtype
from shardwright.verification.uneven_data import UnevenDataset

NUM_SGD_STEPS = 2
GRADIENT_STEPS = (0, NUM_SGD_STEPS - 1)
"""Steps whose raw gradients are compared. DDP rebuilds its buckets after the first step."""
SGD_LEARNING_RATE = 0.3
LEARNING_RATES = (1e-3, 3e-3, 5e-4)
"""AdamW's learning rates, one per step, so that a stale rate is detected."""
WEIGHT_DECAY = 0.1
HF_INIT_STD = 0.1
"""Standard deviation of initial values that transformers' class defines; any would do here."""
ADAPTER_INIT_STD = 0.05
"""Standard deviation of matrix B; adapters then add about as much as their matrices give."""
CLIP_SHARES = (0.5, 8.0, 0.7)
"""Limits of AdamW's gradient norm as shares of the first step's: active, inactive, active."""


@dataclass(frozen=True)
class VerificationProblem:
    """Model, batch and case that engine and reference compute; independent of the layout.

    Only the number of data ranks is part of it.
    """

    shape: ModelShape
    """Shape in the recipe, before the changes of `case`."""
    frozen_names: frozenset[str]
    attention: str
    optimizer: OptimizerSection
    batch: BatchPlan
    case: VerificationCase
    dtype: VerificationDtype
    seed: int
    low_precision: LowPrecisionSection | None = None
    """Quantised products of engine and reference; None multiplies in `dtype`."""
    is_balanced: bool = False
    """True if the engine assigns rows by their work (`data.assignment`)."""
    offload: OffloadSection = NOT_OFFLOADED
    """Offloading of a further run of the engine; its bits are those of a resident run."""
    is_compiled: bool = False
    """True if the engine compiles its blocks. The reference never does."""
    pointwise: PointwiseChoice = SEPARATE_FUNCTIONS
    """Functions that the engine calls for norms, gates and rotations."""

    @property
    def precision(self) -> PrecisionSection:
        """Precision section for `dtype` and `low_precision`."""
        if self.low_precision is None:
            return PrecisionSection(kind="fp32" if self.dtype == "float32" else "fp64")
        return PrecisionSection.of_low_precision(self.low_precision)

    def build_plan(self, layout: Layout) -> Plan:
        """Build the plan of the case under a layout; rows end with the longest if they may.

        Raises:
            LayoutError, RecipeError: the layout does not support the model.
        """
        shape = self.case.apply_to_shape(self.shape)
        plan = build_plan(shape, layout, self.batch, self.precision, self.case.recompute)
        plan = replace(plan, is_compiled=self.is_compiled, pointwise=self.pointwise)
        # Router statistics count every token of a row, and so do scales of a micro-batch.
        if shape.experts is not None or has_micro_batch_scales(self.low_precision):
            short_plan = plan
        else:
            short_plan = pad_to_longest_row(plan)
        if not self.is_balanced:
            return short_plan
        return balance_work(short_plan, has_documents=self.case.documents)

    @property
    def single_plan(self) -> Plan:
        """Plan of one process, which compiles nothing."""
        plain = replace(self, is_compiled=False, pointwise=SEPARATE_FUNCTIONS)
        return plain.build_plan(Layout())

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch dtype for `dtype`."""
        return {"float32": torch.float32, "float64": torch.float64}[self.dtype]

    @property
    def dataset(self) -> UnevenDataset:
        """Rows of all steps."""
        return UnevenDataset(
            self.shape.vocab_size,
            self.batch,
            len(LEARNING_RATES),
            self.seed,
            self.case.documents,
            self.case.weights,
        )


def build_initial_value(
    problem: VerificationProblem, spec: ParameterSpec, narrow: DimRanges | None = None
) -> Tensor:
    """Compute a parameter's value before the first step, or a slice of it.

    It is the model's initial value, except for biases that make experts idle and for adapters,
    whose matrix B is not zero because A would get no gradient.
    """
    if spec.adapter_part is not None:
        return _build_initial_adapter(problem, spec, narrow)
    if spec.packed_matrix is not None:
        matrix = spec.packed_matrix
        whole = tuple((0, size) for size in spec.shape)
        bounds = (
            whole
            if narrow is None
            else tuple(part or every for part, every in zip(narrow, whole, strict=True))
        )
        return read_packed_slice(
            matrix, bounds, lambda _name, rows: build_initial_value(problem, matrix, rows)
        )
    if isinstance(spec.init, HFClassInit):
        spec = replace(spec, init=NormalInit(HF_INIT_STD))
    value = initialise_parameter(spec, problem.seed, dtype=problem.torch_dtype, narrow=narrow)
    if problem.case.idle_experts and spec.is_bias and spec.role in ("router", "balance_bias"):
        first, length = (0, len(value)) if narrow is None or narrow[0] is None else narrow[0]
        value[: max(0, min(length, spec.shape[0] // 2 - first))] += 10.0
    return value


def _build_initial_adapter(
    problem: VerificationProblem, spec: ParameterSpec, narrow: DimRanges | None
) -> Tensor:
    matrix = spec.adapted_matrix
    assert matrix is not None
    if spec.adapter_part == "lora_B":
        spec = replace(spec, init=NormalInit(ADAPTER_INIT_STD))

    def read(_name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        return build_initial_value(problem, matrix, bounds)

    def read_stored(name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        quantised = (
            problem.shape.adapters is not None and problem.shape.adapters.quantize is not None
        )
        return (
            read_dequantised_slice(matrix, bounds, read, problem.torch_dtype)
            if quantised
            else read(name, bounds)
        )

    return initialise_adapter(
        spec,
        problem.seed,
        narrow,
        dtype=problem.torch_dtype,
        read_matrix=read_stored,
        in_out=problem.shape.is_in_out(matrix),
    )


def write_reference(problem: VerificationProblem, path: Path) -> None:
    """Compute the reference and write it as safetensors.

    Tensors: `loss` and `norm` [steps] of the SGD run (for a sparse model also `routers`, the
    result of `RouterTotals.take` after each step), and per parameter `gradient.STEP.NAME` (raw;
    absent if frozen) and `sgd.NAME` (weights after all steps). In float64 also `adamw_norm` and
    `max_grad_norm` [steps] and `adamw.NAME` of the AdamW run.
    """
    tensors: dict[str, Tensor] = {}
    decoder = _build_decoder(problem)
    losses = []
    norms = []
    routers = []
    for step in range(NUM_SGD_STEPS):
        losses.append(_run_backward(decoder, problem, step))
        norms.append(_compute_gradient_norm(decoder))
        if step in GRADIENT_STEPS:
            tensors |= {
                f"gradient.{step}.{n}": p.grad.clone()
                for n, p in decoder.named_parameters()
                if p.grad is not None
            }
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.grad is not None:
                    parameter.sub_(SGD_LEARNING_RATE * parameter.grad)
        routers.append(_update_balance_biases(decoder))
    tensors |= {f"sgd.{name}": parameter.detach() for name, parameter in decoder.named_parameters()}
    tensors["routers"] = torch.stack(routers)
    numbers = {"loss": losses, "norm": norms}
    if problem.dtype == "float64":  # the only dtype in which AdamW's weights are compared
        numbers["max_grad_norm"] = [share * norms[0] for share in CLIP_SHARES]
        weights, numbers["adamw_norm"] = _run_adamw(problem, numbers["max_grad_norm"])
        tensors |= weights
    tensors |= {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _run_adamw(
    problem: VerificationProblem, max_grad_norms: Sequence[float]
) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after AdamW's steps, as `adamw.NAME`, and the norm of each step."""
    decoder = _build_decoder(problem)
    norms = []
    moments = {
        name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in decoder.named_parameters()
    }
    for step, max_grad_norm in enumerate(max_grad_norms):
        _run_backward(decoder, problem, step)
        norms.append(_compute_gradient_norm(decoder))
        clip = min(1.0, max_grad_norm / (norms[-1] + 1e-6))
        _apply_adamw(decoder, moments, problem.optimizer, step, clip)
        _update_balance_biases(decoder)
    return {f"adamw.{name}": p.detach() for name, p in decoder.named_parameters()}, norms


def _build_decoder(problem: VerificationProblem) -> Decoder:
    shape = problem.case.apply_to_shape(problem.shape)
    dtype = problem.torch_dtype
    explicit = problem.attention == "explicit"
    kind = PlainHFDecoder if isinstance(shape, HFShape) else Decoder
    decoder = kind(
        shape,
        attention="explicit" if explicit else "auto",
        compute_dtype=dtype,
        expert_rules=problem.case.expert_rules,
    )
    decoder = decoder.to(dtype).to_empty(device="cpu")
    specs = {spec.name: spec for spec in shape.list_parameters()}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(build_initial_value(problem, specs[name]))
            parameter.requires_grad_(parameter.requires_grad and name not in problem.frozen_names)
    # The emulation of quantised products is their definition; the reference has it, too.
    install_low_precision(decoder, problem.single_plan, None, torch.device("cpu"))
    return decoder


def _run_backward(decoder: Decoder, problem: VerificationProblem, step: int) -> float:
    """Compute loss and gradients of a step from one batch with all its rows; return the loss.

    The loss is the mean over all supervised tokens.
    """
    first = step * problem.batch.global_batch_size
    positions = range(first, first + problem.batch.global_batch_size)
    rows = [problem.dataset.build_row(position) for position in positions]
    labels_BT = torch.from_numpy(np.stack([row.labels for row in rows]))
    documents = [row.document_ids for row in rows if row.document_ids is not None]
    weights = [row.weights for row in rows if row.weights is not None]
    weights_BT = (
        torch.from_numpy(np.stack(weights)).to(problem.torch_dtype)
        if weights
        else torch.ones_like(labels_BT)
    )
    decoder.zero_grad()
    set_rounding_step(decoder, problem.seed, step)
    loss_sum = decoder(
        torch.from_numpy(np.stack([row.input_ids for row in rows])),
        positions_BT=torch.from_numpy(np.stack([row.positions for row in rows])),
        document_ids_BT=torch.from_numpy(np.stack(documents)) if documents else None,
        labels_BT=labels_BT,
        dropout=DropoutKey(problem.seed, step, torch.tensor(positions)),
        row_weight=1 / len(rows),
        weights_BT=weights_BT if weights else None,
    )
    loss = loss_sum / weights_BT[labels_BT != IGNORED_LABEL].sum()
    loss.backward()
    return float(loss.detach())


@torch.no_grad()
def _update_balance_biases(decoder: Decoder) -> Tensor:
    """Update balance biases and return the router statistics of the step.

    An expert's bias moves one step up if it got fewer tokens than the mean, down if more.
    """
    experts = decoder.shape.experts
    if experts is None:
        return torch.zeros(0)
    table = decoder.router_totals.pop_table(
        decoder.shape.num_layers, experts.num_experts, torch.device("cpu")
    )
    for name, parameter in decoder.named_parameters():
        if name.endswith(f".{decoder.shape.names.balance_bias}"):
            tokens = table[int(name.split(".")[2]), : experts.num_experts]
            for expert in range(experts.num_experts):
                difference = float(tokens.mean() - tokens[expert])
                direction = 0.0 if difference == 0.0 else math.copysign(1.0, difference)
                parameter[expert] += decoder.expert_rules.bias_update_rate * direction
    return table


def _compute_gradient_norm(decoder: Decoder) -> float:
    squares = [p.grad.double().square().sum() for p in decoder.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


@torch.no_grad()
def _apply_adamw(
    decoder: Decoder,
    moments: dict[str, tuple[Tensor, Tensor]],
    section: OptimizerSection,
    step: int,
    clip: float,
) -> None:
    """Update weights by Loshchilov and Hutter 2019, algorithm 2, on clipped gradients.

    Matrices decay, vectors do not.
    """
    rate = LEARNING_RATES[step]
    count = step + 1
    for name, parameter in decoder.named_parameters():
        if parameter.grad is None:
            continue
        gradient = parameter.grad * clip
        mean, square = moments[name]
        mean.mul_(section.beta1).add_((1 - section.beta1) * gradient)
        square.mul_(section.beta2).add_((1 - section.beta2) * gradient * gradient)
        corrected = (square / (1 - section.beta2**count)).sqrt() + section.eps
        decay = WEIGHT_DECAY if parameter.ndim >= 2 and not name.endswith("bias") else 0.0
        parameter.sub_(rate * (mean / (1 - section.beta1**count) / corrected + decay * parameter))


class PlainHFDecoder(HFDecoder):
    """Module of transformers called on one document at a time, with our parameter names."""

    has_block_wrappers = False

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        weights_BT: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Sum the loss of the supervised tokens."""
        assert labels_BT is not None
        losses = []
        for row, ids_T in enumerate(input_ids_BT):
            documents_T = (
                torch.zeros_like(ids_T) if document_ids_BT is None else document_ids_BT[row]
            )
            for document in documents_T.unique():
                is_document_T = documents_T == document
                is_float64 = self.compute_dtype == torch.float64
                with Float64Mode() if is_float64 else contextlib.nullcontext():
                    logits_SV = self.hf_module(input_ids=ids_T[is_document_T][None]).logits[0]
                losses_S = F.cross_entropy(
                    logits_SV,
                    labels_BT[row][is_document_T],
                    ignore_index=IGNORED_LABEL,
                    reduction="none",
                )
                losses.append(
                    losses_S.sum()
                    if weights_BT is None
                    else losses_S @ weights_BT[row][is_document_T]
                )
        return torch.stack(losses).sum()
