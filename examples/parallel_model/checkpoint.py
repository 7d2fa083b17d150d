"""One checkpoint of all stages, which any layout reads.

A stage knows its own parameters only. What it saves has full names, so that the stages' parts do not meet: a parameter
is `model.<name>`, its state `optimizer.state.<name>.<key>`, and what its group says
`optimizer.param_groups.<name>.<key>`. Not flattened, groups would have numbers, the same ones in every stage: one would
overwrite the other's, and learning rates of the other would silently not be loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(model: nn.Module, optimizer: Optimizer, step: int, folder: Path) -> None:
    """Save what has been reached after `step` steps; all processes write their parts."""
    dcp.save({**_parts(model, optimizer), "step": step}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Optimizer, folder: Path) -> int:
    """Load a checkpoint of any layout, and return how many steps it has behind it."""
    checkpoint = {**_parts(model, optimizer), "step": 0}
    dcp.load(checkpoint, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=checkpoint["model"],
        optim_state_dict=checkpoint["optimizer"],
        options=BY_NAME,
    )
    return checkpoint["step"]


def _parts(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    parameters, state = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": parameters, "optimizer": state}
