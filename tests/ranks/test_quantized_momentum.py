"""Momentum in 8 bits on shards: layouts that cut between blocks give the bits of one process, others are named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.support.backends import on_every_backend
from tests.support.pieces import put_together
from tests.support.rank_pool import device_of_ranks, one_by_one
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Layout,
    Spec,
    assert_as_alone,
    bits_equal,
    muon,
    one_thread,
    part_of,
    sharded,
    train,
    whole_gradient,
    whole_parameter,
    wholes,
)
from tests.support.sharded_networks import assert_same_network, network_on, set_gradients

pytestmark = on_every_backend()

# Two and four ranks cut columns between blocks, the last of which may be short; rows may be cut anywhere.
SHAPES = {"a": (9, 256), "b": (33, 255), "c": (3, 256)}
MISSING = ["nowhere"], ["here and there", "all but one", "everywhere"]
SETTINGS = {"momentum_dtype": "int8", "lr": 0.02, "chunk_bytes": 3000}


def specs_on(layout: Layout | None, **group) -> tuple[Spec, ...]:
    return tuple(Spec(f"layers.{name}.up.weight", shape, layout, group) for name, shape in SHAPES.items())


@pytest.mark.parametrize("missing", MISSING, ids=["all gradients", "some gradients"])
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=list(LAYOUTS))
def test_every_layout_gives_the_bits_of_one_process(kernel, pools, number, missing):
    """Parameters, codes and scales; a gradient that is absent on some ranks alone is averaged in copies of both."""
    layout, dtype = list(LAYOUTS.values())[number], (torch.float32, torch.bfloat16)[number % 2]
    case = Case(specs_on(layout), SETTINGS, steps=5, dtype=dtype, missing=missing[number % len(missing)])
    assert_as_alone(kernel, pools, case)


@pytest.mark.parametrize("layout", ["rows", "columns", "rows and columns", "strided rows", "hsdp"])
def test_stacks_and_transposed_weights_give_the_bits_of_one_process(kernel, pools, layout):
    layout = LAYOUTS[layout]
    specs = (
        Spec("mlp.experts.up", (5, 8, 200), layout),
        Spec("mlp.experts.down", (4, 256, 70), layout),
        Spec("c_fc.weight", (9, 256), layout, {"transposed": True, "split_rows": (128, 128)}),
        Spec("c_proj.weight", (30, 255), layout, {"transposed": True}),
        Spec("conv.weight", (9, 256, 3), LAYOUTS["rows"]),
    )
    assert_as_alone(kernel, pools, Case(specs, SETTINGS, steps=3, missing="everywhere"))


@pytest.mark.parametrize("sum_gram", [False, True])
def test_summed_matrices_have_the_momentum_of_one_process(kernel, pools, sum_gram):
    """What is summed over ranks rounds otherwise, but momentum comes before it."""
    case = Case(specs_on(LAYOUTS["columns"]), {**SETTINGS, "sum_gram": sum_gram}, steps=3, missing="all but one")
    results = put_together(pools(4).run(train, case))
    plain = put_together(pools(4).run(train, case._replace(settings=SETTINGS)))
    for one, other in zip(results, plain, strict=True):
        for state, plain_state in zip(one.state, other.state, strict=True):
            assert all(bits_equal(state[key], plain_state[key]) for key in ("momentum_buffer", "momentum_scale"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_plain_copies_give_the_bits_of_one_process(kernel, pools, ranks):
    specs = (*specs_on(None), Spec("layers.d.up.weight", (384, 400)))
    case = Case(specs, {**SETTINGS, "ns_steps": 2}, steps=3, missing="everywhere", shared=True)
    assert_as_alone(kernel, pools, case, ranks)


def error_of(kernel, case: Case) -> str:
    with pytest.raises(ValueError) as caught:
        muon(kernel, case, [part_of(case, i) for i in range(len(case.specs))])
    return str(caught.value)


@pytest.mark.parametrize(
    "ranks, shape, dim, part",
    [(4, (8, 200), 1, "50 to 99"), (2, (8, 96), 1, "48 to 95"), (2, (4, 8, 72), 2, "36 to 71")],
    ids=str,
)
def test_a_shard_that_cuts_a_block_is_refused_on_every_rank_with_what_fits(pools, ranks, shape, dim, part):
    layout = Layout((ranks,), (str(dim),))
    case = Case((Spec("mlp.experts.weight", shape, layout),), {"momentum_dtype": "int8"})
    for error in pools(ranks).run(error_of, case):
        assert f"64 neighbours along dimension {dim} of mlp.experts.weight" in error
        assert f"of which rank 1 has {part}: " in error and "parts begin at multiples of 64" in error


def always(name: str, p: torch.Tensor) -> bool:
    """Thin matrices, too, are Muon's."""
    return True


def network(case: Case, device: str) -> nn.Module:
    """Return a module whose parameters, of the case's layouts, are called `weights.a` and so on."""
    values = (here(whole_parameter(case, i).to(device), spec.layout) for i, spec in enumerate(case.specs))
    return nn.ModuleDict({"weights": nn.ParameterDict(dict(zip(SHAPES, map(nn.Parameter, values))))})


