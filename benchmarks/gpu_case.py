"""Cases of the benchmark on one GPU: a shape, a sequence length and what is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.case import Case
from benchmarks.shapes import Shape

VARIANTS = {
    "": (False, False),
    "-compile": (True, False),
    "-recompute": (False, True),
    "-compile-recompute": (True, True),
}
"""Suffix of a case's name -> (compile, recompute)."""


@dataclass(frozen=True)
class GpuCase:
    """One shape, one sequence length, compiled or not, recomputed or not."""

    shape_name: str
    shape: Shape
    sequence_length: int
    variant: str

    @property
    def name(self) -> str:
        """Name of the case for `--case`."""
        return f"{self.shape_name}-{self.sequence_length}{self.variant}"

    @property
    def micro_batch_size(self) -> int:
        """Sequences per step."""
        return self.shape.micro_batch_sizes[self.sequence_length]

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
            recompute="full" if recompute else "none",
            device=device,  # type: ignore[arg-type]
            random_weights=True,
        )

    def count_flops_per_token(self) -> float:
        """Count model FLOPs of a forward and backward pass per token, as the docs do: 6 per matrix
        element, causal attention.
        """
        config = self.shape.config
        length = self.sequence_length
        query, kv = (
            config[heads] * config["head_dim"]
            for heads in ("num_attention_heads", "num_key_value_heads")
        )
        hidden = config["hidden_size"]
        layers = config["num_hidden_layers"]
        block = hidden * (2 * query + 2 * kv) + 3 * hidden * config["intermediate_size"]
        return (
            6.0 * (layers * block + config["vocab_size"] * hidden)
            + layers * 12.0 * query * (length + 1) / 2
        )
