"""Conditions of a measurement: machine, software, date. Imports no torch."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "liger-kernel",
    "torchtune",
    "numpy",
    "triton",
)


def read_conditions() -> dict[str, Any]:
    """Return machine, software and date as JSON values, without packages that are absent."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": _describe_processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {
            name: version for name in PACKAGES if (version := _find_version(name)) is not None
        },
        "shardwright": _find_version("shardwright") or "source tree",
        "commit": _describe_commit(),
    }


def format_rows(value: Any, indent: int = 0) -> str:
    """Return JSON with one line per row: an object without lists of objects is a row.

    A profile of measured rates is one line too: nobody reads or edits it by hand.

    >>> print(format_rows({"a": {"b": 1}, "rows": [{"c": [2, 3]}]}))
    {
     "a": {"b": 1},
     "rows": [
      {"c": [2, 3]}
     ]
    }
    """
    if not _has_rows(value):
        return json.dumps(value)
    is_object = isinstance(value, dict)
    items = (
        [
            f"{json.dumps(key)}: "
            + (json.dumps(item) if key == "profile" else format_rows(item, indent + 1))
            for key, item in value.items()
        ]
        if is_object
        else [format_rows(item, indent + 1) for item in value]
    )
    start, end = "{}" if is_object else "[]"
    lines = ",".join(f"\n{' ' * (indent + 1)}{item}" for item in items)
    return f"{start}{lines}\n{' ' * indent}{end}"


def _has_rows(value: Any) -> bool:
    """Return True for a list of objects, and for anything that contains one."""
    if isinstance(value, dict):
        return any(_has_rows(item) for item in value.values())
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _describe_processor() -> str:
    """Return the model name and the matrix extensions that determine bf16 speed."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    extensions = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    name = fields.get("model name", platform.processor() or "unknown")
    return f"{name} ({', '.join(extensions) or 'no AVX-512'})"


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _describe_commit() -> str | None:
    """Return the short hash of the checkout, with `+` if files differ from it."""
    root = Path(__file__).resolve().parents[1]
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() or None
