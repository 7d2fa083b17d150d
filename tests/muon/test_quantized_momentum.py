"""Momentum in 8 bits: what it takes, what it changes, and how it is saved, loaded, converted and moved."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

from tests.support import oracles
from tests.support.small_model import gradient_of, same_bits, state_of, take_steps

pytestmark = pytest.mark.kernels_ci

# Of each kind of view; blocks are short, whole and several.
SHAPES = {
    "up.weight": (24, 100), "down.weight": (100, 24), "conv.weight": (8, 16, 3, 3), "experts.up": (3, 16, 130),
    "c_fc.weight": (20, 192), "up.bias": (24,),
}  # fmt: skip
SCALES = {
    "up.weight": (24, 2), "down.weight": (100, 1), "conv.weight": (8, 3, 1, 1), "experts.up": (3, 16, 3),
    "c_fc.weight": (20, 3),
}  # fmt: skip


def parameters(dtype=torch.float32, names=SHAPES) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(3)
    values = {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in names}
    return {name: Parameter(value) for name, value in values.items()}


def muon(kernel, params, **settings):
    """Return an optimizer of `params`, of which `c_fc.weight` is (in, out), in two parts."""
    settings = {"lr": 0.02, "momentum_dtype": "int8", **settings}
    turned = {"params": [(name, p) for name, p in params.items() if "c_fc" in name], "transposed": True}
    rest = [(name, p) for name, p in params.items() if "c_fc" not in name]
    groups = [{"params": rest}, {**turned, "split_rows": (128, 64)}]
    return kernel.Muon([group for group in groups if group["params"]], **settings)


def lines(tensor, name: str):
    """Return a tensor of a parameter's state as a matrix whose rows have the blocks."""
    return tensor.flatten(1) if name == "conv.weight" else tensor.flatten(0, -2)


def value_of(state, name: str):
    return oracles.dequantized(lines(state["momentum_buffer"], name), lines(state["momentum_scale"], name))


