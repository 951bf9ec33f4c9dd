"""Diagnosis of CUDA hangs from recorded operations, and reading of damaged records."""

from __future__ import annotations

import argparse
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.watchdog.hang_diagnosis import HangDiagnosis
from shardwright.watchdog.heartbeat import Heartbeat
from shardwright.watchdog.nccl_diagnosis import (
    diagnose_hang_on_cuda,
    diagnose_records,
    format_records,
)
from shardwright.watchdog.nccl_records import (
    RECORD_STEM,
    NcclRecordError,
    NcclRecords,
    RecordRequest,
    get_record_stem,
    parse_record,
    read_record,
)
from tests.unit.watchdog.nccl_dumps import DATA, OTHER_DATA, OTHER_TENSOR, TENSOR, WORLD, Recorder


def make_recorders(count: int = 4) -> list[Recorder]:
    return [Recorder(rank) for rank in range(count)]


def read_all(
    recorders: Sequence[Recorder], unreadable: dict[int, str] | None = None
) -> NcclRecords:
    return NcclRecords(
        {recorder.rank: parse_record(recorder.build(), recorder.rank) for recorder in recorders},
        unreadable or {},
    )


def diagnose(recorders: Sequence[Recorder]) -> HangDiagnosis:
    verdict = diagnose_records(read_all(recorders))
    assert verdict is not None
    return verdict


def test_a_rank_that_has_not_enqueued_the_others_collective_is_missing() -> None:
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 8)
        if recorder.rank != 2:
            recorder.collective(WORLD, "_all_gather_base", 16, "scheduled", outputs=64, line=12)
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (2,)
    assert verdict.message == (
        "rank 2 is missing from all_gather #2 (16 to 64 Float elements) of group default_pg "
        "(ranks 0-3) (not enqueued by the host), where ranks 0, 1, 3 wait at me/job/step.py:12 in "
        "run_step; the last operation of rank 2 is all_reduce #1 (8 Float elements) of group "
        "default_pg (ranks 0-3) (completed) at me/job/step.py:10 in run_step"
    )


def test_the_first_of_several_late_ranks_is_named_across_groups() -> None:
    """Rank 0 waits for 1 (tensor), 2 waits for 0 and 3 for 1 (data): 1 blocks all."""
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4)
    recorders[0].collective(TENSOR, "all_reduce", 32, "scheduled")
    recorders[2].collective(OTHER_TENSOR, "all_reduce", 32)
    recorders[3].collective(OTHER_TENSOR, "all_reduce", 32)
    recorders[2].collective(DATA, "_reduce_scatter_base", 64, "scheduled", outputs=32)
    recorders[3].collective(OTHER_DATA, "_reduce_scatter_base", 64, "scheduled", outputs=32)
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (1,)
    assert "rank 1 is missing from all_reduce #1 (32 Float elements) of group tp" in verdict.message


def test_a_late_rank_that_waits_for_another_late_rank_is_not_named() -> None:
    """Ranks 2 and 3 are missing from the sum of all, and 2 waits for 3 (tensor)."""
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4)
    for recorder in recorders[:2]:
        recorder.collective(WORLD, "all_reduce", 4, "scheduled")
    recorders[2].collective(OTHER_TENSOR, "all_reduce", 32, "scheduled")
    assert diagnose(recorders).blocking_ranks == (3,)


