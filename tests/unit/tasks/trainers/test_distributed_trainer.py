"""``DistributedTrainer`` on threads: the mathematics of one process, checked replicas, errors."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import (
    CollectiveMismatchError,
    ConfigError,
    DdpConfig,
    DistributedComm,
    DistributedTrainConfig,
    DistributedTrainer,
    LMBatch,
    PeerLostError,
    ReplicasDifferError,
    TransformerTrainer,
    UsageError,
    shard_batches,
)
from evener.comm.base import Communicator
from helpers.language import (
    gpt2,
    llama,
    lm_batch,
    plain_loss,
    relative_error,
    train_plainly,
    union,
    vector,
)
from helpers.limits import PATIENCE_S
from helpers.teams import run_team

LR = 1e-3
#: A constant learning rate, so that the plain loop needs no schedule.
OPTIMIZER = {"lr": LR}


def on_threads(
    world_size: int, function: Callable[[DistributedComm, DistributedTrainConfig], Any]
) -> list[Any]:
    """By rank, what the function returned or raised."""
    llama(1)  # transformers cannot be imported on several threads at once
    ends = DistributedComm.local(world_size, timeout_s=PATIENCE_S)

    def body(comm: Communicator) -> Any:
        rank = comm.rank
        try:
            return function(ends[rank], DistributedTrainConfig.of_rank(rank, world_size))
        except Exception as error:
            return error
        finally:
            ends[rank].close()

    return run_team(world_size, body)


def quiet(**options: Any) -> dict[str, Any]:
    return {"options": DdpConfig(quiet=True, timeout_s=PATIENCE_S, **options)}


def share(step: int, rank: int) -> LMBatch:
    """A batch of one to four sequences, another size on every rank and in every step."""
    return lm_batch(10 * step + rank, 1 + (step + 3 * rank) % 4)


# ── the mathematics of one process ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("make", "tolerance"), [(llama, 1e-6), (gpt2, 1e-12)])
def test_ranks_train_as_one_process_on_the_union_batch(
    world_size: int, make: Callable[..., nn.Module], tolerance: float
) -> None:
    # In float32 (llama) and float64 (gpt2).
    num_steps = 5
    unions = [union([share(s, r) for r in range(world_size)]) for s in range(num_steps)]
    true = vector(train_plainly(make(), unions, lr=LR))

    def program(comm: DistributedComm, config: DistributedTrainConfig) -> Tensor:
        model = make(seed=comm.rank)  # all start from rank 0's
        trainer = TransformerTrainer(model, OPTIMIZER)
        with DistributedTrainer(trainer, comm, config, **quiet()) as distributed:
            for step in range(num_steps):
                own = share(step, comm.rank)
                with torch.no_grad():
                    expected = plain_loss(model, own).item()
                assert distributed.train_batch(own) == pytest.approx(expected, rel=1e-5)
                assert distributed.step == step + 1
        return vector(model)

    vectors = on_threads(world_size, program)
    for mine in vectors:
        assert torch.equal(mine, vectors[0])
    assert relative_error(vectors[0], true) <= tolerance


def test_batches_are_accumulated_by_their_tokens_and_a_rank_may_have_none() -> None:
    parts = {0: [lm_batch(1, 3), lm_batch(2, 1)], 1: [lm_batch(3, 2)], 2: []}
    true = vector(train_plainly(llama(), [union([b for p in parts.values() for b in p])], lr=LR))

    def program(comm: DistributedComm, config: DistributedTrainConfig) -> Tensor:
        trainer = TransformerTrainer(llama(), OPTIMIZER)
        with DistributedTrainer(trainer, comm, config, **quiet()):
            for batch in parts[comm.rank]:
                trainer.forward_backward_batch(batch)
            result = trainer.apply_gradients()
            assert result is not None
            assert result.weight == sum(b.num_tokens for p in parts.values() for b in p)
            assert result.size == 6
        return vector(trainer.model)

    for mine in on_threads(3, program):
        assert relative_error(mine, true) <= 1e-6


def test_an_epoch_trains_on_every_batch_once_though_they_divide_by_nothing() -> None:
    batches = [lm_batch(n, 1 + n % 3) for n in range(7)]
    turns = [union(batches[0:3]), union(batches[3:6]), batches[6]]
    true = vector(train_plainly(llama(), turns, lr=LR))

    def program(comm: DistributedComm, config: DistributedTrainConfig) -> tuple[Tensor, float]:
        trainer = TransformerTrainer(llama(), OPTIMIZER)
        with DistributedTrainer(trainer, comm, config, **quiet()) as distributed:
            loss = distributed.train_epoch(batches)
            assert distributed.step == 3
        return vector(trainer.model), loss

    for mine, loss in on_threads(3, program):
        assert relative_error(mine, true) <= 1e-6
        assert 1 < loss < 10


def test_a_trainer_alone_is_a_team_of_one_without_being_told() -> None:
    batches = [lm_batch(1, 2), lm_batch(2, 3)]
    true = vector(train_plainly(llama(), batches, lr=LR))
    trainer = TransformerTrainer(llama(), OPTIMIZER, schedule=lambda _: 1.0, max_steps=2)
    for batch in batches:
        assert not trainer.reached_max_steps
        trainer.forward_backward_batch(batch)
        trainer.apply_gradients()
    assert trainer.reached_max_steps
    assert trainer.step == 2
    with pytest.raises(UsageError, match="max_steps is 2"):
        trainer.forward_backward_batch(batches[0])
    trainer.close()
    assert relative_error(vector(trainer.model), true) <= 1e-6


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tied", [False, True])
def test_buckets_are_blocks_from_the_last_to_the_first(tied: bool) -> None:
    (end,) = DistributedComm.local(1)
    model = llama(tied=tied)
    with DistributedTrainer(TransformerTrainer(model, OPTIMIZER), end, **quiet()) as distributed:
        buckets = distributed.buckets
    heads = [] if tied else ["LM head"]
    assert [bucket.label for bucket in buckets] == [
        *("block 2", "block 1", "block 0"),
        *heads,
        *("final norm", "embedding"),
    ]
    sizes = {name: size for bucket in buckets for name, size in bucket.sizes.items()}
    assert sizes == {name: p.numel() for name, p in model.named_parameters()}


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────


def test_threads_on_the_cpu_share_its_cores_while_they_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("evener.team.host.available_cores", lambda: 6)

    def program(comm: DistributedComm, config: DistributedTrainConfig) -> list[int]:
        torch.set_num_threads(5)
        config = replace(config, launched_by="the user")  # as out of a file
        with DistributedTrainer(TransformerTrainer(llama(1)), comm, config, **quiet()):
            inside = torch.get_num_threads()
        return [inside, torch.get_num_threads()]

    before = torch.get_num_threads()
    try:
        assert on_threads(3, program) == [[2, 5]] * 3
    finally:
        torch.set_num_threads(before)


def test_weights_that_have_come_apart_halt_every_rank() -> None:
    def program(comm: DistributedComm, config: DistributedTrainConfig) -> None:
        trainer = TransformerTrainer(llama(1), OPTIMIZER)
        options = quiet(sharded_update="off")
        with DistributedTrainer(trainer, comm, config, verify_every=1, **options) as distributed:
            distributed.train_batch(lm_batch(comm.rank, 1))
            if comm.rank == 1:
                with torch.no_grad():
                    trainer.model.lm_head.weight[0, 0] += 1e-3
            for _ in range(2):
                distributed.train_batch(lm_batch(comm.rank, 1))

    for error in on_threads(2, program):
        assert isinstance(error, ReplicasDifferError)
        assert "rank 1" in str(error)
        assert "lm_head.weight" in str(error)


def test_a_saved_trainer_continues_in_another_team_as_one_that_was_not_saved(
    tmp_path: Path,
) -> None:
    steps = [union([share(step, rank) for rank in range(2)]) for step in range(4)]
    true = vector(train_plainly(llama(), steps, lr=LR))

    def begin(comm: DistributedComm, config: DistributedTrainConfig) -> None:
        trainer = TransformerTrainer(llama(), OPTIMIZER)
        with DistributedTrainer(trainer, comm, config, **quiet()) as distributed:
            for step in range(2):
                distributed.train_batch(share(step, comm.rank))
            trainer.ddp.save(tmp_path / "saved")

    def go_on(comm: DistributedComm, config: DistributedTrainConfig) -> Tensor:
        trainer = TransformerTrainer(llama(seed=5), OPTIMIZER)
        with DistributedTrainer(trainer, comm, config, **quiet()) as distributed:
            trainer.ddp.load(tmp_path / "saved")
            assert distributed.step == 2
            for step in (2, 3):
                distributed.train_batch(steps[step] if comm.rank == 1 else None)
            assert distributed.step == 4
        return vector(trainer.model)

    assert on_threads(2, begin) == [None, None]
    for found in on_threads(3, go_on):
        assert relative_error(found, true) <= 1e-6


# ── what is refused ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [6, 7])
def test_an_epoch_of_other_batches_on_one_rank_is_refused_on_every_rank(count: int) -> None:
    def program(comm: DistributedComm, config: DistributedTrainConfig) -> None:
        batches = [lm_batch(n, 1) for n in range(count if comm.rank else 5)]
        with DistributedTrainer(TransformerTrainer(llama(1)), comm, config, **quiet()) as d:
            d.train_epoch(batches)

    for error in on_threads(2, program):
        assert isinstance(error, ConfigError)
        assert f"ranks were given epochs of 5, {count} batches; give" in str(error)


def test_a_rank_that_leaves_before_the_others_is_told_how_to_go_along() -> None:
    def program(comm: DistributedComm, config: DistributedTrainConfig) -> None:
        with DistributedTrainer(TransformerTrainer(llama(1)), comm, config, **quiet()) as d:
            for number in shard_batches(3, comm.rank, 2):
                d.train_batch(lm_batch(number, 1))

    for error in on_threads(2, program):
        assert isinstance(error, CollectiveMismatchError)
        assert "train_batch(None); DistributedTrainer.train_epoch does so itself" in str(error)


def test_options_are_followed_or_refused() -> None:
    (end,) = DistributedComm.local(1)
    with DistributedTrainer(TransformerTrainer(llama(1)), end, **quiet(max_grad_norm=0.5)) as d:
        assert d.trainer.ddp.assembly.engine.options.max_grad_norm == 0.5

    def verify_every(given: int | None, **options: Any) -> int:
        (end,) = DistributedComm.local(1)
        trainer = TransformerTrainer(llama(1))
        with DistributedTrainer(trainer, end, verify_every=given, **quiet(**options)) as d:
            return d.trainer.ddp.assembly.engine.options.verify_every

    assert [verify_every(None), verify_every(0), verify_every(3)] == [1, 0, 3]
    assert [verify_every(None, verify_every=5), verify_every(2, verify_every=5)] == [5, 2]


def test_a_rank_that_fails_to_begin_does_not_keep_the_others_waiting() -> None:
    def program(comm: DistributedComm, config: DistributedTrainConfig) -> None:
        trainer = TransformerTrainer(llama(1), OPTIMIZER)
        if comm.rank == 1:
            trainer.forward_backward_batch(lm_batch(1, 1))  # alone: it cannot join any more
        DistributedTrainer(trainer, comm, config, **quiet())

    first, second = on_threads(2, program)
    assert isinstance(first, PeerLostError)
    assert isinstance(second, UsageError)
    assert "in a team already" in str(second)


def test_a_barrier_waits_for_all_and_names_who_has_gone() -> None:
    def program(comm: DistributedComm, config: DistributedTrainConfig) -> None:
        comm.barrier()
        if comm.rank == 1:
            comm.close()
        else:
            comm.barrier()

    first, second = on_threads(2, program)
    assert second is None
    assert isinstance(first, PeerLostError)
    assert "rank 1 has closed" in str(first)


REFUSED = {
    "another world size": ({"place": (1, 3)}, "says rank 1 of 3, and comm is the end of rank 1 of"),
    "ends mixed up": ({"place": (0, 2)}, "says rank 0 of 2, and comm is the end of rank 1"),
    "another model": ({"blocks": 2}, "rank 1 and rank 0 differ in parameter."),
    "threads over NCCL": ({"comm_backend": "nccl"}, "NCCL connects only processes"),
    "no precision": ({"precision": "fp8"}, "precision is 'fp8'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_team_that_does_not_fit_is_refused_on_every_rank(case: str) -> None:
    changes, said = REFUSED[case]

    def program(comm: DistributedComm, config: DistributedTrainConfig) -> None:
        own: dict[str, Any] = dict(changes) if comm.rank else {}
        if place := own.pop("place", None):
            config = DistributedTrainConfig.of_rank(*place)
        if backend := changes.get("comm_backend"):
            own.pop("comm_backend", None)
            config = DistributedTrainConfig.of_rank(comm.rank, 2, comm_backend=backend)
        options = {"precision": own.pop("precision", "auto"), **quiet()}
        trainer = TransformerTrainer(llama(own.pop("blocks", 1)), **own)
        DistributedTrainer(trainer, comm, config, **options)

    errors = on_threads(2, program)
    assert all(isinstance(error, ConfigError | PeerLostError) for error in errors)
    assert any(said in str(error) for error in errors)


def test_wrong_arguments_are_named() -> None:
    (end,) = DistributedComm.local(1)
    for make, said in (
        (lambda: DistributedTrainer(TransformerTrainer(llama(1)), [end]), "comm is a list; give"),
        (lambda: DistributedTrainer(llama(1), end), "trainer is a Llama.*; give a Transformer"),
        (lambda: DistributedComm.local(0), "num_ranks is 0"),
        (lambda: DistributedComm.local(2, timeout_s=math.nan), "every wait needs a deadline"),
        (lambda: DistributedComm.remote({"world_size": 2}), "config is a dict; give this rank's"),
        (
            lambda: DistributedComm.remote(DistributedTrainConfig.of_rank(1, 2)),
            "coordinator_port is 0 for a team of 2",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            make()
