"""Python functions of `torch.cuda`, answered by the device's library instead of CUDA's.

Import it after the library is loaded: it imports torch.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # asks for C functions of CUDA if it is imported after CUDA is "available"

_C: Any = torch._C
_GIB = 1024**3
NAME = "NVIDIA H200"
MEMORY_BYTES = 139 * _GIB
NUM_DEVICES = 8
_PROPERTIES: dict[str, Any] = {
    "name": NAME,
    "major": 9,
    "minor": 0,
    "total_memory": MEMORY_BYTES,
    "multi_processor_count": 132,
    "is_integrated": 0,
    "L2_cache_size": 50 * 1024**2,
    "gcnArchName": "",
    "warp_size": 32,
    "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
}


def _get_index(device: Any = None) -> int:
    if isinstance(device, int) and device >= 0:
        return device
    index = None if device is None or isinstance(device, int) else torch.device(device).index
    if index is None:
        index = _C._accelerator_getDeviceIndex()
    return int(index)


def _get_properties(device: Any = None) -> SimpleNamespace:
    uuid = f"00000000-0000-0000-0000-{_get_index(device):012}"
    return SimpleNamespace(uuid=uuid, **_PROPERTIES)


class Stream(torch.Stream):
    """`torch.cuda.Stream`."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Any:
        if not options:
            options = {"device": torch.device("cuda", _get_index(device)), "priority": priority}
        return torch.Stream.__new__(cls, **options)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """`torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Any:
        return torch.Event.__new__(
            cls, device="cuda", enable_timing=enable_timing, blocking=blocking
        )

    def record(self, stream: Any = None) -> Any:
        super().record(stream or get_current_stream())
        self.recorded_seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        super().wait(stream or get_current_stream())


def _measure_milliseconds(start: Any, end: Any) -> float:
    """Return the host's time between two events: their operations ran when they were issued."""
    return float(1000.0 * (end.recorded_seconds - start.recorded_seconds))


Event.elapsed_time = _measure_milliseconds  # type: ignore[method-assign, assignment, unused-ignore]


def _wrap(stream: torch.Stream) -> Any:
    return Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


def get_current_stream(device: Any = None) -> Any:
    return _wrap(_C._accelerator_getStream(_get_index(device)))


@contextmanager
def _use_stream(stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    with _UseDevice(stream.device_index):
        before = _C._accelerator_getStream(stream.device_index)
        _C._accelerator_setStream(stream)
        try:
            yield
        finally:
            _C._accelerator_setStream(before)


class _UseDevice:
    """`torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        self.idx = _get_index(device)

    def __enter__(self) -> None:
        self.previous = _C._accelerator_exchangeDevice(self.idx)

    def __exit__(self, *_: Any) -> None:
        _C._accelerator_maybeExchangeDevice(self.previous)


def install(library: ctypes.CDLL) -> None:
    """Replace the functions of `torch.cuda` for the rest of this process."""
    live = library.hostcuda_live_bytes
    peak = library.hostcuda_peak_bytes
    generators = tuple(torch.Generator(f"cuda:{index}") for index in range(NUM_DEVICES))
    for index, generator in enumerate(generators):
        library.hostcuda_set_default_generator(index, generator._cdata)
    functions: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": get_current_stream,
        "default_stream": lambda device=None: Stream(
            stream_id=0, device_index=_get_index(device), device_type=1
        ),
        "set_stream": _C._accelerator_setStream,
        "stream": _use_stream,
        "device": _UseDevice,
        "set_device": lambda device: _C._accelerator_setDeviceIndex(_get_index(device)),
        "synchronize": lambda device=None: _C._accelerator_synchronizeDevice(_get_index(device)),
        "current_device": _get_index,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: NUM_DEVICES,
        "get_device_properties": _get_properties,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: (9, 0),
        # So there is no symmetric memory, which the device does not have.
        "can_device_access_peer": lambda device, peer: False,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (MEMORY_BYTES - live(), MEMORY_BYTES),
        "memory_allocated": lambda device=None: live(),
        "max_memory_allocated": lambda device=None: peak(),
        "memory_reserved": lambda device=None: live(),
        "max_memory_reserved": lambda device=None: peak(),
        "reset_peak_memory_stats": lambda device=None: library.hostcuda_reset_peak(),
        "memory_stats": lambda device=None: defaultdict(int),
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": lambda mode: None,  # `log_synchronisations` counts waits
        "default_generators": generators,
        "get_rng_state": lambda device="cuda": generators[_get_index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_get_index(device)].set_state(
            state
        ),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "manual_seed": lambda seed: generators[_get_index()].manual_seed(seed),
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators],
        "_exchange_device": _C._accelerator_exchangeDevice,
        "_maybe_exchange_device": _C._accelerator_maybeExchangeDevice,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    # torch.compile imports these for CUDA graphs, which the device does not capture.
    _C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    _C._set_cached_tensors_enabled = lambda enabled: None
    torch.backends.cuda.is_built = lambda: True  # type: ignore[assignment, unused-ignore]
    flags = "CXX_FLAGS= -DUSE_MSLK"
    torch.__config__.show = lambda: flags  # type: ignore[assignment, unused-ignore]
    _C._set_only_lift_cpu_tensors(True)  # or torch.tensor under a fake mode asks for CUDA
    _install_resize(library)


def _install_resize(library: ctypes.CDLL) -> None:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        library.hostcuda_resize(storage._cdata, size)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment, unused-ignore]
