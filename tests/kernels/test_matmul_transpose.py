"""The public product and its choice: what it returns, what it refuses, and that nothing unmeasured is chosen."""

from types import SimpleNamespace

import pytest
import torch


def matrices(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 5, 9), (2, 3, 4, 6), (0, 4, 6), (4, 0), (0, 4), (1, 1)], ids=str)
def test_product_equals_torchs(kernel, shape, dtype):
    X = matrices(*shape, dtype=dtype)
    expected = X @ X.mT
    assert torch.equal(kernel.matmul_transpose(X), expected)
    out = torch.full_like(expected, float("nan"))
    assert kernel.matmul_transpose(X, out) is out
    assert torch.equal(out, expected)


def test_autocast_changes_neither_dtype_nor_bits(kernel):
    X = matrices(5, 9)
    expected, out = kernel.matmul_transpose(X), torch.empty(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        result = kernel.matmul_transpose(X)
        kernel.matmul_transpose(X, out)
    assert result.dtype == torch.float32 and torch.equal(result, expected) and torch.equal(out, expected)


@pytest.mark.kernels_ci
def test_motif_name_writes_into_its_second_argument(kernel):
    X = matrices(4, 7)
    out = torch.empty(4, 4)
    kernel.compat.matmul_transpose_assign(X, out)
    assert torch.equal(out, X @ X.mT)


@pytest.mark.parametrize(
    "X, out, words",
    [
        (matrices(4), None, r"got \(4,\)"),
        (matrices(4, 4).int(), None, "int32"),
        (matrices(4, 4).to_sparse(), None, "torch.sparse_coo"),
        (matrices(4, 6), matrices(4, 6), r"out must be \(4, 4\)"),
        (matrices(4, 6), matrices(4, 4).double(), "float64"),
        (matrices(4, 6), torch.empty(4, 4, device="meta"), "on meta"),
        (matrices(4, 6), matrices(4, 4).to_sparse(), "torch.sparse_coo"),
    ],
    ids=["vector", "integers", "sparse", "shape", "dtype", "device", "layout"],
)
def test_wrong_operands_raise_and_leave_out_unchanged(kernel, X, out, words):
    before = None if out is None or out.is_meta else out.clone().to_dense()
    with pytest.raises(ValueError, match=words):
        kernel.matmul_transpose(X, out)
    assert before is None or torch.equal(out.to_dense(), before)


@pytest.mark.kernels_ci
def test_result_sharing_the_operands_memory_is_refused(kernel):
    X = matrices(6, 6)
    before = X.clone()
    with pytest.raises(ValueError, match="share its storage"):
        kernel.matmul_transpose(X, X)
    with pytest.raises(ValueError, match="share its storage"):
        kernel.matmul_transpose(X[:3, :3], X[3:, 3:])
    assert torch.equal(X, before)


def test_symmetric_kernel_is_chosen_only_where_measured_faster(kernel, monkeypatch):
    products, measurements = kernel.kernels.products, kernel.kernels.speeds.measurements
    config = kernel.kernels.gpu.tuned.Config(128, 64, 8, 8, 3)._asdict()
    entries = [{"m": 512, "k": 512, **config, "gain": 0.9}, {"m": 4096, "k": 4096, **config, "gain": 1.4}]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imagined GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(products, "has_triton", lambda device: True)
    monkeypatch.setattr(products, "triton_fault", lambda device: "")
    monkeypatch.setattr(products, "predicted", lambda *size: kernel.kernels.speeds.gains.Gain())
    device = torch.device("cuda", 0)
    assert products.select_products(device, torch.float16, 4096, 4096).name == "torch.bmm"
    table = {"symmetric_gemm": {"float16": entries}}
    monkeypatch.setattr(measurements, "shipped", lambda name: (name, table if name == "Imagined GPU" else {}))
    names = {
        (torch.float16, 4096, 8192): "symmetric_gemm + torch.bmm",
        (torch.float16, 608, 608): "torch.bmm",
        (torch.bfloat16, 4096, 8192): "torch.bmm",
        (torch.float16, 4095, 8192): "torch.bmm",  # measured are multiples of 16
        (torch.float16, 4096, 8191): "torch.bmm + symmetric_gemm",
    }
    assert {key: products.select_products(device, *key).name for key in names} == names
    # The product over n may be worth it where the one over m is not.
    entries[0]["gain"], entries[1]["k"] = 0.5, 16384
    mixed = products.select_products(device, torch.float16, 512, 16384)
    assert (mixed.gram, mixed.gram_affine) == (products.SYMMETRIC.gram, products.BATCHED.gram_affine)
    assert products.select_products(torch.device("cpu"), torch.float16, 4096, 8192) is products.SINGLE


def test_torchs_products_stay_where_triton_cannot_launch(kernel, monkeypatch, request):
    """It compiles its launchers, and an image may have no compiler. The first step would break off halfway.

    So it is in a process that can launch later: nothing is chosen anew between steps.
    """

    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    products, launch_cache = kernel.kernels.products, kernel.kernels.gpu.launch_cache
    monkeypatch.setattr(launch_cache, "driver", Driver())
    launch_cache.launch_fault.cache_clear()
    request.addfinalizer(launch_cache.launch_fault.cache_clear)
    monkeypatch.setattr(products, "supports_triton", lambda device: True)
    monkeypatch.setattr(products, "gpu_of", lambda device: kernel.kernels.speeds.predictions.Gpu(90, 132, 50 * 2**20))
    monkeypatch.setattr(products, "gain_of", lambda *_: kernel.kernels.speeds.gains.Gain(1.5, "shipped"))
    device = torch.device("cuda", 0)
    table = products.select_products(device, torch.float16, 4096, 4096)
    why = "by default, as Triton cannot launch here (RuntimeError: Failed to find C compiler.)"
    assert (table.name, table.source) == ("torch.bmm", why)
    assert not kernel.tuning.contest.tasks_of(device, torch.float16, (4096, 4096), 1)
    assert products.small_choice(device, torch.float16, 64, 64).gain is None
    monkeypatch.setattr(launch_cache, "driver", SimpleNamespace(active=SimpleNamespace(utils=None)))
    assert products.select_products(device, torch.float16, 4096, 4096).source == why


def test_the_model_chooses_where_nothing_was_measured(kernel, monkeypatch):
    """On an H100; not on GPUs that it does not know, nor where a candidate of the kernel has failed here."""
    products, gains = kernel.kernels.products, kernel.kernels.speeds.gains
    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=132, L2_cache_size=50 * 2**20, name="Imagined GPU")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imagined GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(products, "launch_fault", lambda: "")
    device, half = torch.device("cuda", 0), torch.float16
    chosen = {m: products.select_products(device, half, m, m) for m in (256, 512, 4096)}
    chosen = {m: (table.name, table.source) for m, table in chosen.items()}
    symmetric = "symmetric_gemm + torch.bmm", "by the model"
    assert chosen == {256: ("torch.bmm", "by default"), 512: symmetric, 4096: symmetric}
    assert products.select_products(device, half, 256, 4096).name == "torch.bmm"  # the rows decide
    monkeypatch.setattr(gains, "failed", lambda *candidate: {"128-64-8-8-3-1": "wrong"})
    assert products.select_products(device, half, 4096, 4096).name == "torch.bmm"
    monkeypatch.setattr(gains, "failed", lambda *candidate: {})
    facts.major = 10
    assert products.select_products(device, half, 4096, 4096).source == "by default"


