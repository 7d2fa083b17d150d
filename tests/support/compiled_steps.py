"""A model of every kind of parameter, and its training by steps that a compiled function takes."""

import torch

from tests.support.small_model import named_parameters, set_gradients, state_of

WITHOUT = ("up.bias", "norm.weight")  # a gradient; the first is frozen, too


def made(kernel, **settings):
    params = named_parameters()
    params["up.bias"].requires_grad_(False)
    return params, kernel.Muon(list(params.items()), **{"lr": 0.02, **settings})


def everything(params, optimizer):
    with_state = {name: p for name, p in params.items() if p in optimizer.state}
    return {name: value.clone() for part in (params, state_of(optimizer, with_state)) for name, value in part.items()}


def clip(params):
    torch.nn.utils.clip_grad_norm_(list(params.values()), 0.5)


def plain_step(params, optimizer):
    optimizer.step()


def trained(params, optimizer, function, steps=5):
    """Call `function` with gradients and rates that are new at each step, and return what has become of all."""
    for seed in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (seed + 1)
        set_gradients(params, seed, WITHOUT)
        function(params, optimizer)
    return everything(params, optimizer)
