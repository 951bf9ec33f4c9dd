"""One rank of an examination that `examine` starts.

`python -m shardwright.probe.worker ORDER ANSWER`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shardwright.errors import ExitCode
from shardwright.probe.doctor import DIAGNOSIS, ORDER, Diagnosis, examine_rank
from shardwright.train.outcome import note_outcome, note_process
from shardwright.train.ranks import find_ranks


def main() -> int:
    """Examine as one rank; rank 0 writes the diagnosis for the process that started it."""
    ranks = find_ranks()
    assert ranks is not None, "this module is started by examine"
    order, answer = (Path(word) for word in sys.argv[1:3])

    def deliver(diagnosis: Diagnosis) -> None:
        partial = answer.with_suffix(".partial")
        partial.write_bytes(DIAGNOSIS.dump_json(diagnosis))
        partial.replace(answer)

    note_process(ranks.rank)
    failure: BaseException | None = None
    try:
        diagnosis = examine_rank(ORDER.validate_json(order.read_bytes()), ranks, deliver)
        if diagnosis is not None and ranks.rank == 0:
            deliver(diagnosis)
    except BaseException as error:
        failure = error
    return note_outcome(ranks.rank, failure) if failure is not None else ExitCode.DONE


if __name__ == "__main__":
    # Threads of process groups may still wait for peers that have ended.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
