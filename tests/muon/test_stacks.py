"""Stacks of experts are matrices of their own, convolutions are not, and nobody guesses which is which."""

import importlib

import pytest
import torch

from tests.muon.test_routing import branches, parameter


@pytest.fixture(scope="module")
def matrices(kernel):
    return importlib.import_module(".parameters.matrices", kernel.__name__)


@pytest.mark.parametrize(
    "name, keys, expected",
    [
        ("layers.0.experts.w1", ("experts",), True),
        ("experts", ("experts",), True),
        ("layers.0.moe.mlp.w1", ("moe.mlp",), True),
        ("layers.0.conv_moe.w1", ("conv_moe",), True),
        ("conv_blocks.0.experts.w1", ("experts",), True),
        ("layers.0.shared_experts.w1", ("experts",), None),
        ("layers.0.experts_bias", ("experts",), None),
        ("layers.0.experts.3.w1", ("experts",), None),
        ("layers.0.moe.w1", (), None),
        ("converter.0.w1", (), None),
        ("layers.0.experts.conv1.weight", ("experts",), False),
        ("layers.0.experts.3.conv1.weight", ("experts",), False),
        ("feature_extractor.conv_layers.0.weight", ("experts",), False),
        ("encoder.ConvBlock.0.weight", (), False),
    ],
)
def test_the_innermost_name_tells_stacks_from_convolutions(matrices, name, keys, expected):
    """By whole components for stacks, of which a number behind makes the module of one; what is told counts more."""
    assert matrices.is_stack(name, 3, keys) is expected
    assert matrices.is_stack(name, 2, keys) is False
    assert matrices.is_stack(name, 3, keys, stacked=True) is True
    assert matrices.is_stack(name, 3, keys, stacked=False) is False


def test_four_dimensions_are_a_convolution_unless_the_name_says_stack(matrices):
    assert matrices.is_stack("layers.0.weight", 4, ("experts",)) is False
    assert matrices.is_stack("layers.0.experts.conv.weight", 4, ("experts",)) is False
    assert matrices.is_stack("layers.0.experts.w13", 4, ("experts",)) is True
    assert matrices.is_stack("layers.0.experts", 4, ("experts",)) is True
    for may_be_a_layers in ("layers.0.experts.weight", "layers.0.experts.up.weight", "layers.0.experts.up.w13"):
        assert matrices.is_stack(may_be_a_layers, 4, ("experts",)) is None


@pytest.mark.parametrize("rows, cols", [(96, 64), (64, 64)])
def test_gates_beside_ups_of_experts_are_matrices_each(kernel, rows, cols):
    """As in torchtitan; of equal sides they look like a kernel that reads two channels of pixels."""
    named = [("layers.1.moe.experts.w13_EFD", parameter(8, 2, rows, cols))]
    expected = {"layers.1.moe.experts.w13_EFD": ("muon", f"matrix: 16 matrices {rows}x{cols}")}
    assert branches(kernel, [(name, p.shape) for name, p in named]) == expected


def test_a_stack_of_stacks_steps_as_one_long_stack_does(kernel):
    stack = torch.randn(6, 8, 12, generator=torch.Generator().manual_seed(0))
    steps = []
    for shape in ((6, 8, 12), (3, 2, 8, 12)):
        p = torch.nn.Parameter(stack.clone().view(shape))
        optimizer = kernel.Muon([("experts.w", p)], lr=0.02)
        for scale in (1.0, -0.5):
            p.grad = scale * stack.flip(0).view(shape)
            optimizer.step()
        steps.append(p.detach().view(6, 8, 12))
    assert torch.equal(*steps) and not torch.equal(steps[0], stack)


