"""A handful of named parameters of every kind, and gradients for them."""

import io
import zlib

import torch
from torch.nn import Parameter

# The keys of the optimizer's state, by whether a parameter is Muon's.
STATE = {True: {"momentum_buffer"}, False: {"step", "exp_avg", "exp_avg_sq"}}


def named_parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "wte.weight": (40, 12), "up.weight": (24, 12), "up.bias": (24,), "down.weight": (12, 24), "norm.weight": (12,),
    }  # fmt: skip
    values = {name: torch.randn(shape, generator=generator, device="cpu") for name, shape in shapes.items()}
    return {name: Parameter(value.to(torch.get_default_device(), dtype)) for name, value in values.items()}


def matrix(rows, cols, seed, dtype=torch.float32):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient_of(name, p, seed):
    generator = torch.Generator().manual_seed(1000 * seed + zlib.crc32(name.encode()) % 1000)
    return torch.randn(p.shape, generator=generator, device="cpu").to(p.device, p.dtype)


def set_gradient(p, gradient):
    """Let a parameter have this gradient, of any dtype, or none."""
    p.grad = None
    if gradient is not None:
        p.grad_dtype = gradient.dtype
        p.grad = gradient


def set_gradients(params, seed, without=()):
    for name, p in params.items():
        p.grad = None if name in without else gradient_of(name, p, seed)


def take_steps(optimizer, params, seeds):
    for seed in seeds:
        set_gradients(params, seed)
        optimizer.step()


def same_bits(params, others):
    return params.keys() == others.keys() and all(torch.equal(params[name], others[name]) for name in params)


def state_of(optimizer, params):
    """Every tensor of the state of named parameters."""
    return {f"{name}/{key}": value for name, p in params.items() for key, value in optimizer.state[p].items()}


def serialized(state_dict):
    """The state dict after a round trip through a file, read with weights_only."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
