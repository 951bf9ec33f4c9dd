"""Reference of an audit: gradients of every recorded micro-batch in one process.

transformers' class computes them, on rows of single documents with all logits and autograd.

Shapes: P numbers of all compared gradients.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shardwright.architecture import MODEL_FAMILIES, read_config, read_content
from shardwright.audit.batch_reading import (
    BatchReading,
    build_positions,
    build_segments,
    build_targets,
    pad_segments,
)
from shardwright.audit.record import AuditInputError, RecordedBatch, StepRecord
from shardwright.audit.recorder import ShardBox, project
from shardwright.config.data import IGNORED_LABEL
from shardwright.config.model import ModelSection
from shardwright.errors import ArchitectureError
from shardwright.model import Decoder
from shardwright.model.hf_decoder import Float64Mode
from shardwright.model.hf_module import instantiate, load_configuration, load_hf_folder

logger = logging.getLogger("shardwright")

_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class GradientPiece:
    """Summed loss of one micro-batch, its supervised tokens, and the sum's gradient, [P]."""

    loss_sum: float
    num_supervised: int
    num_tokens: int
    gradient: Tensor


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

    Raises:
        AuditInputError: no configuration, parameters that do not fit the model.
    """

    def __init__(
        self, record: StepRecord, model_path: Path | None = None, dtype: str = "float32"
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.record = record
        self.config = _choose_config(record, model_path)
        section = ModelSection(config=dict(self.config))
        configuration = load_configuration(dict(self.config), section)
        configuration.use_cache = False
        if getattr(configuration, "output_router_logits", False):
            raise AuditInputError(
                "losses of routers are not audited",
                field="config.output_router_logits",
                got=True,
                allowed="false",
                remedy="Record a step without the router's auxiliary loss",
            )
        self.module = instantiate(configuration, None, contextlib.nullcontext(), eager=True)
        self.module = self.module.to(self.dtype).eval()
        self.owners = _map_tied_names(self.module)
        self._base, self._adapters = self._read_weights(record, model_path)
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

    def _read_weights(
        self, record: StepRecord, model_path: Path | None
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
        """Read every weight of the module, and list adapters by module and part."""
        weights: dict[str, Tensor] = {}
        adapters: dict[str, dict[str, str]] = {}
        self.weight_names: dict[str, str] = {}
        if model_path is not None:
            loaded, _ = load_hf_folder(model_path)
            weights = {name: p.detach().to(self.dtype) for name, p in loaded.named_parameters()}
        for name in record.parameter_info:
            target = _strip_peft(name)
            part = next((p for p in ("lora_A", "lora_B") if f".{p}." in target), None)
            if part is not None:
                module = target.partition(f".{part}.")[0]
                adapters.setdefault(module, {})[part] = name
                continue
            if target not in self.owners:
                raise AuditInputError(
                    f"the record has a parameter {name}, the model "
                    f"{type(self.module).__name__} has not",
                    field=str(record.folder),
                    remedy="Give the model that was trained with --model, or rename parameters "
                    "to those of transformers' class",
                )
            owner = self.owners[target]
            value = record.join("before", name)[0].to(self.dtype)
            expected = self.module.get_parameter(owner).shape
            if value.shape != expected:
                raise AuditInputError(
                    f"{name} has shape {list(value.shape)} in the record and {list(expected)} in "
                    "the model",
                    field=str(record.folder),
                    remedy="Give the model that was trained with --model",
                )
            if owner in weights and not _is_close(weights[owner], value):
                raise AuditInputError(
                    f"the recorded values of {name} are not those of this model",
                    field="--model",
                    got=str(model_path),
                    remedy="Give the weights from which the recorded step started",
                )
            weights[owner] = value
            self.weight_names[name] = owner
        missing = sorted(set(self.owners.values()) - set(weights))
        if missing:
            raise AuditInputError(
                f"{len(missing)} parameters of the model are not recorded, such as {missing[0]}",
                field=str(record.folder),
                remedy="Give the weights from which the step started with --model, or record "
                'all parameters (parameters="*")',
            )
        return weights, adapters

    def _build_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Build the weights of a forward pass, and the leaves whose gradients are compared."""
        leaves: dict[str, Tensor] = {}
        weights = dict(self._base)
        for name in self.names:
            if name in self.weight_names:
                leaf = self._base[self.weight_names[name]].detach().clone().requires_grad_()
                weights[self.weight_names[name]] = leaf
                leaves[name] = leaf
        scales = {
            _strip_peft(name): scale for name, scale in self.record.values["adapter_scales"].items()
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
        generator = torch.Generator().manual_seed(seed)
        if noise:
            weights = {name: _perturb(w, noise, generator) for name, w in weights.items()}
        with self._precision(), _add_noise(self.module, noise, generator):
            if reading.replays_dropout:
                logits, targets = self._forward_as_received(batch, reading, weights)
            else:
                ids, positions, targets, mask = pad_segments(build_segments(batch, reading))
                logits = self._call(
                    weights, input_ids=ids, position_ids=positions, attention_mask=mask
                )
            loss = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
            )
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        vector = torch.zeros(self.num_values, dtype=self.dtype)
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            if gradient is not None:
                vector[self.slices[name]] = self.to_values(name, gradient.view(leaf.shape))
        return GradientPiece(
            float(loss.detach()),
            int((targets != IGNORED_LABEL).sum()),
            batch.input_ids.numel(),
            vector,
        )

    def to_values(self, name: str, gradient: Tensor) -> Tensor:
        """Return a gradient as it is compared: its elements, or its random projection."""
        if self.num_projections is None:
            return gradient.flatten().to(self.dtype)
        shape = tuple(gradient.shape)
        zeros = (0,) * len(shape)
        box = ShardBox(zeros, zeros, shape)
        return project(name, gradient.detach(), shape, [box], self.num_projections).to(self.dtype)

    def _call(self, weights: Mapping[str, Tensor], **arguments: Tensor | None) -> Tensor:
        given = {key: value for key, value in arguments.items() if value is not None}
        output: Any = functional_call(self.module, dict(weights), (), given)
        logits: Tensor = output.logits
        return logits

    def _forward_as_received(
        self, batch: RecordedBatch, reading: BatchReading, weights: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        rows = range(batch.input_ids.shape[0])
        state = torch.get_rng_state()
        torch.set_rng_state(batch.rng_state)
        self.module.train()
        try:
            logits = self._call(
                weights,
                input_ids=batch.input_ids,
                position_ids=None
                if batch.position_ids is None
                else torch.stack([build_positions(batch, row, reading) for row in rows]),
                attention_mask=batch.attention_mask,
            )
        finally:
            self.module.eval()
            torch.set_rng_state(state)
        return logits, torch.stack([build_targets(batch, row, reading) for row in rows])

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return Float64Mode() if self.dtype == torch.float64 else contextlib.nullcontext()

    def compute_decoder_gradient(
        self, batch: RecordedBatch, reading: BatchReading
    ) -> Tensor | None:
        """Compute the gradient of a micro-batch's summed loss by our own decoder, [P].

        None if the decoder does not implement this model.
        """
        if self.config.get("model_type") not in MODEL_FAMILIES or self._adapters:
            return None
        try:
            shape = read_config(dict(self.config))
        except ArchitectureError as error:
            logger.info("our decoder does not check the reference: %s", error)
            return None
        decoder = Decoder(shape, attention="explicit", compute_dtype=self.dtype).to(self.dtype)
        parameters = dict(decoder.named_parameters())
        if shape.experts is not None or set(parameters) != set(self._base):
            logger.info("our decoder does not check the reference: its parameters differ")
            return None
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self._base[name])
        ids, positions, targets, _ = pad_segments(build_segments(batch, reading))
        decoder.eval()(ids, positions_BT=positions, labels_BT=targets).backward()
        vector = torch.zeros(self.num_values, dtype=self.dtype)
        for name in self.names:
            gradient = parameters[self.weight_names[name]].grad
            if gradient is not None:
                vector[self.slices[name]] = self.to_values(name, gradient)
        return vector

    def compute_tied_gradients(
        self, batch: RecordedBatch, reading: BatchReading
    ) -> TiedGradients | None:
        """Compute the two gradients of a tied embedding; None if nothing recorded is tied."""
        tied = [name for name, owner in self.owners.items() if name != owner]
        owner = self.owners[tied[0]] if tied else None
        recorded = next((n for n in self.names if self.weight_names.get(n) == owner), None)
        if recorded is None:
            return None
        weights, leaves = self._build_weights()
        copies = {name: leaves[recorded].detach().clone().requires_grad_() for name in tied}
        ids, positions, targets, mask = pad_segments(build_segments(batch, reading))
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
        with self._precision():
            output: Any = functional_call(
                self.module, {**weights, **copies}, (), given, tie_weights=False
            )
            loss = F.cross_entropy(
                output.logits.flatten(0, 1),
                targets.flatten(),
                ignore_index=IGNORED_LABEL,
                reduction="sum",
            )
        parts = torch.autograd.grad(loss, [leaves[recorded], copies[tied[0]]])
        return TiedGradients(recorded, *(self.to_values(recorded, part) for part in parts))


