"""QK-clip through the optimizer: logits of the next forward pass, whatever attention, branch or scaler there is."""

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_attention import CLIP, HEAD, KINDS, THRESHOLD
from tests.support.small_model import same_bits, state_of

any_kind = pytest.mark.parametrize("kind", KINDS)
any_branch = pytest.mark.parametrize("branch", ["muon", "adamw"])


def muon(kernel, attention, branch="muon", **options):
    """An optimizer for the attention that has its weights in one branch; biases are always the fallback's."""
    clip = {**attention.settings, **options.pop("clip", {})}
    return kernel.Muon(
        attention.named.items(), qk_clip=clip, is_muon=lambda name, p: branch == "muon" and p.ndim == 2, **options
    )


@any_kind
@any_branch
def test_largest_logits_after_a_step_are_the_threshold(kernel, kind, branch):
    attention = copy.deepcopy(KINDS[kind])
    before = attention.largest_logits()
    optimizer = muon(kernel, attention, branch, lr=0.0)
    optimizer.observe_qk_logits("attn", before)
    attention.set_gradients(0)
    optimizer.step()
    after, groups = attention.largest_logits(), before.view(attention.keys, -1)
    assert before.max() > 2 * THRESHOLD and before.min() < THRESHOLD
    # Factors and logits are float32: a few roundings each.
    assert (after <= before.clamp_max(THRESHOLD) * (1 + 1e-5)).all()
    # A head that shares its key head with one of larger logits ends below; the largest of each key head does not.
    largest = after.view(attention.keys, -1).gather(1, groups.argmax(1, keepdim=True))
    torch.testing.assert_close(largest, groups.amax(1, keepdim=True).clamp_max(THRESHOLD), rtol=1e-5, atol=0)


@any_kind
@any_branch
def test_rows_are_scaled_after_the_update(kernel, kind, branch):
    """The factors of a step whose update is zero, applied to what a step without QK-clip gives."""
    still, clipped, plain = (copy.deepcopy(KINDS[kind]) for _ in range(3))
    logits = still.largest_logits()
    for attention, lr, observed in ((still, 0.0, True), (clipped, 0.1, True), (plain, 0.1, False)):
        optimizer = muon(kernel, attention, branch, lr=lr)
        if observed:
            optimizer.observe_qk_logits("attn", logits)
        attention.set_gradients(0)
        optimizer.step()
    for name, start in KINDS[kind].named.items():
        factors = still.named[name].detach() / start.detach()
        # One more rounding in the product, and one in the quotient.
        torch.testing.assert_close(clipped.named[name].detach(), plain.named[name] * factors, rtol=4e-7, atol=1e-7)


def test_layer_without_gradients_is_clipped(kernel):
    attention = copy.deepcopy(KINDS["mha"])
    optimizer = muon(kernel, attention)
    before = attention.largest_logits()
    optimizer.observe_qk_logits("attn", before)
    optimizer.step()
    torch.testing.assert_close(attention.largest_logits(), before.clamp_max(THRESHOLD), rtol=1e-5, atol=0)


@any_branch
def test_factors_are_applied_before_rounding_to_half_precision(kernel, branch):
    attention = copy.deepcopy(KINDS["mha"])
    for name, p in attention.named.items():
        attention.named[name] = Parameter(p.detach().bfloat16())
    before = copy.deepcopy(attention.named)
    optimizer = muon(kernel, attention, branch, lr=0.0, clip=dict(threshold=1.0))
    optimizer.observe_qk_logits("attn", torch.tensor([1.0, 2.0, 3.0, 5.0]))
    attention.set_gradients(0)
    optimizer.step()
    factors = torch.tensor([1.0, 2.0, 3.0, 5.0]).double().rsqrt().repeat_interleave(HEAD).float()
    for name in ("attn.q_proj.weight", "attn.q_proj.bias", "attn.k_proj.weight"):
        start = before[name].float()
        assert torch.equal(attention.named[name], (start * factors.view(-1, *[1] * (start.ndim - 1))).bfloat16())


