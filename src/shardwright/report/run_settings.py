"""Precision, optimizer, offloading and adapters of a recorded run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.config.adapter_section import DEFAULT_RANK
from shardwright.config.low_precision import FP8Section
from shardwright.telemetry.event_log import RunStartedEvent

_OFFLOADED_STATES = {
    "optimizer": "optimizer states",
    "parameters": "weights",
    "activations": "saved tensors",
}
SETTINGS = ("precision", "optimizer", "offload", "adapters")
_TIERS = {"host": "in host memory", "disk": "on disk"}


def name_precision(start: RunStartedEvent) -> str | None:
    """Return the precision of a run's products; None if its recipe does not record it."""
    section = _read_section(start, "precision")
    if "kind" not in section:
        return None
    if section["kind"] != "fp8":
        return str(section["kind"])
    return f"fp8 {(section.get('fp8') or {}).get('recipe', FP8Section().recipe)}"


def describe_settings(start: RunStartedEvent | None) -> dict[str, str | None]:
    """Describe `SETTINGS`; None where the recipe records nothing.

    >>> from shardwright.report.recorded_run import load_run  # doctest: +SKIP
    >>> describe_settings(load_run("runs/demo").start)  # doctest: +SKIP
    {'precision': 'bf16', 'optimizer': 'adamw', 'offload': 'none', 'adapters': 'none'}
    """
    if start is None:
        return dict.fromkeys(SETTINGS)
    precision = name_precision(start)
    if precision and _read_section(start, "precision").get("master_weights") == "bf16":
        precision += ", master weights in bf16"
    optimizer = _read_section(start, "optimizer").get("name")
    return {
        "precision": precision,
        "optimizer": None if optimizer is None else str(optimizer),
        "offload": _describe_offload(_read_section(start, "offload")),
        "adapters": _describe_adapters(start),
    }


def list_settings(settings: Mapping[str, str | None]) -> list[str]:
    """Return the settings that are known, without `none`, for one line of text."""
    listed = (settings[name] for name in SETTINGS)
    return [text for text in listed if text not in (None, "none")]


def _describe_offload(section: Mapping[str, Any]) -> str | None:
    if not section:
        return None
    parts = [
        f"{subject} {_TIERS[section[name]]}"
        for name, subject in _OFFLOADED_STATES.items()
        if section.get(name) in _TIERS
    ]
    return ", ".join(parts) or "none"


def _describe_adapters(start: RunStartedEvent) -> str | None:
    if "adapters" not in start.recipe:
        return None
    section = _read_section(start, "adapters")
    if not section:
        return "none"
    base = f", base in {section['quantize']}" if section.get("quantize") else ""
    if section.get("path"):
        return f"from {section['path']}{base}"
    return f"{section.get('kind') or 'lora'} of rank {section.get('rank') or DEFAULT_RANK}{base}"


def _read_section(start: RunStartedEvent, name: str) -> Mapping[str, Any]:
    """Return a section of the recorded recipe; empty if an older recipe has none."""
    section = start.recipe.get(name)
    return section if isinstance(section, dict) else {}
