"""`release_grads`: a matrix's gradient is let go as soon as it has been read, and the update is the same."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (16, 8), "experts.w": (3, 8, 12), "conv.weight": (8, 6, 3, 3), "a.bias": (16,)}
    params = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def optimizer(kernel, params, **options):
    return kernel.Muon(params.items(), expert_keys=("experts",), **options)


def test_released_gradients_give_the_same_update(kernel):
    kept, released = parameters(), parameters()
    for params, release in ((kept, False), (released, True)):
        optimizer(kernel, params, release_grads=release).step()
    for name, p in kept.items():
        assert torch.equal(p, released[name]), name
    assert all(p.grad is not None for p in kept.values())


def test_only_gradients_of_matrices_are_released(kernel):
    params = parameters()
    optimizer(kernel, params, release_grads=True).step()
    assert [name for name, p in params.items() if p.grad is not None] == ["a.bias"]


@pytest.mark.parametrize("release", [False, True])
def test_memory_is_freed_before_orthogonalization(kernel, monkeypatch, release):
    """When a parameter's last matrix is worked on, nobody holds its gradient any more."""
    params = parameters()
    muon = optimizer(kernel, params, release_grads=release)
    gradients = {name for name in params if name != "a.bias"}
    memory = {name: StorageWeakRef(params[name].grad.untyped_storage()) for name in gradients}
    polar_update = kernel.step.polar_update
    polar_factors, alive = polar_update.polar_factors, []

    def observed(packed, *arguments):
        alive.append({name for name in gradients if not memory[name].expired()})
        assert alive[-1] == {name for name in gradients if params[name].grad is not None}
        return polar_factors(packed, *arguments)

    monkeypatch.setattr(polar_update, "polar_factors", observed)
    muon.step()
    # One gradient fewer at each parameter's last batch.
    assert alive[-1] == (set() if release else gradients)
    assert [len(names) for names in alive] == sorted((len(names) for names in alive), reverse=True)
    assert (len(alive[0]) < len(gradients)) == release
