"""Muon for the Hub: orthogonalized momentum for matrices, AdamW for the rest."""

from .muon import Muon
from .polar import orthogonalize
from .routing import route
from .schedules import polar_express

__all__ = ["Muon", "orthogonalize", "polar_express", "route"]