def here(value: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """Return this rank's part, or the whole for one process."""
    return value if layout is None else sharded(value, layout).data


def take_steps(model: nn.Module, optimizer, case: Case, steps) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = here(whole_gradient(case, step, i).to(p.device), case.specs[i].layout)
        optimizer.step()
    optimizer.zero_grad()


def wholes_of(model: nn.Module, optimizer) -> list[dict[str, torch.Tensor]]:
    return [wholes({"parameter": p, **optimizer.state[p]}) for p in model.parameters()]


def save(kernel, case: Case, device: str, folder: str) -> None:
    model = network(case, device)
    optimizer = kernel.Muon(model.named_parameters(), is_muon=always, **case.settings)
    take_steps(model, optimizer, case, range(1, 4))
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def resume(kernel, case: Case, device: str, folder: str):
    model = network(case._replace(seed=7), device)
    optimizer = kernel.Muon(model.named_parameters(), is_muon=always, **case.settings)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    take_steps(model, optimizer, case, range(4, 7))
    return wholes_of(model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("after", ["columns", "rows", None], ids=str)
@pytest.mark.parametrize("before", ["rows and columns", "strided rows", None], ids=str)
def test_a_checkpoint_of_any_layout_continues_on_any_other(kernel, pools, tmp_path, before, after):
    def run(job, name):
        case = Case(specs_on(LAYOUTS.get(name)), {"momentum_dtype": "int8", "lr": 0.02})
        if name is not None:
            return pools(4).run(job, case, pools.device, str(tmp_path))
        with one_thread(), one_by_one(kernel):
            return [job(kernel, case, pools.device, str(tmp_path))]

    run(save, before)
    with one_thread(), one_by_one(kernel):
        case = Case(specs_on(None), {"momentum_dtype": "int8", "lr": 0.02})
        model = network(case, pools.device)
        optimizer = kernel.Muon(model.named_parameters(), is_muon=always, **case.settings)
        take_steps(model, optimizer, case, range(1, 7))
    for result in run(resume, after):
        for one, other in zip(result, wholes_of(model, optimizer)):
            assert one.keys() == other.keys() == {"parameter", "momentum_buffer", "momentum_scale"}
            assert all(bits_equal(one[key], other[key]) for key in one)


def error_of_flipped_bit(kernel, case: Case, key: str):
    """Flip a bit of a tensor of the state on rank 3; return what `check_copies` says."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    optimizer.check_copies()
    local = optimizer.state[params[0]][key]._local_tensor
    if dist.get_rank() == 3:
        local.view(torch.uint8)[-1, -1] ^= 1
    with pytest.raises(RuntimeError) as caught:
        optimizer.check_copies()
    return str(caught.value)


@pytest.mark.parametrize("key", ["momentum_buffer", "momentum_scale"])
def test_a_flipped_bit_of_codes_or_scales_is_named(pools, key):
    case = Case(specs_on(LAYOUTS["hsdp"])[:1], {"momentum_dtype": "int8"})
    for error in pools(4).run(error_of_flipped_bit, case, key):
        assert f"{key} of layers.a.up.weight differs between ranks [1] and [3]" in error


def converted(kernel, case: Case, device: str):
    """Return wholes after a step with float momentum, its conversion into 8 bits, and one more step."""
    model = network(case, device)
    optimizer = kernel.Muon(model.named_parameters(), is_muon=always, lr=0.02)
    take_steps(model, optimizer, case, [1])
    optimizer.param_groups[0]["momentum_dtype"] = "int8"
    take_steps(model, optimizer, case, [2])
    return wholes_of(model, optimizer)


@pytest.mark.parametrize("layout", ["rows", "columns", "hsdp", "strided rows"])
def test_momentum_on_shards_is_converted_as_in_one_process(kernel, pools, layout):
    with one_thread(), one_by_one(kernel):
        alone = converted(kernel, Case(specs_on(None)), pools.device)
    for result in pools(4).run(converted, Case(specs_on(LAYOUTS[layout])), pools.device):
        for one, other in zip(result, alone):
            assert one.keys() == other.keys() and all(bits_equal(one[key], other[key]) for key in one)


def trained_network(kernel, name: str, device: str) -> dict[str, torch.Tensor]:
    """Return whole parameters of a network after four steps."""
    network = network_on(name, device)
    optimizer = kernel.Muon(network.named_parameters(), lr=0.02, momentum_dtype="int8")
    for step in range(4):
        set_gradients(network, step)
        optimizer.step()
    return wholes(dict(network.named_parameters()))


@pytest.mark.parametrize("name, ranks", [("fsdp", 4), ("fsdp on two ranks", 2), ("hsdp", 4)])
def test_networks_under_fsdp2_end_as_in_one_process(kernel, pools, name, ranks):
    with one_thread(), one_by_one(kernel):
        alone = trained_network(kernel, "one process", pools.device)
    for result in pools(ranks).run(trained_network, name, pools.device):
        assert_same_network(result, alone)


def error_under_tensor_parallelism(kernel) -> str:
    with pytest.raises(ValueError) as caught:
        kernel.Muon(network_on("tp and fsdp", device_of_ranks()).named_parameters(), momentum_dtype="int8")
    return str(caught.value)


def test_tensor_parallelism_within_a_block_is_refused(pools):
    for error in pools(4).run(error_under_tensor_parallelism):
        assert "along dimension 1 of blocks.0.down.weight (10, 26)" in error


def loaded_within_a_block(kernel, saved) -> str:
    """Return the error of a file with momentum in 8 bits for shards that cut its blocks; steps go on as before it."""
    optimizer = kernel.Muon([("w", part_of(Case((Spec("w", (8, 104), LAYOUTS["columns"]),)), 0))])
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.param_groups[0]["momentum_dtype"] is None
    return str(caught.value)


def test_a_file_with_blocks_that_shards_cut_is_refused_before_anything_changes(kernel, pools):
    p = torch.nn.Parameter(torch.ones(8, 104))
    saved = kernel.Muon([("w", p)], momentum_dtype="int8").state_dict()
    for error in pools(4).run(loaded_within_a_block, saved):
        assert "along dimension 1 of w (8, 104)" in error
