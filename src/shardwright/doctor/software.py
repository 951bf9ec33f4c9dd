"""Versions of packages, collectives, attention kernels, compiler and optional packages."""

from __future__ import annotations

import platform
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

from shardwright.doctor.finding import Finding, format_ranks
from shardwright.numerics.compilation import find_compiler
from shardwright.version import __version__

SECTION = "software"

_ATTENTION_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_OPTIONAL_PACKAGES = {
    "nvidia-ml-py": ("temperature, throttling, ECC and link errors of GPUs", "shardwright[nvml]"),
    "tensorboard": ("run.sinks: [tensorboard]", "shardwright[tensorboard]"),
    "wandb": ("run.sinks: [wandb]", "shardwright[wandb]"),
    "matplotlib": ("plots of benchmarks", "shardwright[plots]"),
    "torchao": ("quantised weights", "torchao"),
}
"""Feature and pip requirement of each optional package."""


@dataclass(frozen=True)
class Software:
    """Software of one rank; `unmet_requirements` are those of shardwright that are not met."""

    versions: Mapping[str, str]
    unmet_requirements: tuple[str, ...]
    attention_kernels: tuple[str, ...]
    """Kernels of scaled_dot_product_attention that run on the device."""
    compiler_name: str
    """Compiler that torch.compile uses; empty if there is none."""
    collective_backends: tuple[str, ...]
    has_cuda: bool
    missing_packages: tuple[str, ...]
    """Optional packages that are not installed."""


