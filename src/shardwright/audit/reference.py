"""Reference of an audit: gradients of every recorded micro-batch in one process.

transformers' class computes them, on rows of single documents with all logits and autograd.

Shapes: P numbers of all compared gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardwright.audit.batch_reading import (
    BatchReading,
    Segment,
    build_positions,
    build_segments,
    build_targets,
    build_token_mask,
    locate_tokens,
    pad_segments,
)
from shardwright.audit.decoder_reference import compute_decoder_gradients
from shardwright.audit.errors import AuditInputError
from shardwright.audit.layer_numbers import renumber_layers
from shardwright.audit.mistakes.computation_faults import (
    change_logits,
    inject_fault,
    sum_token_losses,
)
from shardwright.audit.parameter_places import ParameterPlaces
from shardwright.audit.preference import PreferenceSettings, sum_pair_losses, sum_row_log_probs
from shardwright.audit.record import StepRecord
from shardwright.audit.recorded_batch import RecordedBatch
from shardwright.audit.recorded_weights import (
    choose_config,
    read_reference_weights,
    read_weights,
    strip_peft,
)
from shardwright.audit.recorder import ShardBox, project
from shardwright.audit.routers import (
    choose_router_coefficient,
    detach_outputs,
    ignore_mask_of_router_loss,
    list_routers,
)
from shardwright.audit.simulated_rounding import add_noise, perturb
from shardwright.config.data import IGNORED_LABEL
from shardwright.config.model import ModelSection
from shardwright.model.hf.hf_decoder import Float64Mode
from shardwright.model.hf.hf_module import instantiate, load_configuration

_GENERATOR = torch.Generator()
"""Not drawn from: for a computation without simulated rounding."""


@dataclass(frozen=True)
class GradientPiece:
    """Summed loss of one micro-batch, its terms (tokens or pairs), and the sum's gradient, [P]."""

    loss_sum: float
    num_terms: int
    num_tokens: int
    gradient: Tensor


class RouterPiece(NamedTuple):
    """Auxiliary loss of the routers of one micro-batch, and its gradient, [P]."""

    loss: float
    gradient: Tensor


class _Rounding(NamedTuple):
    """Relative size of simulated rounding, and its random numbers."""

    noise: float = 0.0
    generator: torch.Generator = _GENERATOR


class TiedGradients(NamedTuple):
    """Gradients of a tied parameter from its two uses."""

    name: str
    owner_gradient: Tensor
    other_gradient: Tensor


