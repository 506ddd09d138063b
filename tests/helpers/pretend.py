"""An accelerator to test with where there is none: a device of torch's own, ``pretend:0``.

It is a backend outside of torch, as vendors write them, on torch's dispatch key for such backends.
Its memory is the host's; every operator goes to the CPU's kernel for it, over the same memory. To
torch, and so to evener, its tensors are as foreign as those of a GPU: what mixes them with tensors
of the CPU fails. It knows no float64, like Apple's GPUs.

It can be registered once in a process, before the first backward. In another process torch finds
and registers it by itself, if the folder that ``install`` has filled is on PYTHONPATH.
"""

import ctypes
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree, backend_registration
from torch.utils.dlpack import from_dlpack

NAME = "pretend"

#: How often each operator has run on the device.
operators: Counter[str] = Counter()

#: How many copies to the host had it wait for the device.
waits: list[torch.Size] = []

_libraries: list[torch.library.Library] = []
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
#: Operators that make another view of a storage, wherever that lies.
_VIEWS = ("aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::set_")


def register() -> None:
    """Makes the device known to torch, as its only accelerator."""
    backend_registration._setup_privateuseone_for_python_backend(
        NAME, backend_module=_Module(), hook=_Hook(), device_guard=_Guard()
    )
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run_on_cpu, "PrivateUse1")
    some = torch.library.Library("aten", "IMPL")
    some.impl("_copy_from", _copy_from, "PrivateUse1")
    some.impl("empty.memory_format", _empty, "PrivateUse1")
    some.impl("empty_strided", _empty_strided, "PrivateUse1")
    _libraries.extend((everything, some))


def install(folder: Path) -> None:
    """Writes what a package manager would write for a backend that torch loads by itself."""
    described = folder / "torch_pretend-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-pretend\nVersion: 1\n")
    (described / "entry_points.txt").write_text(
        f"[torch.backends]\n{NAME} = helpers.pretend:register\n"
    )


class _Module:
    """What torch asks of a backend's module."""

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        assert torch.device(device) == torch.device(NAME, 0)

    def synchronize(self, device: Any = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        assert torch.device(device) == torch.device(NAME, 0)
        return 10**6, 10**9

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def device_count(self) -> int:
        return 1


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


class _DLManagedTensor(ctypes.Structure):
    """The front of DLPack's struct, which is all that is looked at here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_id", ctypes.c_int),
    )


_KDL_CPU, _KDL_EXT_DEV = 1, 12
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _relabelled(tensor: Tensor, device_type: int) -> Tensor:
    """The same memory, said to lie on another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    managed = _DLManagedTensor.from_address(_pointer_of(capsule, b"dltensor"))
    managed.device_type, managed.device_id = device_type, 0
    return from_dlpack(capsule)


def _as_pretend(tensor: Tensor) -> Tensor:
    _refuse_float64(tensor)
    return _relabelled(tensor, _KDL_EXT_DEV)


def _as_cpu(tensor: Tensor) -> Tensor:
    return _relabelled(tensor, _KDL_CPU)


def _is_pretend(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _refuse_float64(tensor: Tensor) -> None:
    if tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"{NAME} devices have no float64")


# ── operators ────────────────────────────────────────────────────────────────────────────────────


def _run_on_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    name = operator._schema.name
    operators[name] += 1
    if name in _VIEWS:
        return operator.redispatch(_ON_CPU, *args, **kwargs)

    schema = operator._schema
    # Torch hands over a number where a tensor with that value was made of one.
    args = tuple(
        torch.tensor(v) if str(a.type) == "Tensor" and isinstance(v, int | float) else v
        for a, v in zip(schema.arguments, args, strict=False)
    )

    def lower(value: Any) -> Any:
        if _is_pretend(value):
            return _as_cpu(value)
        if isinstance(value, Tensor) and value.dim():
            raise RuntimeError(f"{name} got tensors of {NAME}:0 and of {value.device}")
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    lowered_args, lowered_kwargs = _pytree.tree_map(lower, (args, kwargs))
    # Results that torch has made room for are to be resized, which needs memory of their own.
    outs = [a.name for a in schema.arguments if a.is_out]
    lowered_kwargs |= {name: torch.empty(0, dtype=kwargs[name].dtype) for name in outs}
    result = operator(*lowered_args, **lowered_kwargs)
    for name in outs:
        _fill(kwargs[name], lowered_kwargs[name])
    if written := _written(schema, args, kwargs):
        return written[0] if len(written) == 1 else tuple(written)
    return _pytree.tree_map(lambda v: _as_pretend(v) if isinstance(v, Tensor) else v, result)


def _fill(target: Tensor, value: Tensor) -> None:
    """Gives a tensor of the device a value of another size."""
    if target.shape == value.shape:
        _copy_from(value, target)
        return
    there = _as_pretend(value)
    put = torch.ops.aten.set_.source_Storage_storage_offset
    put.redispatch(_ON_CPU, target, there.untyped_storage(), 0, there.shape, there.stride())


def _written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator has written to and returns."""
    if not any(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
        return []
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
    return [
        given[a.name]
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    ]


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _refuse_float64(source)
    _refuse_float64(target)
    if not (non_blocking or _is_pretend(target)):
        waits.append(source.shape)
    there = _as_cpu(target) if _is_pretend(target) else target
    there.copy_(_as_cpu(source) if _is_pretend(source) else source)
    return target


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return _as_pretend(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _as_pretend(torch.empty_strided(size, stride, dtype=dtype))
