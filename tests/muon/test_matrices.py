"""A parameter is seen as matrices that share its memory and hold each of its elements once."""

import importlib
import math

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import matrix


def channels_last(p):
    return p.contiguous(memory_format=torch.channels_last if p.ndim == 4 else torch.channels_last_3d)


VIEWS = {
    "matrix": ((6, 4), {}),
    "turned": ((6, 4), {"layout": lambda p: p.mT.contiguous().mT}),
    "split": ((12, 4), {"split_rows": (6, 2, 4)}),
    "conv1d": ((6, 4, 3), {}),
    "conv2d": ((6, 4, 3, 2), {}),
    "conv3d": ((6, 4, 2, 3, 2), {}),
    "one_by_one": ((6, 4, 1, 1), {}),
    "channels_last": ((6, 4, 3, 2), {"layout": channels_last}),
    "channels_last_3d": ((6, 4, 2, 3, 2), {"layout": channels_last}),
    "conv_split": ((6, 4, 3), {"split_rows": [2, 4]}),
    "batched": ((6, 4, 3, 2), {"conv_mode": "batched"}),
    "batched_last": ((6, 4, 3, 2), {"conv_mode": "batched", "layout": channels_last}),
    "batched_split": ((6, 4, 3), {"conv_mode": "batched", "split_rows": (3, 3)}),
    "experts": ((5, 6, 4), {"stacked": True}),
    "transposed": ((6, 4), {"transposed": True}),
    "transposed_split": ((6, 12), {"transposed": True, "split_rows": (6, 2, 4)}),
    "experts_transposed": ((5, 6, 4), {"stacked": True, "transposed": True, "split_rows": (1, 3)}),
    "experts_split": ((5, 6, 4), {"stacked": True, "split_rows": (2, 4)}),
    "gates_beside_ups": ((5, 2, 6, 4), {"stacked": True}),
    "gates_beside_ups_transposed": ((5, 2, 6, 4), {"stacked": True, "transposed": True, "split_rows": (1, 3)}),
}


@pytest.fixture(scope="module")
def matrices(kernel):
    return importlib.import_module(".parameters.matrices", kernel.__name__)


def view_and_parameter(matrices, case):
    """The view of a parameter that holds 0, 1, 2 and so on, and the parameter."""
    shape, settings = VIEWS[case]
    settings = dict(settings)
    layout = settings.pop("layout", lambda p: p)
    make = matrices.transposed_view if settings.pop("transposed", False) else matrices.matrix_view
    p = torch.nn.Parameter(layout(torch.arange(float(math.prod(shape))).reshape(shape)))
    return make("w", p, **settings), p


@pytest.mark.parametrize("case", VIEWS)
def test_each_element_is_in_exactly_one_matrix(matrices, case):
    """Matrices have the shapes that the view tells."""
    view, p = view_and_parameter(matrices, case)
    parts = view.matrices(p)
    assert tuple(tuple(M.shape) for M in parts) == view.shapes
    elements = torch.cat([M.flatten() for M in parts])
    assert torch.equal(elements.sort().values, torch.arange(float(p.numel())))


@pytest.mark.parametrize("case", VIEWS)
def test_writing_to_matrices_writes_to_the_parameter(matrices, case):
    view, p = view_and_parameter(matrices, case)
    version = p._version
    with torch.no_grad():
        for i, M in enumerate(view.matrices(p)):
            assert torch._C._is_alias_of(M, p)
            M.fill_(i)
    # Autograd must refuse a backward pass through the old values.
    assert p._version == version + len(view.shapes)
    assert [(p == i).sum() for i in range(len(view.shapes))] == [rows * cols for rows, cols in view.shapes]


@pytest.mark.parametrize("shape", [(6, 4, 3), (6, 4, 3, 2), (6, 4, 2, 3, 2), (6, 4, 1, 1), (6, 4, 1, 3)], ids=str)
def test_flatten_is_the_reshaped_parameter(matrices, shape):
    p = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (M,) = matrices.matrix_view("w", p).matrices(p)
    assert torch.equal(M, p.reshape(6, -1))


