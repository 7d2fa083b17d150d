"""Momentum in host memory gives the bits of momentum that stays, is whole for whoever reads it, and takes two slots."""

import copy
import pickle

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from tests.support.inside import device_bytes, host_of, plan_of, workspace_of
from tests.support.small_model import named_parameters, same_bits, set_gradients, state_of, take_steps

VARIANTS = {
    "plain": {},
    "bfloat16 momentum": dict(momentum_dtype="bfloat16"),
    "stochastic": dict(stochastic_rounding=True),
    "batched convolutions": dict(conv_mode="batched"),
}


def parameters(device="cpu"):
    generator = torch.Generator("cpu").manual_seed(1)
    shapes = {"conv.weight": (8, 4, 3, 3), "experts.up": (5, 16, 12)}
    more = {name: torch.randn(shape, generator=generator, device="cpu") for name, shape in shapes.items()}
    more["conv.weight"] = more["conv.weight"].to(memory_format=torch.channels_last)
    both = {**named_parameters(), **more}
    return {name: Parameter(p.detach().to(device)) for name, p in both.items()}


def pair(kernel, device="cpu", **settings):
    """Parameters and optimizers without and with offload."""
    both = [parameters(device) for _ in range(2)]
    settings = dict(lr=0.02, expert_keys=["experts"], **settings)
    return both, [
        kernel.Muon(params.items(), offload=offload, **settings) for params, offload in zip(both, (False, True))
    ]


