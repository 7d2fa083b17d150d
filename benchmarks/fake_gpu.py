"""A step on a fake GPU: with torch's fake tensors each operation is seen, and none is carried out.

It counts what would be launched, kernels and copies: all of the package's operations, and one for each other operation
except views and empty tensors. `baddbmm` is two: before it multiplies, torch copies the addend to where the result will
be, on every device, unless it is there already or beta is 0 (`common_checks_baddbmm_bmm` in ATen's LinearAlgebra.cpp).
Other libraries may launch more than one behind an operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shapes import Parameter
from benchmarks.step_costs import replaced

# Capability, multiprocessors and bytes of the cache: an H200.
GPU = 90, 132, 50 * 2**20
# How a step's products are launched: by torch, by the symmetric kernel of Triton, by the compiled one, or in graphs,
# whose contents are not counted.
WAYS = "torch", "symmetric", "compiled", "replayed"
# Operations that wait until the device is done, because the host asks for a value.
SYNCS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
SYMMETRIC = "symmetric_gemm_"
# The positions of the two factors among the arguments of these operations.
PRODUCTS = {"bmm": (0, 1), "baddbmm": (1, 2), SYMMETRIC: (0, 1)}
# How torch's copies of an addend are called among the kernels.
ADDEND = "copy of an addend"
# Those that pass over lists, and how many matrices one launch takes: kMatrices in optimizer_cuda/tiles.cuh.
IN_LISTS, MATRICES = {"momentum_pack_": "momentum", "descend_": "parameter"}, 128
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "device")
# Of what a step in one process launches: what a schema marks as written is read, too, except for arguments of these
# names, and `self` of these operations.
OVERWRITTEN, OVERWRITING = ("packed", "norms", "out", "C"), ("zero_", "_foreach_zero_", "fill_", "copy_")
# AdamW's schema marks gradients as written, but it only reads them, as long as it gets no scale.
ONLY_READ = ("grads",)


class Stream:
    """A stream or an event that does nothing: operations on fake tensors are in no queue."""

    def __init__(self, device: torch.device | None = None):
        self.device = device

    def wait_event(self, event: Stream) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def record(self, stream: Stream) -> None: ...

    def synchronize(self) -> None:
        raise RuntimeError("the host waits for a stream of the fake GPU")


# What the package calls of torch.cuda to copy beside its work.
_STREAMS = {"Stream": Stream, "Event": Stream, "current_stream": Stream, "stream": nullcontext}


class Unguarded(TorchFunctionMode):
    """Calls the operations behind those methods of tensors that ask for a real GPU before an operation is seen."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _BEHIND.get(function, function)(*args, **(kwargs or {}))


def _part(x: Tensor, index: object) -> Tensor:
    """Return x[index]; on a GPU `index` is a number, a slice, or a tuple of these."""
    if x.device.type != "cuda":
        return x[index]
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            x, dim = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1), dim + 1
        else:
            x = x.select(dim, part)
    return x


_BEHIND = {Tensor.copy_: torch.ops.aten.copy_, Tensor.__invert__: torch.bitwise_not, Tensor.__getitem__: _part}


class Product(NamedTuple):
    """A product of (batch, m, k) and (batch, k, n), and the operation that computes it."""

    operation: str
    batch: int
    size: tuple[int, int, int]  # m, n, k


class Work(TorchDispatchMode):
    """Counts kernels, the products among them, the bytes that they read and write, and waits of the host.

    A kernel that changes an element in place reads it and writes it. Memory that it reads twice counts once. Copies of
    addends are kernels of their own, whose bytes are not those of products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.products: Counter[Product] = Counter()
        self.bytes = 0
        self.bytes_of_products = 0
        self.syncs: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        inputs, made = _on_device((args, kwargs)), _on_device(result)
        if (inputs and name in SYNCS) or _is_waited_for(operation, args, kwargs or {}, result):
            self.syncs[name] += 1
        elif not operation.is_view and name not in EMPTY and (inputs or made):
            launched = _launched(operation, args, kwargs or {})
            read, written = _read_and_written(operation, args, kwargs or {})
            written += made
            if launched[ADDEND]:
                addend, *factors = read
                self.bytes += _bytes_of([addend]) + _bytes_of(written)
                read = factors + written  # the product reads the copy
            moved = _bytes_of(read) + _bytes_of(written)
            self.kernels += launched
            self.bytes += moved
            if name in PRODUCTS:
                A, B = (args[place] for place in PRODUCTS[name])
                self.products[Product(name, A.size(0), (A.size(1), B.size(2), A.size(2)))] += 1
                self.bytes_of_products += moved
        return result


def _launched(operation: OpOverload, args: Sequence, kwargs: Mapping) -> Counter[str]:
    """Return the kernels that an operation launches. Norms are roots of the sums that another kernel has written."""
    name, arguments = operation.overloadpacket.__name__, _by_name(operation, args, kwargs)
    matrices = len(arguments[IN_LISTS[name]]) if name in IN_LISTS else 1
    has_roots = name == "frobenius_norm_" or (name in IN_LISTS and arguments.get("norms") is not None)
    copies = name == "baddbmm" and arguments.get("beta", 1) != 0 and arguments.get("out") is not arguments["self"]
    return Counter({name: -(-matrices // MATRICES), "take_roots": int(has_roots), ADDEND: int(copies)})


def _on_device(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.device.type == "cuda"]


def _read_and_written(operation: OpOverload, args: Sequence, kwargs: Mapping) -> tuple[list, list]:
    """Return the arguments that an operation reads, and those that it writes; many are both."""
    read, written = [], []
    arguments = _by_name(operation, args, kwargs)
    overwritten = OVERWRITTEN + ("self",) * (operation.overloadpacket.__name__ in OVERWRITING)
    for argument in operation._schema.arguments:
        tensors = _on_device(arguments.get(argument.name))
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if not (marked and argument.name in overwritten):
            read += tensors
        if marked and argument.name not in ONLY_READ:
            written += tensors
    return read, written


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return how many bytes tensors have in memory, where a matrix and its transposed view count once."""
    places = {(x.untyped_storage()._cdata, x.storage_offset(), x.numel()): x for x in tensors}
    return sum(x.numel() * x.element_size() for x in places.values())


