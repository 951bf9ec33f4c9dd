"""Start Python programs as forks of a process that has imported torch, transformers and
shardwright.

A command with two ranks imports torch three times, which takes several seconds of CPU time each,
more than the few steps that a test trains. `run` and `Popen` take the arguments of `subprocess.run`
and `subprocess.Popen`. Where the command is `python -m MODULE` or `python -c CODE`, they fork a
server process instead of starting an interpreter. The program has the same state as after a real
start: `__main__`, arguments, environment, folder, standard streams, session, signal handlers,
random numbers, exit. Only the rate of fp32 products, which a run measures at its start, is that of
the server, but for servers that `serve_environment` adds.

Ranks which the command starts through torch's elastic launcher are forked as well, from a copy of
the server that the launcher has not touched, and are children of the launcher: it sees their exit
status, and they see its death.

A real interpreter starts where a fork is impossible: for environment variables that are read on
import (`READ_ON_IMPORT`) with other values than the server's, options of the interpreter, inherited
file descriptors, or a system other than Linux. `serve_environment` adds a server that has other
values.

Forks do not test whether the imports of a program suffice, or effects of the seed of Python's
hashes, which all forks share. Tests of these use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORTS = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "transformers",
    "shardwright.cli.train",
    "shardwright.training.rank_run",
    "shardwright.verification.cell",
)
"""Modules that the server imports."""
READ_ON_IMPORT = (
    "PYTHON",
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "ATEN_",
    "ONEDNN_",
    "DNNL_",
    "TORCH_CPP_",
    "TORCHDYNAMO",
    "TORCHINDUCTOR",
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC_",
    "GLIBC_",
)
"""Prefixes of environment variables that are read when an interpreter starts or a library is
imported.
"""
READ_WHEN_USED = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables with such a prefix that a fork can change. The import of torch's compiler sets this one
in the middle of the first test that trains.
"""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables that the server adds to its environment, as `launch_ranks` does for its ranks."""

ROOT = Path(__file__).parents[1]
"""Root of the repository, from which `-m tests.MODULE` starts."""

_MAX_REQUEST_BYTES = 1 << 20
"""Upper limit of a request, in bytes: an environment and a command line."""
_PR_SET_CHILD_SUBREAPER = 36
_SERVER_SECONDS = 300.0
"""Longest time of the server's imports on a busy machine."""
_CEILING_OPTION = "--with-ceiling"
"""Option of the server of this process; programs of added servers measure the rate of products, as
started programs do.
"""
_PADDING = {"SHARDWRIGHT_FORK_PADDING": "x" * (1 << 15)}
"""Room in the server's initial environment, into which forked programs write theirs."""


@dataclass(frozen=True)
class Request:
    """Program to run. `words` are the interpreter's arguments, `-m` or `-c` first."""

    words: tuple[str, ...]
    environment: dict[str, str]
    folder: str | None
    is_unbuffered: bool
    """True if standard output and error are written at once (`python -u`)."""
    is_session: bool
    """True if the program leads a session of its own."""


class _Server:
    """Client of a process that forks itself: the socket for requests."""

    def __init__(
        self, requests: socket.socket, environment: Mapping[str, str], *, is_parent: bool
    ) -> None:
        self.requests = requests
        self.pid = os.getpid()
        self.is_parent = is_parent
        """True if forked programs become children of this process."""
        self.environment = select_read_on_import(environment) | QUIET

    def fork(self, request: Request, streams: Sequence[int]) -> socket.socket:
        """Fork a program with these standard streams; return the socket that sends its process id
        and later its status.
        """
        near_end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            socket.send_fds(self.requests, [pickle.dumps(request)], [*streams, far_end.fileno()])
        return near_end


_environment = dict(os.environ)
"""Environment of this process before tests change theirs. The server has it, whichever of them
starts it: with another one it could not serve the later tests.
"""
_servers: list[_Server] = []
"""Server of this process, once it is started."""
_added_servers: list[_Server] = []
"""Servers with other environments."""


def select_read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that a fork cannot change."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_ON_IMPORT) and name not in READ_WHEN_USED
    }


def _find_server(environment: Mapping[str, str]) -> _Server | None:
    """Return the server with these variables, if there is one; start that of this process."""
    wanted = QUIET | select_read_on_import(environment)
    for server in _added_servers:
        if server.pid == os.getpid() and server.environment == wanted:
            return server
    if not _servers or _servers[0].pid != os.getpid():
        server, process = _start_server(_environment, _CEILING_OPTION)
        atexit.register(_end_server, server, process)
        _servers[:] = [server]
    return _servers[0] if _servers[0].environment == wanted else None


