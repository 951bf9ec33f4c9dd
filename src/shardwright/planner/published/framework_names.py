"""Names of training frameworks in the words of a table."""

from __future__ import annotations

import re

_FRAMEWORK_PATTERNS: tuple[tuple[str, str], ...] = (
    (r"nanotron", "nanotron"),
    (r"megatron[-+]deepspeed|bigscience|bloom", "megatron-deepspeed"),
    (r"megascale", "megatron-core"),
    (r"megatron-lm|ptd\b", "megatron-lm"),
    (r"automodel", "automodel"),
    (r"nemo|megatron-core|megatron-bridge|dgxc", "megatron-core"),
    (r"llm-foundry|composer|mosaic", "llm-foundry"),
    (r"torchtune", "torchtune"),
    (r"torchtitan|fsdp2", "torchtitan"),
    (r"lit-?gpt|lightning", "litgpt"),
    (r"aleph", "aleph"),
    (r"unsloth", "unsloth"),
    (r"axolotl", "axolotl"),
    (r"llama-?factory", "llama-factory"),
    (r"gpt-?neox|eleuther", "gpt-neox"),
    (r"colossal", "colossalai"),
    (r"primus", "megatron-core"),
    (r"internevo", "internevo"),
    (r"deepspeed|zero-3", "deepspeed"),
    (r"hugging ?face|transformers|\btrl\b|\bpeft\b|accelerate|q-?lora", "huggingface"),
)
"""Patterns by which a row names its framework; the first match counts."""


def find_framework_name(*texts: str) -> str | None:
    """Return the framework that a text names, trying the texts in order. None if there is no
    match.

    >>> find_framework_name("", "NVIDIA/NeMo docs"), find_framework_name("a table")
    ('megatron-core', None)
    """
    for text in texts:
        for pattern, name in _FRAMEWORK_PATTERNS:
            if re.search(pattern, text.lower()):
                return name
    return None


_PERFORMANCE_RECIPE_PATTERN = r"nemo(?!\S* automodel)|megatron-bridge|dgxc"
"""Names of NVIDIA's tables."""


def is_performance_recipe(*texts: str) -> bool:
    """Return True if a text names NVIDIA's performance recipes (scripts/performance of NeMo and
    of Megatron-Bridge).

    They set `grad_reduce_in_fp32 = False`, and adapt only the fused queries, keys and values
    (`peft.target_modules = ["linear_qkv"]`).
    """
    return any(re.search(_PERFORMANCE_RECIPE_PATTERN, text.lower()) for text in texts)
