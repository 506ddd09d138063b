"""Finds the ranks of a process group that the user has made with ``torch.distributed``.

The group is used to exchange addresses, and then left alone: evener's own connections have a
deadline on every wait and survive its loss, and a collective of the user cannot fall in between.
"""

import os
import secrets
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.addresses import bind, is_loopback
from evener.comm.network import own_address
from evener.devices import count_accelerators
from evener.errors import ConfigError, LaunchError

_BYTES = 256  # enough for a host name and a port

#: They do not listen, so rank 0's coordinator may; the kernel gives their ports to no other.
_reserved: list[socket.socket] = []


def default_group() -> Any:
    """Return the default process group, if the user has made one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def numbers_in(group: Any, number: int) -> list[int]:
    """Return the number that each rank of a group has elsewhere; all its ranks call it together."""
    return [int(said) for said in _gather(group, str(number).encode())]


def find_place(group: Any) -> dict[str, Any]:
    """Find this process's place in a group; all its ranks call it together.

    Returns:
        Fields of a ``DistributedTrainConfig``, by name.

    Raises:
        ConfigError: This process is not in the group.
        LaunchError: Rank 0 has no port.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ConfigError(
            "process_group does not hold this process; call Ddp.setup only on the group's ranks"
        )
    own = socket.gethostname()
    hosts = _gather(group, own.encode())
    one_host = len(set(hosts)) == 1
    address, port, token = "127.0.0.1", 0, ""
    if rank == 0 and world_size > 1:
        address = address if one_host else _reachable_address()
        try:
            _reserved.append(bind(address, 0))
        except OSError as error:
            raise LaunchError(f"rank 0 cannot listen on {address} ({error.strerror})") from None
        port, token = _reserved[-1].getsockname()[1], secrets.token_hex(16)
    port_text, token, address = (
        _gather(group, f"{port} {token} {address}".encode())[0].decode().split(" ")
    )
    port = int(port_text)
    local = [r for r, host in enumerate(hosts) if host == own.encode()[:_BYTES]]
    return {
        "rank": rank, "world_size": world_size,
        "local_rank": local.index(rank), "local_world_size": len(local),
        "coordinator_addr": address, "coordinator_port": port, "coordinator_token": token,
    }  # fmt: skip


def _reachable_address() -> str:
    """Return this host's address for the others: a number where possible, as it needs no DNS."""
    name = socket.gethostname()
    # On the network on which the ranks have met, if it is known.
    address = own_address(os.environ.get("MASTER_ADDR") or name, 1)
    return name if is_loopback(address) else address


def device_of_group(backend: str, kinds: Iterable[str]) -> str:
    """Return the device type for tensors that a group exchanges, on its current device.

    Args:
        backend: The group's backend, such as ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.
        kinds: Accelerators of this host.
    """
    own_backends = dist.Backend.default_device_backend_map
    if "gloo" not in backend:
        for kind in kinds:
            if own_backends.get(kind, "none") in backend:
                return kind
    return "cpu"


def _gather(group: Any, payload: bytes, num_bytes: int = _BYTES) -> list[bytes]:
    """Return every rank's payload of at most ``num_bytes``, as tensors: nothing is pickled."""
    device = torch.device(device_of_group(str(dist.get_backend(group)), count_accelerators()))
    padded = bytearray(payload[:num_bytes].ljust(num_bytes, b"\0"))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return [part.cpu().numpy().tobytes().rstrip(b"\0") for part in parts]
