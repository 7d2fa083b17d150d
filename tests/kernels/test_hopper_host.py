"""What the compiled product for Hopper launches, and with what: its host's code, over a runtime that starts nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import hopper_host
from tests.support.hopper_host import Asked, Gpu, Host, Map

MISSING = hopper_host.what_is_missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

HALF, BFLOAT = torch.float16, torch.bfloat16
SQUARE = 256  # rows of a square
DEPTH = 64  # of a step along k
AT_ONCE = 66  # squares at once
PARTS = 4  # of a square
SUMS = SQUARE * SQUARE * 4  # bytes of a section of a square
MOST_MEMORY = 64 << 20  # of sums, unless one matrix needs more
MOST_SHARED = 227 << 10  # of a block
DEVICE, STREAM = 3, 0x5003  # as tests/hopper_model/runtime.cpp has them
CLUSTER_DIMENSION, MOST_SHARED_ATTRIBUTE = 4, 8  # by CUDA's headers
SWIZZLED_128 = 3
# By what their elements are to the driver: CUTLASS copies both as 16 bits without a sign.
OPERAND_TYPE, RESULT_TYPES = 1, {HALF: 6, BFLOAT: 9}

# (matrices, m, k, sections): less than a square; nothing cut; cut in one launch; in 4, 4 and 2; one matrix a launch, as
# one takes more than there is; as many sections as there are steps along k.
PROBLEMS = (
    *((1, 8, 8, 1), (3, 328, 200, 1), (2, 2816, 512, 5), (3, 328, 200, 3)),
    *((10, 3072, 1024, 5), (3, 2560, 1024, 8), (2, 1288, 72, 8)),
)
# Whose runs of memory are along k: of A and of B.
ORDERS = ((True, True), (True, False), (False, False))
GPUS = tuple(Gpu(count) for count in (132, 133, 114, 2))


@pytest.fixture(scope="module")
def host(repository, tmp_path_factory) -> Host:
    return hopper_host.build(repository, tmp_path_factory.mktemp("host"))


def matrices(count: int, rows: int, cols: int, by_rows: bool = True, dtype: torch.dtype = HALF) -> Tensor:
    """Matrices without contents, with room around each run and each matrix: nothing touches their memory."""
    runs, length = (rows, cols) if by_rows else (cols, rows)
    room = torch.empty(count, runs + 3, length + 16 - length % 8, dtype=dtype)[:, :runs, :length]
    return room if by_rows else room.mT


def operands(count: int, m: int, k: int, order: tuple = ORDERS[0], dtype: torch.dtype = HALF) -> tuple:
    """C, A, B and D."""
    A, B = matrices(count, m, k, order[0], dtype), matrices(count, k, m, not order[1], dtype)
    return matrices(count, m, m, True, dtype), A, B, matrices(count, m, m, True, dtype)


def sections_of(count: int, m: int, k: int, sections: int) -> tuple[int, int, int, int]:
    """Squares along a side, how many of a matrix are cut, into how many sections, and sections of all matrices."""
    side, into = -(-m // SQUARE), min(sections, -(-k // DEPTH))
    triangle = side * (side + 1) // 2
    last = triangle % AT_ONCE if into > 1 else 0
    return side, last, into, count * (triangle - last + last * into)


def described(x: Tensor, kind: int, box: tuple) -> Map:
    """How a driver must know matrices, up to strides of dimensions of one element, which are zero here."""
    run = 2 if x.stride(2) == 1 else 1
    dims = (run, 3 - run, 0)
    strides = (x.stride(dim) * x.element_size() * (x.size(dim) > 1) for dim in dims)
    return Map(kind, SWIZZLED_128, x.data_ptr(), tuple(x.size(dim) for dim in dims), tuple(strides), box)


def known(map: Map) -> Map:
    """The same of what was told."""
    return map._replace(strides=tuple(stride * (size > 1) for size, stride in zip(map.sizes, map.strides)))


def pieces(asked: Asked) -> list[slice]:
    """The matrices of each launch, if they follow one another."""
    ends = torch.tensor([0] + [launch.sizes[2] for launch in asked.launches]).cumsum(0).tolist()
    return [slice(first, end) for first, end in zip(ends, ends[1:])]


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_launches_describe_each_matrix_once_where_it_is(host, problem, order, dtype):
    """With the kernel for their dtype and their order, and with one matrix of A and its part of B in a step's bytes."""
    count, m, k, sections = problem
    C, A, B, D = operands(count, m, k, order, dtype)
    asked = host.call((C, A, B, D), (0.5, 2.0, 3.0), sections)
    of_launches = pieces(asked)
    assert of_launches[-1].stop == count
    for launch, piece in zip(asked.launches, of_launches):
        assert launch.kernel[:3] == (dtype == HALF, *order)
        assert launch.scalars == (0.5, 2.0, 3.0)
        assert launch.addend == (D[piece].data_ptr(), stride_of(D, 0), stride_of(D, 1))
        for name, x, kind in ("A", A, OPERAND_TYPE), ("B", B, OPERAND_TYPE), ("C", C, RESULT_TYPES[dtype]):
            tensor_map = launch.maps[name]
            assert known(tensor_map) == described(x[piece], kind, tensor_map.box)
            assert tensor_map.box[0] * x.element_size() == 128  # what is swizzled
        assert launch.maps["C"].box == (64, 64, 1)
        # A block loads its tile of A, and half of that of B, which comes from both blocks of its cluster.
        of_a, of_b = (boxed(launch.maps[name], SQUARE // 2, DEPTH) for name in "AB")
        assert launch.sizes[:2] == (m, k) and launch.sizes[3] == of_a + 2 * of_b


def stride_of(x: Tensor, dim: int) -> int:
    return x.stride(dim) if x.size(dim) > 1 else 16  # any that the driver takes


def boxed(map: Map, rows: int, depth: int) -> int:
    """The bytes of rows x depth of an operand, if they are made of whole boxes that fit into them."""
    assert map.box[2] == 1 and max(rows, depth) % map.box[0] == 0 and rows * depth % (map.box[0] * map.box[1]) == 0
    return rows * depth * 2


@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_whole_clusters_are_launched_as_many_as_there_is_room_and_work_for(host, problem, gpu):
    """On the device and the stream of the call, with the shared memory that was asked for and is there."""
    count, m, k, sections = problem
    asked = host.call(operands(count, m, k), sections=sections, gpu=gpu)
    for launch in asked.launches:
        all_sections = sections_of(launch.sizes[2], m, k, sections)
        assert launch.sections == all_sections
        blocks = 2 * min(all_sections[3], gpu.multiprocessors // 2)
        kernel, attribute, shared = launch.allowed
        assert launch.launch == (kernel, blocks, 1, 384, 1, shared, STREAM, DEVICE)
        assert attribute == MOST_SHARED_ATTRIBUTE and launch.kernel[3] == shared <= MOST_SHARED
        assert launch.attribute == (CLUSTER_DIMENSION, 2, 1, 1)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sums_of_sections_have_room_and_their_arrivals_start_at_zero_in_each_launch(host, problem):
    count, m, k, sections = problem
    asked = host.call(operands(count, m, k), sections=sections)
    _, last, into, _ = sections_of(count, m, k, sections)
    if last == 0:
        assert asked.order == "l" and asked.launches[0].memory == (0, 0)
        return
    assert asked.order == "m" + "zl" * len(asked.launches)
    ((begin, length, *place),) = asked.allocated
    assert place == [DEVICE, True]
    for launch, (address, value, zeros, *stream) in zip(asked.launches, asked.zeros):
        kept, arrivals = launch.memory
        matrices = launch.sizes[2]
        assert kept == begin and kept % 16 == 0 and kept + matrices * last * into * SUMS <= arrivals == address
        assert value == 0 and stream == [STREAM, DEVICE]
        assert matrices * last * PARTS * 4 <= zeros <= begin + length - address


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_launches_are_as_few_as_memory_allows(host, problem):
    count, m, k, sections = problem
    asked = host.call(operands(count, m, k), sections=sections)
    _, last, into, _ = sections_of(count, m, k, sections)
    together = min(count, max(1, MOST_MEMORY // (last * into * SUMS)) if last else count)
    assert [launch.sizes[2] for launch in asked.launches[:-1]] == [together] * (-(-count // together) - 1)
    for _, length, *_ in asked.allocated:
        assert length == together * last * (into * SUMS + PARTS * 4)


def test_columns_of_the_result_are_its_rows(host):
    _, A, B, _ = operands(3, 328, 200)
    columns = matrices(3, 328, 328, by_rows=False)
    (launch,) = host.call((columns, A, B, None)).launches
    assert known(launch.maps["C"]) == described(columns, RESULT_TYPES[HALF], (64, 64, 1))
    assert launch.addend == (0, 0, 0)


@pytest.mark.parametrize("major, minor", [(8, 0), (9, 1), (10, 0), (12, 0)])
def test_other_devices_are_refused_before_anything_is_asked(host, major, minor):
    with pytest.raises(RuntimeError, match=rf"needs a device of compute capability 9\.0, got {major}\.{minor}"):
        host.call(operands(2, 328, 200), sections=3, gpu=Gpu(132, major, minor))
    assert host.asked().order == "" and host.current_device() == -1


# What fails, what is said, and what had been asked until then.
FAILURES = {
    "cudaDeviceGetAttribute": (r"cudaDeviceGetAttribute failed: CUDA error: it was told to fail", ""),
    "aten::empty": (r"not enough memory for 4718688 bytes of sums", ""),
    "cudaMemsetAsync": (r"cudaMemsetAsync failed: CUDA error: it was told to fail", "mz"),
    "cudaFuncSetAttribute": (r"cudaFuncSetAttribute failed: CUDA error: it was told to fail", "mz"),
    "cuTensorMapEncodeTiled": (r"cuTensorMapEncodeTiled failed with 1", "mz"),
    "cudaLaunchKernelExC": (r"launch of hopper_gemm_ failed: CUDA error: it was told to fail", "mzl"),
}


@pytest.mark.parametrize("failing", FAILURES)
def test_what_fails_is_named_and_ends_the_call(host, failing):
    """And the device that was current is it again."""
    message, asked = FAILURES[failing]
    with pytest.raises(RuntimeError, match=message):
        host.call(operands(2, 328, 200), sections=3, gpu=Gpu(failing=failing))
    assert host.asked().order == asked and host.current_device() == -1


@pytest.mark.parametrize("count, m", [(0, 16), (2, 0)])
def test_nothing_is_asked_where_nothing_is_to_do(host, count, m):
    A, C = torch.empty(count, m, 8, dtype=HALF), torch.empty(count, m, m, dtype=HALF)
    assert host.call((C, A, A.mT, None)).order == ""
