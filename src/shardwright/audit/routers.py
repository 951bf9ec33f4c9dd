"""Routers of transformers' sparse classes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

_ROUTER_NAME = re.compile(r"\.(?:gate|router)$")


def list_routers(module: nn.Module) -> tuple[nn.Module, ...]:
    """List the modules that choose experts: those named so beside a module `experts`."""
    names = {name for name, _ in module.named_modules()}
    return tuple(
        part
        for name, part in module.named_modules()
        if _ROUTER_NAME.search(name) and f"{name.rpartition('.')[0]}.experts" in names
    )


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
