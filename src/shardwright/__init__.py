"""shardwright: plan, prove and train large language models on any number of devices.

    >>> import shardwright as sw
    >>> sorted(sw.__all__)[:3]
    ['Recipe', 'export', 'generate']

`import shardwright` imports neither torch nor the rest of the package; names are loaded when they
are first used. docs/python.md shows them in use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.version import __version__ as __version__

if TYPE_CHECKING:
    from shardwright.api import (
        export,
        generate,
        load_recipe,
        load_run,
        plan,
        rehearse,
        train,
        verify,
    )
    from shardwright.config import Recipe
    from shardwright.tuning.public import tune

__all__ = [
    "Recipe",
    "export",
    "generate",
    "load_recipe",
    "load_run",
    "plan",
    "rehearse",
    "train",
    "tune",
    "verify",
]


_MODULES = {"Recipe": "shardwright.config", "tune": "shardwright.tuning.public"}
"""Modules of the names that are not in `shardwright.api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "shardwright.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
