"""Variants of the recipe, each against a plain computation of what it says."""

import copy
import io
import math

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters, same_bits, set_gradients, take_steps

pytestmark = pytest.mark.kernels_ci


def matrix(rows, cols, seed, dtype=torch.float32):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


def test_group_can_set_its_own_conv_mode_and_experts(kernel):
    conv, experts = (Parameter(torch.zeros(shape)) for shape in ((8, 4, 3, 3), (5, 8, 12)))
    optimizer = kernel.Muon(
        [
            {"params": [("conv.weight", conv)], "conv_mode": "batched"},
            {"params": [("moe.experts.w", experts)], "expert_keys": ["experts"]},
        ]
    )
    assert [(row.matrices, row.reason) for row in optimizer.explain().rows] == [
        (9, "matrix: 9 matrices 8x4"),
        (5, "matrix: 5 matrices 8x12"),
    ]


def test_thin_and_extreme_shapes_go_to_adamw_unless_forced(kernel):
    shapes = {"depthwise": (16, 1, 3, 3), "thin": (3, 64), "extreme": (4, 1024), "pos": (1, 16, 12)}
    params = {f"{name}.weight": Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    branches = [row.branch for row in kernel.Muon(params.items()).explain().rows]
    forced = kernel.Muon(params.items(), is_muon=lambda name, p: True).explain().rows
    assert branches == ["adamw"] * 4 and [row.branch for row in forced] == ["muon"] * 4


def test_groups_differing_in_lr_and_decay_step_independently(kernel):
    """They share a batch all the same: see test_groups_with_equal_recipes_share_a_batch."""
    settings = [dict(lr=0.1, weight_decay=0.0), dict(lr=torch.tensor(0.02), weight_decay=0.5), dict(lr=0.0)]
    together = [{"params": [(f"{i}.weight", Parameter(matrix(16, 16, i)))], **own} for i, own in enumerate(settings)]
    alone = [[(f"{i}.weight", Parameter(matrix(16, 16, i)))] for i in range(3)]
    optimizers = [kernel.Muon(together), *(kernel.Muon(pair, **own) for pair, own in zip(alone, settings))]
    for seed in range(2):
        for i, group in enumerate([*(group["params"] for group in together), *alone]):
            group[0][1].grad = matrix(16, 16, 10 * seed + i % 3)
        for optimizer in optimizers:
            optimizer.step()
    for group, pair in zip(together, alone):
        assert torch.equal(group["params"][0][1], pair[0][1])


@pytest.mark.parametrize("differs", [dict(momentum=0.5), dict(nesterov=False), dict(eps=1e-3), dict(maximize=True)])
def test_groups_with_equal_recipes_share_a_batch(kernel, monkeypatch, differs):
    """Where products take several matrices at once, as on GPUs; here the plan is asked to believe that of a CPU."""
    plan = kernel.distributed.plan
    monkeypatch.setattr(plan, "_length", lambda batch, *_: len(batch.members))
    params = [Parameter(matrix(16, 16, i)) for i in range(4)]
    groups = [{"params": [p], "lr": 0.1 * i, "weight_decay": 0.1 * i} for i, p in enumerate(params)]
    groups[3].update(differs)
    optimizer = kernel.Muon(groups)
    assert sorted(len(batch.members) for batch in optimizer._plan.batches) == [1, 3]
    alone = [copy.deepcopy(p) for p in params]
    others = [kernel.Muon([{**group, "params": [p]}]) for group, p in zip(groups, alone)]
    for i, p in enumerate([*params, *alone]):
        p.grad = matrix(16, 16, 10 + i % 4)
    for each in (optimizer, *others):
        each.step()
    # torch's batched products may sum in another order than single ones.
    for p, other in zip(params, alone):
        torch.testing.assert_close(p, other, rtol=0, atol=0.5 * 0.3 * 0.8 * 2**-8 * 16)


def decayed(kernel, mode, p, gradient, lr, decay):
    """The step of one matrix, in float64."""
    factor = kernel.orthogonalize(gradient.double(), dtype=torch.float64) * 0.2 * math.sqrt(max(p.shape))
    p = p.double()
    keep = 1 - decay if mode == "independent" else 1 - lr * decay
    return (p * keep if mode != "cautious" else torch.where(p * factor > 0, p * keep, p)) - lr * factor


@pytest.mark.parametrize("mode", ["decoupled", "independent", "cautious"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["numbers", "tensors"])
def test_decay_follows_its_mode(kernel, mode, as_tensor):
    p = Parameter(matrix(12, 20, 0, torch.float64))
    lr, decay = (torch.tensor(v, dtype=torch.float64) if as_tensor else v for v in (0.1, 0.3))
    optimizer = kernel.Muon([p], lr=lr, weight_decay=decay, decay_mode=mode, momentum=0.0, ns_dtype="float32")
    gradient = matrix(12, 20, 1, torch.float64)
    p.grad, expected = gradient.clone(), decayed(kernel, mode, p.detach(), gradient, 0.1, 0.3)
    optimizer.step()
    # The iteration is in float32: its roundings, amplified by the product of all a, times lr and multiplier.
    gain = math.prod(a for a, _, _ in kernel.polar_express())
    torch.testing.assert_close(p.detach(), expected, rtol=0, atol=0.1 * 0.2 * 20**0.5 * gain * 2**-23)


def test_decay_modes_differ_from_each_other(kernel):
    p, gradient = matrix(12, 20, 0), matrix(12, 20, 1)
    results = [decayed(kernel, mode, p, gradient, 0.1, 0.3) for mode in ("decoupled", "independent", "cautious")]
    assert min((a - b).abs().max() for a in results for b in results if a is not b) > 0.01


@pytest.mark.parametrize("mode", ["decoupled", "independent", "cautious"])
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_gradients_at_lr_zero_keep_every_bit(kernel, mode, lr, fallback, dtype):
    """Not even the sign of a zero changes, and all state is made: so checkpoints initialise optimizers."""
    params = named_parameters(dtype)
    for p in params.values():
        p.data.flatten()[:2] = torch.tensor([0.0, -0.0])
    before = copy.deepcopy(params)
    optimizer = kernel.Muon(params.items(), lr=lr, weight_decay=0.5, decay_mode=mode, fallback=fallback)
    for p in params.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(p.view(torch.int16).equal(before[name].view(torch.int16)) for name, p in params.items())
    assert all(len(optimizer.state[p]) in (1, 3) for p in params.values())


def test_multiplier_may_be_a_function_of_the_shape(kernel):
    shapes = []

    def adjustment(rows, cols):
        shapes.append((rows, cols))
        return 0.5

    p, q = (Parameter(torch.zeros(24, 12)) for _ in range(2))
    optimizer = kernel.Muon([p], lr=0.1, adjust_lr_fn=adjustment)
    constant = kernel.Muon([q], lr=0.05, adjust_lr_fn=lambda rows, cols: 1.0)
    p.grad = q.grad = matrix(24, 12, 0)
    optimizer.step()
    constant.step()
    assert set(shapes) == {(24, 12)} and optimizer.explain().rows[0].multiplier == 0.5
    assert torch.equal(p, q)


def test_multiplier_function_is_not_saved_but_needed_to_load(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), adjust_lr_fn=lambda rows, cols: 0.5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = kernel.Muon(named_parameters().items(), adjust_lr_fn=lambda rows, cols: 0.25)
    other.load_state_dict(saved)
    assert other.explain().rows[0].multiplier == 0.25
    with pytest.raises(ValueError, match="was a function when the state was saved, and is original here"):
        kernel.Muon(named_parameters().items(), adjust_lr_fn="original").load_state_dict(saved)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_multiplier_function_must_return_a_positive_number(kernel, value):
    with pytest.raises(ValueError, match="finite number above 0"):
        kernel.Muon(named_parameters().items(), adjust_lr_fn=lambda rows, cols: value)


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensor_weight_decay_is_live_and_equals_the_number(kernel, fallback, dtype):
    """In half precision, too, where a factor of 1 - lr * weight_decay of its own would round to 1."""
    results = []
    for decay in (0.1, torch.tensor(9.0)):
        params = named_parameters(dtype)
        optimizer = kernel.Muon(params.items(), lr=2.0**-8, weight_decay=decay, fallback=fallback)
        if isinstance(decay, torch.Tensor):
            decay.fill_(0.1)
        take_steps(optimizer, params, range(3))
        results.append(params)
    for name in results[0]:
        # The factor is rounded to float32 before it is applied, not after.
        torch.testing.assert_close(results[0][name], results[1][name], rtol=2**-22, atol=2**-22)


def test_settings_of_a_group_are_live(kernel):
    """As torch's are: what a group says when the step begins counts."""
    changes = dict(momentum=0.5, nesterov=False, eps=1e-3, decay_mode="cautious", maximize=True, ns_steps=3)
    live, fixed = named_parameters(), named_parameters()
    optimizer = kernel.Muon(live.items())
    for group in optimizer.param_groups:
        group.update(changes)
    take_steps(optimizer, live, range(2))
    take_steps(kernel.Muon(fixed.items(), **changes), fixed, range(2))
    assert same_bits(live, fixed)


def test_capture_is_refused_where_it_cannot_be_repeated(kernel, monkeypatch):
    """So is a capture that was not asked for; nothing moves then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    clip = dict(head_dim=6, layers=[("up.weight", "down.weight")], report=print)
    for options, words in (
        (dict(), "only with Muon"),
        (dict(capturable=True, lr=torch.tensor(0.1)), "lr and weight_decay on the CPU"),
        (dict(capturable=True, qk_clip=clip), "calls no report"),
    ):
        params = named_parameters()
        optimizer = kernel.Muon(params.items(), **options)
        set_gradients(params, 0)
        before = copy.deepcopy(params)
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
        assert same_bits(params, before)
    with pytest.raises(ValueError, match="draws new seeds at every step"):
        kernel.Muon(params.items(), capturable=True, stochastic_rounding=True)
