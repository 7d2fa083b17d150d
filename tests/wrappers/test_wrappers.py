"""What wrappers do to parameters, groups and steps: followed where it can be, refused with a reason where it cannot."""

import copy
import io
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Linear, Parameter, ReLU, Sequential
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.small_model import STATE, named_parameters, same_bits, set_gradients, state_of, take_steps


@pytest.fixture
def fully_sharded():
    """FSDP1 as the first of two processes sees it, over a process group that sends nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this class is the old one, and CPUs no place for it
        yield lambda module, **options: FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)
    torch.distributed.destroy_process_group()


def model(seed=0):
    torch.manual_seed(seed)
    return Sequential(Linear(8, 16), ReLU(), Linear(16, 8))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_parameters_are_refused_with_the_reason(kernel, fully_sharded, use_orig_params):
    wrapped = fully_sharded(model(), use_orig_params=use_orig_params)
    for params in (wrapped.named_parameters(), list(wrapped.parameters())):
        with pytest.raises(ValueError, match=r"belongs to FSDP1 .* Muon needs whole parameters"):
            kernel.Muon(params)


def test_later_fsdp1_wrapping_is_refused_at_the_step(kernel, fully_sharded):
    whole = model()
    optimizer = kernel.Muon(whole.named_parameters())
    wrapped = fully_sharded(whole, use_orig_params=True)
    wrapped(torch.ones(2, 8)).sum().backward()
    before = copy.deepcopy([p.detach() for p in wrapped.parameters()])
    with pytest.raises(ValueError, match="belongs to FSDP1"):
        optimizer.step()
    assert all(map(torch.equal, wrapped.parameters(), before))


def flat_shard(p, **attributes):
    """A parameter cut into one dimension, with what its wrapper puts on it."""
    p = Parameter(p.detach().flatten()[:7].clone())
    for name, value in attributes.items():
        setattr(p, name, value)
    return p


@pytest.mark.parametrize(
    "attributes, wrapper",
    [
        (dict(_fsdp_flattened=True), "FSDP1"),
        (dict(_is_flat_param=True), "FSDP1"),
        (dict(ds_id=0), "ZeRO"),
        (dict(ds_shape=torch.Size([24, 12])), "ZeRO"),
    ],
    ids=str,
)
@pytest.mark.parametrize("later", [False, True], ids=["at construction", "later"])
@pytest.mark.parametrize("name", ["up.weight", "wte.weight"])
def test_flat_shards_raise_instead_of_going_to_adamw(kernel, attributes, wrapper, later, name):
    params = named_parameters()
    optimizer = kernel.Muon(params.items())
    shard = flat_shard(params[name], **attributes)
    group = optimizer.param_groups[name == "wte.weight"]
    group["params"][0] = shard
    params[name] = shard
    with pytest.raises(ValueError, match=f"{name} belongs to .*{wrapper}"):
        optimizer.state_dict() if later else kernel.Muon(params.items())


def test_parameter_emptied_by_zero_is_refused(kernel):
    """zero.Init leaves parameters of shape (0,)."""
    p = Parameter(torch.zeros(0))
    p.ds_id, p.ds_shape = 0, torch.Size([24, 12])
    with pytest.raises(ValueError, match=r"ZeRO.*of shape \(0,\), is not a matrix"):
        kernel.Muon([("up.weight", p)])


def test_flat_vector_for_a_group_of_matrices_is_refused(kernel):
    """ZeRO's first stages put one plain vector there."""
    optimizer = kernel.Muon(named_parameters().items())
    optimizer.param_groups[0]["params"] = [Parameter(torch.zeros(2 * 24 * 12))]
    with pytest.raises(ValueError, match=r"not a matrix.*DeepSpeed's ZeRO, leave no matrices"):
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
def test_wrapper_may_replace_all_parameters(kernel, steps):
    """As accelerate does under FSDP2: new parameters in `group["params"]`, state and plan are of the old ones."""
    params, twin = named_parameters(), named_parameters()
    optimizer, reference = kernel.Muon(params.items(), lr=0.02), kernel.Muon(twin.items(), lr=0.02)
    take_steps(optimizer, params, range(steps))
    take_steps(reference, twin, range(steps))
    state = {name: optimizer.state[p] for name, p in params.items()}
    for group in optimizer.param_groups:
        group["params"] = [Parameter(p.detach().clone()) for p in group["params"]]
        params.update(zip(group["param_names"], group["params"]))
    assert set(optimizer.state_dict()["state"]) == set(range(5))
    assert all(set(optimizer.state[p]) == STATE[name in ("up.weight", "down.weight")] for name, p in params.items())
    for name, p in params.items():
        optimizer.state[p].update(state[name])  # as a wrapper may move it
    take_steps(optimizer, params, range(steps, steps + 2))
    take_steps(reference, twin, range(steps, steps + 2))
    assert same_bits(params, twin)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True])
