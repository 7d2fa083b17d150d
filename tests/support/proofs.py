"""The package's proofs and its race, which need torch alone: from the sources, for modules to import at their top."""

from __future__ import annotations

import importlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[2] / "torch-ext" / "optimizer" / "tuning"
_NAME = "optimizer_tuning_sources"

_spec = spec_from_file_location(_NAME, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])
sys.modules[_NAME] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_NAME])

carried = importlib.import_module(f"{_NAME}.carried")
roundings = importlib.import_module(f"{_NAME}.roundings")
products = importlib.import_module(f"{_NAME}.proof")
race = importlib.import_module(f"{_NAME}.race")
small = importlib.import_module(f"{_NAME}.small_proof")
