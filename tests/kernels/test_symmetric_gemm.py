"""The symmetric product's operation: on CPUs, on a GPU and traced; its kernel is in `test_symmetric_gemm_laws`."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.symmetric_products import (
    ALPHA,
    BETA,
    DIAGONAL,
    DTYPES,
    LAYOUTS,
    PROVEN_SIZES,
    check_nan,
    check_product,
    normal,
    scaled_product,
    symmetric,
)
from tests.support.symmetric_products import operands as laid_out
from tests.support.triton_gpu import skip_without_triton

pytest.importorskip("triton")


NUMBERS = ALPHA, BETA, DIAGONAL


@pytest.fixture(scope="module")
def module(kernel):
    return kernel.kernels.gpu.symmetric_gemm


@pytest.fixture
def device(kernel, device):
    """A device on which the package launches Triton's kernels, if it is a GPU."""
    skip_without_triton(kernel, device)
    return device


def operands(dtype=torch.float32, batch=2, m=6, k=5) -> dict:
    """A, B = Aᵀ, a symmetric D with eigenvalues 1 / n, and coefficients of a Newton-Schulz step."""
    A, D = normal(batch, m, k, dtype=dtype), symmetric(1, m, dtype).expand(batch, m, m)
    scalars = {"alpha": ALPHA, "beta": BETA, "diagonal": DIAGONAL}
    return {"A": A, "B": A.mT, "D": D, "C": A.new_full((batch, m, m), 7.0), **scalars}


def combined(module, A, B, D, *scalars):
    """Two products, one of them without D and with the default coefficients."""
    return scaled_product(module, A, B, D, scalars) + module.symmetric_gemm(A, B)


def inputs(**options) -> tuple:
    values = operands(**options)
    return tuple(values[name] for name in ("A", "B", "D", "alpha", "beta", "diagonal"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_err_by_their_roundings(module, device, dtype, layout):
    """And nothing is written around a result of odd strides."""
    for m, k in [(1, 7), (7, 1), (33, 65), *(PROVEN_SIZES if device == "cuda" else ())]:
        A, B = laid_out(layout, 2, m, k, dtype)
        D = symmetric(2, m, dtype)
        buffer = A.new_full((3, 2 * m + 1, 2 * m + 3), 7.0)
        C = buffer[1:, 1::2, 3::2].fill_(math.nan)
        module.symmetric_gemm(A, B, D, *NUMBERS[:2], C, DIAGONAL)
        check_product(C, A, B, D, NUMBERS)
        C.fill_(7.0)
        assert (buffer == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_stays_in_its_matrix_row_and_column(module, device, dtype):
    check_nan(module.symmetric_gemm, normal(3, 272, 208, dtype=dtype))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (2, 1, 3), (2, 5, 1)], ids=str)
def test_sizes_of_zero_and_one_are_products_too(module, shape):
    A = torch.ones(shape)
    assert torch.equal(module.symmetric_gemm(A, A.mT), torch.full((shape[0], shape[1], shape[1]), float(shape[2])))


@pytest.mark.kernels_ci
def test_on_a_cpu_too_the_result_alone_is_rounded(module):
    """300 ** 2 is more than float16 holds, half of it is not."""
    A = torch.full((1, 1, 1), 300.0, dtype=torch.float16)
    assert module.symmetric_gemm(A, A, alpha=0.5) == 45000
    assert module.symmetric_gemm(A, A, A, alpha=0.5, beta=-200.0) == -15000
    assert module.symmetric_gemm(A, A, diagonal=-45000.0) == 45000


@pytest.mark.parametrize("has_D", [True, False], ids=["with D", "without D"])
def test_the_operation_keeps_torchs_rules_for_operators(module, has_D):
    """Schema, fake kernel and tracing under dynamic shapes; there is no gradient to register."""
    values = operands() if has_D else {**operands(), "D": None}
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(module.symmetric_gemm_, (), values, test_utils=utilities)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_compiled_product_equals_eager_for_all_coefficients(module, scale):
    """They are constants, as those of a schedule are in a step: new matrices need no other graph."""
    torch.compiler.reset()
    numbers, graphs = [scale * number for number in NUMBERS], CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: combined(module, *args, *numbers), fullgraph=True, backend=graphs)
    A, _, D, *_ = inputs()
    for X in (A, 2 * A):
        assert torch.equal(compiled(X, X.mT, D), combined(module, X, X.mT, D, *numbers))
    assert graphs.frame_count == 1


