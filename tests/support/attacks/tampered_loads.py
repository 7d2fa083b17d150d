"""What becomes of each tampered cache: a program, because the Hub's client reads its environment when it is imported.

    python -m tests.support.attacks.tampered_loads COMMIT PINS

It takes the cache that the client has, tampers with a copy in its place, and loads in a fork. It prints a JSON object
with what happens to each of `CACHES` without a check and with one: how `outcome` says that it ended.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import kernels
import torch
from huggingface_hub import constants

from tests.support.attacks.tampered_caches import CACHES
from tests.support.attacks.tampering import Tampering
from tests.support.compiled_variants import MARK, NAME
from tools.pins.verify import VerificationError, verify

CACHE = Path(constants.HF_HUB_CACHE, "kernels--org--tiny")
# In seconds; a load takes a tenth of one. What takes so many waits for a pipe.
PATIENCE = 60


def outcome(load: Callable[[], object]) -> dict[str, object]:
    """Call `load` in a fork and return how it ended, "killed" if by a signal, and whether foreign code left a mark."""
    mark = Path(os.environ[MARK])
    mark.unlink(missing_ok=True)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, json.dumps(ended(load)).encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], PATIENCE)
    if not ready:
        os.kill(child, 9)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    done = json.loads(said) if said else {"end": "killed" if ready else "hangs"}
    return {**done, "foreign": mark.exists()}


def ended(load: Callable[[], object]) -> dict[str, object]:
    try:
        kernel = load()
        return {"end": "loads", "result": kernel.scale(torch.ones(1)).item()}
    except VerificationError as error:
        return {"end": "refused", "told": str(error)}
    except BaseException as error:
        return {"end": "error", "told": f"{type(error).__name__}: {error}"}


def load_today(commit: str) -> object:
    return kernels.get_kernel("org/tiny", revision=commit, backend="cpu")


def load_verified(commit: str, pins: Mapping[str, str]) -> object:
    """Install, verify, load. Where the client does not install, the folder has to be refused all the same."""
    try:
        variant = kernels.install_kernel("org/tiny", revision=commit, backend="cpu", local_files_only=True)
    except Exception:
        variant = CACHE / "snapshots" / commit / "build" / NAME
    return kernels.get_local_kernel(verify(variant, pins), backend="cpu")


def tampered(original: Path, tamper: Tampering) -> None:
    """Put a fresh copy of the cache, tampered with, in its place."""
    shutil.rmtree(CACHE.parent)
    shutil.copytree(original, CACHE.parent, symlinks=True)
    tamper(CACHE)


def main(commit: str, pins: dict[str, str]) -> dict[str, dict[str, object]]:
    original = CACHE.parent.rename(CACHE.parent.with_name("original"))
    shutil.copytree(original, CACHE.parent, symlinks=True)
    seen = {}
    # Twice in the same place, because the first start leaves bytecode, whatever this process was told about that.
    sys.dont_write_bytecode = False
    for name in ("untouched", "started again"):
        left = [path.name for path in CACHE.glob("**/__pycache__/*")]
        seen[name] = {"with pin": outcome(lambda: load_verified(commit, pins)), "bytecode before": len(left)}
    for name, tamper in CACHES:
        tampered(original, tamper)
        today = outcome(lambda: load_today(commit))
        tampered(original, tamper)
        seen[name] = {"today": today, "with pin": outcome(lambda: load_verified(commit, pins))}
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
