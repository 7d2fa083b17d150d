"""The Motif kernel's names: each does what the kernel did in its golden runs, or an error says what to write."""

import copy

import pytest
import torch

from tests.support.small_model import named_parameters, same_bits, set_gradients
from tests.support.trajectories import errors, load_trajectories, norm_as_in_references, run
from tests.wrappers.test_motif_groups import attention_groups


@pytest.fixture
def groups(kernel):
    """Make groups as the kernel has them of named parameters; routing is the package's."""

    def make(params, **settings):
        rows = {row.name: row.branch == "muon" for row in kernel.route(params.items()).rows}
        return [
            {
                "params": [params[name] for name, is_muon in rows.items() if is_muon == use_muon],
                "names": [name for name, is_muon in rows.items() if is_muon == use_muon],
                "use_muon": use_muon,
                **settings,
            }
            for use_muon in (True, False)
        ]

    return make


def golden_runs(kernel, repository, monkeypatch, groups):
    """Each golden run of the kernel, and our steps beside it."""
    for trajectory in load_trajectories(kernel, repository):
        if trajectory.kind != "motif":
            continue
        o = trajectory.case["options"]
        options = {key: o[key] for key in ("lr", "momentum", "nesterov", "ns_steps", "weight_decay")}
        options.update(adamw_betas=tuple(o["betas"]), adamw_eps=o["eps"])
        norm_as_in_references(kernel, monkeypatch, trajectory.added_eps)

        def make(params, options=options, **changes):
            return kernel.compat.Muon(groups(params), **{**options, **changes})

        yield trajectory, run(trajectory, torch.float64, make)


def test_muon_follows_the_kernels_golden_runs(kernel, repository, monkeypatch, groups):
    compared = 0
    for trajectory, steps in golden_runs(kernel, repository, monkeypatch, groups):
        for step, optimizer, params in steps:
            if step in (1, 2, 5, 12):
                rest = list(errors(trajectory, optimizer, params, step))
                assert max(error for *_, error in rest) <= trajectory.case["tol_rel_float64"], (trajectory.case, rest)
                compared += len(rest)
    assert compared > 50


def test_eps_bounds_the_average_where_the_kernel_adds_it_to_the_sum(kernel, groups):
    """Also of a group with another momentum."""
    for settings, arguments, eps in (
        ({"momentum": 0.5}, {"momentum": 0.9}, 0.5e-7),
        ({}, {"momentum": 0.9}, 0.1e-7),
        ({"eps": 1e-3}, {}, 1e-3),
        ({}, {}, 0.05e-7),
    ):
        optimizer = kernel.compat.Muon(groups(named_parameters(), **settings), **arguments)
        assert optimizer.param_groups[0]["eps"] == pytest.approx(eps)


def test_arguments_reach_all_groups_beside_the_kernels_coefficients(kernel, groups):
    """Of which there are ten: later steps of the package's preset are others."""
    arguments = {"adamw_betas": (0.8, 0.9), "adamw_eps": 1e-6, "ns_steps": 10}
    coefficients = kernel.polar_express(lower=1e-3, steps=10, safety=1e-2, cushion=0.02)
    for group in kernel.compat.Muon(groups(named_parameters()), **arguments).param_groups:
        assert {key: group[key] for key in arguments} == arguments
        assert kernel.schedules.resolve_schedule(group["ns_coefficients"], 10) == coefficients


@pytest.mark.parametrize("ahead, in_flight", [(0, 1), (1, 1), (5, 2)])
def test_at_most_two_chunks_are_in_flight(kernel, groups, ahead, in_flight):
    """More would take memory and have no effect; the kernel's default is five."""
    assert kernel.compat.Muon(groups(named_parameters()), warmup_step=ahead)._exchange.chunks_in_flight == in_flight


@pytest.mark.parametrize("indices", [("q_indices", "k_indices"), ("q_indices",), ("k_indices",)])
def test_logits_given_to_a_step_clip_as_the_kernel_does(kernel, indices):
    """Rows of a head whose logit exceeds the threshold are scaled by the root of threshold / logit."""
    config = {key: [0, 1] for key in indices} | {"head_dim": 4, "threshold": 100}
    weights, groups = attention_groups(kernel)
    optimizer = kernel.compat.Muon(groups, lr=0.0, clip_config=config)
    optimizer.step(qk_logits={3: torch.tensor([50.0, 400.0])})
    for p in weights.values():
        torch.testing.assert_close(p.diagonal().detach(), torch.tensor([1.0] * 4 + [0.5] * 4))