@pytest.mark.parametrize("capturable", [False, True])
def test_overflow_scales_nothing_and_the_next_good_step_does(kernel, capturable):
    """Whether the scaler leaves out the step or the step finds it out; a bias and a weight without a gradient, too."""
    attention = copy.deepcopy(KINDS["mha"])
    optimizer = muon(kernel, attention, capturable=capturable)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    before, state = copy.deepcopy(attention.named), copy.deepcopy(state_of(optimizer, attention.named))
    for overflows in (True, False):
        optimizer.observe_qk_logits("attn", attention.largest_logits())
        attention.set_gradients(0)
        attention.named["attn.k_proj.weight"].grad = None
        if overflows:
            attention.named["attn.v_proj.weight"].grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert same_bits(attention.named, before) is overflows
        assert same_bits(state_of(optimizer, attention.named), state) is overflows


def test_reports_come_one_step_late_and_metrics_at_once(kernel):
    attention, told = copy.deepcopy(KINDS["mha"]), []
    optimizer = muon(kernel, attention, clip=dict(report=lambda *counts: told.append(counts)))
    logits = [torch.tensor([1.0, 21.0, 22.0, 23.0]), torch.tensor([1.0, 2.0, float("nan"), 23.0]), torch.zeros(4)]
    counted = []
    for k, seen in enumerate(logits):
        optimizer.observe_qk_logits("attn", seen)
        optimizer.step()
        assert len(told) == k
        counted.append(tuple(int(optimizer.metrics()[key]) for key in ("heads_clipped", "heads_not_finite")))
    assert told == [(3, 0), (1, 1)] and counted == [(3, 0), (1, 1), (0, 0)]


def test_a_step_that_overflow_skips_clips_no_head_and_leaves_that_to_the_next_good_one(kernel):
    """Where the step finds that out itself, as on ranks, and its report and metrics tell of it."""
    attention, told, counted = copy.deepcopy(KINDS["mha"]), [], []
    optimizer = muon(kernel, attention, capturable=True, clip=dict(report=lambda *counts: told.append(counts)))
    optimizer.observe_qk_logits("attn", torch.tensor([1.0, 21.0, 22.0, 23.0]))
    for found_inf in (1.0, 0.0, 0.0):
        optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.tensor([found_inf])
        attention.set_gradients(0)
        optimizer.step()
        counted.append(int(optimizer.metrics()["heads_clipped"]))
    assert counted == [0, 3, 0]
    assert told == [(0, 0), (3, 0)]


def test_a_load_forgets_the_logits_of_the_weights_before_it(kernel):
    """As after a loss that was not finite, when weights and state go back to a checkpoint before any step."""
    attention = copy.deepcopy(KINDS["mha"])
    optimizer = muon(kernel, attention)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.observe_qk_logits("attn", torch.tensor([500.0, float("nan"), 1.0, 1.0]))
    optimizer.load_state_dict(saved)
    attention.set_gradients(0)
    optimizer.step()
    assert [int(optimizer.metrics()[key]) for key in ("heads_clipped", "heads_not_finite")] == [0, 0]


def test_largest_observation_of_one_step_counts(kernel):
    """Observations are of one step, as gradients are, over the micro-batches of an accumulation."""
    once, twice = (copy.deepcopy(KINDS["mha"]) for _ in range(2))
    logits = once.largest_logits()
    for attention, observed in ((once, [logits]), (twice, [0.5 * logits, logits, 0.1 * logits])):
        optimizer = muon(kernel, attention, lr=0.0)
        for seen in observed:
            optimizer.observe_qk_logits("attn", seen)
        attention.set_gradients(0)
        optimizer.step()
        optimizer.step()
    assert same_bits(once.named, twice.named)


def test_motifs_configuration_is_accepted(kernel):
    ours, motif = (copy.deepcopy(KINDS["gqa"]) for _ in range(2))
    config = {"q_indices": [0, 1, 2, 3], "k_indices": [0, 0, 1, 1], "head_dim": HEAD, "threshold": THRESHOLD}
    logits = ours.largest_logits()
    for attention, clip in ((ours, ours.settings), (motif, config)):
        optimizer = kernel.Muon(attention.named.items(), qk_clip=clip)
        optimizer.observe_qk_logits("attn", logits)
        attention.set_gradients(0)
        optimizer.step()
    assert same_bits(ours.named, motif.named)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_clip_their_own_parameters(kernel, duplicate):
    attention = copy.deepcopy(KINDS["mha"])
    optimizer = (
        muon(kernel, attention, lr=0.0)
        if duplicate is copy.deepcopy
        else kernel.Muon(attention.named.items(), lr=0.0, qk_clip=attention.settings)
    )
    before = copy.deepcopy(attention.named)
    other, copied = duplicate((optimizer, attention))
    other.observe_qk_logits("attn", copied.largest_logits())
    other.step()
    assert same_bits(attention.named, before) and copied.largest_logits().max() < 1.01 * THRESHOLD
    assert other.metrics()["heads_clipped"] > 0