def test_a_device_that_has_not_started_the_others_collective_is_late() -> None:
    """All hosts have run ahead and enqueued everything."""
    recorders = make_recorders()
    for recorder in recorders:
        for number in range(3):
            state = "completed" if number == 0 else "scheduled"
            if number == 1 and recorder.rank != 3:
                state = "started"
            recorder.collective(WORLD, "all_reduce", 8 + number, state)
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (3,)
    assert "rank 3 is missing from all_reduce #2" in verdict.message
    assert "(not started on the device), where ranks 0, 1, 2 wait" in verdict.message
    assert "the last operation of rank 3 is all_reduce #1" in verdict.message


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (("broadcast", 8, "Float"), "enqueued broadcast #2 (8 Float elements)"),
        (("all_reduce", 12, "Float"), "enqueued all_reduce #2 (12 Float elements)"),
        (("all_reduce", 8, "BFloat16"), "enqueued all_reduce #2 (8 BFloat16 elements)"),
    ],
    ids=["operation", "size", "dtype"],
)
def test_a_rank_that_enqueued_something_else_is_named(
    other: tuple[str, int, str], expected: str
) -> None:
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4)
        name, elements, dtype = other if recorder.rank == 1 else ("all_reduce", 8, "Float")
        line = 99 if recorder.rank == 1 else 10
        recorder.collective(WORLD, name, elements, "scheduled", dtype=dtype, line=line)
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (1,)
    assert expected in verdict.message
    assert "step.py:99 in run_step, where ranks 0, 2, 3 enqueued all_reduce #2" in verdict.message


def test_even_collectives_may_have_other_shapes_and_uneven_ones_other_sizes() -> None:
    recorders = make_recorders(2)
    for recorder in recorders:
        recorder.collective(TENSOR, "all_to_all", 10 + recorder.rank, "scheduled")
        recorder.collective(TENSOR, "all_reduce", 8, "scheduled")
    recorders[1].entries[-1]["input_sizes"] = recorders[1].entries[-1]["output_sizes"] = [[2, 4]]
    assert diagnose_records(read_all(recorders)) is None


@pytest.mark.parametrize("skipping", [0, 1])
def test_of_two_ranks_the_one_that_skipped_a_collective_is_named(skipping: int) -> None:
    sequence = [("all_reduce", 8), ("broadcast", 5), ("all_reduce", 3), ("all_reduce", 9)]
    recorders = make_recorders(2)
    for recorder in recorders:
        recorder.collective(TENSOR, "all_reduce", 4)
        for name, elements in sequence[1:] if recorder.rank == skipping else sequence:
            recorder.collective(TENSOR, name, elements, "scheduled")
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (skipping,)
    assert "enqueued broadcast #2 (5 Float elements)" in verdict.message


def test_collectives_of_two_groups_in_opposite_orders_are_named() -> None:
    other = ("beef", "cp", (0, 1))
    recorders = make_recorders(2)
    for recorder in recorders:
        for group in (TENSOR, other) if recorder.rank == 0 else (other, TENSOR):
            recorder.collective(group, "all_reduce", 8, "scheduled")
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (0, 1)
    assert "opposite orders: rank 0 begins with all_reduce #1 (8 Float elements) of group tp" in (
        verdict.message
    )
    assert "rank 1 with all_reduce #1 (8 Float elements) of group cp" in verdict.message


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    """The device of each has started another group's collective; rank 1 stopped first."""
    other = ("beef", "cp", (0, 1))
    recorders = make_recorders(2)
    recorders[0].clock += 10**9
    recorders[0].collective(TENSOR, "all_reduce", 8, "started")
    recorders[0].collective(other, "all_reduce", 8, "scheduled")
    recorders[1].collective(other, "all_reduce", 8, "started")
    recorders[1].collective(TENSOR, "all_reduce", 8, "scheduled")
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (1,)
    assert "ranks 0, 1 wait for each other" in verdict.message
    assert "rank 1 stopped first" in verdict.message


def test_a_rank_that_has_not_sent_is_missing() -> None:
    pipeline = ("aaaa", "pp", (0, 1, 2))
    recorders = make_recorders(3)
    recorders[0].send(pipeline, 1, 6)
    recorders[1].receive(pipeline, 0, 6)
    recorders[0].send(pipeline, 1, 6)
    recorders[1].receive(pipeline, 0, 6)
    recorders[1].send(pipeline, 2, 6)
    recorders[2].receive(pipeline, 1, 6)
    recorders[2].receive(pipeline, 1, 6, "scheduled")
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (1,)
    assert (
        "rank 1 is missing from recv from rank 1 to rank 2 (6 BFloat16 elements) of group pp "
        "(ranks 0-2) (not enqueued by the host), where rank 2 waits" in verdict.message
    )


