"""A device without float64, modelled on the CPU: tensors say that they are on `mps` or `xpu`, and have values.

Every operation of torch comes to `NarrowDevice`, which carries it out on the CPU and refuses what such a device would:
a tensor of float64 on it, and operands on two devices. The package's operations run in their portable form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = "mps", "xpu"
WIDE = torch.float64, torch.complex128
# Takes operands on two devices.
COPY = "_to_copy"
# The namespace of collectives.
MESSAGES = "c10d"
# In these torch asks for the device's library before operations come to a mode.
ASKING = Tensor.__getitem__, Tensor.__setitem__, Tensor.__invert__, Tensor.__float__, Tensor.copy_
# By the addresses of storages on the CPU.
HANDLES: dict[int, int] = {}


class OnDevice(Tensor):
    """A tensor on the modelled device; `host` has its values."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device):
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        self = Tensor._make_wrapper_subclass(cls, host.shape, **layout, device=device)
        self.host = host
        return self

    def data_ptr(self) -> int:
        """Return where the elements begin, for which torch has no address in a subclass."""
        return self.untyped_storage().data_ptr() + self.storage_offset() * self.element_size()

    def untyped_storage(self) -> Any:
        """Return what has the address of the storage: on `mps` that of a handle, near to those of other storages."""
        storage = self.host.untyped_storage()
        address = storage.data_ptr()
        if self.device.type == "mps":
            address = HANDLES.setdefault(address, 2**32 + 64 * len(HANDLES))
        return SimpleNamespace(data_ptr=lambda: address, size=storage.size)

    def __repr__(self) -> str:
        return f"{self.device}: {self.host!r}"

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise RuntimeError(f"{operation} outside of NarrowDevice")


@contextmanager
def narrow_device(kernel: ModuleType, kind: str, has_float64: bool = False) -> Iterator[NarrowDevice]:
    """Carry out operations on a device of one of `KINDS`, and those of `kernel`, the package without a library.

    The libraries of such devices are not here: what they are asked for is feigned. Only `xpu` may have float64.
    """
    properties = SimpleNamespace(has_fp64=has_float64)
    answers = {"_lazy_init": None, "is_available": True, "get_device_properties": properties}
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.xpu, name, lambda *_, answer=answer: answer))
        narrow = NarrowDevice(kernel, kind, has_float64)
        accelerator = SimpleNamespace(current_stream=lambda device: None)
        events = SimpleNamespace(Event=lambda device: _Event(narrow), accelerator=accelerator)
        stack.enter_context(mock.patch.object(kernel.kernels.host_copy, "torch", events))
        stack.enter_context(_Functions())
        yield stack.enter_context(narrow)


class NarrowDevice(TorchDispatchMode):
    """The device of `narrow_device`; `operations` counts torch's on it, `waits` those that read a value from it.

    A copy to the CPU that nobody waits for has zeros until an event after it is waited for; `copies` has these copies.
    """

    def __init__(self, kernel: ModuleType, kind: str, has_float64: bool):
        super().__init__()
        self._has_float64 = has_float64
        self.device = torch.device(kind, 0)
        self.operations: Counter[str] = Counter()
        self.waits = 0
        self.copies: list[tuple[Tensor, Tensor]] = []  # what they are in, and what arrives there
        native, operations = kernel.kernels.native, kernel.kernels.portable.operations.OPERATIONS
        self._functions = {native.PREFIX + name: operation.function for name, operation in operations.items()}
        self._namespace = native.ops.name

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation.overloadpacket.__name__
        if any(issubclass(kind, DTensor) for kind in types):  # its parts come here by themselves
            return NotImplemented
        if operation.namespace == self._namespace:
            with self, _Functions():
                return self._functions[name](*args, **kwargs)
        operands: list[Tensor] = []
        _mapped(lambda x: operands.append(x) if isinstance(x, Tensor) else None, [args, kwargs])
        here = [x for x in operands if isinstance(x, OnDevice)]
        if operation.namespace == MESSAGES and len(here) < len(operands):
            raise RuntimeError(f"{operation} has operands on the CPU, and NCCL sends nothing from there")
        if here and name != COPY and any(x.ndim and not isinstance(x, OnDevice) for x in operands):
            raise RuntimeError(f"{operation} has operands on {self.device} and on the CPU")
        wanted = kwargs.get("device")
        to_device = bool(here) if wanted is None else torch.device(wanted).type == self.device.type
        if name == COPY and to_device and not here and kwargs.get("non_blocking"):
            raise RuntimeError(f"{self.device} may read {operands[0].shape} on the CPU after it is changed or freed")
        self.operations[name] += to_device
        is_deferred = bool(here) and not to_device and kwargs.get("non_blocking", False)
        self.waits += bool(here) and (name == "_local_scalar_dense" or not to_device) and not is_deferred
        originals = {id(x.host): x for x in here}
        args, kwargs = _mapped(_on_host, args), _mapped(_on_host, kwargs)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        result = operation(*args, **kwargs)
        if is_deferred:
            self.copies.append((result, result.clone()))
            result.zero_()
        return _mapped(lambda x: self._placed(x, originals) if to_device else x, result)

    def _placed(self, x: Any, originals: dict[int, Tensor]) -> Any:
        """Return a result on the device: the operand itself that an operation has written to."""
        if not isinstance(x, Tensor):
            return x
        if x.dtype in WIDE and not self._has_float64:
            raise RuntimeError(f"{self.device} has no {x.dtype}, and this would be a tensor of {tuple(x.shape)}")
        return originals[id(x)] if id(x) in originals else OnDevice(x, self.device)


class _Event:
    """An event of the device: once it is waited for, the copies to the CPU that began before it have arrived."""

    def __init__(self, narrow: NarrowDevice):
        self._narrow = narrow

    def record(self, stream: None) -> None:
        self._copies = list(self._narrow.copies)

    def synchronize(self) -> None:
        for target, values in self._copies:
            target.copy_(values)


class _Functions(TorchFunctionMode):
    """Carries out functions in which torch asks for the device's library before operations come to `NarrowDevice`."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.tensor and torch.device((kwargs or {}).get("device") or "cpu").type in KINDS:
            return function(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        first = args[0] if args else None
        if function not in ASKING or not any(isinstance(x, OnDevice) for x in args):
            return function(*args, **(kwargs or {}))
        result = function(*_mapped(_on_host, args), **(kwargs or {}))
        if not isinstance(result, Tensor) or not isinstance(first, OnDevice):
            return result
        return first if result is first.host else OnDevice(result, first.device)


def _on_host(x: Any) -> Any:
    return x.host if isinstance(x, OnDevice) else x


def _mapped(function: Callable[[Any], Any], x: Any) -> Any:
    """Return arguments or results with `function` of each value in them; torch's own takes most of a step's time."""
    if isinstance(x, (list, tuple)):
        return type(x)([_mapped(function, each) for each in x])
    if isinstance(x, dict):
        return {key: _mapped(function, each) for key, each in x.items()}
    return function(x)
