"""Agreement of all ranks on `model.compile: auto`."""

from __future__ import annotations

import torch

from shardwright.config import Recipe
from shardwright.numerics.compilation import choose_compilation
from shardwright.plans import CompileChoice
from shardwright.training.rank_sync import RankSync


def agree_on_compilation(
    recipe: Recipe, rank_sync: RankSync, device: torch.device
) -> CompileChoice | None:
    """Choose whether a run with `model.compile: auto` is compiled; None if the recipe chooses.

    All ranks compile if each of them would, because compiled code rounds differently and ranks
    that share a row or have copies of it must compute the same. Collective.
    """
    if recipe.model.compile != "auto":
        return None
    local = choose_compilation(device)
    rows = rank_sync.gather([float(local.is_compiled)])
    num_uncompiled = sum(not is_compiled for (is_compiled,) in rows)
    if num_uncompiled and local.is_compiled:
        return CompileChoice(False, f"{num_uncompiled} of {len(rows)} ranks cannot compile")
    return local