def test_flattened_channels_last_orders_columns_alike(matrices):
    """Columns are the contiguous parameter's, in one order for parameters and for gradients of any layout."""
    generator = torch.Generator().manual_seed(0)
    p, gradient = torch.randn(2, 6, 4, 3, 2, generator=generator).unbind(0)
    last = channels_last(p)
    view = matrices.matrix_view("w", last)
    columns = torch.arange(24).reshape(4, 3, 2).permute(1, 2, 0).flatten()
    assert torch.equal(view.matrices(last)[0], p.reshape(6, 24)[:, columns])
    for g in (gradient, channels_last(gradient), gradient.mT.contiguous().mT):
        assert torch.equal(view.matrices(g, read_only=True)[0], gradient.reshape(6, 24)[:, columns])


def test_memory_format_changes_the_update_only_by_rounding(kernel, matrices):
    """Five steps amplify rounding by at most the product of their first coefficients, of which the largest is 8.3."""
    p = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    last = channels_last(p)
    results = []
    for tensor in (p, last):
        result = torch.empty_like(tensor)
        view = matrices.matrix_view("w", tensor)
        view.matrices(result)[0].copy_(kernel.orthogonalize(view.matrices(tensor)[0]))
        results.append(result)
    assert (results[0] - results[1]).abs().max() <= 8.3**5 * torch.finfo(torch.float64).eps


def test_batched_has_one_matrix_for_each_kernel_position(matrices):
    """They come in the order of the kernel."""
    view, p = view_and_parameter(matrices, "batched_last")
    expected = [p[:, :, i, j] for i in range(3) for j in range(2)]
    assert all(torch.equal(M, E) for M, E in zip(view.matrices(p), expected))


def test_split_parts_are_consecutive_rows_of_each_matrix(matrices):
    view, p = view_and_parameter(matrices, "experts_split")
    expected = [part for expert in p for part in (expert[:2], expert[2:])]
    assert all(torch.equal(M, E) for M, E in zip(view.matrices(p), expected))


@pytest.mark.parametrize("case", ["matrix", "split", "conv_split", "batched_split", "experts_split"])
def test_row_values_go_with_their_rows(matrices, case):
    """Each row of each matrix is found in the rows of the parameter that its value names."""
    view, p = view_and_parameter(matrices, case)
    rows = p.movedim(1, 0) if case == "experts_split" else p
    for M, values in zip(view.matrices(p), view.row_values(torch.arange(rows.size(0))), strict=True):
        assert all(set(row.tolist()) <= set(rows[i].flatten().tolist()) for row, i in zip(M, values, strict=True))


def test_normalize_spatial_scales_only_batched_convolutions(matrices):
    p = torch.zeros(8, 4, 3, 3)
    assert matrices.matrix_view("w", p, conv_mode="batched").scale == pytest.approx(1 / 3)
    assert matrices.matrix_view("w", p, conv_mode="batched", normalize_spatial=False).scale == 1
    assert matrices.matrix_view("w", p).scale == 1
    assert matrices.matrix_view("w", p[0], conv_mode="batched", stacked=True).scale == 1


def test_expert_in_its_own_module_is_one_matrix(matrices):
    p = torch.zeros(6, 4)
    view = matrices.matrix_view("experts.0.w1.weight", p, stacked=True)
    assert view.shapes == ((6, 4),) and view.matrices(p)[0] is p


@pytest.mark.parametrize(
    "case, text",
    [
        ("matrix", "6x4"),
        ("conv2d", "flatten 6x24"),
        ("batched", "6 matrices 6x4"),
        ("experts", "5 matrices 6x4"),
        ("split", "12x4 split 6+2+4"),
        ("experts_split", "5 matrices 6x4 split 2+4"),
        ("transposed", "4x6 transposed"),
        ("experts_transposed", "5 matrices 4x6 transposed split 1+3"),
        ("gates_beside_ups", "10 matrices 6x4"),
        ("gates_beside_ups_transposed", "10 matrices 4x6 transposed split 1+3"),
    ],
)
def test_view_prints_what_it_does(matrices, case, text):
    assert str(view_and_parameter(matrices, case)[0]) == text


def test_many_equal_parts_print_as_a_count(matrices):
    assert str(matrices.matrix_view("w", torch.zeros(96, 4), split_rows=(8,) * 12)) == "96x4 split 12*8"
    assert str(matrices.matrix_view("w", torch.zeros(80, 4), split_rows=(12, 8) * 4)) == "80x4 split 4*(12+8)"


