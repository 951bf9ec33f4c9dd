"""Gradients are reported when they are complete, and again if they change after that."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.parallel.gradient_watch import GradientWatch


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def take_gradient(self, name: str) -> None:
        self.calls.append(name)

    def end_gradients(self) -> None:
        self.calls.append("end")


def build() -> tuple[nn.Sequential, Recorder, GradientWatch]:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    recorder = Recorder()
    watch = GradientWatch(dict(module.named_parameters()), recorder)
    return module, recorder, watch


def test_gradients_are_reported_during_the_backward_pass_that_completes_them() -> None:
    module, recorder, watch = build()
    watch.install_hooks()
    module(torch.ones(1, 4)).sum().backward()
    with watch.complete(()):
        module(torch.ones(1, 4)).sum().backward()
    assert recorder.calls == []  # more micro-batches follow
    with watch.complete(["0.weight", "1.weight"]):
        module(torch.ones(1, 4)).sum().backward()
        assert recorder.calls == ["1.weight"]  # the last one may share memory with others to come
    assert recorder.calls == ["1.weight", "0.weight"]
    watch.end()
    assert recorder.calls == ["1.weight", "0.weight", "end"]


def test_a_pass_reports_only_the_gradients_that_it_completes() -> None:
    module, recorder, watch = build()
    watch.install_hooks()
    with watch.complete(["0.weight"]):
        module(torch.ones(1, 4)).sum().backward()
    assert recorder.calls == ["0.weight"]
    watch.end()
    assert recorder.calls == ["0.weight", "1.weight", "end"]


def test_reduced_gradients_are_reported_by_their_bucket() -> None:
    module, recorder, watch = build()
    module(torch.ones(1, 4)).sum().backward()
    watch.take_reduced([module[1].weight])
    assert recorder.calls == []  # a later pass adds to it
    with watch.complete(["0.weight", "1.weight"]):
        module(torch.ones(1, 4)).sum().backward()
        watch.take_reduced([module[1].weight, torch.ones(1)])
        assert recorder.calls == ["1.weight"]
    watch.end()
    assert recorder.calls == ["1.weight", "0.weight", "end"]


def test_a_gradient_that_changes_after_its_report_is_reported_again() -> None:
    module, recorder, watch = build()
    with watch.complete(["1.weight"]):
        module(torch.ones(1, 4)).sum().backward()
    assert recorder.calls == ["1.weight"]
    gradient = module[1].weight.grad
    assert gradient is not None
    gradient.mul_(2.0)
    watch.end()
    assert recorder.calls == ["1.weight", "0.weight", "1.weight", "end"]


def test_parameters_without_gradients_and_frozen_ones_are_not_reported() -> None:
    _, recorder, watch = build()
    watch.end()
    assert recorder.calls == ["end"]
    frozen = nn.Linear(2, 2)
    frozen.requires_grad_(False)
    frozen_watch = GradientWatch(dict(frozen.named_parameters()), recorder)
    frozen_watch.install_hooks()  # torch has none for them
    with frozen_watch.complete(["weight"]):
        pass
    assert recorder.calls == ["end"]