def test_of_ranks_with_receives_posted_ahead_the_one_that_stopped_first_is_named() -> None:
    """Each has posted a receive; rank 1 hangs in its own work, and rank 0 ran on for a second."""
    recorders = make_recorders(2)
    recorders[0].clock += 10**9
    recorders[0].receive(TENSOR, 1, 6, "scheduled")
    recorders[1].receive(TENSOR, 0, 6, "scheduled")
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (1,)


@pytest.mark.parametrize("count", [2, 3])
def test_receives_in_front_of_the_sends_that_others_wait_for_are_a_circle(count: int) -> None:
    """All hosts have enqueued everything; each device waits in a receive, its send behind it."""
    ring = ("abcd", "pp", tuple(range(count)))
    recorders = make_recorders(count)
    for recorder in recorders:
        recorder.clock += 10**9 * recorder.rank
        recorder.receive(ring, (recorder.rank - 1) % count, 6, "scheduled")
        recorder.send(ring, (recorder.rank + 1) % count, 6, "scheduled")
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (0,)
    assert f"rank 0 in recv from rank {count - 1} to rank 0 (6 BFloat16 elements)" in (
        verdict.message
    )
    for recorder in recorders:  # sends first on one rank: no circle
        if recorder.rank == 0:
            recorder.entries.reverse()
            for number, entry in enumerate(recorder.entries):
                entry["record_id"] = number
    verdict = diagnose_records(read_all(recorders))
    assert verdict is None or "wait for each other" not in verdict.message


def test_a_late_host_is_named_before_late_devices() -> None:
    """The host of rank 3 is late for rank 2, and the device of rank 1 for rank 0."""
    recorders = make_recorders()
    recorders[0].collective(TENSOR, "all_reduce", 8, "started")
    recorders[1].collective(TENSOR, "all_reduce", 8, "scheduled")
    recorders[2].collective(OTHER_TENSOR, "all_reduce", 8, "scheduled")
    recorders[3].collective(WORLD, "barrier", 1)
    assert diagnose(recorders).blocking_ranks == (3,)
    recorders[3].collective(OTHER_TENSOR, "all_reduce", 8, "scheduled")
    assert diagnose(recorders).blocking_ranks == (1,)


def test_batches_of_messages_have_the_state_of_their_end() -> None:
    ring = ("abcd", "cp", (0, 1, 2))
    recorders = make_recorders(3)
    for recorder in recorders:
        messages = [("send", (recorder.rank + 1) % 3, 7), ("recv", (recorder.rank - 1) % 3, 7)]
        recorder.batch(ring, messages)
        if recorder.rank != 1:
            recorder.batch(ring, messages, "scheduled")
    records = read_all(recorders)
    assert [len(record.operations) for record in records.by_rank.values()] == [2, 1, 2]
    assert [part.name for part in records.by_rank[0].operations[0].parts] == ["send", "recv"]
    verdict = diagnose(recorders)
    assert verdict.blocking_ranks == (1,)
    assert (
        "rank 1 is missing from send from rank 0 to rank 1 (7 BFloat16 elements)" in verdict.message
    )
    assert "batch #2 of 2 operations (send from rank 0 to rank 1" in format_records(records)


def test_a_coalesced_collective_is_compared_part_by_part() -> None:
    recorders = make_recorders(2)
    for recorder in recorders:
        for elements in (4, 5 + recorder.rank):
            recorder.collective(TENSOR, "all_reduce", elements, "scheduled")
            recorder.collectives[TENSOR[0]] = 0
        recorder.collective(TENSOR, "coalesced", 0, "scheduled")
        for entry in recorder.entries:
            entry["collective_seq_id"] = 1
        recorder.entries[-1] |= {"input_sizes": [], "output_sizes": []}
    verdict = diagnose(recorders)
    assert "batch #1 of 2 operations" in verdict.message
    assert "all_reduce #1 (6 Float elements)" in verdict.message


