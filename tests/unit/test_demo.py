"""What `make demo` starts ends with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PARENT = """
import subprocess, sys
from recipes.demo import end_with_parent
child = subprocess.Popen([sys.executable, "-c", CHILD], preexec_fn=end_with_parent)
child.wait()
"""

CHILD = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # kept until it is waited for
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
sys.exit("asked to stop")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of a parent's death")
def test_a_child_is_asked_to_stop_when_its_parent_is_killed() -> None:
    program = PARENT.replace("CHILD", repr(CHILD))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        # Both ends of the pipes close when the child, too, is gone.
        assert parent.stdout.read() == ""
        assert parent.stderr.read() == "asked to stop\n"