class ReferenceModel:
    """Model of a record in one process.

    Attributes:
        names: Trained parameters that are compared, in order.
        slices: Place of each parameter in a vector [P].
        preference: Settings of the loss of pairs; None for the loss of tokens.
        routers: The module's routers; empty if it is dense.
        router_coefficient: Factor of the router's auxiliary loss; 0 if the trainer has none.

    Raises:
        AuditInputError: no configuration, parameters that do not fit the model.
    """

    def __init__(
        self,
        record: StepRecord,
        model_path: Path | None = None,
        dtype: str = "float32",
        preference: PreferenceSettings | None = None,
    ) -> None:
        self.preference = preference
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.record = record
        self.config = choose_config(record, model_path)
        section = ModelSection(config=dict(self.config))
        configuration = load_configuration(dict(self.config), section)
        configuration.use_cache = False
        self.router_coefficient = choose_router_coefficient(record, configuration)
        module = instantiate(configuration, None, nullcontext(), eager=True, eager_experts=True)
        self.module = module.to(self.dtype).eval()
        self._set_padding_rows(record.values.get("padding_rows"))
        self.routers = list_routers(self.module)
        self.locations = ParameterPlaces(self.module, self.config)
        self.owners = self.locations.owners
        read = read_weights(record, self.module, self.locations, model_path, self.dtype)
        self._base = read.base
        self._adapters = read.adapters
        self.places = read.places
        self._reference = self._read_reference()
        info = record.parameter_info
        self.names = [name for name in info if info[name]["is_trainable"]]
        if not self.names:
            raise AuditInputError("no recorded parameter is trained", field=str(record.folder))
        self.num_projections: int | None = record.values["projections"]
        self.slices: dict[str, slice] = {}
        end = 0
        for name in self.names:
            size = self.num_projections or int(torch.Size(info[name]["shape"]).numel())
            self.slices[name] = slice(end, end + size)
            end += size
        self.num_values = end

    def _set_padding_rows(self, recorded: Mapping[str, int] | None) -> None:
        """Give the embeddings the rows without gradient that the recorded model has.

        A trainer may change the configuration's padding token after the model was built.
        """
        if recorded is None:
            return
        rows = {strip_peft(name): row for name, row in recorded.items()}
        for name, module in self.module.named_modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = rows.get(name)

    def _read_reference(self) -> dict[str, Tensor]:
        """Read the weights of the reference of a preference loss; empty if none are needed."""
        if self.preference is None:
            return {}
        if self.preference.reference_path is not None:
            return read_reference_weights(self.preference.reference_path, self._base)
        if self._adapters:
            return self._base
        rows = [batch for batches in self.record.read_data() for batch in batches]
        if any(batch.reference_log_probs is None for batch in rows):
            raise AuditInputError(
                "the reference model of the preference loss is unknown",
                field="--reference",
                remedy="Give its Hugging Face folder with --reference, or pass "
                "reference_log_probs of every micro-batch to the recorder",
            )
        return {}

    def _build_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Build the weights of a forward pass, and the leaves whose gradients are compared.

        Leaves have the names of the module's parameters; those of adapters their recorded names.
        """
        leaves: dict[str, Tensor] = {}
        weights = dict(self._base)
        for name in self.names:
            for owner in self.places[name].owners if name in self.places else ():
                if owner not in leaves:
                    leaves[owner] = self._base[owner].detach().clone().requires_grad_()
        weights |= leaves
        scales = {
            strip_peft(name): scale for name, scale in self.record.values["adapter_scales"].items()
        }
        for module, parts in self._adapters.items():
            matrices = []
            for part in ("lora_B", "lora_A"):
                name = parts[part]
                leaf = self.record.join("before", name)[0].to(self.dtype)
                if name in self.slices:
                    leaves[name] = leaf.requires_grad_()
                matrices.append(leaf)
            product = scales.get(module, 1.0) * (matrices[0] @ matrices[1])
            owner = self.owners[f"{module}.weight"]
            base = weights[owner]
            weights[owner] = base + (product if product.shape == base.shape else product.T)
        return weights, leaves

    def compute_piece(
        self, batch: RecordedBatch, reading: BatchReading, noise: float = 0.0, seed: int = 0
    ) -> GradientPiece:
        """Compute the summed loss of a micro-batch and its gradient.

        Args:
            noise: Relative size of random changes of every module's output, forward and
                backward; simulates rounding.
            seed: Seed of the noise.
        """
        weights, leaves = self._build_weights()
        rounding = _Rounding(noise, torch.Generator().manual_seed(seed))
        logits, targets = self._forward(batch, reading, weights, rounding)
        if self.preference is None:
            loss = sum_token_losses(logits, targets, reading.fault)
            num_terms = int((targets != IGNORED_LABEL).sum())
        else:
            reference = self._compute_reference_log_probs(batch, reading, rounding)
            log_probs = sum_row_log_probs(logits, targets, reading)
            loss = sum_pair_losses(log_probs, reference, self.preference, reading)
            num_terms = len(log_probs) // 2
        return GradientPiece(
            float(loss.detach()),
            num_terms,
            batch.input_ids.numel(),
            self._differentiate(loss, leaves),
        )

    def compute_token_gradient(self, batch: RecordedBatch, reading: BatchReading) -> Tensor:
        """Compute the gradient of a micro-batch's summed token losses, whatever the loss, [P]."""
        weights, leaves = self._build_weights()
        logits, targets = self._forward(batch, reading, weights, _Rounding())
        return self._differentiate(sum_token_losses(logits, targets), leaves)

    def compute_router_piece(
        self,
        batch: RecordedBatch,
        reading: BatchReading,
        noise: float = 0.0,
        seed: int = 0,
        *,
        counts_padding: bool = False,
    ) -> RouterPiece:
        """Compute the router's weighted auxiliary loss of a micro-batch, and its gradient.

        transformers' class computes the loss of all tokens that the micro-batch's attention mask
        leaves; with `counts_padding`, of the rows as received with their padding. The other
        arguments are those of `compute_piece`.
        """
        weights, leaves = self._build_weights()
        rounding = _Rounding(noise, torch.Generator().manual_seed(seed))
        ids = batch.input_ids
        positions = batch.position_ids
        mask = batch.attention_mask
        if not counts_padding:
            segments = build_segments(batch, reading, keeps_all=True)
            ids, positions, _, _ = pad_segments(segments)
            mask = build_token_mask(segments)
        with ignore_mask_of_router_loss(self.module) if counts_padding else nullcontext():
            output = self._call(
                weights,
                rounding,
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                output_router_logits=True,
            )
        loss = getattr(output, "aux_loss", None)
        if not isinstance(loss, Tensor):
            raise AuditInputError(
                f"{type(self.module).__name__} returns no aux_loss",
                field="output_router_logits",
                got=True,
                allowed="false",
                remedy="Record a step without the router's auxiliary loss",
            )
        loss = self.router_coefficient * loss
        return RouterPiece(float(loss.detach()), self._differentiate(loss, leaves))

    def _forward(
        self,
        batch: RecordedBatch,
        reading: BatchReading,
        weights: Mapping[str, Tensor],
        rounding: _Rounding,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and targets of a micro-batch's rows."""
        if reading.replays_dropout:
            return self._forward_as_received(batch, reading, weights)
        segments = self._build_rows(batch, reading)
        ids, positions, targets, mask = pad_segments(segments)
        arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        arguments["attention_mask"] = mask
        fault = reading.fault
        if fault is None:
            with detach_outputs(self.routers if reading.detaches_routers else ()):
                logits: Tensor = self._call(weights, rounding, **arguments).logits
            return logits, targets
        places = locate_tokens(batch, segments)
        module = self.module
        if fault.kind == "layer numbers":
            module = renumber_layers(module, fault.degree)
        with inject_fault(module, self.routers, fault, places):
            logits = self._call(weights, rounding, module, **arguments).logits
        return change_logits(logits, targets, fault), targets

    def _build_rows(self, batch: RecordedBatch, reading: BatchReading) -> list[Segment]:
        """Build the rows of single documents; one per response if the loss is of pairs."""
        if self.preference is None:
            return build_segments(batch, reading, keeps_all=reading.fault is not None)
        num_rows = len(batch.input_ids)
        segments = build_segments(batch, reading, keeps_all=True)
        if num_rows % 2 or len(segments) != num_rows:
            raise AuditInputError(
                "this micro-batch is not the chosen and then the rejected responses of pairs",
                field="input_ids",
                got=f"{num_rows} rows of {len(segments)} documents",
                allowed="an even number of rows, each of one document",
                remedy="Record pairs without packing, the chosen responses first",
            )
        return segments

    def _compute_reference_log_probs(
        self, batch: RecordedBatch, reading: BatchReading, rounding: _Rounding
    ) -> Tensor:
        """Return the log-probabilities of the responses under the reference, [rows]."""
        if batch.reference_log_probs is not None:
            return batch.reference_log_probs.to(self.dtype)
        reading = replace(reading, replays_dropout=False)
        with torch.no_grad():
            logits, targets = self._forward(batch, reading, self._reference, rounding)
            return sum_row_log_probs(logits, targets, reading)

    def _differentiate(self, loss: Tensor, leaves: Mapping[str, Tensor]) -> Tensor:
        """Return the gradient of a loss as it is compared, [P]."""
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return self._collect(dict(zip(leaves, gradients, strict=True)))

    def _collect(self, gradients: Mapping[str, Tensor | None]) -> Tensor:
        """Return gradients of leaves as they are compared, [P]; zero where there is none."""
        vector = torch.zeros(self.num_values, dtype=self.dtype)
        for name, part in self.slices.items():
            place = self.places.get(name)
            gradient = gradients.get(name) if place is None else place.gather(gradients)
            if gradient is not None:
                vector[part] = self.to_values(name, gradient)
        return vector

    def to_values(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient as it is compared: its elements, or its random projection."""
        if self.num_projections is None:
            return gradient.flatten().to(self.dtype)
        shape = tuple(gradient.shape)
        zeros = (0,) * len(shape)
        box = ShardBox(zeros, zeros, shape)
        return project(name, gradient.detach(), shape, [box], self.num_projections).to(self.dtype)

    def _call(
        self,
        weights: Mapping[str, Tensor],
        rounding: _Rounding,
        module: nn.Module | None = None,
        **arguments: Tensor | bool | None,
    ) -> Any:
        noise, generator = rounding
        module = module or self.module
        given = {key: value for key, value in arguments.items() if value is not None}
        if noise:
            weights = {name: perturb(w, noise, generator) for name, w in weights.items()}
        with self._precision(), add_noise(module, noise, generator):
            return functional_call(module, dict(weights), (), given)

    def _forward_as_received(
        self, batch: RecordedBatch, reading: BatchReading, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        rows = range(batch.input_ids.shape[0])
        state = torch.get_rng_state()
        torch.set_rng_state(batch.rng_state)
        self.module.train()
        try:
            output = self._call(
                weights,
                _Rounding(),
                input_ids=batch.input_ids,
                position_ids=None
                if batch.position_ids is None
                else torch.stack([build_positions(batch, row, reading) for row in rows]),
                attention_mask=batch.attention_mask,
            )
        finally:
            self.module.eval()
            torch.set_rng_state(state)
        logits: Tensor = output.logits
        return logits, torch.stack([build_targets(batch, row, reading) for row in rows])

    def _precision(self) -> AbstractContextManager[Any]:
        return Float64Mode() if self.dtype == torch.float64 else nullcontext()

    def compute_decoder_gradient(
        self, batch: RecordedBatch, reading: BatchReading
    ) -> Tensor | None:
        """Compute the gradient of a micro-batch's summed token losses by our own decoder, [P].

        None if the decoder does not implement this model.
        """
        if self._adapters:
            return None
        embedding: Any = self.module.get_input_embeddings()  # type: ignore[operator]
        gradients = compute_decoder_gradients(
            self.locations,
            self._base,
            pad_segments(self._build_rows(batch, reading)),
            padding_row=embedding.padding_idx,
            dtype=self.dtype,
        )
        return None if gradients is None else self._collect(gradients)

    def compute_tied_gradients(
        self, batch: RecordedBatch, reading: BatchReading
    ) -> TiedGradients | None:
        """Compute the two gradients of a tied embedding; None if nothing recorded is tied.

        None for a loss of pairs too.
        """
        tied = [name for name, owner in self.owners.items() if name != owner]
        owner = self.owners[tied[0]] if tied else None
        recorded = next(
            (n for n in self.names if n in self.places and self.places[n].owners == (owner,)), None
        )
        if owner is None or recorded is None or self.preference is not None:
            return None
        weights, leaves = self._build_weights()
        copies = {name: leaves[owner].detach().clone().requires_grad_() for name in tied}
        ids, positions, targets, mask = pad_segments(build_segments(batch, reading))
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        with self._precision():
            output: Any = functional_call(
                self.module, {**weights, **copies}, (), given, tie_weights=False
            )
            loss = sum_token_losses(output.logits, targets)
        parts = torch.autograd.grad(loss, [leaves[owner], copies[tied[0]]])
        return TiedGradients(recorded, *(self.to_values(recorded, part) for part in parts))