def test_groups_with_one_name_and_other_ranks_are_different_groups() -> None:
    one = ("0", "split", (0, 1))
    two = ("0", "split", (2, 3))
    recorders = make_recorders()
    for recorder in recorders:
        group = one if recorder.rank < 2 else two
        recorder.collective(group, "all_reduce", 4 if recorder.rank < 2 else 9)
        if recorder.rank != 3:
            recorder.collective(
                group, "all_reduce", 5, "completed" if recorder.rank < 2 else "scheduled"
            )
    assert diagnose(recorders).blocking_ranks == (3,)


def test_no_verdict_without_a_sign() -> None:
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4)
    assert diagnose_records(read_all(recorders)) is None
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4, "scheduled")
    assert diagnose_records(read_all(recorders)) is None
    assert diagnose_records(NcclRecords()) is None


def make_heartbeats(count: int, *, silent: int | None = None) -> list[Heartbeat]:
    beats = {rank: 980.0 if rank == silent else 1000.0 for rank in range(count)}
    return [
        Heartbeat(rank, 100 + rank, count, "step", 4, 990.0, 5.0, beats[rank], None, (), {})
        for rank in range(count)
    ]


def test_a_rank_that_left_is_named_if_all_others_have_enqueued() -> None:
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4)
        recorder.collective(WORLD, "all_reduce", 4, "scheduled")
    records = read_all(recorders[:3], {3: "it wrote no record"})
    verdict = diagnose_hang_on_cuda(make_heartbeats(4), 1000.0, {}, records)
    assert verdict.blocking_ranks == (3,)
    assert "have enqueued all_reduce #2 (4 Float elements)" in verdict.message
    assert "(no record of rank 3: it wrote no record)" in verdict.message


def test_the_verdict_of_the_records_is_used_unless_a_rank_does_not_run() -> None:
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4, "scheduled" if recorder.rank else "completed")
    recorders[0].entries.clear()
    records = read_all(recorders)
    verdict = diagnose_hang_on_cuda(make_heartbeats(4), 1000.0, {}, records)
    assert verdict.blocking_ranks == (0,)
    assert verdict.message.startswith("rank 0 is missing from all_reduce #1")
    assert "rank 0 has been in step 4 for 10.0 s" in verdict.message
    verdict = diagnose_hang_on_cuda(make_heartbeats(4, silent=2), 1000.0, {2: "T"}, records)
    assert verdict.blocking_ranks == (2,)
    assert "rank 2 stopped by a signal" in verdict.message
    assert "NCCL's records: rank 0 is missing" in verdict.message
    verdict = diagnose_hang_on_cuda(make_heartbeats(4), 1000.0, {}, NcclRecords())
    assert "NCCL's records name no rank" in verdict.message