@pytest.mark.parametrize(
    "experts, rows, cols",
    [
        (128, 1536, 2048),  # Qwen3-30B-A3B's, which flattened would be too thin
        (64, 128, 64),  # which flattened would be a matrix like any other
    ],
)
@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.experts.gate_up_proj", "_orig_mod.blocks.3.moe.experts.w1.weight"]
)
def test_stacks_of_experts_are_matrices_of_their_own_by_name(kernel, name, experts, rows, cols):
    stack = torch.empty(experts, rows, cols, device="meta")
    (row,) = kernel.route([(name, stack)]).rows
    assert (row.branch, row.matrices, row.reason) == ("muon", experts, f"matrix: {experts} matrices {rows}x{cols}")
    assert row.multiplier == 0.2 * max(rows, cols) ** 0.5


def test_a_stack_is_judged_by_the_shape_of_one_expert(kernel):
    shapes = {"moe.experts.w": (64, 3, 64), "moe.experts.v": (64, 4, 1024), "moe.experts.gate.weight": (8, 16, 64)}
    assert branches(kernel, shapes.items()) == {
        "moe.experts.w": ("adamw", "min_dim_too_small:3"),
        "moe.experts.v": ("adamw", "extreme_aspect_ratio:256.0"),
        "moe.experts.gate.weight": ("muon", "matrix: 8 matrices 16x64"),  # a router is no stack
    }


@pytest.mark.parametrize("shape", [(0, 8, 8), (2, 0, 8, 8), (2, 8, 0)])
def test_a_stack_without_an_element_is_the_fallbacks(kernel, shape):
    """As of a process that has no expert: nobody asked Muon for it, and the model trains."""
    named = [("layers.0.experts", parameter(*shape)), ("layers.0.up.weight", torch.nn.Parameter(torch.randn(8, 8)))]
    assert branches(kernel, [("layers.0.experts", shape)]) == {"layers.0.experts": ("adamw", "min_dim_too_small:0")}
    optimizer = kernel.Muon(named, lr=0.1)
    for _, p in named:
        p.grad = torch.ones_like(p)
    before = named[1][1].detach().clone()
    optimizer.step()
    assert not torch.equal(named[1][1], before)


def test_what_no_name_tells_goes_to_the_fallback(kernel):
    """Only where a stack or a convolution would be Muon's, and where it has no role."""
    shapes = {
        "blocks.0.w": (8, 16, 12),
        "few": (2, 16, 12),  # as a convolution too thin
        "query_tokens": (1, 16, 12),
        "thin": (3, 2, 64),
        "pos_embed.weight": (8, 16, 12),
    }
    assert branches(kernel, shapes.items()) == {
        "blocks.0.w": ("adamw", "stack_or_convolution"),
        "few": ("adamw", "stack_or_convolution"),
        "query_tokens": ("adamw", "leading_unit_dims"),
        "thin": ("adamw", "min_dim_too_small:3"),
        "pos_embed.weight": ("adamw", "embedding:pos_embed"),
    }


def test_stacked_says_what_no_name_tells(kernel):
    params = [("blocks.0.w", parameter(8, 16, 12))]
    assert [row.reason for row in kernel.route(params, stacked=True).rows] == ["matrix: 8 matrices 16x12"]
    assert [row.reason for row in kernel.route(params, stacked=False).rows] == ["matrix: flatten 8x192"]
    groups = [{"params": params, "stacked": True}]
    assert [row.matrices for row in kernel.Muon(groups).explain().rows] == [8]


def test_muon_is_not_guessed_for_what_no_name_tells(kernel):
    params = [("blocks.0.w", parameter(8, 16, 12))]
    words = r"asked for blocks.0.w \(8, 16, 12\), which may be a stack .* write stacked=True or stacked=False"
    for make in (kernel.route, kernel.Muon):
        with pytest.raises(ValueError, match=words):
            make(params, is_muon=lambda name, p: True)
    with pytest.raises(ValueError, match=words):
        kernel.Muon([{"params": params, "use_muon": True}])


def test_the_work_of_a_stack_is_that_of_its_matrices(kernel):
    stack, one = (kernel.Muon([("experts.w1", parameter(*shape))]).explain().rows for shape in ((3, 8, 16), (8, 16)))
    assert stack[0].flops == 3 * one[0].flops > 0
