"""A forked program behaves like a started one: the same programs, by interpreter and by fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere all programs are started"
)

PROGRAMS = {
    "exit status": "import sys; sys.exit(3)",
    "exit status of more than a byte": "import sys; sys.exit(-1)",
    "last words": "import sys; sys.exit('so long')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)",
    "ignores a broken pipe": "import signal;"
    "print(signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGTERM))",
    "at exit": "import atexit; atexit.register(print, 'last', flush=True); print('first')",
    "waits for threads": "import threading; threading.Timer(0.2, print, ['late']).start();"
    "print('early')",
    "arguments": "import sys; print(sys.argv, sys.path[0], __name__)",
    "environment": "import os; print(os.environ['WORD'], 'HOME' in os.environ, os.getcwd())",
    "environment of the process": (
        "import os; print(sorted(set(open('/proc/self/environ').read().split(chr(0))) - {''}))"
    ),
    "input": "import sys; print(sys.stdin.read().upper())",
    "a session": "import os; print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())",
    "temporary files": "import tempfile; print(tempfile.gettempdir())",
    "open files": "import os; print(sorted(os.listdir('/proc/self/fd'), key=int)[:4])",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_forked_program_behaves_like_a_started_one(program: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HOME"} | {
        "WORD": "two words",
        "TMPDIR": str(tmp_path),
    }
    options: dict[str, Any] = {
        "text": True,
        "env": environment,
        "cwd": tmp_path,
        "start_new_session": True,
    }
    command = [sys.executable, "-c", PROGRAMS[program], "--json", "one"]
    outcomes = []
    for runner in (subprocess, forked):
        with runner.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        ) as process:
            assert isinstance(process, forked.Popen) == (runner is forked)
            assert (getattr(process, "_status_channel", None) is not None) == (runner is forked), (
                "it was not forked"
            )
            out, err = process.communicate("in", timeout=250)
        outcomes.append((process.returncode, out, err.splitlines()[-1:]))
    assert outcomes[0] == outcomes[1]


def test_a_module_runs_as_main() -> None:
    command = [sys.executable, "-m", "shardwright", "--version"]
    forked_result, started = (
        runner.run(command, capture_output=True, text=True) for runner in (forked, subprocess)
    )
    assert (forked_result.returncode, forked_result.stdout, forked_result.stderr) == (
        0,
        started.stdout,
        "",
    )


def test_a_program_that_cannot_be_forked_is_started() -> None:
    command = [sys.executable, "-c", "import os, sys; print('torch' in sys.modules, os.getppid())"]
    assert forked.run(command, capture_output=True, text=True).stdout.startswith("True ")
    changed = os.environ | {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}
    assert (
        forked.run(command, capture_output=True, text=True, env=changed).stdout
        == f"False {os.getpid()}\n"
    )
    isolated = [sys.executable, "-I", *command[1:]]
    assert forked.run(isolated, capture_output=True, text=True).stdout == f"False {os.getpid()}\n"


def test_a_program_is_forked_after_the_import_of_the_compiler(tmp_path: Path) -> None:
    code = "import os, sys; print('torch' in sys.modules, os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    changed = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = forked.run([sys.executable, "-c", code], capture_output=True, text=True, env=changed)
    assert done.stdout == f"True {tmp_path}\n"


def test_the_server_does_not_have_the_environment_of_the_test_that_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environments = []

    def refuse(environment: Mapping[str, str], *_options: str) -> None:
        environments.append(environment)
        raise InterruptedError

    monkeypatch.setattr(forked, "_start_server", refuse)
    monkeypatch.setattr(forked, "_servers", [])
    monkeypatch.setenv("HF_VARIABLE_OF_THIS_TEST", "1")
    with pytest.raises(InterruptedError):
        forked.run([sys.executable, "-c", "print()"])
    assert "HF_VARIABLE_OF_THIS_TEST" not in environments[0]


def test_a_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.5)


def test_signals_reach_a_program_and_poll_returns_its_status() -> None:
    with forked.Popen(
        [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.poll() is None
        process.terminate()
        while process.poll() is None:
            time.sleep(0.01)
    assert process.returncode == -signal.SIGTERM


LAUNCHER = """
import os, sys
from subprocess import PIPE
from shardwright.errors import RankFailed
from shardwright.launch.launcher import launch_ranks
changed = "by the launcher"
os.changed = True
try:
    launch_ranks(2, "tests.unit.forked_rank", [str(os.getpid()), *sys.argv[1:]])
except RankFailed as error:
    print(str(error).partition(".")[0])
"""


@pytest.mark.parametrize("end", ["well", "killed"])
def test_forked_ranks_are_children_of_their_launcher_without_its_state(end: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, end]
    completed = forked.run(
        command,
        capture_output=True,
        text=True,
        cwd=forked.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr
    if end == "killed":  # possibly before its peer has printed anything
        assert (
            completed.stdout.splitlines()[-1]
            == "rank 1 was killed by SIGKILL; the system may be out of memory"
        )
    else:
        assert completed.stdout == "True True False\n"