def read_software(device: torch.device) -> Software:
    """Read the software of this process; attention kernels run on `device`."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["shardwright"] = __version__
    try:
        requirements = metadata.requires("shardwright") or ()
    except metadata.PackageNotFoundError:
        versions["shardwright"] += " (not installed: its requirements are not checked)"
        requirements = ()
    for name in (
        "transformers",
        "tokenizers",
        "safetensors",
        *_OPTIONAL_PACKAGES,
        "flash-attn",
        "triton",
    ):
        version = _find_version(name)
        if version is not None:
            versions[name] = version
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    collectives = ["gloo"] if dist.is_gloo_available() else []
    if dist.is_nccl_available():
        collectives.append("nccl")
        if torch.cuda.is_available():
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return Software(
        versions=versions,
        unmet_requirements=tuple(find_unmet_requirements(requirements, versions)),
        attention_kernels=tuple(
            name
            for name, backend in _ATTENTION_BACKENDS.items()
            if _is_backend_supported(backend, device)
        ),
        compiler_name=find_compiler(device),
        collective_backends=tuple(collectives),
        has_cuda=device.type == "cuda",
        missing_packages=tuple(name for name in _OPTIONAL_PACKAGES if name not in versions),
    )


def find_unmet_requirements(requirements: Sequence[str], versions: Mapping[str, str]) -> list[str]:
    """Find requirements (PEP 508) that the installed versions do not meet; extras are ignored.

    >>> unmet_requirements = ["torch>=99", "numpy>=1", "wandb>=1 ; extra == 'wandb'"]
    >>> find_unmet_requirements(unmet_requirements, {"torch": "2.13.0+cpu", "numpy": "2.0"})
    ['torch>=99 is required, 2.13.0+cpu is installed']
    """
    problems = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = versions.get(requirement.name) or _find_version(requirement.name)
        if installed is None:
            problems.append(
                f"{requirement.name}{requirement.specifier} is required but not installed"
            )
        elif (
            Version(installed) not in requirement.specifier
            and Version(installed).public not in requirement.specifier
        ):
            problems.append(
                f"{requirement.name}{requirement.specifier} is required, {installed} is installed"
            )
    return problems


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _is_backend_supported(backend: SDPBackend, device: torch.device) -> bool:
    """Return True if an attention kernel runs on 4 heads of 64, 128 tokens, bf16, causal."""
    q_BHLE = torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unsupported kernel warns once per reason
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q_BHLE, q_BHLE, q_BHLE, is_causal=True)
        except RuntimeError:
            return False
    return True


def judge_software(by_rank: Mapping[int, Software]) -> list[Finding]:
    """Judge versions against requirements and between ranks, and the available features."""
    first = by_rank[min(by_rank)]
    versions_text = ", ".join(
        f"{name} {version}"
        for name, version in first.versions.items()
        if name not in _OPTIONAL_PACKAGES
    )
    findings = [_judge_versions(first, versions_text), *_judge_version_agreement(by_rank)]
    backend = "nccl" if first.has_cuda else "gloo"
    if backend in first.collective_backends:
        findings.append(
            Finding(SECTION, "collectives", "pass", ", ".join(first.collective_backends))
        )
    else:
        available = ", ".join(first.collective_backends) or "none"
        findings.append(
            Finding(
                SECTION,
                "collectives",
                "fail",
                f"this torch is built without {backend} (it has {available})",
                "Install an official wheel of torch",
            )
        )
    findings.append(_judge_attention_kernels(first))
    if first.compiler_name:
        value = f"model.compile uses {first.compiler_name}"
        findings.append(Finding(SECTION, "compile", "pass", value))
    else:
        remedy = "pip install triton" if first.has_cuda else "Install g++"
        value = "no compiler, so model.compile: auto compiles nothing, and true is an error"
        findings.append(Finding(SECTION, "compile", "warn", value, remedy))
    return [*findings, _judge_optional_packages(first)]


def _judge_versions(first: Software, versions_text: str) -> Finding:
    if first.unmet_requirements:
        value = "; ".join(first.unmet_requirements)
        remedy = "pip install -c constraints.txt shardwright"
        return Finding(SECTION, "versions", "fail", value, remedy, first.versions)
    return Finding(SECTION, "versions", "pass", versions_text, numbers=dict(first.versions))


def _judge_version_agreement(by_rank: Mapping[int, Software]) -> list[Finding]:
    """Compare versions between ranks; no finding for a single rank."""
    if len(by_rank) == 1:
        return []
    differing = []
    for name in sorted({name for software in by_rank.values() for name in software.versions}):
        ranks: dict[str, list[int]] = {}
        for rank, software in by_rank.items():
            ranks.setdefault(software.versions.get(name, "none"), []).append(rank)
        if len(ranks) > 1:
            differing.append(
                f"{name}: "
                + "; ".join(
                    f"{version} on {format_ranks(members)}" for version, members in ranks.items()
                )
            )
    if differing:
        return [
            Finding(
                SECTION,
                "same on all ranks",
                "fail",
                ". ".join(differing),
                "Install the same versions on every node",
            )
        ]
    return [Finding(SECTION, "same on all ranks", "pass", f"{len(by_rank)} ranks")]


def _judge_attention_kernels(first: Software) -> Finding:
    fused = [name for name in first.attention_kernels if name != "math"]
    if fused:
        return Finding(
            SECTION,
            "attention",
            "pass",
            f"{', '.join(fused)} (bf16, heads of 64)",
            numbers={"kernels": list(fused)},
        )
    return Finding(
        SECTION,
        "attention",
        "warn",
        "no fused kernel supports bf16 heads of 64, so the whole score matrix is stored",
        "Use a device and a torch build with flash attention",
    )


def _judge_optional_packages(first: Software) -> Finding:
    installed = [name for name in _OPTIONAL_PACKAGES if name not in first.missing_packages]
    value = f"installed: {', '.join(installed) or 'none'}"
    if first.missing_packages:
        missing = (
            f"{name} ({_OPTIONAL_PACKAGES[name][0]}: pip install '{_OPTIONAL_PACKAGES[name][1]}')"
            for name in first.missing_packages
        )
        value += f"; missing: {', '.join(missing)}"
    return Finding(
        SECTION,
        "optional packages",
        "pass",
        value,
        numbers={"missing": list(first.missing_packages)},
    )
