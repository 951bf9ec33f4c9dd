"""Packages for `make gpu` on a machine without a network, whose Python has torch and little else.

    python -m benchmarks.gpu_packages download build/gpu-wheels --python 3.12     where there is one
    python -m benchmarks.gpu_packages unpack build/gpu-wheels build/gpu-packages  on the GPU machine

Wheels are zip files: unpacking needs no pip and installs nothing. `make gpu` does it by itself if
build/gpu-wheels exists. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 64 * 2**20
"""Most that some machines accept besides the sources."""
PACKAGES = (
    "accelerate", "annotated-doc", "annotated-types", "anyio", "click", "filelock", "fsspec", "h11",
    "hf-xet", "httpcore2", "httpx2", "huggingface-hub", "hypothesis", "idna", "iniconfig", "jinja2",
    "markdown-it-py", "markupsafe", "mdurl", "numpy", "packaging", "peft", "pluggy", "psutil",
    "pydantic", "pydantic-core", "pygments", "pytest", "pytest-timeout", "pyyaml", "regex", "rich",
    "safetensors", "shellingham", "sortedcontainers", "tokenizers", "torchao", "tqdm",
    "transformers", "truststore", "typer", "typing-extensions", "typing-inspection",
)  # fmt: skip
"""All that `make gpu` imports except torch and its own requirements. pyarrow is too large, and only
files in its formats need it."""
PEER_PACKAGES = ("liger-kernel", "torchtune==0.6.1")
"""Those of contenders and optional kernels, which the tests on CPU do not need. torchtune's own
requirements are for data sets (`benchmarks.contenders.with_torchtune`)."""
_PLATFORMS = (
    *("manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    *("manylinux_2_24_x86_64", "manylinux_2_28_x86_64"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Download or unpack; return exit code 0, or 1 with a message."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_packages", description=__doc__.split("\n\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    download = commands.add_parser("download", help="download the wheels with pip")
    download.add_argument("wheels", type=Path)
    download.add_argument(
        "--python", default=platform.python_version(), help="version of the GPU machine's Python"
    )
    unpack = commands.add_parser("unpack", help="unpack the wheels that this Python can import")
    unpack.add_argument("wheels", type=Path)
    unpack.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "download":
            download_wheels(options.wheels, options.python)
        else:
            unpack_wheels(options.wheels, options.folder)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"{error}", file=sys.stderr)
        return 1
    return 0


def download_wheels(wheels: Path, python: str) -> None:
    """Download the tested versions for a version of Python on Linux x86-64.

    Raises:
        ValueError: The wheels are larger than `MAX_BYTES`.
        subprocess.CalledProcessError: pip failed; it printed the reason.
    """
    shutil.rmtree(wheels, ignore_errors=True)
    version = "".join(python.split(".")[:2])
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--dest", str(wheels)),
            *("--constraint", str(ROOT / "constraints.txt")),
            *("--python-version", version, "--implementation", "cp"),
            *("--abi", f"cp{version}", "--abi", "abi3", "--abi", "none"),
            *(word for name in _PLATFORMS for word in ("--platform", name)),
            *PACKAGES,
            *PEER_PACKAGES,
        ],
        check=True,
    )
    num_bytes = sum(wheel.stat().st_size for wheel in wheels.glob("*.whl"))
    print(f"{len(list(wheels.glob('*.whl')))} wheels, {num_bytes / 2**20:.0f} MiB in {wheels}")
    if num_bytes > MAX_BYTES:
        raise ValueError(f"the wheels have {num_bytes:,} bytes, more than {MAX_BYTES:,}")


def unpack_wheels(wheels: Path, folder: Path) -> list[str]:
    """Unpack the wheels that this Python can import; return their names.

    Raises:
        ValueError: A wheel is of another Python, or there is none.
    """
    paths = sorted(wheels.glob("*.whl"))
    if not paths:
        raise ValueError(f"{wheels} has no wheels; make them with `make gpu-wheels`")
    if wrong := [path.name for path in paths if not is_importable(path.name)]:
        raise ValueError(
            f"wheels of another Python than this {platform.python_version()}: {', '.join(wrong)}; "
            f"make them with `make gpu-wheels GPU_PYTHON={platform.python_version()}`"
        )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(partial)
    for data in partial.glob("*.data"):  # files for site-packages that a wheel lists apart
        for part in (data / "purelib", data / "platlib"):
            if part.is_dir():
                shutil.copytree(part, partial, dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return [path.name for path in paths]


def is_importable(wheel: str, version: tuple[int, int] = sys.version_info[:2]) -> bool:
    """True if a wheel's name allows a version of Python.

    >>> is_importable("a-1-py3-none-any.whl", (3, 12))
    True
    >>> is_importable("a-1-cp38-abi3-manylinux_2_17_x86_64.whl", (3, 12))
    True
    >>> is_importable("a-1-cp311-cp311-manylinux_2_17_x86_64.whl", (3, 12))
    False
    """
    *_, pythons, abis, _ = wheel.removesuffix(".whl").split("-")
    own = f"cp{version[0]}{version[1]}"
    if "abi3" in abis.split("."):
        minors = [tag[3:] for tag in pythons.split(".") if tag.startswith("cp3")]
        return any(minor.isdigit() and int(minor) <= version[1] for minor in minors)
    return own in pythons.split(".") or "py3" in pythons.split(".")


if __name__ == "__main__":
    sys.exit(main())