def test_state_has_codes_and_a_scale_for_each_64_neighbours(kernel):
    params = parameters()
    optimizer = muon(kernel, params)
    for name, shape in SCALES.items():
        state = optimizer.state[params[name]]
        assert state.keys() == {"momentum_buffer", "momentum_scale"}
        assert (state["momentum_buffer"].dtype, state["momentum_buffer"].shape) == (torch.int8, params[name].shape)
        assert (state["momentum_scale"].dtype, tuple(state["momentum_scale"].shape)) == (torch.float32, shape)
    assert optimizer.state[params["up.bias"]]["exp_avg"].dtype == torch.float32
    rows = {row.name: row.kernel for row in optimizer.explain().rows}
    assert [name for name, kernel in rows.items() if "momentum in 8 bits" in kernel] == [n for n in rows if n in SCALES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_step_stores_the_average_within_its_bound(kernel, dtype):
    """Of each kind of view: the new average is of the stored one, which another view would not find."""
    params = parameters(dtype)
    optimizer = muon(kernel, params)
    for seed in range(4):
        before = {name: value_of(optimizer.state[params[name]], name) for name in SCALES}
        take_steps(optimizer, params, [seed])
        for name in SCALES:
            gradient = lines(gradient_of(name, params[name], seed), name).double()
            exact = 0.95 * before[name] + 0.05 * gradient
            rounding = 4 * oracles.unit_roundoff(dtype) * (before[name].abs() + gradient.abs())
            error = (value_of(optimizer.state[params[name]], name) - exact).abs()
            assert (error <= oracles.quantization_error(exact) + rounding).all(), name


def test_the_first_step_is_that_of_momentum_in_floating_point(kernel):
    """The direction is of the average before it is stored."""
    results = []
    for dtype in "int8", None:
        params = parameters()
        take_steps(muon(kernel, params, momentum_dtype=dtype), params, [0])
        results.append(params)
    assert same_bits(*results)


def test_a_gradient_that_is_not_finite_is_counted_and_stays_in_its_matrix(kernel):
    results = []
    for spoiled in False, True:
        params = parameters(names=["up.weight", "down.weight"])
        optimizer = kernel.Muon(params.items(), momentum_dtype="int8")
        for seed in range(2):
            for name, p in params.items():
                p.grad = gradient_of(name, p, seed)
            if spoiled and seed == 0:
                params["up.weight"].grad[3, 70] = torch.nan
            optimizer.step()
            assert optimizer.metrics()["matrices_not_finite"] == spoiled
        results.append(params)
    sound, other = results
    assert other["up.weight"].isnan().all() and torch.equal(sound["down.weight"], other["down.weight"])


@pytest.mark.parametrize("how", ["state_dict", "pickle", "offload"])
def test_a_run_resumes_bit_for_bit(kernel, how):
    params = parameters(torch.bfloat16)
    optimizer = muon(kernel, params)
    take_steps(optimizer, params, range(3))
    if how == "pickle":
        resumed, other = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        resumed = copy.deepcopy(params)
        other = muon(kernel, resumed, momentum_dtype=None, offload=how == "offload")
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take_steps(optimizer, params, range(3, 6))
    take_steps(other, resumed, range(3, 6))
    other.state_dict()  # waits
    assert same_bits(params, resumed) and same_bits(state_of(optimizer, params), state_of(other, resumed))


def test_offload_changes_no_bit_and_moves_codes_and_scales(kernel):
    results = []
    for offload in False, True:
        params = parameters()
        optimizer = muon(kernel, params, offload=offload)
        for seed, without in enumerate([(), ("up.weight", "experts.up"), ()]):
            for name, p in params.items():
                p.grad = None if name in without else gradient_of(name, p, seed)
            optimizer.step()
        optimizer.state_dict()  # waits
        results.append({**params, **state_of(optimizer, params)})
    assert same_bits(*results)


def test_codes_and_scales_take_a_quarter_of_the_slots(kernel):
    from tests.support.inside import device_bytes, host_of

    sizes = []
    for dtype in "int8", "float32":
        params = {f"{i}.weight": Parameter(torch.ones(64, 1024)) for i in range(2)}
        params["large.weight"] = Parameter(torch.ones(256, 1024))
        sizes.append(device_bytes(host_of(kernel.Muon(params.items(), offload=True, momentum_dtype=dtype))))
    assert sizes[0] / sizes[1] == (1 + 4 / 64) / 4


@pytest.mark.parametrize("offload", [False, True])
def test_a_change_of_the_setting_converts_momentum_there_and_back(kernel, offload):
    """Into 8 bits within the bound; what codes stand for is a float32 number, rounded once."""
    params = parameters()
    optimizer = muon(kernel, params, momentum_dtype=None, offload=offload)
    take_steps(optimizer, params, range(3))
    optimizer.state_dict()  # waits
    exact = {name: optimizer.state[params[name]]["momentum_buffer"].double() for name in SCALES}
    for group in optimizer.param_groups:
        group["momentum_dtype"] = "int8"
    optimizer.state_dict()
    codes = {name: value_of(optimizer.state[params[name]], name) for name in SCALES}
    for name in SCALES:
        wanted = lines(exact[name], name)
        assert ((codes[name] - wanted).abs() <= oracles.quantization_error(wanted)).all()
    for group in optimizer.param_groups:
        group["momentum_dtype"] = "float32"
    optimizer.state_dict()
    for name in SCALES:
        state = optimizer.state[params[name]]
        assert state.keys() == {"momentum_buffer"} and state["momentum_buffer"].is_cpu
        assert torch.equal(lines(state["momentum_buffer"], name), codes[name].float())
    take_steps(optimizer, params, [5])


def test_momentum_of_torch_becomes_codes_and_a_file_of_ours_says_its_own_form(kernel):
    """torch's groups have no `momentum_dtype`, so that the one here holds; ours have, and it is loaded."""
    p, q = (Parameter(torch.ones(8, 100)) for _ in range(2))
    theirs = torch.optim.Muon([p], lr=0.1)
    p.grad = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    theirs.step()
    exact = theirs.state[p]["momentum_buffer"].double()
    for load in (
        lambda optimizer: optimizer.load_state_dict(theirs.state_dict()),
        lambda optimizer: kernel.import_state(optimizer, theirs.state_dict(), "torch"),
    ):
        ours = kernel.Muon([q], momentum_dtype="int8")
        load(ours)
        ours.state_dict()
        value = value_of(ours.state[q], "q")
        assert ((value - exact).abs() <= oracles.quantization_error(exact)).all() and value.any()
    file = kernel.Muon([p], momentum_dtype="bfloat16")
    ours.load_state_dict(file.state_dict())
    ours.state_dict()
    assert ours.state[q]["momentum_buffer"].dtype == torch.bfloat16
    assert ours.param_groups[0]["momentum_dtype"] == "bfloat16"


def test_codes_without_scales_are_refused(kernel):
    p = Parameter(torch.ones(8, 100))
    optimizer = kernel.Muon([p], momentum_dtype="int8")
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["momentum_scale"]
    with pytest.raises(ValueError, match="param_0 is in 8 bits, and its momentum_scale is missing"):
        optimizer.load_state_dict(saved)
    optimizer.state_dict()


def test_scales_of_another_layout_of_a_convolution_are_refused(kernel):
    """Blocks follow the order of memory, and the scales' shape says which."""
    p = Parameter(torch.ones(8, 16, 3, 3))
    saved = kernel.Muon([p], momentum_dtype="int8", stacked=False).state_dict()
    q = Parameter(p.detach().clone(memory_format=torch.channels_last))
    other = kernel.Muon([q], momentum_dtype="int8", stacked=False)
    assert tuple(other.state[q]["momentum_scale"].shape) == (8, 1, 3, 1)
    with pytest.raises(ValueError, match="momentum_scale of param_0 has shape"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("conv_mode", ["flatten", "batched"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_of_any_layout_train(kernel, conv_mode, layout):
    results = []
    for dtype in "int8", None:
        p = Parameter(torch.ones(8, 16, 3, 3).to(memory_format=layout))
        optimizer = kernel.Muon([("conv.weight", p)], momentum_dtype=dtype, conv_mode=conv_mode, weight_decay=0.0)
        for seed in range(3):
            p.grad = gradient_of("conv.weight", p, seed).to(memory_format=layout)
            optimizer.step()
        results.append(p.detach())
    difference = (results[0] - results[1]).norm() / (results[1] - 1).norm()
    assert 0 < difference < 0.05


def test_what_cuts_a_block_is_refused_with_what_would_fit(kernel):
    p = Parameter(torch.ones(20, 192))
    group = {"params": [("c_fc.weight", p)], "transposed": True, "split_rows": (100, 92)}
    with pytest.raises(
        ValueError,
        match=r"every 64 neighbours in the last dimension of c_fc.weight.*split 100\+92, and split_rows cuts",
    ):
        kernel.Muon([group], momentum_dtype="int8")
    kernel.Muon([{**group, "momentum_dtype": "bfloat16"}], momentum_dtype="int8")


def test_momentum_is_converted_in_all_groups_or_in_none(kernel):
    """A conversion cannot be taken back without a loss."""
    params = parameters(names=["up.weight", "c_fc.weight"])
    optimizer = muon(kernel, params, momentum_dtype=None)
    take_steps(optimizer, params, [0])
    before = copy.deepcopy((params, state_of(optimizer, params)))
    for group in optimizer.param_groups:
        group["momentum_dtype"] = "int8"
    optimizer.param_groups[1]["split_rows"] = (100, 92)
    with pytest.raises(ValueError, match="split_rows cuts between such neighbours"):
        take_steps(optimizer, params, [1])
    assert same_bits(params, before[0]) and same_bits(state_of(optimizer, params), before[1])
