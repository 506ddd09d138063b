"""Two machines: network namespaces with a cable between them. Needs root.

A namespace lives as long as the process that holds it, which ends with this one: nothing is left
behind, however a test ends. All devices are made inside the namespaces; the network of the host is
not touched.
"""

import json
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

#: Addresses of the machines, on a network of their own.
ADDRESSES = ("10.77.0.1", "10.77.0.2")

_STEP_S = 20.0


class Machines:
    """Two network namespaces with host names and addresses of their own, and a cable between them.

    Args:
        rate: What the cable carries in each direction, in words of ``tc``; ``None`` for all it can.
    """

    def __init__(self, rate: str | None = None) -> None:
        self._rate = rate
        self._holders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        try:
            for number in range(len(ADDRESSES)):
                self._holders.append(_hold(f"machine-{number}"))
            self._plug_in()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, machine: int, *words: object) -> list[str]:
        """What runs a command on a machine."""
        process = self._holders[machine].pid
        spaces = [f"--{kind}=/proc/{process}/ns/{kind}" for kind in ("net", "uts")]
        return ["nsenter", *spaces, *map(str, words)]

    def run(self, machine: int, *words: object) -> str:
        """Runs a short command on a machine; returns what it printed."""
        done = subprocess.run(
            self.command(machine, *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_STEP_S,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}"
        return done.stdout

    def sent_bytes(self, machine: int) -> int:
        """What a machine has sent over its cable."""
        (device,) = json.loads(self.run(machine, "ip", "-s", "-j", "link", "show", "eth0"))
        return int(device["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Ends the namespaces."""
        for holder in self._holders:
            with holder:
                assert holder.stdin is not None
                holder.stdin.close()
                holder.wait(_STEP_S)
        self._holders.clear()

    def _plug_in(self) -> None:
        cable = ("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0")
        self.run(0, *cable, "netns", self._holders[1].pid)
        for number, address in enumerate(ADDRESSES):
            self.run(number, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self.run(number, "ip", "link", "set", device, "up")
            if self._rate is not None:
                # Room for two of the largest packets: those that do not fit would be cut into
                # pieces of 1,500 bytes by the cores that compute, and not by a network card.
                shape: Sequence[Any] = ("rate", self._rate, "burst", "128kb", "latency", "200ms")
                self.run(number, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *shape)


def _hold(name: str) -> subprocess.Popen[str]:
    """A process in fresh namespaces that ends with its standard input."""
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && echo held && exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert holder.stdout is not None
    said = holder.stdout.readline()
    assert said == "held\n", f"no namespace: {said}{holder.communicate('', _STEP_S)[0]}"
    return holder
