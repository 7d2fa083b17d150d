"""The environment for a client of a Hub on this machine, without variables that would divert it or make it fail.

With kernels 0.17.2 and huggingface_hub 2.4.0:

- HF_HUB_DISABLE_TELEMETRY, DISABLE_TELEMETRY or DO_NOT_TRACK, set to 1, make `kernels` send an illegal header: every
  request fails, most often with "could not verify publisher trust status".
- A proxy with a socks5:// address, as in ALL_PROXY, fails every client without the package socksio, even for hosts
  that NO_PROXY names. A Hub on this machine needs no proxy.
- LOCAL_KERNELS takes precedence over the Hub, whichever version or revision is requested.
- HUGGINGFACE_HUB_CACHE and HUGGING_FACE_HUB_TOKEN are old names of HF_HUB_CACHE and HF_TOKEN that are still read.
  TRANSFORMERS_OFFLINE means HF_HUB_OFFLINE.
"""

from __future__ import annotations

import os
from pathlib import Path

FOREIGN_PREFIXES = ("HF_", "KERNELS_", "HUGGING", "TRANSFORMERS_")
FOREIGN_NAMES = {"LOCAL_KERNELS", "DISABLE_TELEMETRY", "DO_NOT_TRACK"}


def client_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Return this process's environment for clients of `endpoint` that keep their files in `home`.

    The clients read it when they are imported, so use it for separate processes.
    """
    kept = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    return {**kept, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}


def is_foreign(name: str) -> bool:
    return name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES or name.lower().endswith("_proxy")
