"""The package's proofs and its race, which need torch alone: from the sources, for modules to import at their top."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).resolve().parents[2] / "torch-ext" / "optimizer"
_NAME = "optimizer_sources"

# Without the package's __init__.py, which would load compiled operations.
sys.modules[_NAME] = ModuleType(_NAME)
sys.modules[_NAME].__path__ = [str(_PACKAGE)]

error_propagation = importlib.import_module(f"{_NAME}.tuning.error_propagation")
roundings = importlib.import_module(f"{_NAME}.tuning.roundings")
products = importlib.import_module(f"{_NAME}.tuning.proof")
graphs = importlib.import_module(f"{_NAME}.kernels.graphs")
race = importlib.import_module(f"{_NAME}.tuning.race")
steps = importlib.import_module(f"{_NAME}.kernels.gpu.small_steps")
small = importlib.import_module(f"{_NAME}.tuning.small_proof")
