"""A CUDA device that is not there: tensors that say `cuda:0`, hold their data on the CPU and compute there.

Inside `with PretendDevice():` a backend runs as on a GPU. What a GPU refuses is refused: an operation over tensors of
both devices (a CPU tensor without dimensions excepted, as in torch), `.numpy()`, a CPU generator. Two things that CUDA
does in silence are refused as well, since they move data between the devices unseen: an index that lies on the CPU, and
an assignment across devices. Moves are `.to`, `.cpu` and `.cuda`; reading one element (`item`) is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda:0")
_CPU = torch.device("cpu")
_INSIDE = torch.device("meta")
"""What torch's own C++ is told: a build for CPUs has no guard for cuda, and nobody else uses meta here."""
_READS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__len__", "__contains__"})


class DeviceMixError(RuntimeError):
    """Tensors of the device and of the CPU met in one operation, or data left the device unseen."""


class PretendTensor(torch.Tensor):
    """A tensor on the device; `held` is where its data are."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        """Wrap a CPU tensor; the two share memory."""
        wrapped = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=_INSIDE,
            requires_grad=held.requires_grad,
        )
        wrapped.held = held.detach()
        return wrapped

    @property
    def device(self) -> torch.device:
        """Where this tensor pretends to be."""
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        """True: this is what CUDA tensors say."""
        return True

    @property
    def is_meta(self) -> bool:
        """False: it has data."""
        return False

    def __repr__(self) -> str:
        """Its values and where they pretend to be."""
        return f"PretendTensor({self.held!r}, device='{DEVICE}')"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what torch would answer from a real device's memory."""
        name = getattr(func, "__name__", "")
        if name in _READS and isinstance(args[0], PretendTensor):
            return func(*_held(args), **_held(kwargs or {}))
        if name == "data_ptr":
            return args[0].held.data_ptr()
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use .cpu() first")
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reached only outside `PretendDevice`."""
        return _compute(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Catches, before torch looks for a driver, calls that name the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cuda", "cpu", "type_as") and isinstance(args[0], torch.Tensor):
            return _moved(name, args, kwargs)
        if _is_device(kwargs.get("device")):
            if kwargs.get("generator") is not None:
                raise DeviceMixError(f"Expected a 'cuda' device type for generator but {name} was given a 'cpu' one")
            kwargs["device"] = _CPU
            return _wrapped(func(*_held(args), **_held(kwargs)))
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    """Runs every operation that touches the device, factories inside torch included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        here = any(isinstance(leaf, PretendTensor) for leaf in tree_flatten((args, kwargs))[0])
        if here or _is_device(kwargs.get("device")):
            return _compute(func, args, kwargs)
        return func(*args, **kwargs)


class PretendDevice:
    """Context in which `cuda` exists. `put` moves tensors there, `back` brings them to the CPU."""

    def __enter__(self) -> PretendDevice:
        """Make the device exist."""
        self._stack = ExitStack()
        self._stack.enter_context(_Dispatch())
        self._stack.enter_context(_Functions())
        return self

    def __exit__(self, *raised: object) -> None:
        """Let it vanish; tensors that are left keep their data."""
        self._stack.close()

    @staticmethod
    def put(value: Any) -> Any:
        """The same structure with every CPU tensor copied to the device."""
        return tree_map(lambda leaf: PretendTensor(leaf.clone()) if _on_cpu(leaf) else leaf, value)

    @staticmethod
    def back(value: Any) -> Any:
        """The same structure with every tensor of the device copied to the CPU."""
        return tree_map(lambda leaf: leaf.held.clone() if isinstance(leaf, PretendTensor) else leaf, value)


def left_on_cpu(value: Any) -> list[torch.Tensor]:
    """The tensors of a structure that are not on the device."""
    return [leaf for leaf in tree_flatten(value)[0] if _on_cpu(leaf)]


def _on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, PretendTensor)


def _is_device(device: Any) -> bool:
    return (
        device is not None and not isinstance(device, int) and torch.device(device).type in (DEVICE.type, _INSIDE.type)
    )


def _held(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.held if isinstance(leaf, PretendTensor) else leaf, value)


def _wrapped(value: Any) -> Any:
    return tree_map(lambda leaf: PretendTensor(leaf) if _on_cpu(leaf) else leaf, value)


def _moved(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`.to`, `.cuda`, `.cpu` and `.type_as`, whichever the devices."""
    source = args[0]
    if name == "cuda":
        return source if isinstance(source, PretendTensor) else PretendTensor(source.clone())
    if name == "cpu":
        return source.held.clone() if isinstance(source, PretendTensor) else source
    rest, target, named = list(args[1:]), source.device, "device" in kwargs
    if named:
        target = torch.device(kwargs.pop("device") or target)
    elif rest and isinstance(rest[0], torch.Tensor):
        target, rest[0] = rest[0].device, rest[0].dtype
    elif rest and isinstance(rest[0], torch.device | str):
        target = torch.device(rest.pop(0))
    if rest and rest[0] is None:
        rest.pop(0)
    if target.type == source.device.type:
        cast = source
    elif target.type == DEVICE.type:
        cast = PretendTensor(source.clone())
    else:
        cast = source.held.clone()
    return torch.Tensor.to(cast, *rest, **kwargs) if rest or kwargs else cast


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation of the device on the data held, after refusing what mixes devices."""
    if (
        func is torch.ops.aten._to_copy.default
        and kwargs.get("device") is not None
        and not _is_device(kwargs["device"])
    ):
        return func(*_held(args), **kwargs)
    strangers = [leaf for leaf in tree_flatten((args, kwargs))[0] if _on_cpu(leaf)]
    if any(leaf.ndim or func in _ALWAYS_STRICT for leaf in strangers):
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in strangers)
        raise DeviceMixError(f"Expected all tensors to be on cuda:0, but {func} was given one of {shapes} on the cpu")
    if _is_device(kwargs.get("device")):
        kwargs = kwargs | {"device": _CPU}
    out = _wrapped(func(*_held(args), **_held(kwargs)))
    return return_and_correct_aliasing(func, args, kwargs, out)


_ALWAYS_STRICT: frozenset[Callable[..., Any]] = frozenset(
    {torch.ops.aten.cat.default, torch.ops.aten.stack.default, torch.ops.aten.index_select.default}
)
