"""Muon for the Hub: orthogonalized momentum for matrices, AdamW for the rest.

Pages that docstrings and messages name, such as docs/faq.md, are in the repository of the sources: the card on the Hub
says where.
"""

from .interop import motif as compat
from .interop.models.groups import groups_for
from .interop.models.previews import route
from .interop.state_export import export_state
from .interop.state_import import import_state
from .interop.trainer import MuonFactory
from .kernels.matmul_transpose import matmul_transpose
from .kernels.provenance import build_info
from .muon import Muon
from .plan.exchange_options import ExchangeOptions
from .polar.factors import orthogonalize
from .schedules import polar_express
from .tuning.tune import tune

__all__ = [
    "ExchangeOptions", "Muon", "MuonFactory", "build_info", "compat", "export_state", "groups_for",
    "import_state", "matmul_transpose", "orthogonalize", "polar_express", "route", "tune",
]  # fmt: skip
