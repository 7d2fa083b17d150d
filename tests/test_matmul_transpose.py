"""The public product and its choice: what it returns, what it refuses, and that nothing unmeasured is chosen."""

import pytest
import torch

pytestmark = pytest.mark.kernels_ci


def matrices(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 5, 9), (2, 3, 4, 6), (0, 4, 6), (4, 0), (0, 4), (1, 1)], ids=str)
def test_the_product_is_that_of_torch(kernel, shape, dtype):
    X = matrices(*shape, dtype=dtype)
    expected = X @ X.mT
    assert torch.equal(kernel.matmul_transpose(X), expected)
    out = torch.full_like(expected, float("nan"))
    assert kernel.matmul_transpose(X, out) is out
    assert torch.equal(out, expected)


def test_the_name_that_the_motif_kernel_has_writes_into_its_second_argument(kernel):
    X = matrices(4, 7)
    out = torch.empty(4, 4)
    kernel.compat.matmul_transpose_assign(X, out)
    assert torch.equal(out, X @ X.mT)


@pytest.mark.parametrize(
    "X, out, words",
    [
        (matrices(4), None, r"got \(4,\)"),
        (matrices(4, 4).int(), None, "int32"),
        (matrices(4, 6), matrices(4, 6), r"out must be \(4, 4\)"),
        (matrices(4, 6), matrices(4, 4).double(), "float64"),
        (matrices(4, 6), torch.empty(4, 4, device="meta"), "on meta"),
    ],
    ids=["vector", "integers", "shape", "dtype", "device"],
)
def test_what_does_not_fit_is_named_and_left_alone(kernel, X, out, words):
    before = None if out is None or out.is_meta else out.clone()
    with pytest.raises(ValueError, match=words):
        kernel.matmul_transpose(X, out)
    assert before is None or torch.equal(out, before)


def test_a_result_that_shares_the_operands_memory_is_refused(kernel):
    X = matrices(6, 6)
    before = X.clone()
    with pytest.raises(ValueError, match="share memory"):
        kernel.matmul_transpose(X, X)
    with pytest.raises(ValueError, match="share memory"):
        kernel.matmul_transpose(X[:3, :3], X[3:, 3:])
    assert torch.equal(X, before)


def test_the_symmetric_kernel_is_chosen_only_where_it_was_measured_to_be_faster(kernel, monkeypatch):
    gemms, tuned = kernel.kernels.gemms, kernel.kernels.tuned
    entries = [{"m": 512, "k": 512, "gain": 0.9}, {"m": 4096, "k": 4096, "gain": 1.4}]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imagined GPU")
    device = torch.device("cuda", 0)
    assert gemms.select_gemms(device, torch.float16, 4096, 4096) is gemms.BATCHED
    monkeypatch.setattr(tuned, "measured", lambda name: {"float16": entries} if name == "Imagined GPU" else {})
    assert gemms.select_gemms(device, torch.float16, 4096, 8192) is gemms.SYMMETRIC
    assert gemms.select_gemms(device, torch.float16, 600, 600) is gemms.BATCHED
    assert gemms.select_gemms(device, torch.bfloat16, 4096, 8192) is gemms.BATCHED
    assert gemms.select_gemms(torch.device("cpu"), torch.float16, 4096, 8192) is gemms.SINGLE


def test_the_iteration_over_the_symmetric_kernel_is_the_iteration(kernel):
    """On a CPU the kernel's stand-in computes the lower triangle and its mirror image in float32."""
    G = matrices(2, 12, 20)
    schedule = kernel.polar_express(steps=3)
    gemms = kernel.kernels.gemms
    X = kernel.polar.normalize(G, torch.float32, 1e-7)
    ours = kernel.polar.newton_schulz(X, schedule, gemms.SYMMETRIC)
    torchs = kernel.polar.newton_schulz(X, schedule, gemms.BATCHED)
    # Both round to float32 after every product; errors grow by at most the product of the first coefficients.
    gain = torch.tensor([a for a, _, _ in schedule]).prod().item()
    torch.testing.assert_close(ours, torchs, rtol=0, atol=16 * gain * torch.finfo(torch.float32).eps)
