"""The iterations written plainly, over whatever adds and multiplies: tensors, and numbers that carry their rounding."""

from __future__ import annotations

import torch

from tests.support.proofs import error_propagation

Carried, unit_roundoff = error_propagation.Carried, error_propagation.unit_roundoff


def standard(X, schedule):
    """Return p(X) for wide X (m, n), a `Tensor` or `Carried`, as Jordan's Muon writes it."""
    for a, b, c in schedule:
        A = X @ X.mT
        B = A.addmm(A, A, beta=b, alpha=c)
        X = X.addmm(B, X, beta=a)
    return X


def gram(X, windows, chain_dtype):
    """Return p(X) for wide X (m, n), a `Tensor` or `Carried`, as Dao-AILab's Gram Newton-Schulz writes it.

    R and Q are kept in `chain_dtype`; each of `windows`, which are schedules, starts from a Gram matrix made anew.
    """
    for window in windows:
        R, Q = X.to(chain_dtype), None
        R = R @ R.mT
        identity = torch.eye(R.shape[0], device=R.device).to(chain_dtype)
        for a, b, c in window:
            Z = R.addmm(R, R, beta=b, alpha=c)
            Q = Z.add(identity, alpha=a) if Q is None else Q.addmm(Q, Z, beta=a)
            RZ = R.addmm(R, Z, beta=a)
            R = RZ.addmm(Z, RZ, beta=a)
        X = Q.to(X.dtype) @ X
    return X
