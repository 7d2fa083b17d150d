"""Halves of float32 parameters on shards: the bits of one process, checkpoints of any layout, copies that agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard

from tests.ranks.test_checkpoint import run, state_of, take_steps
from tests.support.backends import on_every_backend
from tests.support.pairwise import in_turn
from tests.support.rank_pool import one_by_one
from tests.support.sharded_models import (
    LAYOUTS,
    Case,
    Spec,
    assert_as_alone,
    bits_equal,
    model,
    muon,
    one_thread,
    part_of,
    wholes,
)
from tests.support.sharded_networks import NETWORK_LAYOUTS, assert_same_network, network_on

SETTINGS = {"master_weights": "split", "lr": 2.0**-9, "ns_dtype": "float32", "chunk_bytes": 1000}
FLOAT32 = {"momentum_dtype": "float32"}
BEFORE, AFTER = 4, 3

pytestmark = on_every_backend()


def embedding(layout, seed):
    return (Spec("embeddings.0.weight", (41, seed), layout),)


@pytest.mark.parametrize("name, missing", in_turn(LAYOUTS, ["nowhere", "everywhere", "here and there", "all but one"]))
def test_matrices_have_the_bits_of_one_process(kernel, pools, name, missing):
    case = Case(model(LAYOUTS[name], 5), {**SETTINGS, **FLOAT32}, steps=6, dtype=torch.bfloat16, missing=missing)
    assert_as_alone(kernel, pools, case)


@pytest.mark.parametrize("name, fallback", in_turn(LAYOUTS, ["adamw", "nadamw"]))
def test_the_fallback_has_the_bits_of_one_process(kernel, pools, name, fallback):
    """Shapes leave parts that fill no vector of torch's kernel."""
    shapes = (41, 9), (3, 70), (7, 5)
    specs = tuple(Spec(f"embeddings.{i}.weight", shape, LAYOUTS[name]) for i, shape in enumerate(shapes))
    settings = {**SETTINGS, "fallback": fallback}
    assert_as_alone(kernel, pools, Case(specs, settings, steps=6, dtype=torch.bfloat16, missing="everywhere"))


@pytest.mark.parametrize("specs", [model, embedding], ids=["matrices", "fallback"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_in_float32_have_the_bits_of_one_process(kernel, pools, layout, specs):
    """A part of a matrix without a gradient counts as zeros, which are in its parameter's dtype beside others."""
    missing = "here and there" if specs is model else "everywhere"
    case = Case(specs(layout, 5), {**SETTINGS, **FLOAT32}, steps=6, dtype=torch.bfloat16, missing=missing)
    assert_as_alone(kernel, pools, case._replace(gradient_dtype=torch.float32))


def differently_laid_out(kernel, case: Case) -> list[str]:
    """Return the errors of values in another layout, and of a bit that one rank has changed."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    plain = wholes(optimizer.master_weights())
    cut = {name: value.redistribute(placements=[Shard(0)]) for name, value in optimizer.master_weights().items()}
    with pytest.raises(ValueError, match=r"must be whole, or laid out like the parameter.*Replicate.*Shard") as misfit:
        optimizer.load_master_weights(cut)
    values = {name: 3 * value for name, value in optimizer.master_weights().items()}
    optimizer.load_master_weights(values)
    assert all(isinstance(value, DTensor) for value in values.values())
    assert all(bits_equal(wholes(values)[name], 3 * plain[name]) for name in plain)
    optimizer.check_copies()
    if dist.get_rank() == 3:
        optimizer.state[params[0]]["remainder"]._local_tensor.view(torch.int16)[0, 0] ^= 1
    with pytest.raises(RuntimeError) as drift:
        optimizer.check_copies()
    return [str(misfit.value), str(drift.value)]


def test_values_and_copies_must_fit(pools):
    case = Case(model(LAYOUTS["replicated"], 6), SETTINGS, dtype=torch.bfloat16)
    for _, drift in pools(4).run(differently_laid_out, case):
        assert "remainder of layers.0.up.weight differs between ranks [0, 1, 2] and [3]" in drift


def wholes_taken_in(kernel, case: Case) -> None:
    """Write float32 values that are whole on each rank, and read them."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params)
    values = {name: 3 * value + 2.0**-20 for name, value in wholes(optimizer.master_weights()).items()}
    optimizer.load_master_weights(values)
    assert all(isinstance(value, DTensor) for value in optimizer.master_weights().values())
    assert all(bits_equal(value, values[name]) for name, value in wholes(optimizer.master_weights()).items())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_of_whole_values_each_rank_takes_its_part(pools, layout):
    """As of a checkpoint in float32 that one process reads."""
    pools(4).run(wholes_taken_in, Case(model(layout, 6), SETTINGS, dtype=torch.bfloat16))


def trained(kernel, name: str, device: str, steps, seed: int = 0):
    """Return a network in bfloat16 and its optimizer after these steps."""
    network = network_on(name, device, seed).to(torch.bfloat16)
    settings = {"lr": 2.0**-9, "exchange": kernel.ExchangeOptions(chunk_bytes=1000), **FLOAT32}
    optimizer = kernel.Muon(network.named_parameters(), master_weights="split", ns_dtype="float32", **settings)
    take_steps(network, optimizer, steps)
    return network, optimizer


def save(kernel, name: str, device: str, folder: str):
    dcp.save(state_of(*trained(kernel, name, device, range(BEFORE))), checkpoint_id=folder)


def save_gathered(kernel, name: str, device: str, folder: str):
    """As one file that rank 0 has whole."""
    pair = trained(kernel, name, device, range(BEFORE))
    weights, state = get_state_dict(*pair, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"model": weights, "optim": state}, f"{folder}/whole.pt")


def resume_gathered(kernel, name: str, device: str, folder: str):
    network, optimizer = trained(kernel, name, device, (), seed=1)
    saved = torch.load(f"{folder}/whole.pt", weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        network, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"], options=options
    )
    take_steps(network, optimizer, range(BEFORE, BEFORE + AFTER))
    return wholes(optimizer.master_weights())


def resume(kernel, name: str, device: str, folder: str):
    """Load into a network of other weights, and go on; returns whole float32 values."""
    network, optimizer = trained(kernel, name, device, (), seed=1)
    saved = state_of(network, optimizer)
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(network, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"])
    take_steps(network, optimizer, range(BEFORE, BEFORE + AFTER))
    return wholes(optimizer.master_weights())


@pytest.fixture(scope="module")
def uninterrupted(kernel, pools):
    with one_thread(), one_by_one(kernel):
        _, optimizer = trained(kernel, "one process", pools.device, range(BEFORE + AFTER))
        return wholes(optimizer.master_weights())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved, loaded", list(zip(NETWORK_LAYOUTS, [*NETWORK_LAYOUTS][2:] + [*NETWORK_LAYOUTS][:2])))
def test_any_layout_continues_a_checkpoint_of_another(kernel, pools, uninterrupted, tmp_path, saved, loaded):
    run(kernel, pools, saved, save, tmp_path)
    for result in run(kernel, pools, loaded, resume, tmp_path):
        assert_same_network(result, uninterrupted)


@pytest.mark.parametrize("saved, loaded", [("fsdp", "hsdp"), ("tp and fsdp", "one process")])
def test_a_gathered_checkpoint_goes_on_too(kernel, pools, uninterrupted, tmp_path, saved, loaded):
    run(kernel, pools, saved, save_gathered, tmp_path)
    for result in run(kernel, pools, loaded, resume_gathered, tmp_path):
        assert_same_network(result, uninterrupted)
