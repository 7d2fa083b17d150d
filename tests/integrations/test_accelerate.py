"""accelerate

Make Muon of the model before `prepare`, as any optimizer. FSDP2 shards the parameters there, and Muon follows. The
prepared optimizer keeps Muon as `opt.optimizer`.
"""

import contextlib
import os
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from tests.integrations.training import BRANCHES, LanguageModel, batches, branches, copied, train
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """accelerate keeps its state in classes. The tests' data are on the CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    yield
    forget()


def forget():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_equals_a_plain_loop_with_accumulation_and_clipping(optimizer):
    """Training with accumulated and clipped gradients gives the bits of a plain loop."""
    model, twin, data = LanguageModel(), LanguageModel(), batches(20)
    # <use>
    accelerator = Accelerator(gradient_accumulation_steps=2)
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=5)
    model, opt, schedule = accelerator.prepare(model, opt, schedule)
    print(opt.optimizer.explain())
    # </use>
    assert branches(opt.optimizer) == BRANCHES
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            schedule.step()
            opt.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    other = optimizer.Muon(optimizer.groups_for(twin), lr=0.02)
    other_schedule = torch.optim.lr_scheduler.LinearLR(other, 0.1, total_iters=5)
    for first in range(0, len(data), 2):
        for batch in data[first : first + 2]:
            (twin(**batch)["loss"] / 2).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        other.step()
        other_schedule.step()
        other.zero_grad()
    assert same_bits(copied(model), copied(twin))


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_saved_state_goes_on_with_the_same_bits(optimizer, tmp_path, mixed_precision):
    """After `save_state` and `load_state` training goes on with the same bits."""
    accelerator, data = Accelerator(cpu=True, mixed_precision=mixed_precision), batches(8)

    def prepared():
        model = LanguageModel()
        return accelerator.prepare(model, optimizer.Muon(optimizer.groups_for(model), lr=0.02))

    model, opt = prepared()
    train(model, opt, data[:4])
    accelerator.save_state(tmp_path)
    train(model, opt, data[4:])
    expected = copied(model)
    accelerator.load_state(tmp_path)
    train(model, opt, data[4:])
    assert same_bits(copied(model), expected)


@contextlib.contextmanager
def launched_process():
    """What accelerate sees in a rank of a pool, as if torchrun had started it."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    with mock.patch.dict(os.environ, variables):
        try:
            yield
        finally:
            forget()


def allow_fsdp():
    """accelerate takes FSDP for a matter of GPUs: on CPUs its distributed type is set by hand."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextlib.contextmanager
def launched(fsdp_plugin=None):
    """An Accelerator among the ranks of a pool, as `accelerate launch` would have started them."""
    with launched_process():
        PartialState(cpu=True)
        if fsdp_plugin is not None:
            allow_fsdp()
        yield Accelerator(cpu=True, fsdp_plugin=fsdp_plugin)


def train_prepared(accelerator, model, opt, data):
    for batch in data:
        part = {
            name: value.chunk(accelerator.num_processes)[accelerator.process_index] for name, value in batch.items()
        }
        opt.zero_grad()
        accelerator.backward(model(**part)["loss"])
        opt.step()


def whole(model):
    tensors = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in tensors.items()}


def run_distributed(kernel, folder, sharded):
    """Train for four steps, save, train on; load and train on again: all of the model's tensors, both times."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False) if sharded else None
    with launched(plugin) as accelerator:
        model, data = LanguageModel(), batches(8)
        opt = kernel.Muon(kernel.groups_for(model), lr=0.02)
        model, opt = accelerator.prepare(model, opt)
        expected = DistributedType.FSDP if sharded else DistributedType.MULTI_CPU
        assert accelerator.distributed_type == expected
        assert any(isinstance(p, DTensor) for p in model.parameters()) == sharded
        train_prepared(accelerator, model, opt, data[:4])
        accelerator.save_state(folder)
        train_prepared(accelerator, model, opt, data[4:])
        first = whole(model)
        accelerator.load_state(folder)
        train_prepared(accelerator, model, opt, data[4:])
        return first, whole(model), branches(opt.optimizer)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_equal_one_and_resume_with_the_same_bits(optimizer, pools, tmp_path, sharded):
    """Two processes train as one does, and resume with the same bits.

    Over gloo. One process takes the halves of each batch one after the other, each with half its loss.
    """
    model = LanguageModel()
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    for batch in batches(8):
        opt.zero_grad()
        for rank in range(2):
            (model(**{name: value.chunk(2)[rank] for name, value in batch.items()})["loss"] / 2).backward()
        opt.step()
    for first, resumed, chosen in pools(2).run(run_distributed, str(tmp_path), sharded):
        assert same_bits(first, copied(model)) and same_bits(resumed, copied(model))
        assert {name.removeprefix("module."): branch for name, branch in chosen.items()} == BRANCHES
