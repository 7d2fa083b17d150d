"""Triton's interpreter with bfloat16 put right: `tl.dot` multiplies its values, and float32 rounds to it to nearest.

As it comes, the interpreter keeps bfloat16 as bit patterns, which `tl.dot` multiplies as integers, and truncates
float32 to it. Other arithmetic on bfloat16 stays wrong: kernels that are tested with this convert to float32 first.
"""

from __future__ import annotations

import functools
import inspect
import os

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

# The internals that are replaced, as they are in these versions.
VERSIONS = ("3.6.", "3.7.", "3.9.")
SIGNATURES = {
    "create_dot": ["self", "a", "b", "d", "input_precision", "max_num_imprecise_acc"],
    "cast_impl": ["self", "src", "dst_type"],
    "create_fp_to_fp": ["self", "src", "dst_type", "rounding_mode"],
}


@functools.cache  # a second repair would take the first one for a change of Triton
def repair_bfloat16() -> None:
    """Replace the interpreter's product and casts of bfloat16; RuntimeError where they are not as they are known."""
    builder = interpreter.InterpreterBuilder
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is imported")
    if not triton.__version__.startswith(VERSIONS):
        raise RuntimeError(f"the repair is known to fit Triton {'* and '.join(VERSIONS)}*, not {triton.__version__}")
    for name, expected in SIGNATURES.items():
        found = list(inspect.signature(getattr(builder, name)).parameters)
        if found != expected:
            raise RuntimeError(
                f"Triton {triton.__version__} has {name}({', '.join(found)}), not ({', '.join(expected)})"
            )
    if triton.__version__.startswith("3.6."):
        interpreter._patch_lang_tensor = _with_index(interpreter._patch_lang_tensor)
    builder.create_dot = _dot_of_values(builder.create_dot)
    builder.cast_impl = _cast_to_nearest(builder.cast_impl)
    builder.create_fp_to_fp = _cast_to_nearest(builder.create_fp_to_fp)


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
