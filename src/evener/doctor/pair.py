"""Two machines as a team of two ranks, which exchange their facts and time their link.

The machine that listens is rank 0 and hosts the coordinator; the other one is rank 1.
"""

import statistics
import time
from dataclasses import asdict
from typing import Final

import torch
from pydantic import TypeAdapter

from evener.comm.addresses import join_address, open_port
from evener.comm.base import Communicator
from evener.devices import kind_of
from evener.doctor.host_facts import HostFacts, MeasuredLink
from evener.planning.policies import ApplyPolicy
from evener.team.backends import connect_team
from evener.team.environment import AverageBackend, DistributedTrainConfig
from evener.team.terminal import say

#: Seconds that the machine that listens waits for the other one.
LISTEN_S: Final = 600.0
#: Seconds that the other one waits for the machine that listens.
CALL_S: Final = 30.0

_ANSWER_S: Final = 60.0
_NUM_ROWS: Final = 15
_FIRST_BYTES: Final = 1 << 18
_MOST_BYTES: Final = 64 << 20
_LONG_ENOUGH_S: Final = 0.2
_FACTS: Final = TypeAdapter(HostFacts)


def examine_pair(
    host: str, port: int, here: HostFacts, token: bytes, *, listens: bool
) -> tuple[HostFacts, MeasuredLink]:
    """Connect to the other machine; both call it together.

    Args:
        host: Name or number of the machine that listens.
        port: Its port.
        here: The facts of this machine, which are sent to the other one.
        token: The token that both must know; needed unless ``host`` is loopback.
        listens: Whether this machine listens.

    Returns:
        The facts of the other machine, and the link to it.

    Raises:
        ConfigError: This machine would listen on another address than loopback without a token.
        LaunchError: It cannot listen, or the two cannot connect to each other.
        CollectiveError: The other machine is lost or does not answer.
    """
    if listens:  # the coordinator would refuse it later
        open_port(host, port, program="evener doctor", is_guarded=bool(token)).close()
        address = join_address(host, port)
        say(f"evener: doctor listens; run `evener doctor {address}` on the other machine")
    place = DistributedTrainConfig.of_rank(
        0 if listens else 1,
        2,
        local_rank=0,
        local_world_size=1,
        coordinator_addr=host,
        coordinator_port=port,
        coordinator_token=token.decode("latin-1"),
    )
    working = [device.name for device in here.accelerators if not device.failure]
    device = torch.device(working[0] if working else "cpu")
    kind_of(device).select(device)
    timeout_s = LISTEN_S if listens else CALL_S
    comm, _ = connect_team(place, AverageBackend.AUTO, ApplyPolicy.SYNC, device, timeout_s)
    with comm:
        comm.timeout_s = _ANSWER_S  # the other machine has connected
        hosts = comm.all_gather_json(asdict(here), what="facts of the hosts")
        return _FACTS.validate_python(hosts[1 - comm.rank]), _measure(comm, device)


def _measure(comm: Communicator, device: torch.device) -> MeasuredLink:
    rows_s = []
    for _ in range(_NUM_ROWS):
        started = time.monotonic()
        comm.all_gather_rows([0.0], what="a row")
        rows_s.append(time.monotonic() - started)
    speeds = [_speed_from(rank, comm, device) for rank in range(2)]
    return MeasuredLink(
        backend=comm.backend,
        reason=comm.reason,
        row_s=statistics.median(rows_s),
        bytes_per_s_there=speeds[comm.rank],
        bytes_per_s_here=speeds[1 - comm.rank],
    )


def _speed_from(rank: int, comm: Communicator, device: torch.device) -> float:
    """Return bytes per second of the first broadcast that takes long enough to be measured."""
    num_bytes = _FIRST_BYTES
    # Random numbers, because a tunnel may compress repeated bytes.
    sent = torch.randint(256, (_MOST_BYTES,), dtype=torch.uint8).to(device)
    comm.broadcast(sent[:num_bytes], rank, what="a first transfer")  # NCCL connects here
    while True:
        comm.barrier(what="the start of a transfer")
        started = time.monotonic()
        comm.broadcast(sent[:num_bytes], rank, what="a transfer")
        took_s = time.monotonic() - started
        # The sender may have finished before all bytes have arrived.
        took_s = comm.all_gather_rows([took_s], what="seconds of a transfer")[1 - rank][0]
        if took_s >= _LONG_ENOUGH_S or num_bytes >= _MOST_BYTES:
            return num_bytes / max(1e-6, took_s)
        num_bytes = min(_MOST_BYTES, 4 * num_bytes)
