"""Layers whose kinds follow from numbers that are counted within a pipeline stage."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from torch import nn

from shardwright.audit.mistakes.fault import FaultNotApplicable
from shardwright.model.hf.hf_module import instantiate

_KINDS_BY_LAYER = ("layer_types", "no_rope_layers")
"""Lists of the configuration with one element for each layer."""


def renumber_layers(module: nn.Module, num_stages: int) -> nn.Module:
    """Build a module of transformers whose stages have the kinds of the first stage's layers.

    Raises:
        FaultNotApplicable: a model whose layers are equal in kind, or repeat in every stage.
    """
    configuration: Any = copy.deepcopy(module.config)
    is_changed = False
    for field in _KINDS_BY_LAYER:
        kinds = getattr(configuration, field, None)
        if isinstance(kinds, list) and len(kinds) % num_stages == 0:
            renumbered = kinds[: len(kinds) // num_stages] * num_stages
            is_changed = is_changed or renumbered != kinds
            setattr(configuration, field, renumbered)
    if not is_changed:
        raise FaultNotApplicable
    other = instantiate(
        configuration, None, contextlib.nullcontext(), eager=True, eager_experts=True
    )
    if {n: p.shape for n, p in other.named_parameters()} != {
        n: p.shape for n, p in module.named_parameters()
    }:
        raise FaultNotApplicable
    for name, part in other.named_modules():
        if isinstance(part, nn.Embedding):
            embedding: Any = module.get_submodule(name)
            part.padding_idx = embedding.padding_idx
    return other.to(next(module.parameters()).dtype).eval()
