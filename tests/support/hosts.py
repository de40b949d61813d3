"""Hosts: two network namespaces joined by a cable, each as a machine of its own to the processes that run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest


class Host(NamedTuple):
    """One of them.

    Attributes:
        name: of the namespace.
        address: on the cable.
        interface: that the cable is plugged into.
    """

    name: str
    address: str
    interface: str

    def start(self, arguments: Sequence[str], **environment: str) -> subprocess.Popen[str]:
        """Start a process of this Python here; what it prints is kept."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, sys.executable, *arguments],
            env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": self.interface},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make them, and remove them at the end; the test is skipped where none can be made."""
    first, second = (Host(f"tba-{os.getpid()}-{n}", f"10.213.77.{n}", f"tba{n}") for n in (1, 2))
    with ExitStack() as stack:
        for host in (first, second):
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "delete", host.name)
        _ip(
            "-n",
            first.name,
            "link",
            "add",
            first.interface,
            "type",
            "veth",
            "peer",
            second.interface,
            "netns",
            second.name,
        )
        for host in (first, second):
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.name, "link", "set", interface, "up")
        yield first, second


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}, {getattr(error, 'stderr', '')}")