def test_an_exported_product_is_the_eager_one(module):
    class Product(torch.nn.Module):
        def forward(self, *operands):
            return combined(module, *operands)

    exported = torch.export.export(Product(), inputs())
    assert torch.equal(exported.module()(*inputs()), combined(module, *inputs()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_product_is_traced_without_the_gpu(module, dtype):
    with FakeTensorMode():
        A, D = (torch.empty(3, 7, n, dtype=dtype, device="cuda") for n in (5, 7))
        C = scaled_product(module, A, A.mT, D, NUMBERS)
        assert (C.shape, C.dtype, C.device.type) == ((3, 7, 7), dtype, "cuda")
        graph = make_fx(lambda *args: combined(module, *args, *NUMBERS), tracing_mode="fake")(A, A.mT, D).graph
        with pytest.raises(ValueError, match="B must be"):
            module.symmetric_gemm(A, A)
        with pytest.raises(ValueError, match=r"B must be .* on cuda:0, got .* on cpu"):
            module.symmetric_gemm(A, torch.empty(3, 5, 7, dtype=dtype))
    assert [node.target.name().split("::")[1] for node in graph.nodes if "symmetric" in node.name] == [
        "symmetric_gemm_", "symmetric_gemm_"
    ]  # fmt: skip


BAD = {
    r"A must be .b, m, k. .* got \(6, 5\)": lambda v: {"A": v["A"][0]},
    r"A must be .* torch.float64": lambda v: {"A": v["A"].double()},
    r"B must be \(2, 5, 6\) .* got \(2, 6, 5\)": lambda v: {"B": v["A"]},
    r"B must be \(2, 5, 6\) .* got \(1, 5, 6\)": lambda v: {"B": v["B"][:1]},
    r"B must be .* torch.float32 .* torch.float16": lambda v: {"B": v["B"].half()},
    r"B must be .* on cpu, .* on meta": lambda v: {"B": v["B"].to("meta")},
    r"D must be \(2, 6, 6\) .* got \(6, 6\)": lambda v: {"D": v["D"][0]},
    r"D must be .* torch.bfloat16": lambda v: {"D": v["D"].bfloat16()},
    r"C must be \(2, 6, 6\) .* got \(2, 6, 5\)": lambda v: {"C": v["C"][..., :5]},
    r"C must be .* torch.float64": lambda v: {"C": v["C"].double()},
    r"C must have a place for each .* \(2, 6, 6\)": lambda v: {"C": v["C"][:1].expand(2, 6, 6)},
}


def sharing(name: str, values: dict) -> dict:
    """C begins where the operand ends but for its last entry."""
    buffer = torch.full((200,), 7.0)
    x = values[name]
    operand = buffer[: x.numel()].view(x.shape)
    return {name: operand, "C": buffer[x.numel() - 1 :][:72].view(2, 6, 6)}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("message", BAD)
def test_misfits_raise_and_write_nothing(module, message):
    assert_refuses(module, message, BAD[message])


@pytest.mark.parametrize("name", ["A", "B", "D"])
def test_a_result_that_shares_memory_with_an_operand_is_refused(module, name):
    assert_refuses(module, "C must not share its storage with A, B or D", lambda values: sharing(name, values))


def assert_refuses(module, message, replacement):
    values = operands()
    values |= replacement(values)
    before = values["C"].clone()
    with pytest.raises(ValueError, match=message):
        module.symmetric_gemm_(**values)
    assert torch.equal(values["C"], before)


IMPORT = """
import torch, triton.runtime
def refuse(*args, **options):
    raise AssertionError("a device was touched")
for name in "_lazy_init", "current_device", "get_device_properties", "get_device_capability", "get_device_name":
    setattr(torch.cuda, name, refuse)
type(triton.runtime.driver).active = property(refuse)
import kernels
package = kernels.get_kernel("org/optimizer", version=0, trust_remote_code=True)
assert package.kernels.gpu.symmetric_gemm
"""


@pytest.mark.slow
def test_importing_touches_no_device(kernel):
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
