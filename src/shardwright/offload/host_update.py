"""Update on the host of parameters that are on a CUDA device.

[Note: order of copies] A gradient leaves the device when its reduction ends, during the rest of
the backward pass, with the weights it belongs to, on a stream of its own. Training's stream waits
for the last of these copies before the gradient norm is computed. So the host, which has to read
the norm, has all of them when it has the norm, and waits for no copy. Updated weights return
piece by piece on another stream while the next piece is updated; what reads them waits for that
stream (`HostDeferredUpdate`), or training's stream for the last one. An update in the backward pass
waits for the copy of each gradient in a thread of its own (`HostBackwardUpdate`). When that copy
has ended, so have all computations that read the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.numerics import get_local_tensor, scale_


@dataclass(frozen=True)
class _HostCopy:
    """Pinned copies of one parameter's local weights and gradient."""

    weights: Tensor
    gradient: Tensor


class HostUpdate:
    """Weights and gradients of a rank in pinned host memory for the time of an update.

    The weights come with every step, so code that changes those on the device (a restored
    checkpoint, kept zeros) need not know of the copies.
    """

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        """Allocate the copies. PyTorch rounds each pinned tensor up to a power of two."""
        self._parameters = dict(parameters)
        self._device = device
        self._copies = {}
        for name, parameter in self._parameters.items():
            local = get_local_tensor(parameter.detach())
            weights, gradient = (
                torch.empty(local.shape, dtype=local.dtype, pin_memory=True) for _ in range(2)
            )
            self._copies[name] = _HostCopy(weights, gradient)
        self._stream_out = torch.cuda.Stream(device)
        self._stream_in = torch.cuda.Stream(device)
        self._copied_event: torch.cuda.Event | None = None
        self._copied_names: set[str] = set()
        self._factor = 1.0

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies, without the rounding of pinned memory."""
        return sum(copy.weights.nbytes + copy.gradient.nbytes for copy in self._copies.values())

    def take_gradient(self, name: str) -> None:
        """Launch the copies of a gradient and its weights to the host, after the current stream."""
        self.launch_copies(name)

    @torch.no_grad()
    def launch_copies(self, name: str) -> torch.cuda.Event:
        """Launch the copies of `take_gradient`; return the event at their end."""
        parameter = self._parameters[name]
        assert parameter.grad is not None
        copy = self._copies[name]
        self._stream_out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream_out):
            copy.gradient.copy_(get_local_tensor(parameter.grad), non_blocking=True)
            copy.weights.copy_(get_local_tensor(parameter.detach()), non_blocking=True)
            copied_event = self._stream_out.record_event()
        self._copied_names.add(name)
        return copied_event

    def end_gradients(self) -> None:
        """Make the training stream wait for the copies, which end before its later work."""
        self._copied_event = self._stream_out.record_event()
        torch.cuda.current_stream(self._device).wait_event(self._copied_event)

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the next update by a factor, as `numerics.scale_` does."""
        self._factor = factor

    def begin_update(self) -> None:
        """Let copies to the device wait for launched kernels; gradients must have arrived."""
        assert self._copied_event is not None, "no gradients have left since the last update"
        if not self._copied_event.query():  # the norm was not read before
            self._copied_event.synchronize()
        self._copied_event = None
        self._stream_in.wait_stream(torch.cuda.current_stream(self._device))

    def get_weights(self, name: str) -> Tensor:
        """Return a parameter's local weights in host memory."""
        assert name in self._copied_names
        return self._copies[name].weights

    def get_gradient(self, name: str) -> Tensor:
        """Return a parameter's local gradient in host memory, before `scale_piece`."""
        assert name in self._copied_names
        return self._copies[name].gradient

    def scale_piece(self, gradient: Tensor) -> None:
        """Scale a piece of a gradient in place, once per step."""
        if self._factor != 1.0:
            scale_([gradient], self._factor)

    def copy_back(self, weights: Tensor, target: Tensor) -> None:
        """Launch the copy of updated weights to their place on the device."""
        with torch.cuda.stream(self._stream_in):
            target.copy_(weights, non_blocking=True)

    def order_after_copies(self, stream: torch.Stream | None = None) -> None:
        """Let a stream, or training's, wait for all weights that are on their way to the device."""
        waiting = torch.cuda.current_stream(self._device) if stream is None else stream
        waiting.wait_stream(self._stream_in)

    def end_update(self) -> None:
        """Let training's stream wait for all weights."""
        self.order_after_copies()
        self._factor = 1.0

    def discard_gradients(self) -> None:
        """Forget which gradients were taken: the step is updated or skipped."""
        self._copied_names.clear()
        self._copied_event = None