def _is_waited_for(operation: OpOverload, args: Sequence, kwargs: Mapping, result: object) -> bool:
    """Whether an operation copies between the device and the host, and the host waits for the copy."""
    if operation.overloadpacket.__name__ not in ("_to_copy", "copy_"):
        return False
    arguments = _by_name(operation, args, kwargs)
    between = {result.device.type, arguments.get("src", arguments["self"]).device.type} == {"cpu", "cuda"}
    return between and not arguments.get("non_blocking", False)


def _by_name(operation: OpOverload, args: Sequence, kwargs: Mapping) -> dict[str, object]:
    """Return the arguments of a call by their names in the schema."""
    return {**dict(zip((argument.name for argument in operation._schema.arguments), args)), **kwargs}


@contextmanager
def fake_gpu(kernel: ModuleType, way: str) -> Iterator[None]:
    """Make the package treat fake tensors as a GPU's, and launch its products in one of `WAYS`."""
    products = kernel.kernels.products
    symmetric = products.SYMMETRIC._replace(gram_gain=1.6, square_gain=1.6, square_name="symmetric_gemm")
    tables = {"symmetric": symmetric, "compiled": symmetric._replace(square_name="hopper_gemm")}
    table = tables.get(way, products.BATCHED._replace(square_name="torch.bmm"))
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(Unguarded())
        gpu = kernel.kernels.speeds.predictions.Gpu(*GPU)
        stack.enter_context(mock.patch.object(kernel.polar.packing, "gpu_of", lambda device: gpu))
        stack.enter_context(replaced(kernel, {products.select_products: lambda *_: table}))
        if way == "replayed":
            stack.enter_context(mock.patch.object(kernel.step.graphs.UpdateGraphs, "packed", _replayed(kernel)))
        for name, stand_in in _STREAMS.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        # torch 2.13 has no such function of this overload; it has one of that for numbers, which does nothing, too.
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("_fused_adamw_.tensor_lr", lambda *args, **kwargs: None, "Meta")
        yield


def fake_optimizer(kernel: ModuleType, parameters: Sequence[Parameter], **settings: object) -> Optimizer:
    """Return Muon over fake parameters with gradients; `fake_gpu` must be entered."""
    named = []
    for p in parameters:
        tensor = torch.empty(p.rows_and_columns if p.matrix else p.shape, device="cuda", requires_grad=True)
        tensor.grad = torch.empty_like(tensor, requires_grad=False)
        named.append((p.name, tensor, p.matrix))
    groups = [{"params": [(n, t) for n, t, m in named if m is muon], "use_muon": muon} for muon in (True, False)]
    # In this mode a clone is a fake tensor, whose number the optimizer does not try to read.
    numbers = {key: value.clone() for key, value in settings.items() if isinstance(value, torch.Tensor)}
    return kernel.Muon(groups, **{**settings, **numbers})


def counted_step(optimizer: Optimizer) -> Work:
    """Return the work of a step after the first one, in which the plan is made."""
    optimizer.step()
    with Work() as work:
        optimizer.step()
    return work


def _replayed(kernel: ModuleType):
    """Replaces `UpdateGraphs.packed` as if every chain had a graph: one kernel."""
    graphs, update = kernel.step.graphs, kernel.step.polar_update

    def packed(self, counts: Sequence[tuple]):
        members = []
        for batch, count, eps in counts:
            directions = update.packed_memory(batch, count)
            members.append(graphs.Packed(batch, eps, directions, update.norms_memory(batch, directions)))

        def replay() -> list[Tensor]:
            factors = [torch.empty_like(each.directions, dtype=each.batch.iteration.work_dtype) for each in members]
            torch._foreach_zero_(factors)  # counts as the graph
            return [update.as_parameter(each.batch, factor) for each, factor in zip(members, factors)]

        return graphs.PackedChain(members, replay)

    return packed
