"""Muon for the Hub: orthogonalized momentum for matrices, AdamW for the rest."""

from . import compat as compat
from .kernels.gemms import matmul_transpose
from .muon import Muon
from .polar import orthogonalize
from .routing import route
from .schedules import polar_express
from .state_import import import_state
from .trainer import MuonFactory

__all__ = ["Muon", "MuonFactory", "import_state", "matmul_transpose", "orthogonalize", "polar_express", "route"]
