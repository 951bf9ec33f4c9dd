"""Versions, and what they enable: collectives, kernels of attention, the compiler, optional packages."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.requirements import Requirement
from packaging.version import Version
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.probe.finding import Finding, name_ranks

SECTION = "software"

_ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_OPTIONAL = {
    "nvidia-ml-py": ("temperature, throttling, ECC and link errors of GPUs", "shardwright[nvml]"),
    "tensorboard": ("run.sinks: [tensorboard]", "shardwright[tensorboard]"),
    "wandb": ("run.sinks: [wandb]", "shardwright[wandb]"),
    "matplotlib": ("plots of benchmarks", "shardwright[plots]"),
    "torchao": ("quantised weights", "torchao"),
}
"""Optional packages: what each enables, and what installs it."""


@dataclass(frozen=True)
class Software:
    """What one rank's environment holds. `versions` by package; `requirements` those that ours names and are not met."""

    versions: Mapping[str, str]
    requirements: tuple[str, ...]
    attention: tuple[str, ...]
    """Fused kernels of scaled_dot_product_attention that ran on the device."""
    compiler: str
    """What torch.compile would build with; empty where there is none."""
    collectives: tuple[str, ...]
    cuda: bool
    missing: tuple[str, ...]
    """Optional packages that are not there."""


def read_software(device: torch.device) -> Software:
    """Of this process; attention is tried on `device`."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("shardwright", "transformers", "tokenizers", "safetensors", *_OPTIONAL, "flash-attn", "triton"):
        found = _version(name)
        if found is not None:
            versions[name] = found
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    collectives = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available():
        collectives.append("nccl")
        if torch.cuda.is_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return Software(
        versions=versions,
        requirements=tuple(unmet(metadata.requires("shardwright") or (), versions)),
        attention=tuple(name for name, backend in _ATTENTION.items() if _runs(backend, device)),
        compiler=_compiler(device),
        collectives=tuple(collectives),
        cuda=device.type == "cuda",
        missing=tuple(name for name in _OPTIONAL if name not in versions),
    )


def unmet(requirements: Sequence[str], versions: Mapping[str, str]) -> list[str]:
    """Requirements (PEP 508) that the installed versions do not meet; extras are left out.

    >>> unmet(["torch>=99", "numpy>=1", "wandb>=1 ; extra == 'wandb'"], {"torch": "2.13.0+cpu", "numpy": "2.0"})
    ['torch>=99 is wanted, 2.13.0+cpu is installed']
    """
    found = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = versions.get(requirement.name) or _version(requirement.name)
        if installed is None:
            found.append(f"{requirement.name}{requirement.specifier} is wanted, none is installed")
        elif Version(installed) not in requirement.specifier and Version(installed).public not in requirement.specifier:
            found.append(f"{requirement.name}{requirement.specifier} is wanted, {installed} is installed")
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _runs(backend: SDPBackend, device: torch.device) -> bool:
    """Whether a kernel of attention takes a small case: 4 heads of 64, 128 tokens, bf16, causal."""
    q_BHLE = torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a kernel that refuses says why in warnings, one per reason
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q_BHLE, q_BHLE, q_BHLE, is_causal=True)
        except RuntimeError:
            return False
    return True


def _compiler(device: torch.device) -> str:
    """What inductor generates code for: triton on CUDA, a C++ compiler on the CPU."""
    if device.type == "cuda":
        return "triton" if importlib.util.find_spec("triton") else ""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((name for name in names if shutil.which(name)), "")


def judge_software(by_rank: Mapping[int, Software]) -> list[Finding]:
    """Versions against what we ask for and against each other's, and what they enable."""
    first = by_rank[min(by_rank)]
    shown = ", ".join(f"{name} {version}" for name, version in first.versions.items() if name not in _OPTIONAL)
    findings = [_judge_versions(first, shown), *_judge_agreement(by_rank)]
    backend = "nccl" if first.cuda else "gloo"
    if backend in first.collectives:
        findings.append(Finding(SECTION, "collectives", "pass", ", ".join(first.collectives)))
    else:
        has = ", ".join(first.collectives) or "none"
        findings.append(
            Finding(
                SECTION, "collectives", "fail", f"this torch is built without {backend} (it has {has})", "Install torch's own wheel"
            )
        )
    findings.append(_judge_attention(first))
    if first.compiler:
        findings.append(Finding(SECTION, "compile", "pass", f"model.compile builds with {first.compiler}"))
    else:
        wanted = "pip install triton" if first.cuda else "Install g++"
        findings.append(Finding(SECTION, "compile", "warn", "model.compile: true will fail: no compiler", wanted))
    return [*findings, _judge_optional(first)]


def _judge_versions(first: Software, shown: str) -> Finding:
    if first.requirements:
        return Finding(
            SECTION, "versions", "fail", "; ".join(first.requirements), "pip install -c constraints.txt shardwright", first.versions
        )
    return Finding(SECTION, "versions", "pass", shown, numbers=dict(first.versions))


def _judge_agreement(by_rank: Mapping[int, Software]) -> list[Finding]:
    """Nothing where there is one rank."""
    if len(by_rank) == 1:
        return []
    differing = []
    for name in sorted({name for software in by_rank.values() for name in software.versions}):
        ranks: dict[str, list[int]] = {}
        for rank, software in by_rank.items():
            ranks.setdefault(software.versions.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            differing.append(f"{name}: " + "; ".join(f"{version} on {name_ranks(members)}" for version, members in ranks.items()))
    if differing:
        return [Finding(SECTION, "same on all ranks", "fail", ". ".join(differing), "Install the same versions on every node")]
    return [Finding(SECTION, "same on all ranks", "pass", f"{len(by_rank)} ranks")]


def _judge_attention(first: Software) -> Finding:
    fused = [name for name in first.attention if name != "math"]
    if fused:
        return Finding(SECTION, "attention", "pass", f"{', '.join(fused)} (bf16, heads of 64)", numbers={"kernels": list(fused)})
    return Finding(
        SECTION,
        "attention",
        "warn",
        "no fused kernel takes bf16 heads of 64: scores are held in full",
        "Use a device and a torch build with flash attention",
    )


def _judge_optional(first: Software) -> Finding:
    here = [name for name in _OPTIONAL if name not in first.missing]
    value = f"has {', '.join(here)}" if here else "none of the optional packages"
    if first.missing:
        lacking = (f"{name} ({_OPTIONAL[name][0]}: pip install '{_OPTIONAL[name][1]}')" for name in first.missing)
        value += f"; without {', '.join(lacking)}"
    return Finding(SECTION, "optional packages", "pass", value, numbers={"missing": list(first.missing)})
