"""Times of the parts of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass
class StepTimes:
    """Times between marks of a step, summed by part in `seconds`.

    On CUDA a mark is an event in the stream, which costs the host nothing; `seconds` waits for
    the last one. `reduction` is the exposed part of the gradient reduction, after the backward
    pass has reached the embeddings.
    """

    device: torch.device
    start_seconds: float = 0.0
    """Reading of `time.perf_counter` at the first mark."""
    _marks: list[tuple[str, float | torch.cuda.Event]] = field(default_factory=list)

    def mark(self, part: str) -> None:
        """End the interval since the last mark and assign it to `part`."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def reset(self) -> None:
        """Forget the previous step and start timing."""
        self._marks.clear()
        self.start_seconds = time.perf_counter()
        self.mark("")

    def list_spans(self) -> list[tuple[str, float, float]]:
        """List the intervals as (part, start, end), in seconds of this process's perf_counter.

        On CUDA the device must be synchronised. Its clock is aligned with the host's at the
        start of the step, when the device was idle.
        """
        spans = []
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            spans.append((part, self._instant(before), self._instant(after)))
        return spans

    @property
    def end(self) -> float | torch.cuda.Event:
        """Last mark."""
        return self._marks[-1][1]

    def compute_seconds_since(self, mark: float | torch.cuda.Event | None) -> float:
        """Return the seconds from `mark` (default: the first mark) to the last one.

        On CUDA the device must have reached both.
        """
        start = self._marks[0][1] if mark is None else mark
        end = self.end
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1000.0

    def _instant(self, mark: float | torch.cuda.Event) -> float:
        if isinstance(mark, float):
            return mark
        first = self._marks[0][1]
        assert isinstance(first, torch.cuda.Event)
        return self.start_seconds + first.elapsed_time(mark) / 1000.0

    def seconds(self) -> dict[str, float]:
        """Return seconds of forward, backward, reduction, optimizer; under pp also waiting."""
        last = self._marks[-1][1]
        if isinstance(last, torch.cuda.Event) and not last.query():
            last.synchronize()
        total = dict.fromkeys(("forward", "backward", "reduction", "optimizer"), 0.0)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            total.setdefault(part, 0.0)
            if isinstance(before, float):
                assert isinstance(after, float)
                total[part] += after - before
            else:
                assert isinstance(after, torch.cuda.Event)
                total[part] += before.elapsed_time(after) / 1000.0
        return total