def test_replaced_parameters_are_clipped(kernel):
    attention = copy.deepcopy(KINDS["mha"])
    optimizer = muon(kernel, attention, lr=0.0)
    optimizer.observe_qk_logits("attn", attention.largest_logits())
    for group in optimizer.param_groups:
        group["params"] = [Parameter(p.detach().clone()) for p in group["params"]]
        attention.named.update(zip(group["param_names"], group["params"]))
    optimizer.step()
    assert attention.largest_logits().max() < 1.01 * THRESHOLD


def test_a_model_that_gets_its_values_after_its_optimizer_was_made_is_clipped(kernel):
    """Nothing has been observed on the meta device, and nothing is kept there."""
    attention = copy.deepcopy(KINDS["mha"])
    empty = [(name, Parameter(torch.empty_like(p, device="meta"))) for name, p in attention.named.items()]
    optimizer = kernel.Muon(empty, lr=0.0, qk_clip=attention.settings)
    for group in optimizer.param_groups:
        group["params"] = [attention.named[name] for name in group["param_names"]]
    optimizer.observe_qk_logits("attn", attention.largest_logits())
    optimizer.step()
    assert attention.largest_logits().max() < 1.01 * THRESHOLD


def test_weights_of_one_name_are_refused(kernel):
    """As of an actor and a critic in two groups: only one of the two would be found."""
    first, second = copy.deepcopy(KINDS["mha"]), copy.deepcopy(KINDS["mha"])
    groups = [{"params": list(attention.named.items())} for attention in (first, second)]
    with pytest.raises(ValueError, match=r"several parameters have the names \['attn.q_proj.weight'"):
        kernel.Muon(groups, qk_clip=first.settings)
    kernel.Muon(groups)


def test_heads_in_columns_are_refused(kernel):
    params = [(f"attn.{name}_proj.weight", Parameter(torch.ones(16, 8))) for name in "qk"]
    with pytest.raises(ValueError, match=r"those of transposed weights are columns: \['attn.q_proj.weight', "):
        kernel.Muon([{"params": params, "transposed": True}], qk_clip={"head_dim": 4})


def test_added_layer_can_be_observed_at_once(kernel):
    first, second = copy.deepcopy(KINDS["mha"]), copy.deepcopy(KINDS["mha"])
    renamed = {f"layers.{i}.{n}": p for i, a in enumerate((first, second)) for n, p in a.named.items()}
    names = list(renamed)
    optimizer = kernel.Muon([(n, renamed[n]) for n in names[:4]], lr=0.0, qk_clip=first.settings)
    optimizer.add_param_group({"params": [(n, renamed[n]) for n in names[4:]]})
    optimizer.observe_qk_logits(1, second.largest_logits())
    optimizer.step()
    assert second.largest_logits().max() < 1.01 * THRESHOLD < first.largest_logits().max()


def test_group_without_fitting_clip_is_refused_and_undone(kernel):
    attention = copy.deepcopy(KINDS["mha"])
    optimizer = muon(kernel, attention)
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    odd = [("layers.1.attn.q_proj.weight", Parameter(torch.ones(12, 8)))]
    with pytest.raises(ValueError, match="qk_clip needs"):
        optimizer.add_param_group({"params": odd})
    assert optimizer.state_dict()["param_groups"] == before
    optimizer.step()


@pytest.mark.parametrize(
    "clip, layer, heads, words",
    [(None, "attn", 4, "needs Muon"), (CLIP, "other", 4, "no layer 'other'"), (CLIP, "attn", 5, "must be")],
)
def test_observations_that_fit_nothing_are_refused(kernel, clip, layer, heads, words):
    attention = copy.deepcopy(KINDS["mha"])
    optimizer = kernel.Muon(attention.named.items(), qk_clip=clip)
    with pytest.raises(ValueError, match=words):
        optimizer.observe_qk_logits(layer, torch.zeros(heads))
