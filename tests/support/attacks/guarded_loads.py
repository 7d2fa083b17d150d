"""Loads of a kernel with the pin, as the Card says, and without it, as most do; both run in a client's process.

Each returns how it ended: "loaded" with the `folder` that was imported, "refused" with what `verify` said, or "error"
with the exception of the client.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path
from typing import Any

import kernels
from huggingface_hub import constants, file_download

from tools.pins.verify import VerificationError, verify

REPO_ID = "org/tiny"
# _LINUX_CAPABILITY_VERSION_3 of linux/capability.h: two words each of effective, permitted and inheritable ones.
CAPABILITIES_VERSION = 0x20080522


def with_pin(wanted: dict[str, Any], pin: str, hurry: bool) -> dict[str, Any]:
    """Install, verify, then load; `wanted` is what `install_kernel` takes besides the repository."""
    hurry_up(hurry)
    try:
        variant = kernels.install_kernel(REPO_ID, **wanted)
    except Exception as error:
        return ended("error", error)
    try:
        verify(variant, pin)
    except VerificationError as error:
        return ended("refused", error)
    try:
        return loaded(kernels.get_local_kernel(variant))
    except Exception as error:
        return ended("error", error)


def without_pin(wanted: dict[str, Any], pin: str, hurry: bool) -> dict[str, Any]:
    """Load as `get_kernel` does; the pin is not looked at."""
    hurry_up(hurry)
    try:
        return loaded(kernels.get_kernel(REPO_ID, **wanted))
    except Exception as error:
        return ended("error", error)


def with_pin_under(conditions: dict[str, int], *arguments: Any) -> dict[str, Any]:
    """Load `with_pin` with a umask, a limit of bytes per file, or without what root may do beyond any user."""
    os.umask(conditions.get("umask", 0o022))
    if "file size" in conditions:
        resource.setrlimit(resource.RLIMIT_FSIZE, (conditions["file size"], conditions["file size"]))
    if "no privileges" in conditions:
        drop_capabilities()
    return with_pin(*arguments)


def drop_capabilities() -> None:
    """Make root a user whom the modes of files bind. Another user could not read this user's Python."""
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def hurry_up(hurry: bool) -> None:
    """Leave out the waits between retries, and wait a second for an answer: neither changes what is asked how often."""
    if hurry:
        time.sleep = lambda seconds: None
        constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = file_download._ETAG_RETRY_TIMEOUT = 1


def loaded(kernel: Any) -> dict[str, Any]:
    return {"end": "loaded", "folder": str(Path(kernel.__file__).parent)}


def ended(how: str, error: Exception) -> dict[str, Any]:
    return {"end": how, "error": f"{type(error).__name__}: {error}"}