class Harmful:
    """Object whose pickle would run a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("ran",))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be opened"),
        (b"", "is empty"),
        (b"\x80\x02}q\x00(X\x07", "incomplete or damaged"),
        (b"not a pickle", "incomplete or damaged"),
        (b"\xff" * 4096, "incomplete or damaged"),
        (pickle.dumps(Harmful()), "an object of builtins.print"),
        (pickle.dumps(["a list"]), "unknown format"),
        (pickle.dumps({"version": "3.0", "pg_config": {}}), "version 3.0, not 2.x"),
        (pickle.dumps({"version": "2.10"}), "unknown format (KeyError: 'pg_config')"),
    ],
)
def test_a_record_that_cannot_be_read_is_an_error_with_its_reason(
    content: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nccl-rank-0"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(NcclRecordError) as error:
        read_record(path, 0)
    assert reason in str(error.value)
    assert "ran" not in capsys.readouterr().out


def test_an_incomplete_record_is_an_error(tmp_path: Path) -> None:
    recorder = Recorder(0)
    recorder.collective(WORLD, "all_reduce", 4, "scheduled")
    path = recorder.write(tmp_path)
    data = path.read_bytes()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(NcclRecordError):
            read_record(path, 0)
    for place in range(0, len(data), 11):  # other bytes may make a valid record or an error
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with suppress(NcclRecordError):
            diagnose_records(NcclRecords({0: read_record(path, 0)}))


def test_records_are_waited_for_and_those_of_an_earlier_hang_are_refused(tmp_path: Path) -> None:
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 4, "scheduled")
    recorders[1].write(tmp_path)
    stem = get_record_stem(tmp_path, {})
    request = RecordRequest(stem, range(4))
    (tmp_path / "whole").mkdir()

    def write_later() -> None:
        time.sleep(0.1)
        recorders[0].write(tmp_path)
        path = recorders[3].write(tmp_path / "whole")
        (tmp_path / path.name).write_bytes(path.read_bytes()[:100])

    writer = threading.Thread(target=write_later)
    writer.start()
    records = request.wait(4.0)
    writer.join()
    assert set(records.by_rank) == {0}
    assert records.unreadable[1] == "its record belongs to an earlier hang"
    assert records.unreadable[2] == "it wrote no record"
    assert "incomplete" in records.unreadable[3]
    started = time.monotonic()
    records = RecordRequest(stem, [0]).wait(60.0, optional=[0])
    assert time.monotonic() - started < 30
    assert set(records.unreadable) == {0}


def test_the_users_folder_of_records_is_used(tmp_path: Path) -> None:
    assert get_record_stem(tmp_path, {}) == f"{tmp_path}/{RECORD_STEM}"
    former = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/scratch/old_"}
    assert get_record_stem(tmp_path, former) == "/scratch/old_"
    assert get_record_stem(tmp_path, former | {"TORCH_FR_DUMP_TEMP_FILE": "/a_"}) == "/a_"


def test_torchs_own_analysis_reads_the_built_records() -> None:
    """The builder has torch's format, and both name the same rank."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    recorders = make_recorders()
    for recorder in recorders:
        recorder.collective(WORLD, "all_reduce", 8)
        if recorder.rank != 2:
            recorder.collective(WORLD, "all_reduce", 16, "scheduled")
    details = {
        f"dump_{recorder.rank}": {
            "host_name": f"host{recorder.rank}",
            "rank": recorder.rank,
            **recorder.build(),
        }
        for recorder in recorders
    }
    arguments = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    database = builder.build_db(details, arguments, "2.10")
    (missing,) = [each for each in database.collectives if each.missing_ranks]
    assert missing.missing_ranks == {2}


def test_a_record_that_torch_wrote_is_read(tmp_path: Path) -> None:
    """gloo fills the same recorder on a CPU, with its own name before the operations."""
    recorder = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if recorder is None:
        pytest.skip("this torch has no _dump_fr_trace")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(4, dtype=torch.bfloat16))
        content = pickle.loads(recorder())  # noqa: S301
    finally:
        dist.destroy_process_group()
    if not content.get("entries"):
        pytest.skip("this torch does not record gloo")
    # gloo registers its groups before they have a name.
    content["pg_config"][content["entries"][-1]["process_group"][0]] = {"desc": "", "ranks": "[0]"}
    path = tmp_path / "nccl-rank-0"
    path.write_bytes(pickle.dumps(content))
    record = read_record(path, 0)
    operation = record.operations[-1]
    assert str(operation).startswith("all_reduce")
    assert operation.input_elements == 4
    assert operation.dtypes == ("BFloat16", "BFloat16")
    assert "test_nccl_diagnosis.py" in operation.frame
    built = Recorder(0)
    built.collective(WORLD, "all_reduce", 4)
    assert set(built.build()) <= set(content)
    assert set(built.build()["entries"][0]) <= set(content["entries"][-1])
