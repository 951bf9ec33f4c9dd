"""Cases of the benchmark on one GPU: a shape, a sequence length and what is compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.case import Case
from benchmarks.shapes import Settings, Shape

VARIANTS = {
    "": (False, False),
    "-compile": (True, False),
    "-recompute": (False, True),
    "-compile-recompute": (True, True),
}
"""Suffix of a case's name -> (compile, recompute)."""


class CaseDoesNotFitError(Exception):
    """No settings of a case fit the device; the message has the reason for each."""


@dataclass(frozen=True)
class GpuCase:
    """One shape, one sequence length, compiled or not, recomputed or not."""

    shape_name: str
    shape: Shape
    sequence_length: int
    variant: str
    settings: Settings = field(default_factory=Settings)
    """Those of the shape that fit the device (`benchmarks.gpu_fit`)."""
    num_layers: int | None = None
    """Layers of the model; None: all of the shape."""

    @property
    def name(self) -> str:
        """Name of the case for `--case`."""
        return f"{self.shape_name}-{self.sequence_length}{self.variant}"

    @property
    def micro_batch_size(self) -> int:
        """Sequences per step."""
        return self.shape.micro_batch_sizes[self.sequence_length]

    @property
    def config(self) -> dict[str, Any]:
        """Values of the model's config.json."""
        config = self.shape.config
        return config | {"num_hidden_layers": self.num_layers or config["num_hidden_layers"]}

    def build_case(self, contender: str, folder: str, device: str, precision: str) -> Case:
        """Return the case of a rank process; `folder` contains the model's config.json."""
        compile_blocks, recompute = VARIANTS[self.variant]
        return Case(
            contender=contender,
            zero_stage=0,
            precision=precision,  # type: ignore[arg-type]
            weights_dir=folder,
            world_size=1,
            sequence_length=self.sequence_length,
            micro_batch_size=self.micro_batch_size,
            compile=compile_blocks,
            recompute="full" if recompute or self.settings.recompute else "none",
            lora_rank=self.shape.lora_rank,
            optimizer=self.settings.optimizer,
            has_offloaded_moments=self.settings.has_offloaded_moments,
            has_bf16_weights=self.settings.has_bf16_weights,
            device=device,  # type: ignore[arg-type]
            random_weights=True,
        )

    def describe(self) -> dict[str, Any]:
        """Return the case's part of its result."""
        return {
            "name": self.name,
            "shape": self.shape_name,
            "sequence_length": self.sequence_length,
            "micro_batch_size": self.micro_batch_size,
            "options": self.list_options(),
            "compared_with": self.compared_with,
        }

    @property
    def compared_with(self) -> str | None:
        """Name of the case whose MFU is the measure of this one's."""
        reference = self.shape.compared_with
        return f"{reference}-{self.sequence_length}{self.variant}" if reference else None

    def list_options(self) -> list[str]:
        """Describe for a reader what differs from the whole model and plain AdamW."""
        compile_blocks, recompute = VARIANTS[self.variant]
        options = ["compile"] if compile_blocks else []
        if recompute or self.settings.recompute:
            options.append("recompute")
        if self.shape.lora_rank is not None:
            options.append(f"LoRA of rank {self.shape.lora_rank}")
        if self.settings.optimizer == "adamw_8bit":
            options.append("8-bit AdamW")
        if self.settings.has_bf16_weights:
            options.append("weights and moments in bf16")
        if self.settings.has_offloaded_moments:
            options.append("moments in host memory")
        if self.shape.has_fitted_layers:
            num_layers = self.shape.config["num_hidden_layers"]
            options.append(f"{self.num_layers or num_layers} of {num_layers} layers")
        return options

    def count_flops_per_token(self) -> float:
        """Count model FLOPs of a forward and backward pass per token, as the docs do: 6 per matrix
        element that a token uses (4 if it is frozen), causal attention.
        """
        from benchmarks.predicted import read_shape

        return read_shape(self.config, self.shape.lora_rank).count_flops_per_token(
            self.sequence_length
        )
