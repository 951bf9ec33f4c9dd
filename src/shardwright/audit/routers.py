"""Routers of transformers' sparse classes."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from shardwright.audit.errors import AuditInputError
from shardwright.audit.mistakes.fault import FaultNotApplicable
from shardwright.audit.record import StepRecord

_ROUTER_LOSS = "load_balancing_loss_func"
"""Name of the auxiliary loss in the modules of transformers."""
_ROUTER_NAME = re.compile(r"\.(?:gate|router)$")


def list_routers(module: nn.Module) -> tuple[nn.Module, ...]:
    """List the router modules: siblings of a module `experts` with a router's name."""
    names = {name for name, _ in module.named_modules()}
    return tuple(
        part
        for name, part in module.named_modules()
        if _ROUTER_NAME.search(name) and f"{name.rpartition('.')[0]}.experts" in names
    )


def choose_router_coefficient(record: StepRecord, configuration: Any) -> float:
    """Return the factor of the router's auxiliary loss, 0 if the trainer has none; switch it off.

    Raises:
        AuditInputError: a loss of routers whose factor is not in the configuration.
    """
    numbers = [n for rank in record.ranks for n in rank.values["micro_batches"]]
    is_requested = getattr(configuration, "output_router_logits", False) or any(
        batch.get("output_router_logits") is True for batch in numbers
    )
    coefficient = getattr(configuration, "router_aux_loss_coef", None)
    if is_requested and coefficient is None:
        raise AuditInputError(
            "the losses of this model's routers are not audited",
            field="config.output_router_logits",
            got=True,
            allowed="a model with router_aux_loss_coef, or false",
            remedy="Record a step without the router's auxiliary loss",
        )
    configuration.output_router_logits = False
    return float(coefficient) if is_requested and coefficient is not None else 0.0


@contextlib.contextmanager
def ignore_mask_of_router_loss(module: nn.Module) -> Iterator[None]:
    """Make a class of transformers compute its auxiliary loss of all tokens, padding included."""
    source = sys.modules[type(module).__module__]
    original = getattr(source, _ROUTER_LOSS, None)
    if original is None:
        raise FaultNotApplicable

    def compute(logits: Any, num_experts: Any = None, top_k: Any = 2, _mask: Any = None) -> Any:
        return original(logits, num_experts, top_k)

    setattr(source, _ROUTER_LOSS, compute)
    try:
        yield
    finally:
        setattr(source, _ROUTER_LOSS, original)


@contextlib.contextmanager
def detach_outputs(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Detach the outputs of modules inside this context."""

    def detach(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(value.detach() if isinstance(value, Tensor) else value for value in output)
        return output.detach()

    handles = [module.register_forward_hook(detach) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
