"""The symmetric product's operation: on CPUs, on a GPU and traced; its kernel is in `test_symmetric_gemm_laws`."""

from __future__ import annotations

import contextlib
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
    DTYPES,
    LAYOUTS,
    PROVEN_SIZES,
    WrongResultError,
    check_nan,
    check_product,
    normal,
    prove_product,
    symmetric,
)
from tests.support.symmetric_products import operands as laid_out

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def module(kernel):
    return kernel.kernels.symmetric_gemm


def operands(dtype=torch.float32, batch=2, m=6, k=5) -> dict:
    """A, B = Aᵀ, a symmetric D with eigenvalues 1 / n, and coefficients of a Newton-Schulz step."""
    A, D = normal(batch, m, k, dtype=dtype), symmetric(1, m, dtype).expand(batch, m, m)
    scalars = {"alpha": torch.tensor(ALPHA), "beta": torch.tensor(BETA)}
    return {"A": A, "B": A.mT, "D": D, "C": A.new_full((batch, m, m), 7.0), **scalars}


def combined(module, A, B, D, alpha, beta):
    """Two products, one of them without D and by numbers."""
    return module.symmetric_gemm(A, B, D, alpha, beta) + module.symmetric_gemm(A, B)


def inputs(**options) -> tuple:
    values = operands(**options)
    return tuple(values[name] for name in ("A", "B", "D", "alpha", "beta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_err_by_their_roundings(module, device, dtype, layout):
    """And nothing is written around a result of odd strides."""
    for m, k in [(1, 7), (7, 1), (33, 65), *(PROVEN_SIZES if device == "cuda" else ())]:
        A, B = laid_out(layout, 2, m, k, dtype)
        D = symmetric(2, m, dtype)
        buffer = A.new_full((3, 2 * m + 1, 2 * m + 3), 7.0)
        C = buffer[1:, 1::2, 3::2].fill_(math.nan)
        module.symmetric_gemm(A, B, D, ALPHA, BETA, out=C)
        check_product(C, A, B, D, (ALPHA, BETA))
        C.fill_(7.0)
        assert (buffer == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_stays_in_its_matrix_row_and_column(module, device, dtype):
    check_nan(module.symmetric_gemm, normal(3, 272, 208, dtype=dtype))


def test_numbers_and_tensors_give_the_same_bits(module, device):
    S = symmetric(2, 272, torch.float16)
    tensors = torch.tensor(ALPHA), torch.tensor(BETA)
    numbers = [x.item() for x in tensors]
    assert torch.equal(module.symmetric_gemm(S, S, S, *numbers), module.symmetric_gemm(S, S, S, *tensors))


# What may go wrong in a launch.
FAULTS = {
    "wrong": lambda C: C * 1.02,
    "asymmetric": lambda C: C + torch.ones_like(C).triu(1) * 1e-3,
    "not written": lambda C: C.index_fill(1, torch.tensor([0]), torch.nan),
    "NaN is lost": lambda C: C.nan_to_num(),
    "NaN spreads": lambda C: C + 0 * C.sum((1, 2), keepdim=True),
    "knows its batch": lambda C: C * (1 + len(C) * torch.finfo(C.dtype).eps),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_proof_finds_what_is_wrong(module, fault):
    spoil = FAULTS.get(fault, lambda C: C)

    def launch(A, B, D, C, scalars) -> None:
        C.copy_(spoil(module.symmetric_gemm(A, B, D, *scalars)))

    with pytest.raises(WrongResultError) if fault else contextlib.nullcontext():
        prove_product(launch, torch.float16, [(48, 32)])


def test_a_proof_finds_sums_that_are_rounded_too_early():
    """The Gram matrix of one dominant row has a square that float16 holds only after its small coefficient."""

    def launch(A, B, D, C, scalars) -> None:
        product = scalars[0] * (A.double() @ B.double()).half().double()
        C.copy_(product if D is None else product + scalars[1] * D.double())

    with pytest.raises(WrongResultError, match="an error is"):
        prove_product(launch, torch.float16, [(48, 32)])


def test_a_proof_finds_a_nan_of_the_addend_elsewhere(module):
    def launch(A, B, D, C, scalars) -> None:
        C.copy_(module.symmetric_gemm(A, B, D, *scalars))
        if D is not None and D is not A:
            C += 0 * D.sum((1, 2), keepdim=True)

    with pytest.raises(WrongResultError, match="a NaN of D"):
        prove_product(launch, torch.float16, [(48, 32)])


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


@pytest.mark.parametrize("has_D", [True, False], ids=["with D", "without D"])
def test_the_operation_keeps_torchs_rules_for_operators(module, has_D):
    """Schema, fake kernel and tracing under dynamic shapes; there is no gradient to register."""
    values = operands() if has_D else {**operands(), "D": None}
    utilities = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(module.symmetric_gemm_, (), values, test_utils=utilities)


def test_compiled_product_equals_eager_for_all_coefficients(module):
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: combined(module, *args), fullgraph=True, backend=graphs)
    A, B, D, alpha, beta = inputs()
    for scale in (1.0, 2.0):
        arguments = A, B, D, scale * alpha, scale * beta
        assert torch.equal(compiled(*arguments), combined(module, *arguments))
    assert graphs.frame_count == 1


def test_an_exported_product_is_the_eager_one(module):
    class Product(torch.nn.Module):
        def forward(self, A, B, D, alpha, beta):
            return combined(module, A, B, D, alpha, beta)

    exported = torch.export.export(Product(), inputs())
    assert torch.equal(exported.module()(*inputs()), combined(module, *inputs()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_product_is_traced_without_the_gpu(module, dtype):
    with FakeTensorMode():
        A, D = (torch.empty(3, 7, n, dtype=dtype, device="cuda") for n in (5, 7))
        alpha = torch.empty((), device="cuda")
        arguments = A, A.mT, D, alpha, alpha
        C = module.symmetric_gemm(*arguments)
        assert (C.shape, C.dtype, C.device.type) == ((3, 7, 7), dtype, "cuda")
        graph = make_fx(lambda *args: combined(module, *args), tracing_mode="fake")(*arguments).graph
        with pytest.raises(ValueError, match="B must be"):
            module.symmetric_gemm(A, A)
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
    r"alpha must be a real 0-d tensor on the CPU or cpu, got \(2,\)": lambda v: {"alpha": torch.ones(2)},
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
assert package.kernels.symmetric_gemm
"""


@pytest.mark.slow
def test_importing_touches_no_device(kernel):
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
