"""Fitted efficiencies from `efficiencies.yaml`, combined by accelerator, framework and kernel.

`benchmarks/fit_planner.py` writes the file from published measurements. Each section overrides
fields of `Efficiency`: `frameworks` first for all frameworks and then per framework and kind or
generation of accelerator, `accelerators` by kind, generation and name, `features` by a kernel or
setting that a row names.
A measured machine profile is separate: the formulas prefer it to any fitted share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwright.hardware import Accelerator
from shardwright.hardware.catalog_loading import parse_yaml_table
from shardwright.planner.rates.efficiency import Efficiency

EFFICIENCY_SECTIONS = ("accelerators", "frameworks", "features")
COMMUNICATION_FAMILIES = {
    "shardwright": "FSDP2",
    "torchtitan": "FSDP2",
    "torchtune": "FSDP2",
    "automodel": "FSDP2",
}
"""Frameworks whose data ranks gather and reduce with the same implementation -> the entry of
`frameworks` that they share."""
ALL_FRAMEWORKS = "every trainer"
"""Entry of `frameworks` that applies unless the framework's own entry overrides it, and on GPUs
to frameworks without measurements."""


@dataclass(frozen=True)
class EfficiencyTable:
    """Fitted numbers: section -> name -> field of `Efficiency` -> value."""

    sections: Mapping[str, Mapping[str, Mapping[str, Any]]]

    @staticmethod
    def list_entries(
        accelerator: Accelerator, framework: str, features: Iterable[str] = ()
    ) -> tuple[tuple[str, str], ...]:
        """Return section and name of the entries that apply to a run, most general first. Later
        ones override earlier ones."""
        return (
            ("frameworks", ALL_FRAMEWORKS),
            ("frameworks", COMMUNICATION_FAMILIES.get(framework, ALL_FRAMEWORKS)),
            ("accelerators", accelerator.kind),
            ("accelerators", accelerator.generation),
            ("accelerators", accelerator.name),
            ("frameworks", framework),
            ("frameworks", f"{framework} on {accelerator.kind}"),
            ("frameworks", f"{framework} on {accelerator.generation}"),
            *(("features", feature) for feature in features),
        )

    def get_efficiency(
        self,
        accelerator: Accelerator,
        framework: str = "shardwright",
        features: Iterable[str] = (),
        *,
        before_entry: tuple[str, str] | None = None,
    ) -> Efficiency:
        """Return the efficiency of `framework` on `accelerator`. Fields that were not fitted
        keep the defaults of `Efficiency`.

        `before_entry` names an entry: it and all entries that would override it are ignored.
        """
        changes = _scale_to_sustained_clock(accelerator, Efficiency())
        for section, name in self.list_entries(accelerator, framework, features):
            if (section, name) == before_entry:
                break
            changes |= self.sections.get(section, {}).get(name) or {}
            if (section, name) == ("accelerators", accelerator.kind):
                # What all accelerators of a kind share is not known of this one.
                changes |= _scale_to_sustained_clock(accelerator, replace(Efficiency(), **changes))
        return replace(Efficiency(), **changes)

    def replace_value(self, section: str, name: str, field: str, value: Any) -> EfficiencyTable:
        """Return a copy with one number changed, or removed if `value` is None."""
        assert section in EFFICIENCY_SECTIONS, section
        assert field in {f.name for f in fields(Efficiency)}, field
        entry = {**(self.sections.get(section, {}).get(name) or {}), field: value}
        if value is None:
            del entry[field]
        return EfficiencyTable(
            {**self.sections, section: {**self.sections.get(section, {}), name: entry}}
        )


def _scale_to_sustained_clock(accelerator: Accelerator, shared: Efficiency) -> dict[str, Any]:
    """Scale matmul and attention shares to the accelerator's measured sustained rate.

    `shared`: numbers of all accelerators of the kind. The sustained rate is that of the largest
    products, so the fitted share of a generation or accelerator overrides it. Empty if no rate was
    measured.
    """
    sustained = accelerator.sustained_flops_per_second.get("bf16")
    if sustained is None:
        return {}
    share = sustained / accelerator.get_peak_flops_per_second("bf16")
    slowdown = min(1.0, share / shared.matmul_share)
    return {
        "matmul_share": share,
        "attention_forward_share": shared.attention_forward_share * slowdown,
        "attention_backward_share": shared.attention_backward_share * slowdown,
    }


@cache
def load_efficiencies(path: Path | None = None) -> EfficiencyTable:
    """Load the package's `efficiencies.yaml`, or another file of the same format."""
    source = files("shardwright.planner.rates") / "efficiencies.yaml" if path is None else path
    sections = parse_yaml_table(source.read_text(encoding="utf-8")) or {}
    known_fields = {field.name for field in fields(Efficiency)}
    for section, names in sections.items():
        assert section in EFFICIENCY_SECTIONS, section
        for name, entry in (names or {}).items():
            assert set(entry) <= known_fields, (
                f"{section}.{name}: {sorted(set(entry) - known_fields)}"
            )
    return EfficiencyTable(sections)
