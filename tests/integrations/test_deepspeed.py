"""DeepSpeed

Stage 0 keeps parameters whole. Stages 1 to 3 of ZeRO cut them into flat pieces, in which no matrix is left: Muon
refuses them. Use stage 0, or FSDP2. DeepSpeed clips gradients at a norm of 1 where `gradient_clipping` does not say
otherwise.
"""

import contextlib
import os
from unittest import mock

import deepspeed
import pytest
from torch import distributed as dist

from tests.integrations.training import BRANCHES, LanguageModel, batches, branches, copied
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


@contextlib.contextmanager
def launched():
    """What the ranks of a pool are told as `deepspeed` would have told them."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    variables = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    # DeepSpeed would compile messages through shared memory, which takes minutes; without, gloo carries them.
    without_compiling = mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False)
    with mock.patch.dict(os.environ, variables), without_compiling:
        yield


def initialized(optimizer, model, **options):
    # <use>
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 0}}
    # </use>
    config.update(options)
    # <use>
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)
    # </use>
    return engine, opt


def train_engine(engine, data):
    losses = []
    for batch in data:
        loss = engine(**batch)["loss"]
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


@launched()
def run_stage_zero(kernel, folder):
    data, (model, other) = batches(20), (LanguageModel(), LanguageModel(seed=1))
    engine, opt = initialized(kernel, model, gradient_clipping=1.0)
    losses = train_engine(engine, data[:10])
    engine.save_checkpoint(folder)
    losses += train_engine(engine, data[10:])
    resumed, _ = initialized(kernel, other, gradient_clipping=1.0)
    resumed.load_checkpoint(folder)
    train_engine(resumed, data[10:])
    return losses, branches(opt), copied(model), copied(other)


def test_stage_zero_trains_and_resumes_with_the_same_bits(pools, tmp_path):
    """Stage 0 trains, and resumes from a checkpoint with the same bits."""
    ((losses, chosen, first, resumed),) = pools(1).run(run_stage_zero, str(tmp_path))
    assert losses[-1] < 0.8 * losses[0] and chosen == BRANCHES
    assert same_bits(first, resumed)


@launched()
def run_beside_a_plain_loop(kernel):
    model, twin = LanguageModel(), LanguageModel()
    engine, _ = initialized(kernel, model, gradient_accumulation_steps=2, gradient_clipping=0.0)
    train_engine(engine, batches(8))
    opt = kernel.Muon(kernel.groups_for(twin), lr=0.02)
    for first in range(0, 8, 2):
        for batch in batches(8)[first : first + 2]:
            (twin(**batch)["loss"] / 2).backward()
        opt.step()
        opt.zero_grad()
    return copied(model), copied(twin)


def test_stage_zero_equals_a_plain_loop_with_accumulation(pools):
    """Stage 0 with accumulated gradients gives the bits of a plain loop."""
    ((model, twin),) = pools(1).run(run_beside_a_plain_loop)
    assert same_bits(model, twin)


@launched()
def run_sharded(kernel, stage):
    try:
        # Without this DeepSpeed refuses every optimizer but those that it knows.
        options = dict(zero_allow_untested_optimizer=True, zero_optimization={"stage": stage})
        engine, _ = initialized(kernel, LanguageModel(), **options)
        train_engine(engine, batches(1))
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_stages_refuse_and_say_what_to_do(pools, stage):
    """Other stages raise an error that says what to do.

    They cut parameters into flat pieces, in which no matrix is left.
    """
    (said,) = pools(1).run(run_sharded, stage)
    assert "ZeRO" in said and "stage 0" in said and "FSDP2" in said
