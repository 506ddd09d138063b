"""``ddp.gather``: the rows of all ranks in the order of the data set."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evener import CollectiveMismatchError, Ddp, DdpConfig, UsageError
from evener.comm.base import Communicator
from helpers.ranks import Rank, run_ranks
from helpers.teams import run_team, setup

#: Samples and batch sizes that do not divide, and fewer samples than ranks.
SIZES = [(0, 4), (1, 4), (2, 1), (5, 2), (8, 3), (64, 16)]


def numbered(count: int) -> TensorDataset:
    """Samples of an id and 3 features."""
    return TensorDataset(torch.arange(count), torch.arange(3.0 * count).view(-1, 3) / 99)


def started(config: DdpConfig | None = None, **options: Any) -> tuple[nn.Module, Ddp]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, Ddp.setup(
        model, optimizer, devices="cpu", quiet=True, config=config or DdpConfig(), **options
    )


def go_through(ddp: Ddp, model: nn.Module, count: int, batch_size: int) -> None:
    """Evaluates ``count`` samples and compares all rows with those of one process."""
    data, found = numbered(count), []
    own = 0
    with ddp.evaluating():
        for ids, x in ddp.eval_loader(data, batch_size=batch_size):
            assert 0 < len(ids) <= batch_size
            logits, labels = ddp.gather((model(x), ids))
            some = ddp.gather({"odd": ids[ids % 2 == 1]})["odd"]  # ragged: not a row a sample
            sizes = ddp.gather(torch.tensor(len(ids)))  # a scalar of each batch
            found.append((labels, logits, some, sizes))
            own += len(ids)
        if found:
            labels, logits, some, sizes = (torch.cat(rows) for rows in zip(*found, strict=True))
            assert labels.tolist() == list(range(count))
            assert torch.allclose(logits, model(data.tensors[1]), atol=1e-5)
            assert not logits.requires_grad
            assert some.tolist() == list(range(1, count, 2))
            assert int(sizes.sum()) == count
    assert bool(found) == (count > 0 and (count >= ddp.world_size or ddp.rank == 0))
    assert ddp.weighted_mean(own) * ddp.world_size == pytest.approx(count), "not each sample once"


def evaluate_everywhere(rank: Rank, policy: str) -> list[str]:
    slow = {1: 9.0} if rank.world_size > 1 else {}
    model, ddp = started(DdpConfig(emulate_slow=slow), policy=policy)
    places = []
    with ddp:

        @ddp.on_commit
        def _(result: Any) -> None:
            if result.window in (0, 2):
                go_through(ddp, model, 23, 4)
                assert ddp.gather(torch.tensor([ddp.rank])).tolist() == list(range(ddp.world_size))
                places.append(f"window {result.window}")

        loader = ddp.loader(numbered(64), batch_size=8)
        for epoch in range(2):  # equal speeds are taken for granted before the first, measured ones
            for count, batch_size in SIZES:
                go_through(ddp, model, count, batch_size)
                places.append(f"{count} before epoch {epoch}")
            for _ids, x in loader.epoch(epoch):
                ddp.backward(model(x).square().mean())
                ddp.step()
        part = ddp.eval_loader(DataLoader(numbered(50), batch_size=4, shuffle=True))
        for number, (ids, _) in enumerate(part):
            rows = ddp.gather(ids)
            assert rows.tolist() == list(range(int(rows[0]), int(rows[-1]) + 1))
            if number == 1:
                break
        assert len(ddp.gather(torch.zeros(ddp.rank))) == sum(range(ddp.world_size))
        go_through(ddp, model, 9, 2)
    return places


@pytest.mark.parametrize(("world_size", "policy"), [(1, "sync"), (2, "async"), (3, "sync")])
def test_every_rank_gets_all_rows_in_the_order_of_the_data_set(
    world_size: int, policy: str
) -> None:
    """In any place, at equal and at measured speeds, whatever divides, after a ``break``, too."""
    for places in run_ranks(evaluate_everywhere, world_size, policy):
        assert len(places) == 2 * len(SIZES) + places.count("window 0") + places.count("window 2")
        assert places.count("window 0") == 1


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32]
DTYPES += [torch.float64, torch.complex64]


def gather_kinds(rank: Rank) -> None:
    _, ddp = started()
    with ddp:
        for dtype in DTYPES:
            for shape in ((), (0,), (2, 30, 2)):  # short and long messages
                whole = torch.arange(18).remainder(2 if dtype is torch.bool else 100).to(dtype)
                whole = whole.view(9, 2, *[1] * len(shape)).expand(-1, -1, *shape)
                for (part,) in ddp.eval_loader(TensorDataset(whole), batch_size=5):
                    rows = ddp.gather(part.transpose(0, 1).contiguous().transpose(0, 1))
                    assert rows.dtype == dtype
                    assert torch.equal(rows, whole)
                rows = ddp.gather(whole[ddp.rank :: 2])
                assert torch.equal(rows, torch.cat([whole[0::2], whole[1::2]]))


def test_any_dtype_and_shape_travels_bit_for_bit() -> None:
    run_ranks(gather_kinds, 2)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────

Body = Callable[[Ddp, int, Tensor], Any]


def refused(body: Body, kind: type[Exception], world_size: int = 2) -> list[str]:
    """The messages of each rank where ``body(ddp, round, ids)`` runs in an evaluation's loop."""

    def run(comm: Communicator) -> str:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def evaluate(ddp: Ddp) -> None:
            for number, (ids, _) in enumerate(ddp.eval_loader(numbered(12), batch_size=2)):
                body(ddp, number, ids)
            ddp.weighted_mean(1.0)

        with setup(comm, model, optimizer) as ddp, pytest.raises(kind) as caught:
            evaluate(ddp)
        return str(caught.value)

    return run_team(world_size, run)


