"""Let torchvision be imported where its compiled operators cannot be loaded.

The registry's torchvision is built for torch with CUDA, and its import fails beside a torch without (`operator
torchvision::nms does not exist`), with that of every library that looks for it. So its operators stay unimplemented,
and those that the import asks for are declared. Nothing that is tested calls one.
"""

from importlib.machinery import PathFinder
from pathlib import Path

import torch

_NON_MAXIMUM_SUPPRESSION = ("nms", "qnms")
_declared = torch.library.Library("torchvision", "FRAGMENT")


def declare_missing() -> None:
    """Declare those operators of torchvision, where it is installed and torch cannot load them."""
    spec = PathFinder.find_spec("torchvision")
    if spec is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        for name in _NON_MAXIMUM_SUPPRESSION:
            _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
