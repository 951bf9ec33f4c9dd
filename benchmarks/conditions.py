"""Under what conditions numbers were measured: machine, software, date. No torch."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "liger-kernel", "numpy", "triton")


def read_conditions() -> dict[str, Any]:
    """Machine, software and date as JSON values; packages that are absent are left out."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "shardwright": _version("shardwright"),
        "commit": _commit(),
    }


def _processor() -> str:
    """Model name, and the matrix extensions that decide bf16 speed."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(fields.get("flags", "").split())
    extensions = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{fields.get('model name', platform.processor() or 'unknown')} ({', '.join(extensions) or 'no AVX-512'})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Short hash of the checkout, `+` when files differ from it."""
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
