"""The ranks that a ``DistributedTrainer`` trains with: threads of this process, or processes."""

import os
from dataclasses import replace
from typing import Self, final

import torch

from evener.closing import Closing
from evener.comm.base import Communicator, check_timeout
from evener.comm.existing import default_group, numbers_in
from evener.comm.threads import ThreadTeam
from evener.config.checks import require, whole_number
from evener.errors import ConfigError
from evener.planning.policies import ApplyPolicy
from evener.team.backends import connect_team
from evener.team.environment import AverageBackend, DistributedTrainConfig
from evener.team.fixed import place_in
from evener.team.host import threads_per_rank
from evener.team.placement import choose_device

_TIMEOUT_S = 600.0


@final
class DistributedComm(Closing):
    """One rank's end of a connection to the others.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        config: This rank's place.
        shares_process: Whether the other ranks are threads of this process.
        communicator: The communicator; not part of the public interface.
    """

    def __init__(
        self,
        communicator: Communicator,
        config: DistributedTrainConfig,
        *,
        shares_process: bool = False,
    ) -> None:
        self.communicator = communicator
        self.config = config
        self.shares_process = shares_process
        self.rank = communicator.rank
        self.world_size = communicator.world_size

    @classmethod
    def local(cls, num_ranks: int, *, timeout_s: float = _TIMEOUT_S) -> list[Self]:
        """Return connected ends for threads of this process, by rank; each thread uses one.

        Args:
            num_ranks: 1 or more.
            timeout_s: Longest wait for another rank.

        Raises:
            ConfigError: A number is not whole, or out of range.
        """
        num_ranks = whole_number("num_ranks", num_ranks, 1)
        places = [DistributedTrainConfig.of_rank(rank, num_ranks) for rank in range(num_ranks)]
        if num_ranks == 1:
            return [cls(Communicator(timeout_s=timeout_s), places[0])]
        team = ThreadTeam(num_ranks, timeout_s=check_timeout(timeout_s))
        return [cls(team.communicator(p.rank), p, shares_process=True) for p in places]

    @classmethod
    def remote(cls, config: DistributedTrainConfig, *, timeout_s: float = _TIMEOUT_S) -> Self:
        """Meet the other ranks over the network; all ranks call it together.

        A script that has called ``torch.distributed.init_process_group`` has met them already: with
        a default group of as many ranks, they meet through it, and the address is not used.

        Args:
            config: This rank's place. Its ``comm_backend`` says how ranks exchange, its ``backend``
                on what this one computes.
            timeout_s: Longest wait for another rank.

        Raises:
            ConfigError: The address is unknown here, there is no port, a device that was asked for
                is not there, or the default group numbers its ranks otherwise.
            LaunchError: A rank did not come, or was started for another ``world_size``.
        """
        remedy = "this rank's place, such as DistributedTrainConfig.from_env()"
        require("config", config, DistributedTrainConfig, remedy)
        check_timeout(timeout_s)
        device = choose_device("auto", config)
        communicator, _ = connect_team(
            _meeting_place(config),
            AverageBackend.AUTO.value,
            ApplyPolicy.SYNC.value,
            device,
            timeout_s,
        )
        return cls(communicator, config)

    def barrier(self) -> None:
        """Return when every rank has called it.

        Raises:
            PeerLostError: A rank has ended.
            CollectiveTimeoutError: A rank did not come in time; says which.
        """
        self.communicator.barrier(what="DistributedComm.barrier")

    def close(self) -> None:
        """Let the connection go; who still needs this rank gets ``PeerLostError``. Idempotent."""
        self.communicator.close()


def share_cores(num_ranks: int) -> None:
    """Let this thread compute with its part of the cores, unless ``OMP_NUM_THREADS`` says how.

    Args:
        num_ranks: Ranks that are threads of this process and compute on the CPU.
    """
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(threads_per_rank(num_ranks))


def _meeting_place(config: DistributedTrainConfig) -> DistributedTrainConfig:
    """Return the same rank, with an address at which the others can be met."""
    group = default_group()
    if group is not None and config.world_size > 1 and group.size() == config.world_size:
        for rank, number in enumerate(numbers_in(group, config.rank)):
            if number != rank:
                raise ConfigError(
                    f"the DistributedTrainConfig of rank {rank} of the default process group says "
                    f"rank {number}; number ranks alike in both"
                )
        place = place_in(group)
        return replace(place, backend=config.backend, comm_backend=config.comm_backend)
    if config.world_size > 1 and not config.coordinator_port:
        raise ConfigError(
            f"coordinator_port is 0 for a team of {config.world_size}; give every rank the "
            "same free port of rank 0's host, such as 29500"
        )
    return config