@pytest.mark.parametrize("shape", [(5, 9), (3, 5, 9), (2, 3, 4, 6), (0, 4, 6), (4, 0), (0, 4), (2, 3, 4, 0)], ids=str)
def test_symmetric_branch_gives_the_product_in_place_or_new(kernel, monkeypatch, shape):
    """On a CPU the kernel's stand-in runs: shapes, results in place and gradients are what this shows."""
    launched, symmetric = [], kernel.kernels.matmul_transpose.symmetric_product
    monkeypatch.setattr(
        kernel.kernels.matmul_transpose, "symmetric_choice", lambda *_: kernel.kernels.speeds.gains.Gain(2.0)
    )
    monkeypatch.setattr(
        kernel.kernels.matmul_transpose,
        "symmetric_product",
        lambda *A, out=None: launched.append(1) or symmetric(*A, out=out),
    )
    X = matrices(*shape)
    expected = X @ X.mT
    # Both sum k products in float32, in orders of their own.
    close = dict(rtol=0, atol=max(shape[-1], 1) * torch.finfo(torch.float32).eps * max(1.0, X.square().sum().item()))
    torch.testing.assert_close(kernel.matmul_transpose(X), expected, **close)
    nan = torch.full_like(expected, float("nan"))
    for out in (nan, nan.mT.contiguous().mT, nan.transpose(0, -3 % nan.ndim).contiguous().transpose(0, -3 % nan.ndim)):
        assert kernel.matmul_transpose(X, out) is out
        torch.testing.assert_close(out, expected, **close)
    assert len(launched) == 4
    assert kernel.matmul_transpose(X.clone().requires_grad_()).requires_grad


