"""``DistributedTrainer`` over processes: as one process, large buckets, bad places."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from evener import (
    ConfigError,
    DdpConfig,
    DistributedComm,
    DistributedTrainConfig,
    DistributedTrainer,
    LMBatch,
    TransformerTrainer,
)
from helpers.forking import Zygote
from helpers.language import llama, lm_batch, relative_error, train_plainly, union, vector
from helpers.limits import PATIENCE_S
from helpers.ranks import Rank, run_ranks

LR = 1e-3
NEEDED = ("evener.tasks.trainers.distributed", "transformers.models.llama.modeling_llama")
QUIET = DdpConfig(quiet=True)


def own_batch(step: int, rank: int) -> LMBatch:
    return lm_batch(10 * step + rank, 1 + (step + 3 * rank) % 4)


def train(rank: Rank, folder: str) -> Any:
    """As started by hand, with one file for all."""
    config = DistributedTrainConfig.from_yaml(
        Path(folder) / "team.yaml",
        rank=rank.rank,
        coordinator_port=rank.port,
        # Rank 0 may listen on every address; the others connect to the one in the file.
        **({} if rank.rank else {"coordinator_addr": "0.0.0.0"}),
    )
    model = llama(seed=rank.rank)
    with (
        DistributedComm.remote(config, timeout_s=PATIENCE_S) as comm,
        DistributedTrainer(
            TransformerTrainer(model, {"lr": LR}), comm, config, options=QUIET
        ) as trainer,
    ):
        comm.barrier()
        for step in range(3):
            trainer.train_batch(own_batch(step, rank.rank))
    return vector(model).numpy()


def test_processes_train_as_one_on_the_union_batch(tmp_path: Path) -> None:
    (tmp_path / "team.yaml").write_text("{world_size: 2, coordinator_addr: localhost}")
    unions = [union([own_batch(step, rank) for rank in range(2)]) for step in range(3)]
    true = vector(train_plainly(llama(), unions, lr=LR))
    Zygote.get().preload(*NEEDED)
    vectors = [torch.from_numpy(v) for v in run_ranks(train, 2, str(tmp_path))]
    for mine in vectors:
        assert torch.equal(mine, vectors[0])
    assert relative_error(vectors[0], true) <= 1e-6


def meet_in_group(rank: Rank, address: str) -> tuple[int, int, int]:
    """As under ``evener launch``, whose port torch has taken for its own store."""
    dist.init_process_group("gloo", init_method=address, rank=rank.rank, world_size=rank.world_size)
    backwards = DistributedTrainConfig.of_rank(2 - rank.rank, rank.world_size)
    with pytest.raises(ConfigError, match="of rank 0 of the default process group says rank 2"):
        DistributedComm.remote(backwards)
    place = {"local_rank": rank.rank // 2, "local_world_size": 2, "backend": "cpu"}
    config = DistributedTrainConfig.of_rank(
        rank.rank, rank.world_size, coordinator_addr="no-such-host.invalid", **place
    )
    with (
        DistributedComm.remote(config, timeout_s=PATIENCE_S) as comm,
        DistributedTrainer(TransformerTrainer(llama(1)), comm, options=QUIET) as trainer,
    ):
        trainer.train_batch(own_batch(0, rank.rank))
        found = (trainer.step, trainer.dist_config.local_rank, trainer.world_size)
        assert "NCCL connects only GPUs" in trainer.trainer.ddp.assembly.comm.reason
    dist.destroy_process_group()
    return found


def test_ranks_that_have_a_process_group_meet_through_it(tmp_path: Path) -> None:
    Zygote.get().preload(*NEEDED)
    found = run_ranks(meet_in_group, 3, f"file://{tmp_path}/store")
    # The place is the one that was given to `remote`.
    assert found == [(1, 0, 3), (1, 0, 3), (1, 1, 3)]


def train_large(rank: Rank) -> list[tuple[str, int]]:
    config = DistributedTrainConfig.from_env()
    model = llama(1, tied=True, vocab_size=32_768 + 64, hidden_size=1024, initializer_range=0.02)
    with (
        DistributedComm.remote(config, timeout_s=PATIENCE_S) as comm,
        DistributedTrainer(
            TransformerTrainer(model, {"lr": LR}), comm, config, options=QUIET
        ) as trainer,
    ):
        before = model.get_input_embeddings().weight[-1].clone()
        trainer.train_batch(lm_batch(rank.rank, 1, vocabulary=32_832))  # ranks are compared
        assert not torch.equal(model.get_input_embeddings().weight[-1], before)
        return [(b.label, 4 * sum(b.sizes.values())) for b in trainer.buckets]


@pytest.mark.long
def test_a_bucket_of_more_than_134_million_bytes_passes() -> None:
    Zygote.get().preload(*NEEDED)
    first, second = run_ranks(train_large, 2)
    assert first == second
    assert first[-1] == ("embedding", (32_768 + 64) * 1024 * 4)
    assert first[-1][1] > 134_217_728
