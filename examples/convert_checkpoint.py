"""Convert the checkpoint of another optimizer into one that `Muon(...).load_state_dict` takes.

    python -m examples.convert_checkpoint old.pt --from timm --model parameters.json --output new.pt

What is known of the model is its parameters' names and shapes, in its own order: a JSON file that one line writes,

    json.dump({name: list(p.shape) for name, p in model.named_parameters()}, open("parameters.json", "w"))

or a state dict of the model, saved by torch.save, if it has no buffers. Build the optimizer as usual afterwards, of
model.named_parameters() and with the same settings, and load the new file. If the old optimizer gave Muon a parameter
that `Muon` here gives to AdamW, such as an embedding, or the other way round: name all of Muon's parameters by --muon,
and give `Muon` an `is_muon` that chooses the same ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import torch
from kernels import get_kernel
from torch import Tensor
from torch.nn import Parameter

REPO_ID = "org/optimizer"


def main(arguments: Sequence[str] | None = None, kernel: ModuleType | None = None) -> None:
    """Convert as the command line says, with `kernel` or the one that it names; SystemExit for what does not fit."""
    options = parser().parse_args(arguments)
    kernel = kernel or get_kernel(options.kernel, version=0, trust_remote_code=True)
    try:
        state_dict, notes = converted(kernel, options)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise SystemExit(f"not converted, nothing written: {error}") from error
    torch.save(state_dict, options.output)
    for note in notes:
        print(f"not taken over: {note}")
    print(f"written: {options.output}, for {len(state_dict['state'])} parameters")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("checkpoint", type=Path, help="file with the other optimizer's state dict")
    made.add_argument("--from", dest="source", required=True, help="a source of import_state, such as torch or timm")
    made.add_argument("--model", type=Path, required=True, help="names and shapes: JSON, or the model's state dict")
    made.add_argument("--output", type=Path, required=True, help="file to write")
    made.add_argument("--key", default="", help="where in the file the state dict is, such as optimizer_states.0")
    made.add_argument("--adamw", type=Path, help="file of the AdamW beside a Muon of matrices alone")
    made.add_argument("--order", type=Path, help="JSON list of names in the checkpoint's order, if that is another")
    made.add_argument("--muon", nargs="+", help="patterns of all names that are Muon's; else shapes and names decide")
    made.add_argument("--settings", type=json.loads, default={}, help="arguments of Muon, as JSON")
    made.add_argument("--kernel", default=REPO_ID, help="repository of the package: %(default)s")
    return made


def converted(kernel: ModuleType, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the state dict of a Muon that has taken over a checkpoint, and what was not, in sentences.

    Raises KeyError, TypeError or ValueError for what does not fit, and OSError for a file that is not there.
    """
    shapes = shapes_of(options.model)
    named = [(name, Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    settings = dict(options.settings)
    if options.muon is not None:
        settings["is_muon"] = lambda name, _: any(fnmatchcase(name, pattern) for pattern in options.muon)
    opt = kernel.Muon(named, **settings)
    others: dict[str, Any] = {}
    if options.adamw is not None:
        others["adamw_state_dict"] = loaded(options.adamw, "")
    if options.order is not None:
        others["names"] = json.loads(options.order.read_text())
    notes = kernel.import_state(opt, loaded(options.checkpoint, options.key), options.source, **others)
    return opt.state_dict(), notes


def loaded(path: Path, key: str) -> Mapping[str, Any]:
    """Return the dict that a file of torch.save holds under a dotted key, read without running code.

    Raises KeyError where there is nothing under it, TypeError for what is no dict, and ValueError for a file that
    cannot be read so.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"torch.load cannot read {path} without running code: {reason}") from error
    for part in filter(None, key.split(".")):
        try:
            content = content[part] if isinstance(content, Mapping) else content[int(part)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise KeyError(f"{path} has nothing under {key}") from error
    if not isinstance(content, Mapping):
        raise TypeError(f"{path} has no dict {f'under {key}' if key else 'in it'}, got {type(content).__name__}")
    return content


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters, by name and in the order of a file; TypeError for what is no such file."""
    if path.suffix == ".safetensors":
        raise TypeError(f"{path} keeps no order of parameters: write names and shapes as JSON")
    content = json.loads(path.read_text()) if path.suffix == ".json" else loaded(path, "")
    if not isinstance(content, Mapping):
        raise TypeError(f"{path} must hold names and shapes, or a state dict, got {type(content).__name__}")
    return {name: tuple(value.shape if isinstance(value, Tensor) else value) for name, value in content.items()}


if __name__ == "__main__":
    main()
