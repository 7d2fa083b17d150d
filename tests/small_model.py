"""A handful of named parameters of every kind, and gradients for them."""

import torch
from torch.nn import Parameter

# The keys of the optimizer's state, by whether a parameter is Muon's.
STATE = {True: {"momentum_buffer"}, False: {"step", "exp_avg", "exp_avg_sq"}}


def named_parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "wte.weight": (40, 12), "up.weight": (24, 12), "up.bias": (24,), "down.weight": (12, 24), "norm.weight": (12,),
    }  # fmt: skip
    return {name: Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def set_gradients(params, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for name, p in params.items():
        gradient = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if name in without else gradient


def take_steps(optimizer, params, seeds):
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


def same_bits(params, others):
    return all(torch.equal(params[name], others[name]) for name in params)
