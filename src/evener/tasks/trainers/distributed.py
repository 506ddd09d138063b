"""``DistributedTrainer``: a causal language model on all ranks; the caller owns the loop."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, final

import torch

from evener.comm.base import Communicator
from evener.comm.flat_groups import Bucket
from evener.config.checks import require
from evener.config.settings import DdpConfig
from evener.errors import ConfigError
from evener.tasks.lm_batch import LMBatch
from evener.tasks.trainers.distributed_comm import DistributedComm, share_cores
from evener.tasks.trainers.sharding import shard_batches
from evener.tasks.trainers.transformer import TransformerTrainer
from evener.team.environment import AverageBackend, DistributedTrainConfig


@final
class DistributedTrainer:
    """A rank of a team that trains a language model, with the engine of ``evener pretrain``.

    Every rank has its own batches, of any size. An update is that of one process on all of them:
    the gradient is Σ tokens · ∇(mean loss) / Σ tokens over ranks and batches. Gradients are
    exchanged in buckets, transformer blocks from the last to the first, then LM head, final norm
    and embedding; all at once if the update is sharded.

    The constructor is collective, and gives all ranks rank 0's weights. Ranks that are threads and
    compute on the CPU share its cores until they are closed, unless ``OMP_NUM_THREADS`` is set.

    Args:
        trainer: The trainer of this rank.
        comm: This rank's end; closed with the trainer.
        config: This rank's place; that of ``comm`` if left out.
        verify_every: Number of updates after which weights and averaged buffers of all ranks are
            compared by hashes, and after the last update; training stops if they differ. 0 does not
            compare. It reads them once and exchanges 16 bytes per rank. If left out, that of
            ``options``, or 1.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; ``"auto"`` is the fast one of this rank's
            device. Ranks may differ.
        options: Further options; deadlines are those of ``comm``.

    Attributes:
        trainer: As given.
        dist_config: This rank's place.
        rank: This rank.
        world_size: Number of ranks.

    Raises:
        ConfigError: config and connection contradict each other, or ranks train different models.
            If only one rank raises it, the others get ``PeerLostError``.
    """

    def __init__(
        self,
        trainer: TransformerTrainer,
        comm: DistributedComm,
        config: DistributedTrainConfig | None = None,
        *,
        verify_every: int | None = None,
        precision: str = "auto",
        options: DdpConfig | None = None,
    ) -> None:
        remedy = (
            "this rank's end: DistributedComm.remote(config), or one element of the list "
            "DistributedComm.local(num_ranks)"
        )
        require("comm", comm, DistributedComm, remedy)
        self.trainer = trainer
        self._comm = comm.communicator
        self.dist_config = config or comm.config
        self.rank = comm.rank
        self.world_size = comm.world_size
        options = options or DdpConfig()
        try:
            require("trainer", trainer, TransformerTrainer, "a TransformerTrainer(model)")
            place = self.dist_config
            if (place.rank, place.world_size) != (self.rank, self.world_size):
                raise ConfigError(
                    f"config says rank {place.rank} of {place.world_size}, and comm is the end of "
                    f"rank {self.rank} of {self.world_size}; give each rank the end of its own "
                    "number, and all the same world_size"
                )
            # Processes have agreed on it when they connected.
            wanted = self.dist_config.comm_backend if comm.shares_process else AverageBackend.AUTO
            if verify_every is None:
                verify_every = 1 if options.verify_every is None else options.verify_every
            self._ddp = trainer.join_team(
                environment=_as_started(self.dist_config, comm),
                communicator=comm.communicator,
                backend=wanted.value,
                precision=precision,
                config=replace(options, verify_every=verify_every),
            )
        except BaseException:
            comm.close()  # so the others notice at once that this rank will not come
            raise
        self._torch_threads = torch.get_num_threads()
        if comm.shares_process and self._ddp.device.type == "cpu":
            share_cores(comm.world_size)

    @property
    def is_coordinator(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """Optimizer steps so far; the same on every rank."""
        return self.trainer.step

    @property
    def reached_max_steps(self) -> bool:
        """Whether the trainer's ``max_steps`` have been made; the same on every rank."""
        return self.trainer.reached_max_steps

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of gradients in the order of exchange: labels, parameters, sizes.

        A sharded update exchanges all at once, unless ``DdpConfig(sharded_update="off")``.
        """
        return tuple(bucket for _, bucket in self._ddp.assembly.flat.buckets_of(None))

    def train_batch(self, batch: LMBatch | None) -> float:
        """Make one update with the batches of all ranks; all ranks call it together.

        Args:
            batch: This rank's batch; ``None`` on a rank without one, which still takes part.

        Returns:
            The mean loss per counted token of this rank's batch, in nats, before the update;
            ``nan`` without one.

        Raises:
            NonFiniteGradientError: On every rank; nothing was applied.
            ReplicasDifferError: On every rank: weights differ.
            PeerLostError: Another rank has ended.
            UsageError: ``max_steps`` has been reached.
        """
        loss = math.nan if batch is None else self.trainer.forward_backward_batch(batch)
        self.trainer.apply_gradients()
        return loss

    def train_epoch(self, batches: Sequence[LMBatch]) -> float:
        """Train on all batches once, each on one rank; all ranks call it together.

        Rank r trains on ``shard_batches(len(batches), r, world_size)``. An update uses one batch of
        each rank, and fewer at the end. It stops when ``max_steps`` is reached.

        Args:
            batches: The same on every rank; only this rank's are read.

        Returns:
            The mean loss per counted token of this rank's batches; ``nan`` without any.

        Raises:
            ConfigError: On every rank: the numbers of batches differ.
        """
        _check_lengths(self._comm, len(batches))
        own = shard_batches(len(batches), self.rank, self.world_size)
        loss_sum, num_tokens = 0.0, 0
        for turn in range(-(-len(batches) // self.world_size)):
            if self.reached_max_steps:
                break
            batch = batches[own[turn]] if turn < len(own) else None
            loss = self.train_batch(batch)
            if batch is not None and (tokens := batch.num_tokens):
                loss_sum += tokens * loss
                num_tokens += tokens
        return loss_sum / num_tokens if num_tokens else math.nan

    def close(self) -> None:
        """Leave the team and close the connection; the model stays usable. Idempotent."""
        torch.set_num_threads(self._torch_threads)
        self.trainer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.set_num_threads(self._torch_threads)
        self._ddp.__exit__(*exception)


def _as_started(config: DistributedTrainConfig, comm: DistributedComm) -> DistributedTrainConfig:
    """Return a place that says who has divided the cores of a host among its ranks."""
    if comm.shares_process:
        return replace(config, launched_by="alone")  # nobody: DistributedTrainer does
    by_hand = config.launched_by == "alone" and config.world_size > 1
    return replace(config, launched_by="the user") if by_hand else config


def _check_lengths(comm: Communicator, num_batches: int) -> None:
    """Compare the lengths of an epoch on all ranks: otherwise some batches would be skipped."""
    rows = comm.all_gather_rows([num_batches], what="batches of an epoch")
    lengths = [int(length) for (length,) in rows]
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"ranks were given epochs of {', '.join(map(str, lengths))} batches; give train_epoch "
            "the same list on every rank: it distributes the batches itself"
        )
