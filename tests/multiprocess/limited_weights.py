"""Program: training steps under a limit of the process's memory.

Prints a hash of the trained weights, and the most bytes of anonymous memory that were resident.

`python -m tests.multiprocess.limited_weights RECIPE TIER LIMIT`: the limit is in bytes beyond the
memory of a process that has trained a small model, 0 for none.
"""

from __future__ import annotations

import hashlib
import re
import resource
import sys
from pathlib import Path

import torch

from shardwright.config import Recipe, load_recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters

NUM_BLOCKS = 6
CONFIG = {
    "model_type": "llama", "vocab_size": 60, "hidden_size": 1024, "intermediate_size": 1536,
    "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
BLOCK_BYTES = 4 * (4 * 1024 * 1024 + 3 * 1024 * 1536)
"""34 MiB: glibc may keep freed memory of less than 32 MiB."""
NUM_STEPS = 2


def read_status(name: str) -> int:
    """Return a number of bytes from this process's status."""
    status = Path("/proc/self/status").read_text()
    (kibibytes,) = re.findall(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(kibibytes) * 1024


def train(recipe: Recipe) -> tuple[str, int]:
    """Return a hash of the trained weights, and the most resident bytes at the end of a block."""
    validated_run = validate_run(recipe, 1)
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    state = build_state(validated_run, torch.device("cpu"))
    resident_bytes = []
    for block in state.model.decoder.blocks:
        block.register_forward_hook(lambda *_: resident_bytes.append(read_status("RssAnon")))
    for step in range(NUM_STEPS):
        batches = read_step_micro_batches(
            validated_run.data.train, order, validated_run.plan.batch, step, 0
        )
        accumulate_gradients(state.model, batches, seed=0, step=step)
        update_parameters(state.model, state.optimizer, learning_rate=0.01, max_grad_norm=1.0)
    digest = hashlib.sha256()
    for name, parameter in state.model.named_parameters():
        if parameter.requires_grad:
            values = state.model.read_parameter(name)
            assert values is not None
            digest.update(values.numpy())
    if state.weight_offload is not None:
        state.weight_offload.close()
    return digest.hexdigest(), max(resident_bytes)


def main(path: str, tier: str, limit_bytes: int) -> None:
    torch.set_num_threads(1)
    offload = [f"offload.parameters={tier}", "offload.buffer_bytes=1048576"]
    if limit_bytes:
        # A step loads modules and libraries, which are not what the limit is for.
        train(load_recipe(path, [*offload, "model.config.hidden_size=64"]))
        limit_bytes += read_status("VmData")
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    digest, resident_bytes = train(load_recipe(path, offload))
    sys.stdout.write(f"{digest} {resident_bytes}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
