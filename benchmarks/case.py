"""One case of a benchmark: contender, model, data and layout; all inputs of a rank process.

The cases of a comparison differ in the contender's name only: initial weights (read from one
safetensors folder), tokens and their order, optimizer settings and precision are the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16"]

LLAMA_29M: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
"""8 layers, 512 wide, 29.5M parameters."""

NUM_SAMPLES = 256
"""Distinct sequences; step s reads samples s*G .. s*G + G-1, modulo this."""


@dataclass(frozen=True)
class Optimisation:
    """Settings of AdamW and gradient clipping, the same for all contenders."""

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Case:
    """Model, layout and settings that one contender runs.

    `weights_dir` contains config.json and the initial weights, or config.json alone if
    `random_weights` is set, because copying gigabytes of noise would only take time.
    """

    contender: str
    zero_stage: int
    precision: Precision
    weights_dir: str
    world_size: int = 2
    sequence_length: int = 512
    micro_batch_size: int = 4
    compile: bool = False
    recompute: Literal["none", "full"] = "none"
    lora_rank: int | None = None
    """Rank of adapters of all projections; None: every weight is trained."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    has_offloaded_moments: bool = False
    """True if the optimizer's moments are in host memory."""
    has_bf16_weights: bool = False
    """True if weights, gradients and moments are stored in bf16, as torchtune always does."""
    device: Literal["cpu", "cuda"] = "cpu"
    random_weights: bool = False
    optimisation: Optimisation = field(default_factory=Optimisation)

    @property
    def name(self) -> str:
        """Name of the case in file names of logs."""
        parts = [f"zero{self.zero_stage}", self.precision, self.contender]
        options = [
            word
            for word, on in (("compile", self.compile), ("recompute", self.recompute != "none"))
            if on
        ]
        return "-".join(parts + options)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        return self.world_size * self.micro_batch_size * self.sequence_length

    def to_json(self) -> str:
        """Return one line of JSON for a rank's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Parse the text of `to_json`."""
        fields = json.loads(text)
        return cls(**(fields | {"optimisation": Optimisation(**fields["optimisation"])}))


def read_model_config(case: Case) -> dict[str, Any]:
    """Read the config.json of the case's model."""
    config: dict[str, Any] = json.loads((Path(case.weights_dir) / "config.json").read_text())
    return config


def make_tokens(
    vocab_size: int, sequence_length: int, num_samples: int = NUM_SAMPLES
) -> torch.Tensor:
    """Draw token ids `[num_samples, sequence_length]`, a function of the arguments alone.

    Frequencies fall as 1/rank like those of words, so the loss decreases from the first step on.
    Equal losses show that two contenders train alike; a constant one shows that one does not train.
    """
    import torch

    generator = torch.Generator().manual_seed(20_240_607)
    frequency_V = 1.0 / torch.arange(1, vocab_size + 1, dtype=torch.float64)
    drawn = torch.multinomial(
        frequency_V, num_samples * sequence_length, replacement=True, generator=generator
    )
    return drawn.view(num_samples, sequence_length)


def select_batch(tokens: torch.Tensor, case: Case, step: int, rank: int) -> torch.Tensor:
    """Return the token ids `[micro_batch_size, sequence_length]` that `rank` reads at `step`: its
    slice of the step's global batch.
    """
    first = (step * case.world_size + rank) * case.micro_batch_size
    return tokens[[(first + i) % len(tokens) for i in range(case.micro_batch_size)]]


def shift_labels(input_ids_BT: torch.Tensor) -> torch.Tensor:
    """Return targets `[B, T]`, shifted by one; the last position has none (-100)."""
    import torch

    return torch.nn.functional.pad(input_ids_BT[:, 1:], (0, 1), value=-100)
