"""One rank of an examination that `examine` starts.

`python -m shardwright.doctor.worker REQUEST_ADAPTER DEFAULT_PATTERN`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardwright.doctor.diagnosis import DIAGNOSIS_ADAPTER, REQUEST_ADAPTER, Diagnosis, examine_rank
from shardwright.errors import ExitCode
from shardwright.launch.rank_environment import detect_rank_environment
from shardwright.launch.rank_outcome import write_outcome, write_pid


def main() -> int:
    """Examine as one rank; rank 0 writes the diagnosis for the process that started it."""
    ranks = detect_rank_environment()
    assert ranks is not None, "this module is started by examine"
    request_path, diagnosis_path = (Path(word) for word in sys.argv[1:3])

    def deliver(diagnosis: Diagnosis) -> None:
        partial = diagnosis_path.with_suffix(".partial")
        partial.write_bytes(DIAGNOSIS_ADAPTER.dump_json(diagnosis))
        partial.replace(diagnosis_path)

    write_pid(ranks.rank)
    failure: BaseException | None = None
    try:
        diagnosis = examine_rank(
            REQUEST_ADAPTER.validate_json(request_path.read_bytes()), ranks, deliver
        )
        if diagnosis is not None and ranks.rank == 0:
            deliver(diagnosis)
    except BaseException as error:
        failure = error
    return write_outcome(ranks.rank, failure) if failure is not None else ExitCode.DONE


if __name__ == "__main__":
    # Threads of process groups may still wait for peers that have ended.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
