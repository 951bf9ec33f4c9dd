"""Setting of the CUDA allocator: expandable segments, unless the user has chosen."""

from __future__ import annotations

import pytest

from shardwright.launch.allocator import use_expandable_segments


def test_segments_are_expandable_by_default() -> None:
    environment = {"PATH": "/bin"}
    use_expandable_segments(environment)
    assert environment == {"PATH": "/bin", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_setting_of_the_user_stays(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    use_expandable_segments(environment)
    assert environment == {name: "max_split_size_mb:64"}
