"""What kernels of CUDA would have computed: torch's operations for CPUs, over the memory of the CUDA tensors.

While a stream is captured, results are computed for their shapes only. The work is recorded, and done when the graph is
launched.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from itertools import chain
from typing import Any, Callable, Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Operations whose CUDA kernels are no kernels: they make tensors and views, and pin memory.
ON_THE_HOST = {
    "empty.memory_format", "empty_strided", "resize_", "set_", "set_.source_Storage", "set_.source_Tensor",
    "set_.source_Storage_storage_offset", "is_pinned", "_pin_memory", "record_stream",
}  # fmt: skip
# Operations that read a value on the host, which a capture forbids.
READING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}
# What an element gets from torch's fused AdamW on CPUs depends on its place: the last ones, which fill no vector of so
# many elements, are rounded differently. On a GPU it does not.
VECTOR = 32
OFFSET = 4  # by which a generator moves on with each operation; it takes multiples of this
CUDA_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# Namespaces of messages between GPUs, which no operation for CPUs stands for.
MESSAGES = ("c10d", "_c10d_functional", "symm_mem")

_runtime = ctypes.CDLL("libcudart.so.13")
_runtime.feigned_capture.argtypes = [ctypes.c_void_p]
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_int)
_recorded: dict[int, list[Callable[[], None]]] = defaultdict(list)
_libraries: dict[str, torch.library.Library] = {}


def _launch(graph: int) -> None:
    for work in _recorded[graph]:
        work()


def _end(graph: int) -> None:
    _recorded.pop(graph, None)


# Kept, because the runtime has only their addresses.
_callbacks = _Callback(_end), _Callback(_launch)
_runtime.feign_callbacks(*_callbacks)


def on_host(x: Tensor) -> Tensor:
    """Return the tensor for CPUs that is in the same memory as a CUDA tensor."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    host = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype, device="cpu").set_(host, x.storage_offset(), x.shape, x.stride())


def do(work: Callable[[], None]) -> None:
    """Do `work` now, or at each launch of the graph that the current stream is captured into."""
    capture = _runtime.feigned_capture(torch.cuda.current_stream().cuda_stream)
    if capture:
        _recorded[capture].append(work)
    else:
        work()


def is_capturing() -> bool:
    """Whether the current stream is captured."""
    return bool(_runtime.feigned_capture(torch.cuda.current_stream().cuda_stream))


def feign(names: Iterable[str]) -> None:
    """Compute these operations, such as "aten::add.Tensor", of CUDA tensors on the CPU."""
    for name in names:
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        operation = getattr(getattr(getattr(torch.ops, namespace), base, None), overload or "default", None)
        if operation is None or rest in ON_THE_HOST or namespace in MESSAGES:
            continue
        if any(x.alias_info is not None and not x.alias_info.is_write for x in operation._schema.returns):
            continue  # a view
        _library(namespace).impl(rest, _kernel(operation), "CUDA", allow_override=True)