def only_rank_0(ddp: Ddp, number: int, ids: Tensor) -> None:
    if ddp.is_main_process:
        ddp.gather(ids)


def not_in_the_second_round(ddp: Ddp, number: int, ids: Tensor) -> None:
    if ddp.is_main_process or number != 1:
        ddp.gather(ids)


def twice_on_rank_1(ddp: Ddp, number: int, ids: Tensor) -> None:
    for _ in range(1 + ddp.rank):
        ddp.gather(ids)


def other_dtype(ddp: Ddp, number: int, ids: Tensor) -> None:
    ddp.gather(ids if ddp.rank else ids.float())


def other_length(ddp: Ddp, number: int, ids: Tensor) -> None:
    ddp.gather(torch.zeros(len(ids), 5 + ddp.rank))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (only_rank_0, ("rank 0 is gathering rows", "rank 1 is averaging a value")),
        (not_in_the_second_round, ("(round 1, number 1)", "(round 2, number 1)")),
        (twice_on_rank_1, ("(round 1, number 1)", "(round 0, number 2)")),
        (other_dtype, ("rank 0 gathers rows of shape (*) and dtype torch.float32", "torch.int64")),
        (other_length, ("rank 1 gathers rows of shape (*, 6)", "pad longer rows")),
    ],
)
def test_ranks_that_gather_unlike_rows_are_named(body: Body, words: tuple[str, ...]) -> None:
    for message in refused(body, CollectiveMismatchError):
        assert "Remedy: " in message
        for word in words:
            assert word in message


def test_what_is_no_tensor_is_refused_with_the_remedy() -> None:
    for value, words in ((["a text"], "'a text' of type str"), (torch.eye(2).to_sparse(), "dense")):
        for message in refused(lambda d, n, i, value=value: d.gather(value), UsageError):
            assert "ddp.gather was given" in message
            assert words in message


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_gathering_in_a_training_loop_names_what_to_use_instead(policy: str) -> None:
    def run(comm: Communicator) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with setup(comm, model, optimizer, policy=policy) as ddp:
            looked_at = iter(ddp.eval_loader(numbered(8), batch_size=2))
            next(looked_at)  # and the rest is never asked for
            for _ids, x in ddp.loader(numbered(8), batch_size=4).epoch(0):
                with pytest.raises(UsageError, match=r"ddp\.eval_loader.*ddp\.weighted_mean"):
                    ddp.gather(x)
                ddp.backward(model(x).mean())
                ddp.step()

    run_team(2, run)