@contextmanager
def serve_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Fork programs with this environment too."""
    if sys.platform != "linux":
        yield
        return
    server, process = _start_server(environment)
    _added_servers.append(server)
    try:
        yield
    finally:
        _added_servers.remove(server)
        _end_server(server, process)


def _start_server(
    environment: Mapping[str, str], *options: str
) -> tuple[_Server, subprocess.Popen[bytes]]:
    near_end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far_end:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(far_end.fileno()), *options],
            cwd=ROOT,
            env={**environment, **QUIET, **_PADDING},
            stdin=subprocess.DEVNULL,
            pass_fds=[far_end.fileno()],
        )
    near_end.settimeout(_SERVER_SECONDS)
    assert near_end.recv(1) == b"!", "the server ended before its first request"
    near_end.settimeout(None)
    return _Server(near_end, environment, is_parent=False), process


def _end_server(server: _Server, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == server.pid:  # not in a fork
        server.requests.close()
        process.wait()


class Popen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks the server where the result is the same."""

    _status_channel: socket.socket | None = None
    """Socket with the status of a forked program that is not a child of this process."""

    def _execute_child(  # type: ignore[override, unused-ignore]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *others: Any,
    ) -> None:
        *_, umask, is_session, process_group = others
        words = (
            ()
            if isinstance(args, str | bytes | os.PathLike)
            else tuple(os.fspath(word) for word in args)
        )
        is_plain = (
            not (executable or preexec_fn or pass_fds or shell)
            and close_fds
            and umask < 0
            and process_group < 0
        )
        environment = dict(os.environ if env is None else env)
        is_forked = sys.platform == "linux" and is_plain and is_program(words)
        server = _find_server(environment) if is_forked else None
        if server is None:
            arguments = (
                args,
                executable,
                preexec_fn,
                close_fds,
                pass_fds,
                cwd,
                env,
                startupinfo,
                creationflags,
                shell,
            )
            ends = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            super()._execute_child(*arguments, *ends, *others)  # type: ignore[misc, unused-ignore]
            return
        is_unbuffered = words[1] == "-u"
        request = Request(
            words[2:] if is_unbuffered else words[1:],
            environment,
            os.fspath(cwd or os.getcwd()),
            is_unbuffered,
            is_session,
        )
        streams = (p2cread, c2pwrite, errwrite)
        channel = server.fork(
            request, [stream if stream >= 0 else own for own, stream in enumerate(streams)]
        )
        for end, remaining in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if end >= 0 and remaining >= 0:
                os.close(end)
        answer = channel.recv(16)
        assert answer, "the fork server has ended"
        self.pid = int(answer)
        self._child_created = True
        if server.is_parent:
            channel.close()
            # Until then a poll would find no child, and take its status for 0.
            while _read_parent(self.pid) != os.getpid():
                time.sleep(0.001)
        else:
            self._status_channel = channel

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status_channel is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc, unused-ignore, no-any-return]
        if not select.select(
            [self._status_channel], [], [], 0 if wait_flags & os.WNOHANG else None
        )[0]:
            return 0, 0
        status = int(self._status_channel.recv(16))
        self._status_channel.close()
        return self.pid, status

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._status_channel is None:
            poll = super()._internal_poll  # type: ignore[misc, unused-ignore]
            return poll(*arguments, **options)  # type: ignore[unused-ignore, no-any-return]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined, unused-ignore]
        return self.returncode


def _read_parent(pid: int) -> int:
    """Return the process id of a process's parent; it may have ended but not been waited for."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_program(words: Sequence[str]) -> bool:
    """True for `python -m MODULE ...` and `python -c CODE ...`, with or without `-u`."""
    if len(words) < 3 or words[0] != sys.executable:
        return False
    return words[1] in ("-m", "-c") or (words[1] == "-u" and words[2] in ("-m", "-c"))


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a command as `subprocess.run`, by a fork where the result is the same."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# The server's side.


def _serve(requests: socket.socket) -> Request:
    """Fork a program for each request and send its process id and status; return in the program."""
    while True:
        request, streams = _receive(requests)
        if os.fork() == 0:
            requests.close()
            if (program := os.fork()) == 0:
                _apply_request(request, streams)
                _prepare_ranks()
                return request
            for stream in streams[:3]:
                os.close(stream)
            with socket.socket(fileno=streams[3]) as channel:
                channel.send(b"%d" % program)
                channel.send(b"%d" % os.waitpid(program, 0)[1])
            os._exit(0)
        _close_all(streams)
        while _reap():
            pass


def _reap() -> bool:
    """Reap one child that has ended, if there is one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _prepare_ranks() -> None:
    """Fork a copy of this process, from which ranks are forked, before the program changes it."""
    libc = ctypes.CDLL(None, use_errno=True)
    # A rank's parent ends at once, and the nearest subreaper among its ancestors becomes its
    # parent: this process.
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    launcher = os.getpid()
    near_end, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        near_end.close()
        _execute(_serve_ranks(far_end, launcher))
    far_end.close()
    _servers[:] = [_Server(near_end, os.environ, is_parent=True)]


