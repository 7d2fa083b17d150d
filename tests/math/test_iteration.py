"""Which iteration is chosen for which size and dtype, what it costs, and what it holds in memory."""

import itertools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.spectra import one_large, with_spectrum

CPU = torch.device("cpu")
METHODS = ("standard", "gram", "gram_float32")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def schedule(kernel):
    return kernel.schedules.resolve_schedule("polar_express", 5)


@pytest.fixture(scope="module")
def halving(kernel):
    """Products that save half of each symmetric result."""
    return kernel.kernels.products.SINGLE._replace(name="halving", gram_gain=2.0, square_gain=2.0)


@pytest.fixture
def choose(kernel, schedule):
    def chosen(dtype, m, n, method="auto", schedule=schedule):
        return kernel.iteration.choose_iteration(CPU, dtype, (m, n), schedule, method)

    return chosen


@pytest.mark.parametrize("m, n", [(1, 1), (64, 64), (512, 2048), (4096, 16384)])
@pytest.mark.parametrize("steps, windows", [(1, 1), (5, 1), (5, 2), (5, 3), (5, 5), (8, 3)])
def test_costs_follow_the_formulas_of_symmetric_products(kernel, halving, m, n, steps, windows):
    standard, gram = kernel.iteration.iteration_costs(m, n, steps, windows, halving)
    assert standard == steps * (3 * m**2 * n + m**3)
    assert gram == 4 * steps * m**3 + 3 * windows * m**2 * (n - m)


@pytest.mark.parametrize("m, n", [(64, 64), (512, 2048)])
def test_costs_of_full_products_count_every_flop(kernel, m, n):
    """Standard: 4 m² n + 2 m³ a step. A window of w steps: 2 m² n twice, and w + (w - 1) + 2 (w - 1) squares."""
    products = kernel.kernels.products.SINGLE
    standard, gram = kernel.iteration.iteration_costs(m, n, 5, 2, products)
    assert standard == 5 * (4 * m**2 * n + 2 * m**3)
    squares = sum(w + (w - 1) + 2 * (w - 1) for w in (2, 3))
    assert gram == 2 * 2 * (2 * m**2 * n) + squares * 2 * m**3


