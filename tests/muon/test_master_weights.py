"""bfloat16 parameters with their lower halves in the state train as float32 parameters do, bit for bit."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from tests.muon.test_state import serialized
from tests.support.small_model import named_parameters, same_bits, set_gradients, state_of, take_steps

# A parameter of each branch, one of them with a shape whose elements fill no vector.
SETTINGS = dict(lr=2.0**-9, ns_dtype="float32", momentum_dtype="float32")
CASES = {
    "adamw": {},
    "nadamw": dict(fallback="nadamw"),
    "bfloat16 momentum": dict(momentum_dtype="bfloat16", ns_dtype="bfloat16"),
    "tensors": dict(lr=torch.tensor(2.0**-9), weight_decay=torch.tensor(0.3)),
    "independent": dict(decay_mode="independent", maximize=True),
    "cautious": dict(decay_mode="cautious", nesterov=False),
    "offload": dict(offload=True),
    "release_grads": dict(release_grads=True),
    "capturable": dict(capturable=True),
    "qk_clip": dict(qk_clip=dict(head_dim=6, layers=[("up.weight", "down.weight")])),
}
any_case = pytest.mark.parametrize("options", CASES.values(), ids=list(CASES))


def wide(params):
    return {name: Parameter(p.detach().float()) for name, p in params.items()}


def pair(kernel, **options):
    """An optimizer of halves and one of the same numbers in float32, with their parameters."""
    halves = named_parameters(torch.bfloat16)
    wholes = wide(halves)
    settings = {**SETTINGS, **options}
    ours = kernel.Muon(halves.items(), **settings, master_weights="split")
    return halves, ours, wholes, kernel.Muon(wholes.items(), **settings)


def set_equal_gradients(halves, wholes, seed, without=()):
    set_gradients(halves, seed, without)
    for name, p in wholes.items():
        p.grad = None if halves[name].grad is None else halves[name].grad.float()


def assert_same(ours, halves, reference, wholes):
    masters = ours.master_weights()
    assert same_bits(masters, {name: p.detach() for name, p in wholes.items()})
    assert not any(master.requires_grad for master in masters.values())
    state = {key: value for key, value in state_of(ours, halves).items() if not key.endswith("/remainder")}
    assert same_bits(state, state_of(reference, wholes))
    for name, p in halves.items():  # the parameter is the nearest bfloat16
        assert ((p.double() - masters[name].double()).abs() <= 2.0**-8 * masters[name].double().abs()).all()


@any_case
@pytest.mark.parametrize("without", [(), ("up.weight", "norm.weight")], ids=["all", "some missing"])
def test_training_has_the_bits_of_float32_training(kernel, options, without):
    halves, ours, wholes, reference = pair(kernel, **options)
    for seed in range(4):
        set_equal_gradients(halves, wholes, seed, without if seed % 2 else ())
        for optimizer in (ours, reference):
            if "qk_clip" in options:
                optimizer.observe_qk_logits(0, torch.tensor([300.0, 50.0, 120.0, 90.0]))
            optimizer.step()
        ours.state_dict()  # waits for what is offloaded
        reference.state_dict()
        assert_same(ours, halves, reference, wholes)
    assert all(ours.state[p]["remainder"].any() for p in halves.values())


@pytest.mark.parametrize("fallback", ["adamw", "nadamw"])
def test_parameters_in_pieces_have_the_same_bits(kernel, fallback, monkeypatch):
    """As large models have them, whose masters are not in memory together."""
    monkeypatch.setattr(kernel.rules.widened, "WIDENED_AT_ONCE", 30)
    halves, ours, wholes, reference = pair(kernel, fallback=fallback)
    for seed in range(2):
        set_equal_gradients(halves, wholes, seed)
        ours.step()
        reference.step()
    assert_same(ours, halves, reference, wholes)


def test_steps_below_bfloat16s_resolution_add_up(kernel):
    """A 1 stays 1 where each step is below 2^-9, half of the spacing below it, and bfloat16 is all there is."""
    moved = {}
    for setting in (None, "split"):
        shapes = {"up.weight": (8, 12), "norm.weight": (7,)}
        params = {name: Parameter(torch.ones(shape, dtype=torch.bfloat16)) for name, shape in shapes.items()}
        optimizer = kernel.Muon(params.items(), lr=2.0**-10, weight_decay=0.0, master_weights=setting)
        for _ in range(64):
            for p in params.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
        moved[setting] = [float((1 - p.detach().float()).abs().max()) for p in params.values()]
    assert moved[None] == [0.0, 0.0]
    assert min(moved["split"]) > 2.0**-9


@pytest.mark.parametrize("capturable", [False, True])
def test_scaled_training_takes_overflows_for_no_steps(kernel, capturable):
    halves, ours, wholes, reference = pair(kernel, capturable=capturable)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler.scale(torch.zeros(()))
    for seed, overflow in enumerate([True, False, True, False, False]):
        set_equal_gradients(halves, wholes, seed)
        for p in halves.values():
            p.grad *= scaler.get_scale()
        if overflow:
            halves["norm.weight"].grad[0] = float("inf")
        else:
            reference.step()
        scaler.step(ours)
        scaler.update()
    assert_same(ours, halves, reference, wholes)


def test_frozen_weights_and_biases_are_clipped_as_float32_ones(kernel):
    clip = CASES["qk_clip"]["qk_clip"]
    halves, ours, wholes, reference = pair(kernel, qk_clip=clip)
    set_equal_gradients(halves, wholes, 0)
    ours.step()
    reference.step()
    for _ in range(2):
        for params, optimizer in ((halves, ours), (wholes, reference)):
            for p in params.values():
                p.grad = None
            optimizer.observe_qk_logits(0, torch.tensor([300.0, 50.0, 120.0, 90.0]))
            optimizer.step()
    assert_same(ours, halves, reference, wholes)


def test_a_resumed_run_and_a_copy_go_on_bit_for_bit(kernel):
    halves, ours, _, _ = pair(kernel)
    take_steps(ours, halves, range(3))
    resumed = {name: Parameter(p.detach().clone()) for name, p in halves.items()}
    other = kernel.Muon(resumed.items(), lr=1.0, master_weights="split")
    other.load_state_dict(serialized(ours.state_dict()))
    twin, twins = copy.deepcopy((ours, halves))
    for optimizer, params in ((ours, halves), (other, resumed), (twin, twins)):
        take_steps(optimizer, params, range(3, 5))
    assert same_bits(halves, resumed) and same_bits(halves, twins)
    assert same_bits(ours.master_weights(), other.master_weights())
    assert same_bits(ours.master_weights(), twin.master_weights())


def test_plain_float32_goes_out_and_in(kernel):
    """Into a model of float32 parameters, and from there into halves again."""
    halves, ours, _, _ = pair(kernel)
    take_steps(ours, halves, range(3))
    masters = serialized(ours.master_weights())
    assert all(value.dtype == torch.float32 for value in masters.values())
    fresh = {name: Parameter(torch.zeros_like(p)) for name, p in halves.items()}
    other = kernel.Muon(fresh.items(), master_weights="split")
    version = fresh["up.weight"]._version
    other.load_master_weights({**masters, "buffer": torch.ones(3, dtype=torch.int64)})
    assert same_bits(fresh, halves) and same_bits(other.master_weights(), masters)
    assert fresh["up.weight"]._version > version


def test_values_that_do_not_fit_raise_and_change_nothing(kernel):
    halves, ours, _, _ = pair(kernel)
    masters = ours.master_weights()
    before = copy.deepcopy(halves)
    bad = {
        "up.bias must be a float32 tensor, got torch.bfloat16": halves["up.bias"].detach(),
        "up.bias must be a float32 tensor, got list": [1.0],
        r"laid out like the parameter, \(24,\), got \(12,\)": torch.ones(12),
        r"up.bias must be dense and have values, got \(24,\) .* on meta": masters["up.bias"].to("meta"),
        r"up.bias must be dense and have values, got a fake": FakeTensorMode().from_tensor(masters["up.bias"]),
        r"up.bias must be dense and have values, got \(24,\) torch.sparse_coo": masters["up.bias"].to_sparse(),
    }
    bad = {message: {**masters, "up.bias": value} for message, value in bad.items()}
    bad["no float32 values were given for 1 parameters: up.bias"] = {k: v for k, v in masters.items() if k != "up.bias"}
    for message, values in bad.items():
        with pytest.raises((ValueError, TypeError), match=message):
            ours.load_master_weights({name: 2 * v if name == "up.weight" else v for name, v in values.items()})
    assert same_bits(halves, before) and same_bits(ours.master_weights(), masters)


def test_two_parameters_of_one_name_raise(kernel):
    groups = [{"params": [("weight", Parameter(torch.ones(8, 8, dtype=torch.bfloat16)))]} for _ in range(2)]
    optimizer = kernel.Muon(groups, master_weights="split")
    with pytest.raises(ValueError, match="several parameters are called weight"):
        optimizer.master_weights()


def test_a_state_without_remainders_begins_with_the_parameters_as_masters(kernel):
    """Their averages become float32. The setting stays the one that is here."""
    params = named_parameters(torch.bfloat16)
    before = kernel.Muon(params.items(), lr=0.02)
    take_steps(before, params, range(2))
    after = kernel.Muon(params.items(), master_weights="split")
    after.load_state_dict(serialized(before.state_dict()))
    assert all(group["master_weights"] == "split" for group in after.param_groups)
    assert same_bits(after.master_weights(), {name: p.detach().float() for name, p in params.items()})
    averages = {key: value for key, value in state_of(after, params).items() if "exp_avg" in key}
    assert same_bits(averages, {key: state_of(before, params)[key].float() for key in averages})


def test_a_state_with_remainders_fits_nowhere_else(kernel):
    halves, ours, wholes, _ = pair(kernel)
    take_steps(ours, halves, [0])
    saved = serialized(ours.state_dict())
    for params, setting in ((halves, None), (wholes, "split"), (wholes, None)):
        other = kernel.Muon(params.items(), master_weights=setting)
        state = copy.deepcopy(state_of(other, params))
        with pytest.raises(ValueError, match="saved with the lower half of a float32 value"):
            other.load_state_dict(saved)
        assert same_bits(state_of(other, params), state)


def test_the_setting_may_change_between_steps(kernel):
    """On: the parameters are the masters from then on. Off: they stay the rounded ones."""
    params = named_parameters(torch.bfloat16)
    optimizer = kernel.Muon(params.items(), lr=2.0**-9)
    take_steps(optimizer, params, [0])
    for group in optimizer.param_groups:
        group["master_weights"] = "split"
    assert same_bits(optimizer.master_weights(), {name: p.detach().float() for name, p in params.items()})
    take_steps(optimizer, params, [1])
    assert optimizer.state[params["norm.weight"]]["exp_avg"].dtype == torch.float32
    for group in optimizer.param_groups:
        group["master_weights"] = None
    before = copy.deepcopy(params)
    assert optimizer.master_weights() == {} and same_bits(params, before)
    assert not any(key.endswith("remainder") for key in state_of(optimizer, params))
    take_steps(optimizer, params, [2])


def test_only_bfloat16_parameters_have_remainders(kernel):
    params = {**named_parameters(), "half.weight": Parameter(torch.ones(8, 12, dtype=torch.bfloat16))}
    optimizer = kernel.Muon(params.items(), master_weights="split")
    take_steps(optimizer, params, [0])
    assert list(optimizer.master_weights()) == ["half.weight"]
    rows = {row.name: row.kernel for row in optimizer.explain().rows}
    assert "float32 in two halves" in rows["half.weight"] and "halves" not in rows["up.weight"]


def test_what_cannot_be_raises(kernel):
    with pytest.raises(ValueError, match=r"up\.weight is float16, whose exponent has another width"):
        kernel.Muon([("up.weight", Parameter(torch.ones(8, 12, dtype=torch.float16)))], master_weights="split")
    with pytest.raises(ValueError, match="nothing to round with master_weights"):
        kernel.Muon(named_parameters().items(), master_weights="split", stochastic_rounding=True)
    with pytest.raises(ValueError, match="master_weights must be one of None, split, got 'float32'"):
        kernel.Muon(named_parameters().items(), master_weights="float32")


def test_state_has_two_more_bytes_an_element(kernel):
    params = named_parameters(torch.bfloat16)
    optimizer = kernel.Muon(params.items(), master_weights="split")
    for name, p in params.items():
        remainder = optimizer.state[p]["remainder"]
        assert remainder.nbytes == 2 * p.numel() and remainder.stride() == p.stride() and not remainder.any(), name