def _serve_ranks(requests: socket.socket, launcher: int) -> Request:
    """Fork a child of the launcher for each request; return in the child."""
    while True:
        request, streams = _receive(requests)
        if (intermediate := os.fork()) == 0:
            intermediate = os.getpid()
            requests.close()
            if rank := os.fork():
                with socket.socket(fileno=streams[3]) as channel:
                    channel.send(b"%d" % rank)
                os._exit(0)
            while os.getppid() == intermediate:
                time.sleep(0.001)
            libc = ctypes.CDLL(None)
            assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
            _apply_request(request, streams)
            if "WORLD_SIZE" not in request.environment:  # a program's command, not a rank
                _prepare_ranks()
            return request
        _close_all(streams)
        os.waitpid(intermediate, 0)


def _receive(requests: socket.socket) -> tuple[Request, list[int]]:
    """Receive a request and its standard streams; end this process if the client has ended."""
    message, streams, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 4)
    if not message:
        os._exit(0)
    return pickle.loads(message), list(streams)  # our own process's bytes  # noqa: S301


def _close_all(streams: Sequence[int]) -> None:
    for stream in streams:
        os.close(stream)


def _apply_request(request: Request, streams: Sequence[int]) -> None:
    """Give this process the properties of the request."""
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
    _close_all(streams)
    _open_standard_streams(request.is_unbuffered)
    faulthandler.enable()
    if request.is_session:
        os.setsid()
    if request.folder is not None:
        os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _expose_environment(request.environment)
    time.tzset()
    tempfile.tempdir = None  # as TMPDIR has it now
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator and torch's need nothing


def _expose_environment(environment: Mapping[str, str]) -> None:
    """Write the environment where /proc/PID/environ and psutil read it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin = int(fields[47])  # env_start of proc(5)
    end = int(fields[48])  # env_end
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(block) < end - begin, "the padding of the server's environment is too small"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, block, len(block))


def _open_standard_streams(is_unbuffered: bool) -> None:
    """Open the standard streams as an interpreter does at its start.

    Python's streams remember if their file can seek, and the server's may be of another kind.
    """
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
        2, "w", errors="backslashreplace", closefd=False
    )
    sys.stdout.reconfigure(write_through=is_unbuffered)
    sys.stderr.reconfigure(line_buffering=True, write_through=is_unbuffered)


def _execute(request: Request) -> None:
    """Run the program as the interpreter would, then end this process."""
    kind, target, *words = request.words
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["-c" if kind == "-c" else "-m", *words]
    sys.path[0] = "" if kind == "-c" else os.getcwd()
    status = 0
    try:
        if kind == "-c":
            exec(compile(target, "<string>", "exec"), vars(main))  # noqa: S102 (a test's program)
        else:
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    except BaseException as error:
        status = _print_error(error)
    # The interpreter's next steps, without the finalisation of all modules, which takes longer than
    # most programs.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by the program or by its reader
            stream.flush()
    os._exit(status)


def _print_error(error: BaseException) -> int:
    """Print the error that ended the program as the interpreter does; return the exit status."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _import_all() -> None:
    for name in IMPORTS:
        import_module(name)
    # A forked launcher forks its ranks too.
    import_module(
        "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    ).Popen = Popen
    # Otherwise a launch takes four times as long: for the name of each event torch inspects the
    # stack, twice, and Python searches all modules for a frame that has no file, as runpy's.
    rendezvous = import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    nodes = import_module("shardwright.launch.nodes")
    assert nodes.Popen is subprocess.Popen  # where the processes of ranks are started
    nodes.Popen = Popen
    # Otherwise every program's first full collection copies the pages of all imports.
    import_module("shardwright.training.garbage_collection").freeze_imports()
    if _CEILING_OPTION in sys.argv:
        _measure_ceiling()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, (
        f"a process with {len(threads)} threads cannot be forked: an import starts some"
    )


def _measure_ceiling() -> None:
    """Measure the denominator of MFU once: each rank would take as long as for its first steps."""
    cpu = import_module("torch").device("cpu")
    dtype = import_module("torch").float32
    measure = import_module("shardwright.numerics.peak_flops").measure_matmul_flops_per_second
    import_module("shardwright.training.setup")._ceilings[cpu, dtype] = measure(cpu, dtype)


if __name__ == "__main__":
    # Imported by its name too, so that `Popen` and its server are one.
    from tests import forked

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the programs
    forked._import_all()
    requests_socket = socket.socket(fileno=int(sys.argv[1]))
    requests_socket.send(b"!")
    forked._execute(forked._serve(requests_socket))