@pytest.mark.parametrize(
    "shape, settings, message",
    [
        ((12, 4), {"split_rows": (6, 4)}, r"attn\.qkv must sum to its 12 rows, 6\+4 gives 10"),
        ((3, 12, 4), {"split_rows": (1, 2), "stacked": True}, "must sum to its 12 rows"),
    ],
)
def test_impossible_views_are_refused_by_name(matrices, shape, settings, message):
    with pytest.raises(ValueError, match=message):
        matrices.matrix_view("attn.qkv", torch.zeros(shape), **settings)


@pytest.mark.parametrize(
    "value, error",
    [
        ((), ValueError),
        ((0, 12), ValueError),
        ((True, 11), ValueError),
        ("ab", TypeError),
        ((1.5,), TypeError),
        (7, TypeError),
    ],
)
def test_split_rows_must_be_positive_integers(kernel, value, error):
    with pytest.raises(error, match="split_rows"):
        kernel.Muon([{"params": [("qkv", Parameter(torch.zeros(12, 4)))], "split_rows": value}])


def test_layout_that_cannot_be_viewed_is_refused(matrices):
    """It is never copied."""
    p = torch.zeros(4, 6, 3).transpose(0, 1)
    with pytest.raises(ValueError, match="w must be contiguous or channels_last"):
        matrices.matrix_view("w", p)
    assert len(matrices.matrix_view("w", p, conv_mode="batched").matrices(p)) == 3
    view = matrices.matrix_view("w", torch.zeros(6, 4, 3))
    with pytest.raises(ValueError, match="cannot be seen as one matrix 6 x 12"):
        view.matrices(p)


def test_view_depends_on_shape_and_layout_and_is_frozen(matrices):
    real = matrices.matrix_view("w", torch.zeros(6, 4, 3, 2))
    assert real == matrices.matrix_view("other", torch.ones(6, 4, 3, 2, device="meta", dtype=torch.bfloat16))
    with pytest.raises(AttributeError):
        real.cols = 1


@pytest.mark.parametrize("work_dtype", ["float32", "bfloat16", "float16"])
def test_split_rows_are_stepped_as_separate_parameters(kernel, work_dtype):
    """Bit for bit, with the multiplier of each part's own shape."""
    rows = (24, 8, 8)
    whole = {"qkv.weight": Parameter(matrix(40, 16, 0))}
    parts = {name: Parameter(part.clone()) for name, part in zip("qkv", whole["qkv.weight"].detach().split(rows))}
    options = dict(lr=0.1, ns_dtype=work_dtype, adjust_lr_fn="match_rms_adamw")
    ours = kernel.Muon([{"params": whole.items(), "split_rows": rows}], **options)
    separate = kernel.Muon(parts.items(), **options, is_muon=lambda *_: True)
    for seed in range(2):
        whole["qkv.weight"].grad = matrix(40, 16, 10 + seed)
        for p, gradient in zip(parts.values(), whole["qkv.weight"].grad.split(rows)):
            p.grad = gradient.clone()
        ours.step()
        separate.step()
    assert torch.equal(whole["qkv.weight"], torch.cat(list(parts.values())))
    assert ours.explain().rows[0].matrices == 3


def test_experts_are_stepped_as_separate_parameters(kernel):
    stack = Parameter(torch.stack([matrix(8, 12, seed) for seed in range(5)]))
    single = [Parameter(p.clone()) for p in stack.detach()]
    ours = kernel.Muon([("moe.experts.w1", stack)], expert_keys=["experts"], lr=0.1)
    separate = kernel.Muon(single, lr=0.1)
    stack.grad = torch.stack([matrix(8, 12, 10 + seed) for seed in range(5)])
    for p, gradient in zip(single, stack.grad):
        p.grad = gradient.clone()
    ours.step()
    separate.step()
    assert torch.equal(stack, torch.stack(single))


def test_parts_of_one_tensor_are_parameters_of_their_own(kernel):
    """Rows, and even columns, of one tensor lie beside each other."""
    whole = torch.ones(12, 8)
    parts = {"rows": whole[:4], "more rows": whole[4:8], "left": whole[8:, :4], "right": whole[8:, 4:]}
    kernel.Muon([(name, Parameter(part)) for name, part in parts.items()])
