"""The matrix products of a Newton-Schulz iteration as one value: another backend is another table, not a branch."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

from torch import Tensor


class Products(NamedTuple):
    """Products of wide matrices X (..., m, n) and symmetric A, B (..., m, m).

    Each returns a new tensor. If it is given an `out`, it writes to that and returns it. If `in_place`, `affine`
    without an `out` overwrites X and returns that. Polynomials of one matrix commute except for rounding, so
    `commuting` and `conjugated` may choose the order. Full products err least if all factors are multiplied from one
    side. Symmetric products discard the upper triangle that they computed, and err least if factors are multiplied
    from both sides.
    """

    gram: Callable[..., Tensor]  # X, out -> X Xᵀ
    gram_affine: Callable[..., Tensor]  # A, b, c, a, out -> a I + b A + c A²
    commuting: Callable[..., Tensor]  # A, B, out -> A B, of two polynomials of one matrix
    conjugated: Callable[[Tensor, Tensor], Tensor]  # A, B -> A B A, also of two polynomials of one matrix
    affine: Callable[[Tensor, Tensor, float, Optional[Tensor]], Tensor]  # B, X, a, out -> a X + B X
    name: str
    # All steps of an iteration in one call, if there is one, with the same bits: X, schedule, squares -> X, which is
    # overwritten. `squares` is memory for two m x m matrices of each X, or None. The Gram iteration takes windows, and
    # four squares.
    newton_schulz: Optional[Callable[..., Tensor]] = None
    gram_newton_schulz: Optional[Callable[..., Tensor]] = None
    # For the Gram iteration with float32 squares, and for no other: `gram` also writes X Xᵀ to a float32 `out`.
    float32_squares: bool = False
    batched: bool = True  # takes X (B, m, n); False: one (m, n) at a time
    in_place: bool = False
    a_on_diagonal: bool = False  # the standard iteration multiplies (a I + B) X, because a X + B X would copy X first
    # torch's time divided by this table's: for X Xᵀ, and for the products of two m x m matrices.
    gram_gain: float = 1.0
    square_gain: float = 1.0
    square_name: str = ""  # the kernel for m x m matrices on a GPU, which may be another than that for X Xᵀ
    source: str = ""  # how the table was chosen, if it was: measured here, shipped, by the model, or by default
