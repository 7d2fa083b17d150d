"""A training so small that every torch and Python takes it in a moment: what they make of the package on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def trained_on_cpu(kernel: ModuleType) -> dict[str, Any]:
    """Return the variant's name, the losses of 20 steps, where parameters go, and how many operators it has."""
    variant = Path(kernel.__file__).parent
    namespace = json.loads((variant / "metadata.json").read_text())["id"]
    torch.manual_seed(0)
    model, x, target = torch.nn.Linear(32, 16), torch.randn(64, 32), torch.randn(64, 16)
    opt = kernel.Muon(model.named_parameters(), lr=0.05, weight_decay=0.0)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(model(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    rows = [(row.name, row.branch) for row in opt.explain()]
    operators = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")]
    return {"variant": variant.name, "losses": losses, "rows": rows, "operators": len(operators)}
