"""The pool of the verifier, so that tests run on the same code as users."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.verification.compiled_code import let_compiler_trace_groups
from shardwright.verification.local_group import BACKEND
from shardwright.verification.rank_pool import RankPool
from shardwright.verification.reference import write_reference

__all__ = ["RankPool", "SharedReferencePool"]

let_compiler_trace_groups()


class SharedReferencePool(RankPool):
    """Pool that computes equal references once: many tests compare a layout with the same one."""

    def __init__(self, *, timeout_seconds: float = 120.0, backend: str = BACKEND) -> None:
        super().__init__(timeout_seconds=timeout_seconds, backend=backend)
        self._folder = tempfile.TemporaryDirectory(prefix="shardwright-references-")
        self._references: dict[bytes, Path] = {}

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Run a function on all ranks, as `RankPool` does; copy a reference that exists."""
        if function is not write_reference:
            return super().run(num_ranks, function, *arguments, timeout_seconds=timeout_seconds)
        problem, path = arguments
        key = pickle.dumps(problem)
        if key not in self._references:
            reference = Path(self._folder.name, str(len(self._references)))
            super().run(1, write_reference, problem, reference, timeout_seconds=timeout_seconds)
            self._references[key] = reference
        shutil.copyfile(self._references[key], path)
        return [None]

    def close(self) -> None:
        """End all workers and remove the references."""
        super().close()
        self._folder.cleanup()
