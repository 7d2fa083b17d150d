"""The laws of the compiled product on a GPU that it is compiled for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.proofs import products

pytestmark = pytest.mark.gpu

HALF_DTYPES = (torch.float16, torch.bfloat16)
# Cut squares, one and several; a dozen squares for each pair of multiprocessors; long sums.
SIZES = ((8, 8), (272, 208), (2048, 512), (4096, 1024), (1024, 16384))
# Their last 1, 21, 10, 12 and 4 squares are cut.
CUT = ((8, 2048), (1288, 5000), (1024, 16384), (3072, 3072), (4096, 4096))
RUNS = 50


@pytest.fixture
def hopper_product(kernel) -> Callable[..., Tensor]:
    module = kernel.kernels.gpu.hopper_gemm
    if not module.is_built() or torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"this build has no such product for {torch.cuda.get_device_name()}")
    return module.hopper_product


def integers(*shape: int, dtype: torch.dtype, most: int = 3) -> Tensor:
    """Small integers, whose sums of products are exact in any order."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randint(-most, most + 1, shape, generator=generator, device="cuda").to(dtype)


def symmetric(*shape: int, dtype: torch.dtype) -> Tensor:
    S = integers(*shape, dtype=dtype)
    return S.tril() + S.tril(-1).mT


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize(
    "m, k, sections", [*((m, k, 1) for m, k in SIZES), *((m, k, n) for m, k in CUT for n in (3, 5))]
)
def test_it_passes_the_proof(hopper_product, dtype, m, k, sections):
    def compute(A, B, D, scalars):
        alpha, beta, diagonal = scalars
        return hopper_product(A, B, D, alpha, beta, A.new_full((len(A), m, m), torch.nan), diagonal, sections)

    like = torch.empty(0, dtype=dtype, device="cuda")
    products.prove_launch(compute, products.operands_of(like, (m, k)))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("count, m, k", [(1, 264, 72), (3, 1000, 136), (5, 2048, 256)])
@pytest.mark.parametrize("columns", ["none", "of B", "of A", "of C"])
@pytest.mark.parametrize("sections", [1, 3])
def test_products_of_integers_are_exact(hopper_product, dtype, count, m, k, columns, sections):
    """With an addend and a number on the diagonal, in a result with room around it, which stays as it is."""
    A = integers(count, k, m, dtype=dtype).mT if columns == "of A" else integers(count, m, k, dtype=dtype)
    B, D = A.mT.contiguous() if columns == "of B" else A.mT, symmetric(count, m, m, dtype=dtype)
    buffer = torch.full((count + 2, m + 8, m + 16), 7.0, dtype=dtype, device="cuda")
    C = buffer[1:-1, :m, 8 : m + 8]
    hopper_product(A, B, D, 0.5, 2.0, C.mT if columns == "of C" else C, 3.0, sections)
    wanted = 0.5 * A.double() @ A.double().mT + 2 * D.double() + 3 * torch.eye(m, device="cuda")
    assert torch.equal(C, wanted.to(dtype))
    C.fill_(7.0)
    assert (buffer == 7.0).all()


@pytest.mark.parametrize("sections", [1, 5])
def test_many_launches_give_the_same_bits(hopper_product, sections):
    X = torch.randn(4, 1288, 5000, generator=torch.Generator("cuda").manual_seed(0), device="cuda").half()
    first = hopper_product(X, X.mT, sections=sections)
    results = [hopper_product(X, X.mT, sections=sections) for _ in range(RUNS)]
    assert all(torch.equal(first, C) for C in results)


def test_two_streams_do_not_share_the_memory_of_sections(hopper_product):
    X = torch.randn(2, 1024, 8192, generator=torch.Generator("cuda").manual_seed(0), device="cuda").half()
    wanted, streams = hopper_product(X, X.mT, sections=5), [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(RUNS):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(hopper_product(X, X.mT, sections=5))
    torch.cuda.synchronize()
    assert all(torch.equal(wanted, C) for C in results)


@pytest.mark.parametrize("k, sections", [(64, 1), (4096, 5)])
def test_a_replayed_graph_computes_it(hopper_product, k, sections):
    """Twice: sections count arrivals anew in each replay."""
    A, C = integers(2, 520, k, dtype=torch.float16), torch.zeros(2, 520, 520, dtype=torch.float16, device="cuda")
    hopper_product(A, A.mT, out=C, sections=sections)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper_product(A, A.mT, out=C, sections=sections)
    for most in (2, 1):
        A.copy_(integers(2, 520, k, dtype=torch.float16, most=most))
        graph.replay()
        assert torch.equal(C, (A.float() @ A.float().mT).half())


def test_it_runs_on_the_stream_that_is_current(hopper_product):
    A, stream = integers(4, 2048, 2048, dtype=torch.float16), torch.cuda.Stream()
    wanted = (A.float() @ A.float().mT).half()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        C = hopper_product(A, A.mT)
    stream.synchronize()
    assert torch.equal(C, wanted)
