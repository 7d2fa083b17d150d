"""torch

Its schedulers, `GradScaler`, averages of weights and checkpoints take Muon as they take its own optimizers.
`ZeroRedundancyOptimizer` gives each rank a part of every group, and knows no names. So each group must be of one
branch, and its parameters without names. For a group of matrices and vectors torch raises `Mismatch between number of
source and destination parameter groups`.
"""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.integrations.training import LanguageModel, batches, copied, train
from tests.support.small_model import same_bits

pytestmark = pytest.mark.integrations


def test_grad_scaler_changes_nothing_but_overflows(optimizer):
    """`GradScaler` changes no bit, and skips a step whose gradients overflow.

    Scales are powers of two, so clipping after `unscale_` gives the same bits.
    """
    model, twin = LanguageModel(), LanguageModel()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    other = optimizer.Muon(optimizer.groups_for(twin), lr=0.02)
    for batch in batches(8):
        opt.zero_grad()
        other.zero_grad()
        scaler.scale(model(**batch)["loss"]).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        twin(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        other.step()
    assert same_bits(copied(model), copied(twin))
    model.lm_head.weight.grad.fill_(torch.inf)
    scale = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == scale / 2 and same_bits(copied(model), copied(twin))


def test_averages_of_weights_follow(optimizer):
    """`AveragedModel` follows the weights."""
    model, seen = LanguageModel(), []
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    mean, moving = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for batch in batches(3):
        train(model, opt, [batch])
        mean.update_parameters(model)
        moving.update_parameters(model)
        seen.append(copied(model))
    for name in seen[0]:
        first, second, third = (each[name] for each in seen)
        torch.testing.assert_close(mean.module.state_dict()[name], (first + second + third) / 3)
        torch.testing.assert_close(moving.module.state_dict()[name], (first + second + 2 * third) / 4)


def test_rate_of_swa_anneals_both_branches(optimizer):
    """`SWALR` changes the rates of Muon and of AdamW."""
    model = LanguageModel()
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    schedule = SWALR(opt, swa_lr=0.01, anneal_epochs=2)
    for batch in batches(3):
        train(model, opt, [batch])
        schedule.step()
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.01] * len(opt.param_groups))


@pytest.mark.parametrize("how", ["whole", "flattened"])
def test_checkpoint_goes_on_with_the_same_bits(optimizer, tmp_path, how):
    """Saved by `torch.distributed.checkpoint`, training goes on with the same bits."""
    options, data = StateDictOptions(flatten_optimizer_state_dict=how == "flattened"), batches(8)
    model, other = LanguageModel(), LanguageModel(seed=1)
    opt = optimizer.Muon(optimizer.groups_for(model), lr=0.02)
    train(model, opt, data[:4])
    weights, state = get_state_dict(model, opt, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    train(model, opt, data[4:])
    other_opt = optimizer.Muon(optimizer.groups_for(other), lr=0.02)
    weights, state = get_state_dict(other, other_opt, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=tmp_path)
    loaded = dict(model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    set_state_dict(other, other_opt, **loaded, options=options)
    train(other, other_opt, data[4:])
    assert same_bits(copied(model), copied(other))


def run_zero(optimizer, folder):
    """Groups of one branch each, of tensors without names: the wrapper gives each rank a part of every group."""
    data, models = batches(8), (LanguageModel(), LanguageModel(seed=1))

    def wrapped(model):
        # <use>
        groups = optimizer.groups_for(model)
        groups = [{**group, "params": [p for _, p in group["params"]]} for group in groups]
        opt = ZeroRedundancyOptimizer(groups, optimizer.Muon, lr=0.02)
        # </use>
        return opt

    opt = wrapped(models[0])
    train(models[0], opt, data[:4])
    opt.consolidate_state_dict(to=0)
    # On a CPU the consolidated state is the living one of rank 0, not a copy.
    saved = [copy.deepcopy(opt.state_dict()) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(saved)
    models[1].load_state_dict(models[0].state_dict())
    train(models[0], opt, data[4:])
    other = wrapped(models[1])
    other.load_state_dict(saved[0])
    train(models[1], other, data[4:])
    return tuple(map(copied, models))


def test_zero_redundancy_trains_and_resumes_with_the_same_bits(optimizer, pools, tmp_path):
    """`ZeroRedundancyOptimizer` trains as one process does, and resumes with the same bits.

    On two ranks with the same gradients, as under DDP.
    """
    model = LanguageModel()
    train(model, optimizer.Muon(optimizer.groups_for(model), lr=0.02), batches(8))
    for first, resumed in pools(2).run(run_zero, str(tmp_path)):
        assert same_bits(first, copied(model)) and same_bits(resumed, copied(model))
