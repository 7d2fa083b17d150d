"""Errors of Triton, without which the package works, too: which they are, and how they are told."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Optional


def is_of_triton(error: Exception) -> bool:
    """Whether Triton, or a part of it, cannot be imported: it is absent, older or newer than needed, or broken.

    An error that Triton's own files raise, as for a library that cannot be loaded, may be of any class. Any other error
    is Triton's if the module that cannot be imported, or that lacks an attribute, is Triton's, or the file that this
    Python cannot read.
    """
    if isinstance(error, SyntaxError) and "triton" in Path(error.filename or "").parts:
        return True
    missing = error.name if isinstance(error, ImportError) else getattr(getattr(error, "obj", None), "__name__", None)
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(map(_is_triton, (missing, *(frame.f_globals.get("__name__") for frame in frames))))


def in_a_line(error: Exception) -> str:
    """Return kind and text of an error, in one line; without the folder of a file that could not be imported.

    Ranks compare such lines, and each machine may have Triton in a folder of its own.
    """
    text = str(error)
    if isinstance(error, ImportError) and error.path:
        text = text.replace(error.path, Path(error.path).name)
    return f"{type(error).__name__}: {text}".splitlines()[0]


def _is_triton(module: Optional[str]) -> bool:
    return (module or "").partition(".")[0] == "triton"