def feign_own(namespace: str, others: dict[str, Callable]) -> None:
    """Let the package's operations launch their kernels, and compute as on CPUs, or as `others` of these names do."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        if name.startswith(f"{namespace}::") and "symmetric_gemm_" not in name and "small_polar_" not in name:
            operation = getattr(getattr(torch.ops, namespace), name.partition("::")[2]).default
            compute = others.get(name.partition("::")[2], operation)
            kernel = _launching_kernel(torch.library.get_kernel(operation, "CUDA"), compute)
            _library(namespace).impl(name.partition("::")[2], kernel, "CUDA", allow_override=True)


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


def _launching_kernel(launch: Any, compute: Callable) -> Callable:
    def kernel(*args, **kwargs) -> None:
        launch.call_boxed(CUDA_KERNELS, *args, **kwargs)
        do(lambda: _computed(compute, args, kwargs))

    return kernel


def _kernel(operation: torch._ops.OpOverload) -> Callable:
    """Return what an operation does with CUDA tensors: it writes some of its arguments, or returns new tensors."""
    schema, name = operation._schema, operation.name()
    outs = [x.name for x in schema.arguments if x.kwarg_only and x.alias_info is not None]
    writes = all(x.alias_info is not None for x in schema.returns)

    def kernel(*args, **kwargs):
        if name == "aten::copy_":
            _check_copy(*args[:2])
        if name in READING and is_capturing():
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if name == "aten::_local_scalar_dense":
            return on_host(args[0]).item()
        if outs:
            do(lambda: _write(operation, args, kwargs, outs))
        elif writes:
            do(lambda: _computed(operation, args, kwargs))
        else:
            return _new(operation, args, kwargs)
        arguments = {x.name: arg for x, arg in zip(schema.arguments, args)} | kwargs
        written = [arguments[x.name] for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        results = written[: len(schema.returns)]
        return results[0] if len(results) == 1 else tuple(results) or None

    return kernel


def _computed(operation: Callable, args: tuple, kwargs: dict) -> Any:
    """Return what an operation gives for these arguments in host memory."""
    schema = getattr(operation, "_schema", None)
    args, kwargs = tree_map(_moved, (list(args), kwargs))
    operation = BY_ELEMENT.get(operation, operation)
    if schema is not None:  # numbers come for tensors without a dimension, whose dtype does not count
        args = [_as_tensor(x) if str(s.type) == "Tensor" else x for x, s in zip(args, schema.arguments)]
    with torch.no_grad():
        return operation(*args, **kwargs)


def _adamw_by_element_(params, grads, averages, squares, maxima, steps, **options) -> None:
    """Update parameters, gradients and averages in place, in copies that are whole vectors."""
    lists = params, grads, averages, squares
    vectors = [[torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % VECTOR)) for x in each] for each in lists]
    torch.ops.aten._fused_adamw_(*vectors, maxima, steps, **options)
    for x, vector in zip(chain.from_iterable(lists), chain.from_iterable(vectors)):
        x.copy_(vector[: x.numel()].view(x.shape))


BY_ELEMENT = {
    torch.ops.aten._fused_adamw_.default: _adamw_by_element_,
    torch.ops.aten._fused_adamw_.tensor_lr: _adamw_by_element_,
}


def _as_tensor(x: Any) -> Any:
    is_number = isinstance(x, (int, float)) and not isinstance(x, bool)
    return torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None, device="cpu") if is_number else x


def _moved(x: Any) -> Any:
    if isinstance(x, Tensor):
        return on_host(x) if x.is_cuda else x
    if isinstance(x, torch.Generator) and x.device.type == "cuda":
        seed = x.initial_seed() + x.get_offset()
        x.set_offset(x.get_offset() + OFFSET)
        return torch.Generator().manual_seed(seed)
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x


def _write(operation: Callable, args: tuple, kwargs: dict, outs: list[str]) -> None:
    """Compute into new tensors, and copy them into those that are given as `outs`, which may have to grow first."""
    old = {out: kwargs[out] for out in outs}
    new = tree_map(lambda x: torch.empty(0, dtype=x.dtype, device="cpu"), old)
    _computed(operation, args, {**kwargs, **new})
    for out, result in zip(tree_leaves(old), tree_leaves(new)):
        if out.shape != result.shape:
            out.resize_(result.shape)
        on_host(out).copy_(result)


def _new(operation: Callable, args: tuple, kwargs: dict) -> Any:
    """Return new CUDA tensors, with what an operation gives in them."""
    on = [x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_cuda]
    device = on[0] if on else torch.device("cuda", torch.cuda.current_device())
    result = _computed(operation, args, kwargs)  # of a capture only for the shapes
    made: list[Tensor] = []

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made.append(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device))
        return made[-1]

    placed = tree_map(place, result)
    captured = is_capturing()

    def fill() -> None:
        values = _computed(operation, args, kwargs) if captured else result
        for target, value in zip(made, (x for x in tree_leaves(values) if isinstance(x, Tensor))):
            on_host(target).copy_(value)

    do(fill)
    return placed


def _check_copy(to: Tensor, source: Tensor) -> None:
    """Raise RuntimeError for a copy that a capture forbids: one from or to memory of the host that is not pinned."""
    host = next((x for x in (to, source) if x.is_cpu), None)
    if host is not None and is_capturing() and not host.is_pinned():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
