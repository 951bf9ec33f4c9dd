"""Hosts on this machine: network namespaces with addresses and host names of their own.

They need root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COMMANDS = ("ip", "nsenter", "unshare")
_ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
"""Shell that gives a process the host name and the host table of its host."""


def find_obstacle() -> str | None:
    """Return why no host can be made here; None if they can."""
    missing = [name for name in COMMANDS if shutil.which(name, path=build_path()) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux)"
    return None if os.geteuid() == 0 else "network namespaces need root"


@dataclass(frozen=True)
class NetworkHosts:
    """Hosts by name with their addresses in one network of 256; `hub` has the bridge."""

    folder: Path
    addresses: Mapping[str, str]
    hub: str

    def create(self) -> None:
        """Create a namespace per host; a bridge in the hub's joins them.

        Raises:
            RuntimeError: the namespaces cannot be created.
        """
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{address} {name}" for name, address in self.addresses.items()]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        try:
            for name in self.addresses:
                _ip("netns", "add", self._get_namespace(name))
                _ip("-n", self._get_namespace(name), "link", "set", "lo", "up")
            hub = self._get_namespace(self.hub)
            _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", hub, "address", "add", f"{self.addresses[self.hub]}/24", "dev", "bridge")
            _ip("-n", hub, "link", "set", "bridge", "up")
            for name in self.addresses:
                if name == self.hub:
                    continue
                host = self._get_namespace(name)
                peer = ["peer", "name", "eth0", "netns", host]
                _ip("-n", hub, "link", "add", name, "type", "veth", *peer)
                _ip("-n", hub, "link", "set", name, "master", "bridge", "up")
                _ip("-n", host, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
                _ip("-n", host, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"no network namespaces: {error.stderr.decode().strip()}") from error

    def delete(self) -> None:
        """Kill what runs on the hosts and remove their namespaces."""
        for name in self.addresses:
            self.kill(name)
            subprocess.run(
                ["ip", "netns", "delete", self._get_namespace(name)],
                capture_output=True,
                check=False,
            )

    def build_command(self, name: str, *command: str) -> list[str]:
        """Return the command that runs `command` on a host."""
        hosts = str(self.folder / "hosts")
        inside = ["unshare", "--uts", "--mount", "sh", "-c", _ENTER, name, hosts, *command]
        # `ip netns exec` would hide the control groups, without which slurmd does not start.
        return ["nsenter", f"--net=/run/netns/{self._get_namespace(name)}", *inside]

    def kill(self, name: str) -> None:
        """Kill all processes of a host at once, as a power failure does."""
        listing = subprocess.run(
            ["ip", "netns", "pids", self._get_namespace(name)],
            capture_output=True,
            text=True,
            check=False,
        )
        for word in listing.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)

    def disconnect(self, name: str) -> None:
        """Take a host off the network without ending anything on it."""
        _ip("-n", self._get_namespace(self.hub), "link", "set", name, "down")

    def _get_namespace(self, name: str) -> str:
        return f"shardwright-{os.getpid()}-{name}"


def build_path() -> str:
    """Return PATH with the folders of programs that only root has."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