def momentum_of(optimizer, params):
    return {key: value for key, value in state_of(optimizer, params).items() if key.endswith("momentum_buffer")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_offload_changes_no_bit_of_parameters_and_state(kernel, device, variant):
    (params, others), (optimizer, offloaded) = pair(kernel, device, **VARIANTS[variant])
    for seed, without in enumerate([(), ("up.weight", "experts.up"), params.keys(), ()]):
        for weights, each in ((params, optimizer), (others, offloaded)):
            for name, p in weights.items():
                gradient = torch.randn(p.shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
                p.grad = None if name in without else gradient.to(device)
            each.step()
    offloaded.state_dict()  # waits
    assert same_bits(params, others)
    expected, state = state_of(optimizer, params), state_of(offloaded, others)
    assert state.keys() == expected.keys()
    assert all(torch.equal(expected[key].cpu(), state[key].cpu()) for key in expected)


def test_only_momentum_is_in_host_memory(kernel, device):
    _, (_, optimizer) = pair(kernel, device)
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in optimizer.state[p].items():
                hosted = key == "momentum_buffer"
                assert value.device.type == ("cpu" if hosted else device)
                assert value.is_pinned() == (hosted and device == "cuda")
                assert key == "step" or value.stride() == p.stride()


def test_device_holds_the_largest_batch_for_each_up_to_three(kernel, device):
    """Buffers rounded up to 512 bytes; host memory has one element for each of the matrices' elements.

    The small matrices are one batch if products take several at once, else three.
    """
    params = {f"{i}.weight": Parameter(torch.ones(shape, device=device)) for i, shape in enumerate([(8, 8)] * 3)}
    params["large"] = Parameter(torch.ones(64, 48, device=device))
    optimizer = kernel.Muon(params.items(), offload=True, momentum_dtype="bfloat16")
    assert device_bytes(host_of(optimizer)) == min(3, len(plan_of(optimizer).batches)) * 64 * 48 * 2
    buffers = momentum_of(optimizer, params).values()
    assert sum(b.numel() * b.itemsize for b in buffers) == 2 * (3 * 8 * 8 + 64 * 48)


def resumed(state_dict, kernel, params, offload):
    optimizer = kernel.Muon(params.items(), offload=offload, expert_keys=["experts"])
    optimizer.load_state_dict(state_dict)
    return optimizer


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_run_resumes_with_or_without_offload(kernel, before, after):
    """Where momentum lives is a matter of the machine, which may be another: the loaded settings do not say it."""
    (params, others), optimizers = pair(kernel)
    first, originals = optimizers[before], (params, others)[before]
    take_steps(first, originals, range(2))
    copies = copy.deepcopy(originals)
    second = resumed(copy.deepcopy(first.state_dict()), kernel, copies, after)
    assert all(group["offload"] is after for group in second.param_groups)
    take_steps(first, originals, range(2, 4))
    take_steps(second, copies, range(2, 4))
    assert (host_of(second) is not None) is after
    assert same_bits(originals, copies) and second.state_dict()["state"].keys() == first.state_dict()["state"].keys()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_have_their_own_host_memory(kernel, device, duplicate):
    (_, params), (_, optimizer) = pair(kernel, device)
    take_steps(optimizer, params, [0])
    other, others = duplicate((optimizer, params))
    take_steps(other, others, [1])
    take_steps(optimizer, params, [1])
    take_steps(optimizer, params, [2])
    assert not same_bits(params, others)
    take_steps(other, others, [2])
    assert same_bits(params, others)


def test_offload_setting_is_live(kernel):
    (params, others), (optimizer, changing) = pair(kernel)
    for seed in range(4):
        for group in changing.param_groups:
            group["offload"] = seed % 2 == 1
        take_steps(optimizer, params, [seed])
        take_steps(changing, others, [seed])
    assert same_bits(params, others)


def test_the_dtype_that_momentum_gets_later_is_live(kernel):
    both, optimizers = pair(kernel)
    for params, optimizer in zip(both, optimizers):
        take_steps(optimizer, params, [0])
        for group in optimizer.param_groups:
            group["momentum_dtype"] = "bfloat16"
        take_steps(optimizer, params, range(1, 3))
    assert {buffer.dtype for buffer in momentum_of(optimizers[1], both[1]).values()} == {torch.bfloat16}
    assert same_bits(*both)


def test_groups_differing_in_offload_share_no_batch(kernel, monkeypatch):
    monkeypatch.setattr(kernel.plan.batches, "_length", lambda *_: 4)
    params = [Parameter(torch.ones(8, 8)) for _ in range(4)]
    optimizer = kernel.Muon([{"params": params[:3], "offload": True}, {"params": params[3:]}])
    works = [work for chain in workspace_of(optimizer).chains for work in chain]
    assert [(len(work.parts), work.host is not None) for work in works] == [(3, True), (1, False)]


@pytest.mark.parametrize("offload", [False, True])
def test_frozen_parameter_joins_when_it_has_a_gradient(kernel, offload):
    params, others = parameters(), parameters()
    params["up.weight"].requires_grad_(False)
    settings = dict(momentum_dtype="bfloat16", expert_keys=["experts"])
    optimizer = kernel.Muon(params.items(), offload=offload, **settings)
    assert params["up.weight"] not in optimizer.state
    take_steps(optimizer, params, range(2))
    take_steps(kernel.Muon(others.items(), **settings), others, range(2))
    assert same_bits(params, others)


def test_failed_step_leaves_momentum_in_host_memory(kernel, monkeypatch):
    """Once a state is loaded, as after every step that broke off, training goes on."""
    (params, others), (optimizer, offloaded) = pair(kernel)
    saved = offloaded.state_dict()

    def fail(*_):
        raise MemoryError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(kernel.step.batch, "update_chain_", fail)
        set_gradients(others, 7)
        with pytest.raises(MemoryError):
            offloaded.step()
    assert not any(value.any() for value in momentum_of(offloaded, others).values())
    offloaded.load_state_dict(saved)
    take_steps(optimizer, params, range(2))
    take_steps(offloaded, others, range(2))
    assert same_bits(params, others)


def test_unsupported_offload_options_raise(kernel):
    with pytest.raises(ValueError, match="captured"):
        kernel.Muon([Parameter(torch.ones(4, 4))], offload=True, capturable=True)
    with pytest.raises(TypeError, match="offload must be True or False, got 1"):
        kernel.Muon([Parameter(torch.ones(4, 4))], offload=1)


@pytest.mark.parametrize("is_dtensor", [False, True])
def test_offload_is_refused_for_copies_and_for_dtensors_even_of_one_rank(kernel, tmp_path, is_dtensor):
    distributed, exchange, w = torch.distributed, None, torch.ones(4, 4)
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        if is_dtensor:
            w = distribute_tensor(w, DeviceMesh("cpu", [0]), [Shard(0)])
        else:
            exchange = kernel.ExchangeOptions(process_group=distributed.group.WORLD)
        with pytest.raises(ValueError, match=r"not supported for DTensors, nor for copies under .*, and w is one"):
            kernel.Muon([("w", Parameter(w))], offload=True, exchange=exchange)
    finally:
        distributed.destroy_process_group()


def test_replaced_momentum_buffer_is_used(kernel):
    """Chunks are of tensors: another one in the place of a buffer has to be noticed."""
    both, optimizers = pair(kernel)
    for params, optimizer in zip(both, optimizers):
        take_steps(optimizer, params, [0])
        optimizer.state[params["up.weight"]]["momentum_buffer"] = torch.ones(24, 12)
        take_steps(optimizer, params, [1])
    assert same_bits(*both)


@pytest.mark.parametrize("offload", [False, True])
def test_momentum_that_is_changed_between_steps_counts(kernel, device, offload):
    """Also that of a batch without a gradient, which the step before has fetched ahead."""
    params = {f"{i}.weight": Parameter(torch.ones(8, 4 + 4 * i, device=device)) for i in range(3)}
    optimizer = kernel.Muon(params.items(), offload=offload)
    set_gradients(params, 0)
    optimizer.step()
    set_gradients(params, 1, without=("1.weight", "2.weight"))
    optimizer.step()
    for p in params.values():
        optimizer.state[p]["momentum_buffer"].zero_()
    set_gradients(params, 2)
    optimizer.step()
    optimizer.state_dict()  # waits for momentum on its way
    for name, momentum in momentum_of(optimizer, params).items():
        gradient = params[name.split("/")[0]].grad
        torch.testing.assert_close(momentum.to(gradient.device), gradient * (1 - 0.95))


def test_replaced_scales_of_momentum_are_used(kernel):
    """Those of 8 bits are copied to the device like the codes, and another tensor in their place has to be noticed."""
    both, optimizers = pair(kernel, momentum_dtype="int8")
    for params, optimizer in zip(both, optimizers):
        take_steps(optimizer, params, [0])
        state = optimizer.state[params["up.weight"]]
        state["momentum_scale"] = state["momentum_scale"] * 8
        take_steps(optimizer, params, [1])
    assert same_bits(*both)
    assert same_bits(*(state_of(optimizer, params) for optimizer, params in zip(optimizers, both)))
