"""Flat buffers, and what users do to parameters that live in them."""

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener.comm.flat import FlatBuffers
from evener.comm.flat_groups import ALIGNMENT_BYTES
from evener.errors import ConfigError, UsageError


class Net(nn.Module):
    """Tied, frozen, 0-dim, channels_last and never-used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(5))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        hidden = self.frozen(self.embed(tokens)) * self.scale
        return F.cross_entropy(self.head(hidden), tokens) + self.conv(image).square().mean()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(7, (6,), generator=generator),
        torch.randn(2, 2, 5, 5, generator=generator),
    )


def flatten(model: nn.Module, world_size: int = 3) -> FlatBuffers:
    return FlatBuffers(list(model.named_parameters()), world_size)


def lies_in(tensor: Tensor, buffer: Tensor) -> bool:
    start, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
    return start <= tensor.data_ptr() < start + size


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


# ── layout ───────────────────────────────────────────────────────────────────────────────────────


def test_values_shapes_and_strides_survive(model: Net) -> None:
    before = {n: (p.detach().clone(), p.stride(), id(p)) for n, p in model.named_parameters()}
    flatten(model)
    for name, parameter in model.named_parameters():
        value, stride, identity = before[name]
        assert torch.equal(parameter, value)
        assert parameter.stride() == stride
        assert id(parameter) == identity
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    model(*batch(0)).backward()
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.stride() == model.conv.weight.stride()


def test_order_is_that_of_backward_and_tied_and_frozen_are_left_out(model: Net) -> None:
    flat = flatten(model)
    assert flat.names == ("conv.bias", "conv.weight", "embed.weight", "unused", "scale")
    assert [flat.names.index(name) for name in flat.names] == [0, 1, 2, 3, 4]
    assert flat.parameters[2] is model.head.weight
    assert model.frozen.weight.grad is None
    assert "frozen.weight" not in flat.names


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_views_are_aligned_disjoint_and_padded(
    model: Net, world_size: int, dtype: torch.dtype
) -> None:
    flat = flatten(model.to(dtype), world_size)
    (group,) = flat.groups
    model.unused.grad = torch.ones_like(model.unused)
    model(*(t if t.dtype == torch.int64 else t.to(dtype) for t in batch(0))).backward()
    flat.gather()
    assert group.data.numel() % world_size == 0
    assert group.grad.numel() % world_size == 0
    assert (group.grad.numel() == 0) == (world_size == 1)
    assert group.grad_values.numel() in (0, group.data.numel())
    for buffer, tensors in (
        (group.data, [p.data for p in flat.parameters]),
        (group.grad, [p.grad for p in flat.parameters if world_size > 1]),
    ):
        spans = []
        for tensor in tensors:
            assert tensor is not None
            assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
            assert lies_in(tensor, buffer)
            start = tensor.data_ptr()
            spans.append((start, start + tensor.numel() * tensor.element_size()))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))
    used = sum(p.numel() for p in flat.parameters)
    assert int((group.data != 0).sum()) <= used
    assert group.touched.numel() in (0, len(flat.parameters))
    assert group.touched.data_ptr() >= group.grad_values[-1:].data_ptr()


def test_one_group_for_each_dtype() -> None:
    model = nn.ModuleList(
        [
            nn.Linear(2, 2, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64)
        ]
    )
    flat = flatten(model)
    assert [g.data.dtype for g in flat.groups] == [torch.float64, torch.float32, torch.bfloat16]
    assert [g.indices.start for g in flat.groups] == [0, 2, 6]
    assert flat.names[2:6] == ("2.bias", "2.weight", "0.bias", "0.weight")
    for index, (name, parameter) in enumerate(zip(flat.names, flat.parameters, strict=True)):
        group = next(g for g in reversed(flat.groups) if g.indices.start <= index)
        assert group.names[index - group.indices.start] == name
        assert group.parameters[index - group.indices.start] is parameter


def test_parameters_with_holes_and_empty_ones_fit() -> None:
    odd = nn.Parameter(torch.arange(12.0).view(3, 4)[:, ::2])
    spread = nn.Parameter(torch.ones(1).expand(5))
    transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    empty = nn.Parameter(torch.empty(0, 3))
    flat = FlatBuffers([("o", odd), ("s", spread), ("t", transposed), ("e", empty)], 2)
    assert odd.tolist() == [[0, 2], [4, 6], [8, 10]]
    assert spread.tolist() == [1.0] * 5
    assert transposed.stride() == (1, 3)
    (odd.sum() + 2 * spread.sum() + 3 * transposed.sum() + empty.sum()).backward()
    flat.gather()
    assert flat.groups[0].grad_values.sum() == 6 + 10 + 18
    assert flat.groups[0].touched.tolist() == [1, 1, 1, 1]
    assert flat.first_non_finite() is None


def test_memory_tied_without_one_parameter_is_refused() -> None:
    first = nn.Parameter(torch.zeros(4))
    second = nn.Parameter(first.data[2:])
    with pytest.raises(ConfigError, match="parameters 'a' and 'b' share memory"):
        FlatBuffers([("a", first), ("b", second)], 2)


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.Linear(2, 3, device="meta")])
def test_parameters_without_values_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"parameter 'weight' has no values yet"):
        flatten(make())


# ── buckets ──────────────────────────────────────────────────────────────────────────────────────


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2, dtype=torch.float64))


def test_buckets_lie_and_are_exchanged_in_their_order_and_hold_all_there_is() -> None:
    model = layers()
    wanted = [("first", ["0.bias", "2.weight"]), ("second", ["1.bias", "0.weight"])]
    flat = FlatBuffers(list(model.named_parameters()), 3, buckets=wanted)
    order = flat.buckets_of(None)
    assert [(b.label, list(b.sizes.items())) for _, b in order] == [
        ("first", [("2.weight", 4)]),
        ("first", [("0.bias", 5)]),
        ("second", [("1.bias", 2), ("0.weight", 15)]),
        ("", [("2.bias", 2)]),
        ("", [("1.weight", 10)]),
    ]
    for group in flat.groups:
        spans = [(b.start, b.stop) for b in group.buckets]
        assert spans[0][0] == 0
        assert spans[-1][1] == group.grad.numel()
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    for i, parameter in enumerate(flat.parameters):
        parameter.grad = torch.full_like(parameter, float(i + 1))
    flat.gather()
    for group, bucket in order:
        values = set(group.grad[bucket.start : bucket.stop].tolist())
        assert {float(flat.names.index(name) + 1) for name in bucket.sizes} <= values


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        ([("x", ["3.weight"])], "bucket 'x' names the parameter '3.weight', which the model does"),
        ([("x", ["0.bias"]), ("y", ["0.bias"])], "'0.bias' is in the gradient buckets 'x' and 'y'"),
    ],
)
def test_buckets_of_other_models_are_refused(buckets: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FlatBuffers(list(layers().named_parameters()), 2, buckets=buckets)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        n: None if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def assert_same(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        mine = ours[name]
        if grad is None:
            assert mine is None or not mine.any(), name
        else:
            assert mine is not None
            assert torch.equal(mine, grad), name


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_accumulate_as_they_would_outside(model: Net, world_size: int) -> None:
    plain = copy.deepcopy(model)
    flat = flatten(model, world_size)
    for window in range(2):  # in the second one, buffers hold what the first one has left
        for seed in range(3):
            assert flat.attach_grads() == 0
            model(*batch(seed + window)).backward()
            plain(*batch(seed + window)).backward()
        assert flat.gather()
        assert_same(gradients(model), gradients(plain))
        if world_size > 1:
            parts = zip(flat.groups[0].spans(), flat.parameters, strict=True)
            for (start, stop), parameter in parts:
                grad = torch.zeros(()) if parameter.grad is None else parameter.grad
                part = flat.groups[0].grad[start:stop]
                torch.testing.assert_close(part.sum(), grad.sum(), rtol=1e-5, atol=1e-6)
                if parameter.grad is not None:
                    assert lies_in(parameter.grad, flat.groups[0].grad)
        flat.zero_()
        plain.zero_grad()
        assert all(p.grad is None for p in flat.parameters)


@pytest.mark.parametrize("world_size", [1, 3])
def test_zero_grad_to_none_keeps_what_was_accumulated(model: Net, world_size: int) -> None:
    plain = copy.deepcopy(model)
    flat = flatten(model, world_size)
    for seed in range(3):
        flat.attach_grads()
        model.zero_grad(set_to_none=True)
        assert flat.attach_grads() == (4 if seed else 0)
        model(*batch(seed)).backward()
        plain(*batch(seed)).backward()
    assert_same(gradients(model), gradients(plain))


def test_gradients_of_a_divided_update_lie_in_the_order_of_its_states(model: Net) -> None:
    weight = model.conv.weight
    flat = FlatBuffers(list(model.named_parameters()), 2, is_divided=True)
    before = weight.stride()
    model(*batch(0)).backward()
    flat.attach_grads()
    values = torch.arange(float(weight.numel())).view(weight.shape)
    assert values.stride() != before
    weight.data = weight.data.contiguous().clone()
    assert weight.grad is not None
    weight.grad.data = values.clone()
    flat.attach_grads()
    flat.gather()
    start, stop = flat.groups[0].spans()[flat.names.index("conv.weight")]
    part = flat.groups[0].grad[start:stop]
    assert torch.equal(part.as_strided(weight.shape, before), values)
    assert weight.stride() == before


def test_assigned_gradients_are_copied_in(model: Net) -> None:
    flat = flatten(model)
    flat.attach_grads()
    model(*batch(0)).backward()
    assigned = torch.full_like(model.conv.weight, 2.0)
    model.conv.weight.grad = assigned
    model.scale.grad.data = torch.tensor(7.0)  # type: ignore[union-attr]
    assert flat.attach_grads() == 2
    assert (model.conv.weight.grad == 2).all()
    assert model.conv.weight.grad is not assigned
    assert model.scale.grad is not None
    assert model.scale.grad == 7
    start, stop = flat.groups[0].spans()[flat.names.index("conv.weight")]
    assert (flat.groups[0].grad[start:stop] == 2).all()
    start, _ = flat.groups[0].spans()[flat.names.index("scale")]
    assert flat.groups[0].grad[start] == 7
    assert flat.attach_grads() == 0


def test_second_order_gradients_reach_the_buffer(model: Net) -> None:
    flat = flatten(model)
    with pytest.warns(UserWarning, match="create_graph=True"):
        model(*batch(0)).backward(create_graph=True)
    flat.gather()
    assert flat.groups[0].grad_values.count_nonzero() > 20
    assert not any(p.grad.requires_grad for p in flat.parameters if p.grad is not None)
    assert flat.attach_grads() == 0


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    flat = flatten(model)
    model.zero_grad(set_to_none=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"gradient of '0\.weight' is sparse.*sparse=False"):
        flat.gather()


# ── who had a gradient ───────────────────────────────────────────────────────────────────────────


def test_flags_are_summed_with_the_gradients_even_for_many_ranks() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2)])
    flat = flatten(model)
    model[0](torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    flat.gather()
    (group,) = flat.groups
    total = torch.zeros_like(group.grad)
    for _ in range(256):
        total += group.grad
    group.grad.copy_(total)
    assert group.touched.tolist() == [0, 0, 256, 256]


def test_a_parameter_that_only_another_rank_touched_is_updated(model: Net) -> None:
    flat = flatten(model)
    model.conv(batch(0)[1]).sum().backward()
    flat.gather()
    number = flat.names.index("scale")
    start, _ = flat.groups[0].spans()[number]
    flat.groups[0].touched[number] += 1  # the sum with the other rank's
    flat.groups[0].grad[start] = 5.0
    flat.mask_untouched()
    assert model.scale.grad == 5
    assert model.embed.weight.grad is None


def test_freezing_afterwards_leaves_a_parameter_out_and_thawing_takes_it_in(model: Net) -> None:
    flat = flatten(model)
    model.conv.requires_grad_(False)
    model(*batch(0)).backward()
    flat.gather()
    assert flat.groups[0].touched.tolist() == [0, 0, 1, 0, 1]
    flat.zero_()
    model.conv.requires_grad_(True)
    model(*batch(0)).backward()
    flat.gather()
    assert flat.groups[0].touched.tolist() == [1, 1, 1, 0, 1]
    model.frozen.requires_grad_(True)
    model(*batch(0)).backward()
    flat.gather()
    assert flat.names[5:] == ("frozen.bias", "frozen.weight")
    assert flat.names.index("frozen.weight") == 6
    _, thawed = flat.groups
    assert thawed.touched.tolist() == [1, 1]
    assert lies_in(model.frozen.weight, thawed.data)
    assert lies_in(model.frozen.weight.grad, thawed.grad)
    assert thawed.grad_values.count_nonzero() > 4
    flat.zero_()
    model(*batch(0)).backward()
    assert lies_in(model.frozen.weight.grad, thawed.grad)  # its hook has moved it


def test_a_rank_follows_another_one_in_what_is_trained(model: Net) -> None:
    other = Net()
    flat, follower = flatten(model), flatten(other)
    model.frozen.bias.requires_grad_(True)
    flat.add_unfrozen()
    model.frozen.weight.requires_grad_(True)
    flat.add_unfrozen()
    model.scale.requires_grad_(False)
    follower.follow(flat.describe())
    assert [group.names for group in follower.groups] == [group.names for group in flat.groups]
    assert follower.describe() == flat.describe()
    assert follower.outside == []
    with pytest.raises(UsageError, match=r"trains 7 parameters and the team 5.*'frozen.bias'"):
        follower.follow(flatten(Net()).describe())


# ── not finite ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["conv.bias", "conv.weight", "embed.weight", "unused", "scale"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_first_parameter_that_is_not_finite_is_found(
    model: Net, name: str, bad: float, world_size: int
) -> None:
    flat = flatten(model, world_size)
    model.unused.grad = torch.zeros(5)
    model(*batch(0)).backward()
    flat.gather()
    assert flat.first_non_finite() is None
    grad = dict(model.named_parameters())[name].grad
    assert grad is not None
    grad[(-1,) * grad.ndim] = bad
    model.scale.grad.fill_(bad)  # type: ignore[union-attr]  # the last one in flat order
    assert flat.first_non_finite() == flat.names.index(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_infinities_that_cancel_are_found_and_large_numbers_are_not(dtype: torch.dtype) -> None:
    model = nn.ModuleList([nn.Linear(40, 40, dtype=dtype) for _ in range(3)])
    flat = flatten(model)
    for parameter in flat.parameters:
        parameter.grad = torch.full_like(parameter, torch.finfo(dtype).max)
    flat.gather()
    assert flat.first_non_finite() is None
    weight = model[1].weight.grad
    assert isinstance(weight, Tensor)
    weight[0, 0], weight[0, 1] = float("inf"), -float("inf")
    assert flat.first_non_finite() == flat.names.index("1.weight")


# ── what users do ────────────────────────────────────────────────────────────────────────────────


def test_buffers_live_as_long_as_a_parameter(model: Net) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    flatten(model).close()
    gc.collect()
    _ = [torch.full((100,), 9.0) for _ in range(100)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_assigned_data_is_copied_in(model: Net) -> None:
    flat = flatten(model)
    model(*batch(0)).backward()
    grad = model.conv.weight.grad
    assert grad is not None
    before = grad.clone()
    model.conv.weight.data = model.conv.weight.data.clamp(-0.01, 0.01)
    model.scale.data = torch.tensor(3.0)
    flat.gather()
    assert model.conv.weight.abs().max() <= 0.01
    assert model.scale == 3
    for parameter in flat.parameters:
        assert lies_in(parameter, flat.groups[0].data)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("way", ["module", "data alone"])
def test_another_memory_format_is_followed(model: Net, way: str) -> None:
    flat = flatten(model)
    model(*batch(0)).backward()
    weight, grad = model.conv.weight.detach().clone(), model.conv.weight.grad
    assert grad is not None
    before = grad.detach().clone()
    if way == "module":
        model.conv.to(memory_format=torch.contiguous_format)
    else:  # the gradient lies where it belongs, in the order of before
        model.conv.weight.data = weight.contiguous()
    flat.gather()
    assert model.conv.weight.is_contiguous()
    assert torch.equal(model.conv.weight, weight)
    assert model.conv.weight.grad is not None
    assert model.conv.weight.grad.is_contiguous()
    assert torch.equal(model.conv.weight.grad, before)
    assert flat.attach_grads() == 0


def test_moving_the_model_afterwards_is_refused_by_name(model: Net) -> None:
    flat = flatten(model)
    model.half()
    with pytest.raises(UsageError, match=r"'conv\.bias' was on cpu as torch\.float32.*float16"):
        flat.gather()


def test_another_shape_is_refused_by_name(model: Net) -> None:
    flat = flatten(model)
    model.unused.data = torch.zeros(6)
    with pytest.raises(UsageError, match=r"'unused' had shape \(5,\) .* has \(6,\) now"):
        flat.gather()
