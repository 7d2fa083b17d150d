"""The tables of products: each computes the polynomials that its fields name."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.proofs import roundings
from tests.support.symmetric_products import ALPHA, BETA, DIAGONAL, normal, symmetric

CPU, FLOAT32 = torch.device("cpu"), torch.float32
TABLES = [(name, FLOAT32) for name in ("SINGLE", "NATIVE", "NATIVE_SYMMETRIC", "BATCHED", "SYMMETRIC")]
TABLES += [(name, torch.bfloat16) for name in ("NATIVE", "NATIVE_SYMMETRIC")]


@pytest.fixture(params=TABLES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, kernel):
    """A table and a dtype that it multiplies on a CPU."""
    (name, dtype), products = request.param, kernel.kernels.products
    if name == "SYMMETRIC":
        pytest.importorskip("triton")
    return products.cpu_tables(dtype).get(name) or getattr(products, name), dtype


def assert_within(result, exact, allowed):
    assert ((result.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("a", [0.0, DIAGONAL])
def test_a_square_has_its_affine_part_and_its_diagonal(case, a):
    """The number on the diagonal may be rounded, and added to the rounded rest, which rounds a second time."""
    table, dtype = case
    A = symmetric(2, 48, dtype)[slice(None) if table.batched else 0]
    exact, allowed = roundings.product(A, A, ALPHA, (BETA, A))
    diagonal = a * torch.eye(48, dtype=torch.float64)
    exact, allowed = exact + diagonal, allowed + roundings.rounding_error(diagonal, dtype)
    allowed = allowed + roundings.rounding_error(exact.abs() + allowed, dtype)
    assert_within(table.gram_affine(A.clone(), BETA, ALPHA, a), exact, allowed)


@pytest.mark.parametrize("a", [0.0, DIAGONAL])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_product_with_a_long_matrix_has_its_addend(case, a, elsewhere):
    table, dtype = case
    B, X = (x[slice(None) if table.batched else 0] for x in (symmetric(2, 48, dtype), normal(2, 48, 80, dtype=dtype)))
    out = torch.full_like(X, torch.nan) if elsewhere else None
    result = table.affine(B, X.clone(), a, out)
    assert out is None or result.data_ptr() == out.data_ptr()
    assert_within(result, *roundings.product(B, X, 1.0, (a, X)))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_products_of_whole_numbers_are_exact(case, elsewhere):
    """Each dtype holds these numbers: X Xᵀ of signs, and A B and A B A of two polynomials of one matrix."""
    table, dtype = case
    neighbours = torch.eye(48).roll(1, 0) + torch.eye(48).roll(-1, 0)
    A, B, X = torch.eye(48) + neighbours, 2 * neighbours, normal(48, 80).sign()
    a, b, x = (each.expand(2, -1, -1).to(dtype).contiguous()[slice(None) if table.batched else 0] for each in (A, B, X))
    outs = [torch.full_like(a, torch.nan) if elsewhere else None for _ in range(2)]
    integer_products = table.gram(x, outs[0]), table.commuting(a, b, outs[1]), table.conjugated(a, b)
    for product, exact in zip(integer_products, (X @ X.mT, A @ B, A @ B @ A)):
        assert product.dtype == dtype and (product == exact).all()
    assert all(out is None or out.data_ptr() == product.data_ptr() for out, product in zip(outs, integer_products))


def test_a_diagonal_is_added_in_place(kernel):
    A, before = symmetric(2, 5), symmetric(2, 5)
    assert kernel.kernels.products.add_to_diagonal_(A, 0.5) is A
    assert torch.equal(A, before + 0.5 * torch.eye(5))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_matrix_in_another_dtype_than_its_gram_matrix_is_multiplied_by_torch(
    kernel, products, dtype, fast, monkeypatch
):
    """The method `gram_float32` has such; the compiled product takes no float16, and may be slow in bfloat16."""
    monkeypatch.setattr(kernel.kernels.native_products, "is_faster", lambda of: fast and of != torch.bfloat16)
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    iteration = kernel.iteration.choose_iteration(CPU, dtype, (48, 80), schedule, "gram_float32")
    B, X = symmetric(2, 48, dtype), normal(2, 48, 80, dtype=dtype)
    if not iteration.products.batched:
        B, X = B[0], X[0]
    assert iteration.products.name.endswith("torch.mm")
    assert_within(iteration.products.affine(B, X, 0.0, None), *roundings.product(B, X, 1.0, (0.0, X)))


@pytest.fixture
def products(kernel, measurements):
    """The tables, where nothing was measured."""
    return kernel.kernels.products


def test_a_cpu_takes_the_compiled_product_if_it_has_fast_instructions(kernel, products):
    """Instructions that nobody has timed are left to `warmup`."""
    instructions, in_plain_code = kernel.kernels.native.gemm_instructions, kernel.kernels.native_products
    for dtype in (FLOAT32, torch.bfloat16):
        fast = instructions(dtype) in ("avx2", "avx512", "avx512_bf16", "amx")
        fast = fast or (dtype == torch.bfloat16 and in_plain_code._PLAIN_CODE_IS_FASTER)
        name = f"gemm_ ({instructions(dtype)})" if fast else "torch.mm"
        table = products.select_products(CPU, dtype, 96, 128)
        assert (table.name, table.source) == (name, "by default")
    for dtype in (torch.float16, torch.float64):
        assert products.select_products(CPU, dtype, 96, 128) is products.SINGLE


@pytest.mark.parametrize("torch_is_slow", [True, False])
def test_plain_code_multiplies_bfloat16_where_torch_is_slower(kernel, products, torch_is_slow, monkeypatch):
    native = kernel.kernels.native_products
    monkeypatch.setitem(native.INSTRUCTIONS, torch.bfloat16, "portable")
    monkeypatch.setattr(native, "_PLAIN_CODE_IS_FASTER", torch_is_slow)
    tables = products.cpu_tables(torch.bfloat16)
    for n in 96, 960:  # not the Gram iteration, whose squares would be float32
        table = products.select_products(CPU, torch.bfloat16, 96, n)
        assert table == tables["NATIVE" if torch_is_slow else "SINGLE"]._replace(source="by default")


@pytest.mark.parametrize("instructions, taken", [("amx", "NATIVE_SYMMETRIC"), ("avx512_bf16", "NATIVE")])
def test_torch_multiplies_long_and_large_matrices_where_it_has_amx(kernel, products, instructions, taken, monkeypatch):
    """Up to what a core takes alone, the compiled product does all."""
    monkeypatch.setitem(kernel.kernels.native_products.INSTRUCTIONS, torch.bfloat16, instructions)
    monkeypatch.setattr(products, "failed_here", lambda *_: ())
    tables = products.cpu_tables(torch.bfloat16)
    for size, expected in {(1536, 1536): taken, (96, 128): "NATIVE", (1024, 1024): "NATIVE"}.items():
        table = products.select_products(CPU, torch.bfloat16, *size, method="standard")
        assert table == tables[expected]._replace(source="by default")


def test_a_variant_without_a_library_leaves_every_product_to_torch(portable_kernel, measurements):
    for dtype in (FLOAT32, torch.bfloat16):
        assert portable_kernel.kernels.products.select_products(CPU, dtype, 96, 128).name == "torch.mm"


def test_autograd_and_vmap_go_through_torchs_products(kernel, products, monkeypatch):
    is_transformed, X = kernel.kernels.tracing.is_transformed, torch.ones(2, 3, 4)
    seen = []
    torch.vmap(lambda x: seen.append(is_transformed(x)) or x)(X)
    assert seen == [True] and not is_transformed(X) and is_transformed(X.clone().requires_grad_())
    with torch.no_grad():
        assert not is_transformed(X.clone().requires_grad_())
    with forward_ad.dual_level():
        assert is_transformed(forward_ad.make_dual(X, X)) and not is_transformed(X)
    circumstances = kernel.kernels.circumstances.Circumstances(transformed=True)
    assert products.select_products(CPU, FLOAT32, 96, 128, circumstances) is products.SINGLE
    gain = kernel.kernels.speeds.gains.Gain(1.5, "shipped")
    monkeypatch.setattr(products, "symmetric_choice", lambda *_: gain)
    cuda = torch.device("cuda", 0), torch.float16, 512, 2048
    assert products.select_products(*cuda, circumstances) is products.BATCHED is not products.select_products(*cuda)


def test_a_kernel_that_is_slower_than_torchs_is_neither_taken_nor_counted(kernel, monkeypatch):
    """The gains of a table say what its products cost: torch's cost what torch's do."""
    products, gains, device = kernel.kernels.products, {(512, 2048): 1.5, (512, 512): 0.5}, torch.device("cuda", 0)
    monkeypatch.setattr(
        products,
        "symmetric_choice",
        lambda device, dtype, *size: kernel.kernels.speeds.gains.Gain(gains[size[:2]], "shipped"),
    )
    table = products.select_products(device, torch.float16, 512, 2048)
    assert (table.gram, table.gram_affine) == (products.SYMMETRIC.gram, products.BATCHED.gram_affine)
    assert (table.gram_gain, table.square_gain) == (1.5, 1.0)


def test_a_gpu_that_nothing_is_known_of_takes_torchs_products_by_default(kernel):
    table = kernel.kernels.products.select_products(torch.device("cuda", 0), torch.float16, 500, 2000)
    assert (table.name, table.source) == ("torch.bmm", "by default")


def test_each_product_is_named_after_the_kernel_of_its_size(kernel, monkeypatch):
    products, device = kernel.kernels.products, torch.device("cuda", 0)
    monkeypatch.setattr(products, "symmetric_choice", lambda *_: kernel.kernels.speeds.gains.Gain(1.5, "shipped"))
    for compiled in (512, 2048):
        monkeypatch.setattr(
            products, "launches_hopper_gemm", lambda device, dtype, m, k, among, compiled=compiled: k == compiled
        )
        table = products.select_products(device, torch.float16, 512, 2048)
        names = ("symmetric_gemm", "hopper_gemm") if compiled == 512 else ("hopper_gemm", "symmetric_gemm")
        assert (table.name, table.square_name) == (" + ".join([*names, "torch.bmm"]), names[1])


@pytest.mark.parametrize("among", [None, (0, 1)])
def test_what_ranks_have_agreed_on_is_asked_for_and_launched(kernel, monkeypatch, among):
    """A rank that went by its own measurements would round otherwise than those with copies of the same matrix."""
    pytest.importorskip("triton")
    products, asked, gain = kernel.kernels.products, [], kernel.kernels.speeds.gains.Gain(1.5, "shipped")
    monkeypatch.setattr(products, "gain_of", lambda *of: asked.append(of[-1]) or gain)
    monkeypatch.setattr(products, "launches_hopper_gemm", lambda *of: asked.append(of[-1]))
    monkeypatch.setattr(products, "symmetric_product", lambda *_, among, **__: asked.append(among))
    monkeypatch.setattr(products, "measured_sizes", lambda *of: asked.append(of[-1]) or ([], []))
    schedule = kernel.schedules.resolve_schedule("polar_express", 5)
    circumstances = kernel.kernels.circumstances.Circumstances(among=among)
    for place, dtype in (CPU, FLOAT32), (torch.device("cuda", 0), torch.float16):
        asked.clear()
        table = kernel.iteration.choose_iteration(place, dtype, (64, 256), schedule, "auto", circumstances).products
        assert asked and {*asked} == {among}
    asked.clear()
    table.gram(torch.ones(1, 64, 256)), table.commuting(*torch.ones(2, 1, 64, 64))
    assert asked == [among, among]


def test_what_was_measured_for_float32_squares_counts_for_no_other_method(kernel, products, measurements, monkeypatch):
    """`auto` asks again for `standard` where the Gram iteration is not safe."""
    native, bfloat16, file = kernel.kernels.native_products, torch.bfloat16, kernel.kernels.speeds.measurement_file
    tables = {"SINGLE": products.SINGLE, "NATIVE_GRAM": products.NATIVE._replace(float32_squares=True)}
    monkeypatch.setitem(products._CPU_TABLES, bfloat16, tables)
    monkeypatch.setattr(native, "is_faster", lambda dtype: False)
    key, entry = kernel.kernels.speeds.machine.key_of(CPU), {"m": 96, "k": 128, "products": "NATIVE_GRAM"}
    measurements.keep(key, file.Table({file.Need("cpu_products", "bfloat16", 96, 128): entry}, {}))
    choices = {of: products.select_products(CPU, bfloat16, 96, 128, method=of) for of in ("auto", "standard", "gram")}
    assert {of: table.float32_squares for of, table in choices.items()} == {
        "auto": True,
        "standard": False,
        "gram": False,
    }


@pytest.mark.parametrize("cols", [9, 12, 16])
def test_blas_gets_no_operand_that_begins_inside_a_cache_line(kernel, cols, monkeypatch):
    """On some processors it sums such an operand in another order, so no test of bits tells on the others."""
    affine, begun, addmm = kernel.kernels.affine_products, [], torch.addmm

    def noted(*operands, beta, out):
        begun.extend(x.data_ptr() % 64 for x in (*operands, *([] if out is None else [out])))
        return addmm(*operands, beta=beta, out=out)

    monkeypatch.setattr(torch, "addmm", noted)
    B, X = normal(3, 9, 9), normal(3, 9, cols)
    out = torch.empty(3 * 9 * cols + 1)[1:].view(3, 9, cols)
    affine.one_by_one_affine(B, X, 3.4, out)
    assert begun and not any(begun)


@pytest.mark.parametrize("shape", [(3, 40, 60), (2, 512, 640)], ids=str)
def test_an_iteration_errs_no_more_than_with_torchs_products(kernel, products, shape):
    """Both are as far from float64 as rounding takes them: at most twice as far as torch's whole products."""
    G = normal(*shape)
    exact = kernel.orthogonalize(G.double())
    schedule, errors = kernel.schedules.resolve_schedule("polar_express", 5), {}
    iteration = kernel.iteration.choose_iteration(CPU, FLOAT32, shape[1:], schedule, "standard")
    for name, table in products.cpu_tables(FLOAT32).items():
        factors = kernel.polar.factors.polar_factors(G, iteration._replace(products=table), 1e-7)
        errors[name] = (factors.double() - exact).norm()
    assert max(errors.values()) <= 2 * errors["SINGLE"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("a", [0.0, 3.4])
def test_products_one_after_the_other_have_the_bits_of_single_ones(kernel, dtype, a):
    """Wherever in a cache line they begin: BLAS may sum in another order there."""
    affine, draw = kernel.kernels.affine_products, torch.Generator().manual_seed(0)
    B, X = (torch.randn(9, 9, cols, generator=draw, dtype=dtype) for cols in (9, 301))
    together, out = affine.one_by_one_affine(B, X, a), torch.empty_like(X)
    for i in range(len(X)):
        alone = affine.single_affine(B[i].clone(), X[i].clone(), a)
        assert torch.equal(together[i], alone) and torch.equal(
            affine.single_affine(B[i].clone(), X[i].clone(), a, out[i]), alone
        )
