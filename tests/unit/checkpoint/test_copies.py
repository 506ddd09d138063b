import pytest
import torch

from evener.checkpoint import alias_table, copy_to_cpu
from evener.errors import CheckpointError


def test_copies_are_independent_contiguous_and_keep_dtype() -> None:
    live = {
        "f32": torch.randn(3, 4).t(),
        "bf16": torch.randn(5).bfloat16(),
        "i64": torch.tensor(7),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "wide": torch.randn(2, 1).expand(2, 3),
        "grad": torch.randn(2, requires_grad=True),
    }
    before = {name: tensor.detach().clone() for name, tensor in live.items()}
    copies = copy_to_cpu(live)
    for tensor in live.values():
        if tensor.numel() and tensor.stride()[-1:] != (0,):
            tensor.detach().zero_()
    assert list(copies) == list(live)
    for name, copy in copies.items():
        assert copy.dtype == live[name].dtype
        assert copy.is_contiguous()
        assert not copy.requires_grad
        assert torch.equal(copy, before[name]), name


def test_tied_tensors_are_copied_once_and_named() -> None:
    weight = torch.randn(4, 3)
    live = {
        "embed": weight,
        "norm": torch.ones(3),
        "head": weight,
        "same_memory": weight.view(4, 3),
        "transposed": weight.t(),
        "rows": weight[:2],
    }
    assert alias_table(live) == {"head": "embed", "same_memory": "embed"}
    copies = copy_to_cpu(live)
    assert copies["embed"] is copies["head"] is copies["same_memory"]
    assert alias_table(copies) == {"head": "embed", "same_memory": "embed"}
    assert torch.equal(copies["transposed"], weight.t())
    assert torch.equal(copies["rows"], weight[:2])


def test_neighbours_in_one_flat_buffer_are_not_tied() -> None:
    flat = torch.arange(8.0)
    live = {"a": flat[:4], "b": flat[4:], "none": flat[:0], "neither": flat[:0]}
    assert alias_table(live) == {}
    copies = copy_to_cpu(live)
    assert copies["a"].tolist() == [0, 1, 2, 3]
    assert copies["b"].tolist() == [4, 5, 6, 7]


def test_old_memory_is_used_again_where_it_fits() -> None:
    first = copy_to_cpu({"w": torch.ones(4), "v": torch.ones(2), "kept": torch.ones(1)})
    live = {
        "w": torch.full((4,), 2.0),
        "v": torch.ones(2, dtype=torch.float64),
        "new": torch.ones(3),
    }
    second = copy_to_cpu(live, into=first)
    assert second["w"] is first["w"]
    assert second["w"].tolist() == [2.0] * 4
    assert second["v"].dtype == torch.float64
    assert sorted(second) == ["new", "v", "w"]


def test_names_that_were_tied_and_are_no_longer_get_memory_of_their_own() -> None:
    weight = torch.ones(4)
    first = copy_to_cpu({"a": weight, "b": weight})
    second = copy_to_cpu({"a": torch.full((4,), 2.0), "b": torch.full((4,), 3.0)}, into=first)
    assert second["a"].tolist() == [2.0] * 4
    assert second["b"].tolist() == [3.0] * 4


def test_sparse_and_meta_tensors_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'s' is sparse_coo"):
        copy_to_cpu({"s": torch.eye(2).to_sparse()})
    with pytest.raises(CheckpointError, match=r"'m' is meta"):
        copy_to_cpu({"m": torch.empty(2, device="meta")})
