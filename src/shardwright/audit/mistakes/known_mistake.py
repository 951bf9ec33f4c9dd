"""Row of the table of known mistakes, and the addresses of the issues where it was seen."""

from __future__ import annotations

from dataclasses import dataclass

_REPOSITORIES = {
    "HF": "huggingface/transformers",
    "M": "NVIDIA/Megatron-LM",
    "DS": "deepspeedai/DeepSpeed",
    "titan": "pytorch/torchtitan",
    "torchtune": "pytorch/torchtune",
    "trl": "huggingface/trl",
    "accelerate": "huggingface/accelerate",
    "gpt-neox": "EleutherAI/gpt-neox",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "AReaL": "inclusionAI/AReaL",
    "SkyRL": "NovaSky-AI/SkyRL",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "ms-swift": "modelscope/ms-swift",
    "verl": "volcengine/verl",
}


@dataclass(frozen=True)
class Mistake:
    """A known mistake, as it is reported."""

    title: str
    remedy: str
    bugs: tuple[str, ...] = ()
    """Issues, pull requests or commits where it was seen, as "HF 34191"."""

    @property
    def links(self) -> tuple[str, ...]:
        """Addresses of the issues and commits."""
        addresses = []
        for bug in self.bugs:
            project, _, number = bug.rpartition(" ")
            kind = "issues" if number.isdigit() else "commit"
            addresses.append(f"https://github.com/{_REPOSITORIES[project]}/{kind}/{number}")
        return tuple(addresses)
