"""`shardwright predict` reads and writes a table: it reports rows without a prediction and never
reads results.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from shardwright.cli.predict import predict_command
from shardwright.errors import DataError, InputError
from tests.unit.planner.published.rows import OUTCOMES, ROW


def _write_table(path: Path, rows: list[dict[str, str]]) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(
            file, fieldnames=list(dict.fromkeys(key for row in rows for key in row))
        )
        table.writeheader()
        table.writerows(rows)
    return path


def _predict(
    tmp_path: Path, rows: list[dict[str, str]], name: str = "out.csv"
) -> list[dict[str, str]]:
    predict_command(_write_table(tmp_path / "rows.csv", rows), tmp_path / name)
    with open(tmp_path / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_predicted_with_speed_memory_and_whether_it_fits(tmp_path: Path) -> None:
    plain, large = _predict(
        tmp_path,
        [ROW, ROW | {"id": "some-0002", "tp": "1", "pp": "1", "dp": "64", "micro_batch": "8"}],
    )
    assert list(plain)[:4] == ["id", "pred_tok", "pred_mem", "fits"]
    for name in ("pred_tok", "pred_mem"):
        assert float(plain[f"{name}_low"]) < float(plain[name]) < float(plain[f"{name}_high"])
    assert float(plain["fit_probability"]) > 0.9 > float(large["fit_probability"])
    assert 500 < float(plain["pred_tok"]) < 5000
    assert 10 < float(plain["pred_mem"]) < 80
    assert plain["fits"] == "1"
    assert large["fits"] == "0"


def test_an_empty_file_is_not_a_table(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"")
    with pytest.raises(DataError, match="not a table of measurements"):
        predict_command(tmp_path / "rows.csv", tmp_path / "out.csv")


def test_changing_results_changes_no_prediction(tmp_path: Path) -> None:
    before = _predict(tmp_path, [ROW], "before.csv")
    with_results = ROW | OUTCOMES | {"notes": f"OOM; {ROW['notes']}; aggregate 4.4 PFLOP/s"}
    assert _predict(tmp_path, [with_results], "after.csv") == before
    slower = with_results | {
        "step_time_s": "99",
        "tokens_per_sec_per_gpu": "1",
        "peak_memory_gib_per_gpu": "1",
        "verification": "x",
    }
    assert _predict(tmp_path, [slower], "slower.csv") == before


def test_an_incomplete_row_is_reported_and_left_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = dict.fromkeys(ROW, "") | {
        "id": "x",
        "model_name": "Mystery",
        "gpu": "H100",
        "gpus": "8",
    }
    predict_command(
        _write_table(tmp_path / "rows.csv", [unknown, ROW]), tmp_path / "out.csv", as_json=True
    )
    captured = capsys.readouterr()
    assert "1 row not predicted (x): measurements.hidden: neither the model's name" in captured.err
    output = json.loads(captured.out)
    assert (output["predicted"], output["not_predicted"], output["schema_version"]) == (1, 1, 1)
    assert output["refused"][0]["ids"] == ["x"]
    with open(tmp_path / "out.csv", encoding="utf-8", newline="") as file:
        empty = next(csv.DictReader(file))
        assert empty["id"] == "x"
        assert not any(value for name, value in empty.items() if name != "id")


def test_unpredictable_rows_do_not_stop_the_others_and_are_grouped_by_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown_gpus = [ROW | {"id": f"tpu-{i}", "gpu": "TPU v4"} for i in range(7)]
    other = [
        ROW | {"id": "half", "gpu": "A100", "precision": "fp8"},
        ROW | {"id": "rl", "task": "GRPO"},
    ]
    written = _predict(tmp_path, [*unknown_gpus, ROW, *other])
    assert [row["id"] for row in written if row["pred_tok"]] == [ROW["id"]]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "7 rows not predicted (tpu-0, tpu-1, tpu-2, tpu-3, tpu-4 and 2 more)",
        "1 row not predicted (half)",
        "1 row not predicted (rl)",
    ]
    assert "TPU v4" in lines[0]
    assert "no hardware support for fp8" in lines[1]


def test_a_table_without_predictable_rows_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of the rows"):
        _predict(tmp_path, [ROW | {"gpu": "warp drive"}])
    (tmp_path / "no").touch()
    with pytest.raises(InputError, match="cannot be written"):
        predict_command(
            _write_table(tmp_path / "rows.csv", [ROW]), tmp_path / "no" / "such" / "out.csv"
        )


def test_the_table_of_measurements_is_not_replaced(tmp_path: Path) -> None:
    path = _write_table(tmp_path / "rows.csv", [ROW])
    content = path.read_bytes()
    (tmp_path / "link.csv").symlink_to(path)
    for out in (path, tmp_path / "link.csv"):
        with pytest.raises(InputError, match=r"--out: --measurements reads this file"):
            predict_command(path, out)
    assert path.read_bytes() == content
