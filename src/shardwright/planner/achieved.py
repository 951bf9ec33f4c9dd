"""The fitted efficiencies: `efficiencies.yaml`, by accelerator, trainer and kernel, put together for one run. Torch-free.

The file is written by `benchmarks/fit_planner.py` from published measurements. Each section changes fields of `Efficiency`:
`frameworks` for every trainer and then by trainer, `accelerators` by kind, by generation and then by name, `features` by a kernel
or a setting that a row names. A machine's own measured profile is no part of this: the formulas prefer it to any share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from shardwright.hardware import Accelerator
from shardwright.planner.efficiency import Efficiency

SECTIONS = ("accelerators", "frameworks", "features")
FAMILIES = {"shardwright": "FSDP2", "torchtitan": "FSDP2", "torchtune": "FSDP2", "automodel": "FSDP2"}
"""Trainers whose data ranks gather and reduce by one implementation, and its entry of `frameworks`, which they share."""
EVERY_TRAINER = "every trainer"
"""The entry of `frameworks` that holds for a trainer until its own says otherwise, and on GPUs for one that nobody has measured."""


@dataclass(frozen=True)
class Efficiencies:
    """All fitted numbers: section -> name -> field of `Efficiency` -> value."""

    sections: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @staticmethod
    def entries(accelerator: Accelerator, framework: str, features: Iterable[str] = ()) -> tuple[tuple[str, str], ...]:
        """Section and name of what a run reads, the widest first: each may override those before it."""
        return (
            ("frameworks", EVERY_TRAINER),
            ("frameworks", FAMILIES.get(framework, EVERY_TRAINER)),
            ("accelerators", accelerator.kind),
            ("accelerators", accelerator.generation),
            ("accelerators", accelerator.name),
            ("frameworks", framework),
            *(("features", feature) for feature in features),
        )

    def of(
        self,
        accelerator: Accelerator,
        framework: str = "shardwright",
        features: Iterable[str] = (),
        *,
        before: tuple[str, str] | None = None,
    ) -> Efficiency:
        """What `framework` achieves on `accelerator`; where nothing was fitted, the defaults of `Efficiency`.

        `before` names an entry: of that and of all that would override it nothing is read.
        """
        changes = _at_sustained_clock(accelerator)
        for section, name in self.entries(accelerator, framework, features):
            if (section, name) == before:
                break
            changes |= self.sections.get(section, {}).get(name) or {}
        return replace(Efficiency(), **changes)

    def with_value(self, section: str, name: str, field: str, value: Any) -> Efficiencies:
        """The same with one number changed; with None, without it."""
        assert section in SECTIONS, section
        assert field in {f.name for f in fields(Efficiency)}, field
        entry = {**(self.sections.get(section, {}).get(name) or {}), field: value}
        if value is None:
            del entry[field]
        return Efficiencies({**self.sections, section: {**self.sections.get(section, {}), name: entry}})


def _at_sustained_clock(accelerator: Accelerator) -> dict[str, Any]:
    """Of products and attention, where nobody fitted this accelerator but somebody measured what its largest products reach."""
    reached = accelerator.sustained_flops_per_second.get("bf16")
    if reached is None:
        return {}
    usual = Efficiency()
    share = reached / accelerator.peak("bf16")
    slower = min(1.0, share / usual.matmul_share)
    return {
        "matmul_share": share,
        "attention_forward_share": usual.attention_forward_share * slower,
        "attention_backward_share": usual.attention_backward_share * slower,
    }


@cache
def load_efficiencies(path: Path | None = None) -> Efficiencies:
    """The efficiencies that come with the package, or those of another file of its kind."""
    source = files("shardwright.planner") / "efficiencies.yaml" if path is None else path
    sections = yaml.safe_load(source.read_text(encoding="utf-8")) or {}
    known = {field.name for field in fields(Efficiency)}
    for section, names in sections.items():
        assert section in SECTIONS, section
        for name, entry in (names or {}).items():
            assert set(entry) <= known, f"{section}.{name}: {sorted(set(entry) - known)}"
    return Efficiencies(sections)
