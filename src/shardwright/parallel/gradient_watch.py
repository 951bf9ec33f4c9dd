"""Events of a backward pass: the end of the blocks, and complete gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from shardwright.numerics import get_local_tensor
from shardwright.optim.sharded_optimizer import GradientListener


@contextmanager
def call_at_backward_end(first_block: nn.Module, callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` when the gradient of the first block's input is computed.

    Wrap forward and backward passes in this context. After that call only the embedding's
    gradient and waiting for reductions remain. If that input takes no gradient (frozen
    embeddings), `callback` runs when the context ends.
    """
    is_hooked = False

    def hook_input(_module: nn.Module, arguments: tuple[Any, ...]) -> None:
        nonlocal is_hooked
        if arguments and isinstance(arguments[0], Tensor) and arguments[0].requires_grad:
            is_hooked = True
            arguments[0].register_hook(lambda _gradient: callback())

    handle = first_block.register_forward_pre_hook(hook_input)
    try:
        yield
    finally:
        handle.remove()
    if not is_hooked:
        callback()


class GradientWatch:
    """Reports the gradients of a step to a listener.

    autograd calls the hooks when a gradient has been added to its parameter; FSDP2 calls them
    for its shards, on the stream of the reduction, when that is launched. Shards of one reduction
    share memory, and FSDP2 adds to one after another: they are reported when all are complete.
    DDP calls `take_reduced` for each of its buckets. A gradient that changes after its report is
    reported again at the end.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        listener: GradientListener,
        before_report: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """
        Args:
            before_report: called with a parameter's name before the listener, which may free the
                gradient.
        """
        self._parameters = {
            name: parameter for name, parameter in parameters.items() if parameter.requires_grad
        }
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._listener = listener
        self._before_report = before_report
        self._completing: frozenset[str] = frozenset()
        """Parameters whose gradients the current backward pass completes."""
        self._versions: dict[str, tuple[int, int]] = {}
        """Identity and version of each gradient that was reported."""
        self._complete: list[str] = []
        """Gradients in one storage that are complete, and not reported yet."""
        self._storage_address = 0

    def install_hooks(self) -> None:
        """Report gradients when autograd or FSDP2 has added them, in `complete`."""
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._take_early, name))

    @contextmanager
    def complete(self, names: Collection[str]) -> Iterator[None]:
        """Report the gradients of these parameters during the backward pass in this context, which
        completes them; at its end those of which nothing was known before."""
        self._completing = frozenset(self._parameters).intersection(names)
        yield
        self._take_unreported(self._completing)
        self._completing = frozenset()

    def take_reduced(self, parameters: Sequence[Tensor]) -> None:
        """Report gradients that DDP has reduced, on the stream on which their sums are known."""
        for parameter in parameters:
            name = self._names.get(cast(nn.Parameter, parameter))
            if name in self._completing:
                self._take(name)

    def _take_early(self, name: str, _parameter: Tensor) -> None:
        if name not in self._completing:
            return
        gradient = self._parameters[name].grad
        assert gradient is not None
        address = get_local_tensor(gradient).untyped_storage().data_ptr()
        if address != self._storage_address:
            self._take_complete()
            self._storage_address = address
        self._complete.append(name)

    def _take_complete(self) -> None:
        names, self._complete = self._complete, []
        for name in names:
            self._take(name)

    def _take(self, name: str) -> None:
        gradient = self._parameters[name].grad
        assert gradient is not None
        self._versions[name] = _identify(gradient)
        if self._before_report is not None:
            self._before_report([name])
        self._listener.take_gradient(name)

    def _take_unreported(self, names: Collection[str]) -> None:
        self._complete.clear()
        self._storage_address = 0
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if (
                name in names
                and gradient is not None
                and self._versions.get(name) != _identify(gradient)
            ):
                self._take(name)

    def end(self) -> None:
        """Report the gradients not yet reported, then the end of the step."""
        self._take_unreported(self._parameters.keys())
        self._versions.clear()
        self._listener.end_gradients()


def _identify(gradient: Tensor) -> tuple[int, int]:
    """Return a value that differs once the gradient is another tensor, or is changed in place."""
    return id(gradient), get_local_tensor(gradient)._version
