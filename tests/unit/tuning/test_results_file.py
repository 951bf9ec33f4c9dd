"""The file of trials: appended, resumed, locked, and never mixed with another search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.errors import InputError
from shardwright.tuning.halving import Trial
from shardwright.tuning.measurement import Measurement, TrialOutcome
from shardwright.tuning.results_file import RESULTS_FILE_NAME, ResultsFile, SearchIdentity

IDENTITY = SearchIdentity({"seed": 1}, "2xCPU, data sheets", 2, "cpu", {"torch": "2.13.0"})
MEASURED = TrialOutcome("measured", 3.0, Measurement(4, 1.0, 0.1, 10.0, 5, 0.0, 2.0))
OOM = TrialOutcome("out_of_memory", 3.0, reason="rank 1 ran out of memory")


def write_two(folder: Path) -> None:
    with ResultsFile.open(folder, IDENTITY, resume=False) as results:
        results.append(Trial("a", 4, MEASURED))
        results.append(Trial("b", 4, OOM))


def test_results_are_found_again(tmp_path: Path) -> None:
    write_two(tmp_path)
    with ResultsFile.open(tmp_path, IDENTITY, resume=True) as results:
        assert results.known == {("a", 4): MEASURED, ("b", 4): OOM}
        results.append(Trial("a", 16, MEASURED))
    with ResultsFile.open(tmp_path, IDENTITY, resume=True) as results:
        assert set(results.known) == {("a", 4), ("b", 4), ("a", 16)}


def test_a_line_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    write_two(tmp_path)
    path = tmp_path / RESULTS_FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    with ResultsFile.open(tmp_path, IDENTITY, resume=True) as results:
        assert set(results.known) == {("a", 4)}
        results.append(Trial("c", 4, MEASURED))
    with ResultsFile.open(tmp_path, IDENTITY, resume=True) as results:
        assert set(results.known) == {("a", 4), ("c", 4)}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"recipe": {"seed": 2}}, "recipe"),
        ({"cluster": "2xCPU, measured"}, "cluster"),
        ({"num_ranks": 4}, "number of ranks"),
        ({"device": "cpu (1 thread)"}, "device"),
        ({"versions": {"torch": "2.14.0"}}, "versions"),
    ],
)
def test_results_of_another_search_are_refused(tmp_path: Path, change: dict, name: str) -> None:
    write_two(tmp_path)
    before = (tmp_path / RESULTS_FILE_NAME).read_bytes()
    with pytest.raises(InputError, match=f"another search: they differ in {name} "):
        ResultsFile.open(tmp_path, replace(IDENTITY, **change), resume=True)
    assert (tmp_path / RESULTS_FILE_NAME).read_bytes() == before


def test_existing_results_need_resume_and_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results to resume"):
        ResultsFile.open(tmp_path / "new", IDENTITY, resume=True)
    assert not (tmp_path / "new").exists()
    write_two(tmp_path)
    with pytest.raises(InputError, match="already has results"):
        ResultsFile.open(tmp_path, IDENTITY, resume=False)


def test_a_second_search_in_the_folder_is_refused(tmp_path: Path) -> None:
    with (
        ResultsFile.open(tmp_path, IDENTITY, resume=False),
        pytest.raises(InputError, match="another process is tuning"),
    ):
        ResultsFile.open(tmp_path, IDENTITY, resume=True)


@pytest.mark.parametrize("text", ["[]\n", "not json\n", '{"schema_version": 1}\n'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RESULTS_FILE_NAME).write_text(text)
    with pytest.raises(InputError, match="not a file of trials"):
        ResultsFile.open(tmp_path, IDENTITY, resume=True)


def test_another_version_is_refused(tmp_path: Path) -> None:
    write_two(tmp_path)
    path = tmp_path / RESULTS_FILE_NAME
    first, *rest = path.read_text().splitlines()
    header = json.loads(first) | {"schema_version": 2}
    path.write_text("\n".join([json.dumps(header), *rest]) + "\n")
    with pytest.raises(InputError, match="they differ in format of the file"):
        ResultsFile.open(tmp_path, IDENTITY, resume=True)