def _choose_config(record: StepRecord, model_path: Path | None) -> dict[str, Any]:
    if model_path is not None:
        path = model_path / "config.json" if model_path.is_dir() else model_path
        return dict(read_content(path))
    config = record.values["config"]
    if not config or "model_type" not in config:
        raise AuditInputError(
            "the recorded model has no Hugging Face configuration",
            field=str(record.folder),
            remedy="Give the folder of the model with --model, or pass Recorder(config={...})",
        )
    return dict(config)


def _map_tied_names(module: nn.Module) -> dict[str, str]:
    """Map every parameter name, tied ones included, to the name that owns the tensor."""
    owners = {id(p): name for name, p in module.named_parameters()}
    return {name: owners[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def _strip_peft(name: str) -> str:
    return name.removeprefix(_PEFT_PREFIX).replace(".base_layer.", ".")


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Compare at the precision of bf16, in which a model may have been loaded."""
    return bool((one - other).norm() <= 0.01 * one.norm() + 1e-12)


def _perturb(tensor: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    change = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 0.5
    return tensor * (1.0 + noise * change)


@contextlib.contextmanager
def _add_noise(module: nn.Module, noise: float, generator: torch.Generator) -> Any:
    """Multiply the output of every leaf module by numbers near 1 inside this context."""
    if not noise:
        yield
        return

    def perturb_output(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            output = _perturb(output, noise, generator)
            if output.requires_grad:
                output.register_hook(lambda gradient: _perturb(gradient, noise, generator))
            return output
        return None

    leaves = [m for m in module.modules() if not any(True for _ in m.children())]
    handles = [leaf.register_forward_hook(perturb_output) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
