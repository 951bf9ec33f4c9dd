"""Build the device's C++ library once, and load it before torch is imported.

The library is in a cache folder outside the repository, by the version of torch and a hash of the
sources and of torch's folder. Nothing here imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import yaml

SOURCES = Path(__file__).with_name("native")
_LACKING_TABLE = "without_kernel.h"


def find_obstacle() -> str | None:
    """Return why this machine cannot have the device; None if it can."""
    if sys.platform != "linux":
        return "the test device needs Linux"
    version = (_find_torch() / "version.py").read_text()
    if re.search(r"^(cuda|hip)\b[^=\n]*= *['\"]", version, re.MULTILINE):
        return "this build of torch has its own CUDA device"
    if shutil.which("g++") is None:
        return "the test device needs g++"
    if not (_find_torch() / "include/ATen/ATen.h").exists():
        return "this installation of torch has no headers"
    return None


def load_library() -> ctypes.CDLL:
    """Load the library into this process, and build it if it is not in the cache.

    Raises:
        RuntimeError: torch is imported already, or `find_obstacle` finds one.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the test device must be loaded before torch is imported")
    obstacle = find_obstacle()
    if obstacle is not None:
        raise RuntimeError(obstacle)
    path = build_library()
    ctypes.CDLL(str(_find_torch() / "lib/libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.hostcuda_take_violation.restype = ctypes.c_char_p
    for name in ("live_bytes", "peak_bytes", "count_attention"):
        getattr(library, f"hostcuda_{name}").restype = ctypes.c_int64
    library.hostcuda_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.hostcuda_set_default_generator.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.hostcuda_count_attention.argtypes = [ctypes.c_int64]
    library.hostcuda_has_kernel.argtypes = [ctypes.c_char_p]
    return library


def build_library() -> Path:
    """Return the library's path; compile it, which takes 20 s, if it does not exist."""
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources))
    digest.update(Path(__file__).read_bytes())
    digest.update(str(_find_torch()).encode())  # the library finds torch's libraries by this path
    name = f"{metadata.version('torch')}-{digest.hexdigest()[:16]}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "shardwright-tests" / "hostcuda" / name
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libhostcuda.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(folder, library)
    return library


def _compile(folder: Path, library: Path) -> None:
    names = "".join(f'    "{name}",\n' for name in list_operators_without_kernel())
    (folder / _LACKING_TABLE).write_text(
        "#include <string>\n#include <unordered_set>\n"
        f"const std::unordered_set<std::string> kWithoutKernel{{\n{names}}};\n"
    )
    torch = _find_torch()
    partial = library.with_suffix(".partial")
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", "-w", str(SOURCES / "hostcuda.cpp")]
    command += [f"-I{path}" for path in (torch / "include", SOURCES, folder)]
    command += [f"-I{torch / 'include/torch/csrc/api/include'}", f"-L{torch / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}", "-o", str(partial)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"g++ cannot compile the test device:\n{result.stderr[-4000:]}")
    partial.replace(library)


def list_operators_without_kernel() -> list[str]:
    """List the overloads that have a CPU kernel and no CUDA kernel, by torch's own table."""
    generator = util.find_spec("torchgen")
    assert generator is not None
    assert generator.submodule_search_locations is not None
    root = Path(generator.submodule_search_locations[0])
    table = (root / "packaged/ATen/native/native_functions.yaml").read_text()
    entries: list[dict[str, Any]] = yaml.load(  # C's parser takes 1 s, Python's 15 s
        table,
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # noqa: S506 (both are safe)
    )
    backends = {
        str(entry["func"]).partition("(")[0]: {
            backend.strip() for keys in entry.get("dispatch", {}) for backend in keys.split(",")
        }
        for entry in entries
    }
    lacking = []
    for entry in entries:
        name = str(entry["func"]).partition("(")[0]
        found = backends[name] | backends.get(str(entry.get("structured_delegate")), set())
        is_composite = any(backend.startswith("Composite") for backend in found)
        if "CPU" in found and "CUDA" not in found and not is_composite:
            lacking.append(f"aten::{name}")
    return lacking


def _find_torch() -> Path:
    specification = util.find_spec("torch")
    assert specification is not None
    assert specification.submodule_search_locations is not None
    return Path(specification.submodule_search_locations[0])
