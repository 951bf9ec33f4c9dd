"""The fitted efficiencies: `efficiencies.yaml`, by accelerator, trainer and kernel, put together for one run. Torch-free.

The file is written by `benchmarks/fit_planner.py` from published measurements. Each section changes fields of `Efficiency`:
`accelerators` by kind, by generation and then by name, `frameworks` by trainer, `features` by a kernel or a setting that a row
names. A machine's own measured profile is no part of this: the formulas prefer it to any share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from shardwright.hardware import Accelerator
from shardwright.planner.efficiency import Efficiency

SECTIONS = ("accelerators", "frameworks", "features")


@dataclass(frozen=True)
class Efficiencies:
    """All fitted numbers: section -> name -> field of `Efficiency` -> value."""

    sections: Mapping[str, Mapping[str, Mapping[str, Any]]]

    def of(self, accelerator: Accelerator, framework: str = "shardwright", features: Iterable[str] = ()) -> Efficiency:
        """What `framework` achieves on `accelerator`; where nothing was fitted, the defaults of `Efficiency`."""
        changes: dict[str, Any] = {}
        for section, name in (
            ("accelerators", accelerator.kind),
            ("accelerators", accelerator.generation),
            ("accelerators", accelerator.name),
            ("frameworks", framework),
            *(("features", feature) for feature in features),
        ):
            changes |= self.sections.get(section, {}).get(name) or {}
        return replace(Efficiency(), **changes)

    def with_value(self, section: str, name: str, field: str, value: Any) -> Efficiencies:
        """The same with one number changed."""
        assert section in SECTIONS, section
        assert field in {f.name for f in fields(Efficiency)}, field
        entry = {**(self.sections.get(section, {}).get(name) or {}), field: value}
        return Efficiencies({**self.sections, section: {**self.sections.get(section, {}), name: entry}})


@cache
def load_efficiencies() -> Efficiencies:
    """The efficiencies that come with the package."""
    text = (files("shardwright.planner") / "efficiencies.yaml").read_text(encoding="utf-8")
    sections = yaml.safe_load(text) or {}
    known = {field.name for field in fields(Efficiency)}
    for section, names in sections.items():
        assert section in SECTIONS, section
        for name, entry in (names or {}).items():
            assert set(entry) <= known, f"{section}.{name}: {sorted(set(entry) - known)}"
    return Efficiencies(sections)
