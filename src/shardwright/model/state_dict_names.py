"""Hooks of a decoder's state dict, whose keys are the names of Hugging Face files."""

from __future__ import annotations

from typing import Any

from torch import nn


def rename_to_hf(decoder: Any, tensors: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Rename the entries of a state dict that begin with `prefix`, in place and in order."""
    for key in list(tensors):
        name = key.removeprefix(prefix)
        is_ours = key.startswith(prefix)
        tensors[prefix + decoder._to_hf_name(name) if is_ours else key] = tensors.pop(key)


def rename_from_hf(decoder: Any, tensors: dict[str, Any], prefix: str, *_others: Any) -> None:
    """Rename entries of a state dict to paths in the decoder, in place."""
    for path, _ in nn.Module.named_parameters(decoder):
        name = prefix + decoder._to_hf_name(path)
        if name in tensors:
            tensors[prefix + path] = tensors.pop(name)
