"""Triton's interpreter, put right in bfloat16 and robbed of an order that GPUs do not promise.

`tl.dot` multiplies the values of bfloat16, and float32 rounds to it to nearest. Programs of a launch run in random
order: a kernel in which a program overwrites, or reads, what another one writes gives other results from seed to seed.

As it comes, the interpreter keeps bfloat16 as bit patterns, which `tl.dot` multiplies as integers, and truncates
float32 to it. Other arithmetic on bfloat16 stays wrong: kernels that are tested with this convert to float32 first.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import random

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

# The internals that are replaced, as they are in these versions.
VERSIONS = ("3.6.", "3.7.", "3.8.", "3.9.")
SIGNATURES = {
    "create_dot": ["self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"],
    "cast_impl": ["self", "src", "dst_type"],
    "create_fp_to_fp": ["self", "src", "dst_type", "rounding_mode"],
    "set_grid_dim": ["self", "nx", "ny", "nz"],
    "set_grid_idx": ["self", "x", "y", "z"],
}
ORDER = random.Random()


def shuffle_programs(seed: int) -> None:
    """Let programs run in an order that follows from the seed, from the next launch on; `repair` comes before."""
    ORDER.seed(seed)


@functools.cache  # a second repair would take the first one for a change of Triton
def repair() -> None:
    """Replace the product and casts of bfloat16, and the order of programs; RuntimeError where Triton is unknown."""
    builder = interpreter.InterpreterBuilder
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported")
    if not triton.__version__.startswith(VERSIONS):
        raise RuntimeError(f"the repair is known to fit Triton {'* and '.join(VERSIONS)}*, not {triton.__version__}")
    for name, expected in SIGNATURES.items():
        parameters = list(inspect.signature(getattr(builder, name)).parameters)
        if parameters != expected:
            raise RuntimeError(
                f"Triton {triton.__version__} has {name}({', '.join(parameters)}), not ({', '.join(expected)})"
            )
    if triton.__version__.startswith("3.6."):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    builder.create_dot = _dot_of_values(builder.create_dot)
    builder.cast_impl = _cast_to_nearest(builder.cast_impl)
    builder.create_fp_to_fp = _cast_to_nearest(builder.create_fp_to_fp)
    builder.set_grid_dim = _drawing_an_order(builder.set_grid_dim)
    builder.set_grid_idx = _in_that_order(builder.set_grid_idx)


def _with_index(patch):
    """Return `patch` with an index of tensors that NumPy takes: 3.6 makes it of an array with a dimension."""

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patch_with_index


def _dot_of_values(dot):
    def values(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot_of_values(self, a, b, d, input_precision, max_num_imprecise_acc):
        return dot(self, values(a), values(b), d, input_precision, max_num_imprecise_acc)

    return dot_of_values


def _cast_to_nearest(cast):
    def cast_to_nearest(self, src, dst_type, *rounding_mode):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, dst_type, *rounding_mode)
        bits = np.ascontiguousarray(src.data).view(np.uint32).reshape(np.shape(src.data)).astype(np.uint64)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(np.where(np.isnan(src.data), np.uint16(0x7FC0), nearest), tl.bfloat16)

    return cast_to_nearest


def _drawing_an_order(set_grid_dim):
    def draw_an_order(self, nx, ny, nz):
        set_grid_dim(self, nx, ny, nz)
        self.programs = list(itertools.product(range(nx), range(ny), range(nz)))
        ORDER.shuffle(self.programs)

    return draw_an_order


def _in_that_order(set_grid_idx):
    def set_in_that_order(self, x, y, z):
        _, ny, nz = self.grid_dim
        set_grid_idx(self, *self.programs[(x * ny + y) * nz + z])

    return set_in_that_order
