"""Setting of torch's CUDA allocator for training."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
_VARIABLES = (ALLOCATOR_VARIABLE, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names that torch reads; those of one device type are older."""


def use_expandable_segments(environment: MutableMapping[str, str] | None = None) -> None:
    """Let CUDA's allocator grow its segments, unless the user has set the allocator's variable.

    A segment that cannot grow is useless for a larger tensor: where sizes change (rows of other
    lengths, evaluation between training steps), reserved memory grows beyond what is used. Torch
    reads the variable when it first allocates on a device, so call this before.
    """
    target = os.environ if environment is None else environment
    if not any(name in target for name in _VARIABLES):
        target[ALLOCATOR_VARIABLE] = "expandable_segments:True"