@pytest.mark.parametrize("name", ["matmul_transpose", "orthogonalize"])
def test_public_functions_trace_for_an_absent_gpu(kernel, name):
    function = getattr(kernel, name)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        X = torch.empty(2, 32, 64, dtype=torch.float16, device="cuda")
        result = function(X)
        assert (result.device.type, result.dtype) == ("cuda", torch.float16)
        graphs = []
        compiled = torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
        assert compiled(X).shape == result.shape and len(graphs) == 1


def test_iteration_is_the_same_with_symmetric_products(kernel):
    """On a CPU the kernel's stand-in computes the lower triangle and its mirror image in float32."""
    G = matrices(2, 12, 20)
    schedule = kernel.polar_express(steps=3)
    products = kernel.kernels.products
    X = kernel.kernels.normalization.normalize(G, torch.float32, 1e-7)
    ours = kernel.kernels.newton_schulz.newton_schulz(X, schedule, products.SYMMETRIC)
    torchs = kernel.kernels.newton_schulz.newton_schulz(X, schedule, products.BATCHED)
    # Both round to float32 after every product; errors grow by at most the product of the first coefficients.
    gain = torch.tensor([a for a, _, _ in schedule]).prod().item()
    torch.testing.assert_close(ours, torchs, rtol=0, atol=16 * gain * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("device, gain", [("cpu", None), ("cuda", None), ("cuda", 0.5)])
@pytest.mark.parametrize("name", ["matmul_transpose", "orthogonalize"])
def test_compiled_functions_accept_changing_sizes(kernel, monkeypatch, name, device, gain):
    """The second size makes dynamo trace with symbols in place of numbers."""
    sizes = () if gain is None else ((32, 64), (512, 512))
    config = kernel.kernels.gpu.tuned.HOPPER._asdict()
    entries = [{"m": m, "k": k, "gain": gain, **config} for m, k in sizes]
    monkeypatch.setattr(kernel.kernels.speeds.gains, "shipped_entries", lambda *_: entries)
    function = getattr(kernel, name)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        for shape in ((2, 32, 64), (2, 48, 80), (2, 96, 64), (2, 16, 112)):
            X = torch.empty(shape, dtype=torch.float32, device=device)
            assert compiled(X).shape == function(X).shape


def test_what_is_no_tensor_is_refused(kernel):
    with pytest.raises(TypeError, match="matmul_transpose needs a tensor, got list"):
        kernel.matmul_transpose([[1.0, 2.0]])