def test_auto_takes_gram_in_float16_exactly_where_cheaper(choose):
    """With full products, 20 m² n + 10 m³ against 8 m² n + 28 m³: where n is more than 1.5 m."""
    for m in (2, 64, 1000):
        assert choose(torch.float16, m, 3 * m // 2).method == "standard"
        assert choose(torch.float16, m, 3 * m // 2 + 1).method == "gram"


def test_auto_takes_gram_for_non_squares_if_products_save_half(kernel, halving, choose, monkeypatch):
    """15 m² n + 5 m³ against 20 m³ + 6 m² (n - m)."""
    monkeypatch.setitem(kernel.iteration.choose_iteration.__globals__, "select_products", lambda *size: halving)
    assert choose(torch.float16, 64, 64).method == "standard"
    assert choose(torch.float16, 64, 65).method == "gram"


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_auto_loses_no_digits_where_users_choose_them(choose, dtype):
    for m, n in ((1, 100), (64, 64), (64, 6400)):
        assert choose(dtype, m, n).method == "standard"


def test_auto_takes_standard_where_gram_is_unsafe(kernel, choose):
    many = kernel.schedules.resolve_schedule("original", 12)
    assert choose(torch.float16, 64, 6400, schedule=many).method == "standard"


@pytest.mark.parametrize(
    "dtype, m, n, method, text",
    [
        (torch.float32, 64, 640, "auto", "standard torch.mm float32"),
        (torch.bfloat16, 32, 128, "auto", "standard torch.mm bfloat16"),
        (torch.float16, 64, 640, "auto", "gram[2+3] torch.mm float16"),
        (torch.float16, 64, 64, "gram", "gram[2+3] torch.mm float16"),
        (torch.float32, 64, 64, "gram", "gram torch.mm float32"),
        (torch.bfloat16, 64, 64, "gram_float32", "gram_float32[1+4] torch.mm bfloat16"),
    ],
    ids=str,
)
def test_iteration_prints_method_windows_and_dtype(choose, dtype, m, n, method, text):
    # Behind the products' name may stand what else of them was chosen.
    first, *_, last = str(choose(dtype, m, n, method)).split()
    assert (first, last) == (text.split()[0], text.split()[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gram_float32_chain_is_float32_or_wider(choose, dtype):
    iteration = choose(dtype, 64, 640, "gram_float32")
    assert iteration.chain_dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    windows = [len(window) for window in iteration.windows]
    assert (iteration.work_dtype, windows) == (dtype, [1, 4] if dtype == torch.bfloat16 else [5])


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype, method", [*itertools.product(DTYPES, METHODS[::2]), (torch.float16, "gram")], ids=str)
def test_windows_join_to_the_schedule_with_folded_scale(kernel, choose, schedule, dtype, method):
    iteration = choose(dtype, 64, 160, method)
    steps = tuple(step for window in iteration.windows for step in window)
    assert steps == kernel.schedules.with_folded_scale(schedule, iteration.scale)


@pytest.mark.kernels_ci
@pytest.mark.parametrize(
    "options, words",
    [
        (dict(method="fast"), r"one of auto, standard, gram, gram_float32, got 'fast'"),
        (dict(method="gram", dtype=torch.bfloat16), r"method 'gram' is not safe .* 5 steps in torch\.bfloat16"),
        (
            dict(method="gram", dtype=torch.float16, ns_steps=12, ns_coefficients="original"),
            r"12 steps .* use standard",
        ),
        (dict(method="gram_float32", dtype=torch.bfloat16, ns_coefficients=[(9, 9, 9)]), r"safe .*: use standard"),
        (dict(ns_coefficients=[(1.0, 2.0)]), r"got \[\(1\.0, 2\.0\)\]"),
        (dict(ns_steps=0), r"got 0"),
        (dict(dtype=torch.complex64), r"torch\.complex64"),
    ],
    ids=str,
)
def test_impossible_requests_are_refused_before_any_work(kernel, options, words):
    G = torch.ones(4, 9)
    with pytest.raises(ValueError, match=words), Untouched():
        kernel.orthogonalize(G, **options)


class Untouched(TorchDispatchMode):
    """Fails at the first operation that takes or makes a tensor."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        assert not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs, result))), operation
        return result


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and somebody still holds, views and `known` ones left out."""

    def __init__(self, known):
        super().__init__()
        self.known, self.holders, self.peak = known.untyped_storage().data_ptr(), {}, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() != self.known:
                held = self.holders.setdefault((storage.data_ptr(), storage.nbytes()), [])
                held.append(weakref.ref(tensor))
        self.holders = {key: held for key, held in self.holders.items() if any(ref() is not None for ref in held)}
        self.peak = max(self.peak, sum(size for _, size in self.holders))
        return result


def callers_keep_arguments() -> bool:
    """Whether a caller holds what it passes on until the call returns.

    Python hands it over, but not while torch.compile evaluates frames. After it has refused a function for
    `fullgraph=True`, it does so until the process ends.
    """

    def alone(tensor):
        reference = weakref.ref(tensor)
        del tensor
        return reference() is None

    return not alone(torch.empty(1))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", [(128, 128), (128, 640)], ids=str)
@pytest.mark.parametrize(
    "dtype, method",
    [
        (torch.float32, "standard"),
        (torch.bfloat16, "standard"),
        (torch.float16, "gram"),
        (torch.bfloat16, "gram_float32"),
    ],
    ids=str,
)
def test_peak_memory_follows_a_formula(kernel, choose, dtype, method, shape, batch):
    """For the matrices worked on together two copies and their squares, and the results where there are more.

    One copy where the product that is not symmetric replaces it; then the Gram iteration has four squares, else five.
    """
    m, n = shape
    iteration = choose(dtype, m, n, method)
    G = torch.randn(batch, m, n, generator=torch.Generator().manual_seed(0))
    with Held(G) as held:
        kernel.polar.factors.polar_factors(G, iteration, eps=1e-7)
    copy = m * n * dtype.itemsize
    copies = 1 if iteration.products.affine is kernel.kernels.products.NATIVE.affine else 2
    squares = (2 if method == "standard" else 4 if copies == 1 else 5) * m * m * iteration.chain_dtype.itemsize
    together = 1 if not iteration.products.batched else batch
    alone = 1 if not iteration.products.batched else 0
    chains_copy = copies == 2 and iteration.chain_dtype != dtype
    normalizing = copy + (4 * m * n if chains_copy else 0)
    formula = together * max(copies * copy + squares, normalizing) + (batch * copy if alone or together < batch else 0)
    kept = m * m * iteration.chain_dtype.itemsize if callers_keep_arguments() else 0
    # Norms and their intermediate results are a few numbers a row.
    assert held.peak <= formula + kept + 64 * m * batch
    if method == "standard" or copies == 1:
        assert held.peak >= formula


def ship(kernel, monkeypatch, *sizes: tuple[int, int, float]) -> None:
    """Let these gains, each with its size, be the shipped ones of `small_polar`."""
    entries = [{"m": m, "k": k, "gain": gain} for m, k, gain in sizes]
    shipped = lambda key, name, dtype: entries if name == "small_polar" else []  # noqa: E731
    monkeypatch.setattr(kernel.kernels.speeds.gains, "shipped_entries", shipped)


@pytest.mark.parametrize("gain, expected", [((), False), ((64, 256, 0.99), False), ((64, 256, 1.0), True)])
def test_one_launch_is_chosen_only_where_measured_faster(kernel, monkeypatch, gain, expected):
    ship(kernel, monkeypatch, *([gain] if gain else []))
    schedule, gpu = kernel.schedules.resolve_schedule("polar_express", 5), torch.device("cuda", 0)
    choose = kernel.iteration.choose_iteration
    small = choose(gpu, torch.float16, (64, 256), schedule)
    assert small.in_one_launch == expected and ("small_polar" in str(small)) == expected
    large = choose(gpu, torch.float16, (129, 256), schedule)
    assert not large.in_one_launch
    assert not choose(gpu, torch.float16, (64, 256), schedule, "gram_float32").in_one_launch


def test_one_launch_takes_no_derivative_and_says_who_measured_it(kernel, monkeypatch):
    """autograd and torch.func cannot see through a kernel."""
    ship(kernel, monkeypatch, (64, 256, 1.1))
    schedule, iterations = kernel.schedules.resolve_schedule("polar_express", 5), {}
    for transformed in (False, True):
        circumstances = kernel.kernels.circumstances.Circumstances(transformed=transformed)
        case = torch.device("cuda", 0), torch.float16, (64, 256), schedule, "auto", circumstances
        iterations[transformed] = kernel.iteration.choose_iteration(*case)
    assert iterations[False].in_one_launch and iterations[False]._replace(method="standard").squares[0] == 0
    assert iterations[False].explained == f"{iterations[False]}, shipped"
    assert not iterations[True].in_one_launch and iterations[True].explained == str(iterations[True])


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(3, 40, 96), (3, 96, 40)])
def test_one_launch_agrees_with_separate_products(kernel, choose, method, shape):
    """Both within what float16 makes of the polynomial: each errs as the accuracy tests allow, so twice that apart."""
    G = with_spectrum(one_large(40, 0.03), *shape[1:], seed=0).float().expand(shape)  # bad for one window
    iteration = choose(torch.float16, 40, 96, method)
    products = kernel.polar.factors.polar_factors(G, iteration, eps=1e-7).double()
    together = kernel.polar.factors.polar_factors(G, iteration._replace(in_one_launch=True), eps=1e-7).double()
    assert (products - together).norm() <= 1e-2 * products.norm()