def test_distributed_checkpoints_take_state_in_both_forms(kernel, tmp_path, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    first, second = model(0), model(1)
    settings = dict(lr=0.02, momentum_dtype="bfloat16", adjust_lr_fn=lambda rows, cols: 0.3)
    optimizer, other = (kernel.Muon(m.named_parameters(), **settings) for m in (first, second))
    take_steps(optimizer, dict(first.named_parameters()), range(2))
    saved = get_optimizer_state_dict(first, optimizer, options=options)
    torch.distributed.checkpoint.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"optimizer": get_optimizer_state_dict(second, other, options=options)}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(second, other, loaded["optimizer"], options=options)
    second.load_state_dict(first.state_dict())
    take_steps(optimizer, dict(first.named_parameters()), range(2, 4))
    take_steps(other, dict(second.named_parameters()), range(2, 4))
    assert same_bits(first.state_dict(), second.state_dict())


def test_compiled_training_steps_as_uncompiled(kernel):
    eager, compiled = model(), model()
    optimizers = [kernel.Muon(m.named_parameters(), lr=0.02) for m in (eager, compiled)]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

    def train(network, optimizer):
        optimizer.zero_grad()
        loss = network(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    function = torch.compile(train, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(train(eager, optimizers[0]), function(compiled, optimizers[1]))
    assert same_bits(eager.state_dict(), compiled.state_dict())


def test_step_and_state_dict_hooks_are_called(kernel):
    """What they return is heeded."""
    params, called = named_parameters(), []
    optimizer = kernel.Muon(params.items(), lr=0.02)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    optimizer.register_state_dict_pre_hook(lambda _: called.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "note": len(saved["state"])})
    take_steps(optimizer, params, [0])
    saved = optimizer.state_dict()
    assert called == ["before", "after", "saving"] and saved["note"] == 5
    other = kernel.Muon(named_parameters().items())
    other.register_load_state_dict_pre_hook(changed)

    def halve(loaded):
        for state in loaded.state.values():
            for value in state.values():
                value *= 0.5

    other.register_load_state_dict_post_hook(halve)
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.5]
    loaded = other.state_dict()["state"]
    for i, state in saved["state"].items():
        assert all(torch.equal(loaded[i][key], 4 * value) for key, value in state.items())


def changed(_, state_dict):
    """What a hook may make of a state dict: another lr, and state eight times as large."""
    state = {i: {key: 8 * value for key, value in tensors.items()} for i, tensors in state_dict["state"].items()}
    return {"state": state, "param_groups": [{**group, "lr": 0.5} for group in state_dict["param_groups"]]}


def test_group_added_late_has_its_state_at_once(kernel):
    params, late = (
        named_parameters(),
        {"late.weight": Parameter(torch.ones(16, 8)), "late.bias": Parameter(torch.ones(8))},
    )
    everything = {**named_parameters(), **copy.deepcopy(late)}
    optimizer = kernel.Muon(params.items(), lr=0.02)
    take_steps(optimizer, params, range(2))
    optimizer.add_param_group({"params": list(late.items()), "lr": 0.01})
    assert [set(optimizer.state[p]) for p in late.values()] == [STATE[True], STATE[False]]
    params.update(late)
    reference = kernel.Muon(
        [{"params": list(everything.items())[:5]}, {"params": list(everything.items())[5:], "lr": 0.01}], lr=0.02
    )
    for seed in range(2):
        set_gradients(everything, seed, without=late)
        reference.step()
    take_steps(optimizer, params, range(2, 4))
    take_steps(reference, everything, range(2, 4))
    assert same_bits(params, everything) and same_bits(state_of(optimizer, params), state_of(reference, everything))


def test_training_loop_resumes_from_a_file_bit_for_bit(kernel):
    """What a trainer does around a step: clip, step, schedule, zero, save; and then load into new objects."""

    def run(steps, resume_at=None):
        network = model()
        optimizer = kernel.Muon(network.named_parameters(), lr=0.02, adamw_lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        for step in range(steps):
            if step == resume_at:
                file = io.BytesIO()
                torch.save([network.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                network = model(seed=5)
                optimizer = kernel.Muon(network.named_parameters(), lr=0.02, adamw_lr=0.01)
                schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
                for each, state in zip((network, optimizer, schedule), saved):
                    each.load_state_dict(state)
            set_gradients(dict(network.named_parameters()), step)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return network.state_dict()

    assert same_bits(run(6), run(6, resume_at=3))


def test_hooks_run_once_beside_an_optimizer_of_the_class_above(kernel):
    """torch lets the `step` of each class that is used run them."""
    model, counts = Sequential(Linear(8, 8)), []
    optimizer = kernel.compat.Muon(kernel.compat.get_default_muon_param_groups(model))
    kernel.Muon(named_parameters().items())
    optimizer.register_step_pre_hook(lambda *_: counts.append("before"))
    optimizer.register_step_post_hook(lambda *_: counts.append("after"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert counts == ["before", "after"]
