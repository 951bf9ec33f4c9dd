"""Start of ranks through torch's elastic launcher."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher import api

from shardwright.launch import launcher

TORCHS = dynamic_rendezvous.get_method_name


def record_event(get_name: Callable[[], str]) -> str:
    return get_name()


def join_rendezvous(get_name: Callable[[], str]) -> str:
    return record_event(get_name)


def test_events_of_a_launch_are_named_without_a_search_of_all_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", TORCHS)
    names: list[str] = []

    def launch(*_config: Any) -> Callable[..., None]:
        return lambda *_words: names.append(join_rendezvous(dynamic_rendezvous.get_method_name))

    def inspect_stack() -> None:
        raise AssertionError("the stack is inspected")

    assert join_rendezvous(TORCHS) == "join_rendezvous"
    monkeypatch.setattr(api, "elastic_launch", launch)
    monkeypatch.setattr(inspect, "stack", inspect_stack)
    launcher._run_with_agent(1, "a.module", [], tmp_path, is_quiet=True)
    assert names == ["join_rendezvous"]