def test_logits_without_indices_are_refused(kernel):
    """The kernel would leave them unread, as its default clip_config has no indices."""
    _, groups = attention_groups(kernel)
    empty = {"q_indices": [], "k_indices": [], "head_dim": 128, "threshold": 100}
    with pytest.raises(ValueError, match="clip_config with q_indices and k_indices"):
        kernel.compat.Muon(groups, clip_config=empty).step(qk_logits={3: torch.ones(2)})


def test_a_step_returns_the_loss_of_its_closure(kernel, groups):
    """Which it calls first: without gradients nothing would move."""
    params = named_parameters()
    before, optimizer = {name: p.detach().clone() for name, p in params.items()}, kernel.compat.Muon(groups(params))

    def closure():
        set_gradients(params, 0)
        return 0.25

    assert optimizer.step(closure) == 0.25 and optimizer.step() is None
    assert not any(torch.equal(p, before[name]) for name, p in params.items())


def test_gradients_of_matrices_are_dropped_unless_asked_to_stay(kernel, groups):
    for none_grad in (True, False):
        params = named_parameters()
        optimizer = kernel.compat.Muon(groups(params), none_grad=none_grad)
        set_gradients(params, 0)
        optimizer.step()
        assert (params["up.weight"].grad is None) == none_grad and params["up.bias"].grad is not None


def test_offload_changes_no_bit(kernel, groups):
    ends = []
    for offloaded in (False, True):
        params = named_parameters()
        optimizer = kernel.compat.Muon(groups(params))
        for seed in range(3):
            if offloaded and seed == 1:
                optimizer.turn_on_cpu_offload()
                assert all(group["offload"] for group in optimizer.param_groups)
            set_gradients(params, seed)
            optimizer.step()
        if offloaded:
            optimizer.turn_off_cpu_offload()
        assert not any(group["offload"] for group in optimizer.param_groups)
        ends.append(params)
    assert same_bits(*ends)


def test_a_checkpoint_of_the_names_resumes_and_copies(kernel, groups):
    params = named_parameters()
    optimizer = kernel.compat.Muon(groups(params))
    set_gradients(params, 0)
    optimizer.step()
    others, resumed = copy.deepcopy((params, optimizer))
    resumed.load_state_dict(optimizer.state_dict())
    for each, its_params in ((optimizer, params), (resumed, others)):
        set_gradients(its_params, 1)
        each.step()
    assert same_bits(params, others)


def test_the_kernels_modules_are_this_one(kernel):
    compat = kernel.compat
    for module in ("muon", "newton_schulz", "matmul_transpose_triton", "core"):
        assert getattr(compat, module) is compat
    assert issubclass(compat.Muon, kernel.Muon)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(debug=True), r"print\(opt.explain\(\)\)"),
        (dict(chunk_size=8), r"ExchangeOptions\(chunk_bytes=...\)"),
        (dict(use_distributed_muon=True), "leave it out"),
    ],
    ids=str,
)
def test_arguments_without_a_meaning_say_what_to_write(kernel, groups, arguments, words):
    with pytest.raises(ValueError, match=words):
        kernel.compat.Muon(groups(named_parameters()), **arguments)


@pytest.mark.parametrize(
    "name, words",
    [
        ("set_ns_compile", "leave it out"),
        ("COMM_DTYPE", "ns_dtype"),
        ("DEFAULT_CHUNK_SIZE_RATIO", "chunk_bytes"),
        ("adjust_lr_for_muon", "explain"),
        ("parse_qk_layer", "clip_config"),
        ("construct_shard_mesh", "ranks of shards are found automatically"),
        ("CPUOffloadPool", "turn_on_cpu_offload"),
    ],
)
def test_names_without_a_meaning_say_what_to_write(kernel, name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(kernel.compat, name)


def test_methods_without_a_meaning_say_what_to_write(kernel, groups):
    optimizer = kernel.compat.Muon(groups(named_parameters()))
    with pytest.raises(AttributeError, match="turn_on_cpu_offload"):
        optimizer.reload_group("layer 0")
    with pytest.raises(AttributeError, match="'nothing_of_this_name'"):
        _ = optimizer.nothing_of_this_name
    with pytest.raises(AttributeError, match="'nothing_of_this_name'"):
        _ = kernel.compat.nothing_of_this_name
