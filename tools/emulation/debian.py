"""Makes a folder with Debian's Python and torch for aarch64, which QEMU runs here. Needs Debian's mmdebstrap and QEMU.

    python -m tools.emulation.debian

Unpacking takes a minute. The first import of torch writes its bytecode, in the emulator, and takes several. PyPI's
torch for aarch64 needs CUDA's libraries, so this one is Debian's newest. No version is pinned: results name it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

from tools.build.commands import BuildError, run

EMULATOR = "qemu-aarch64"
ARM_ROOT = Path(__file__).resolve().parents[2] / "out/aarch64"
SUITE, MIRROR = "sid", "http://deb.debian.org/debian"
PLATFORMS = "manylinux_2_28_aarch64", "manylinux2014_aarch64"
# Installing Debian's packages would make links to the first two. Its torch calls its libraries libtorch.so.2.14 and the
# like; a variant asks for libtorch.so, as torch from PyPI calls it, which is a link in the last.
LIBRARIES = "aarch64-linux-gnu/blas", "aarch64-linux-gnu/lapack", "python3/dist-packages/torch/lib"
CLIENTS = "kernels", "huggingface_hub"
IMPORT = "import kernels, torch, torch._dynamo, torch.distributed.tensor; print('torch', torch.__version__, 'is ready')"


def python(root: Path) -> tuple[str, ...]:
    """Return the command that runs the Python in the folder `root`.

    `BuildError` if it is not there whole, or if there is no emulator.
    """
    if shutil.which(EMULATOR) is None:
        raise BuildError(f"there is no {EMULATOR}: apt-get install qemu-user")
    interpreters = sorted(root.glob("usr/bin/python3.*[0-9]"))
    if not interpreters or not list(root.glob("usr/local/lib/python3*/dist-packages/kernels")):
        raise BuildError(f"there is no Python with torch in {root}: python -m tools.emulation.debian")
    folders = "LD_LIBRARY_PATH=" + ":".join(f"/usr/lib/{folder}" for folder in LIBRARIES)
    return (EMULATOR, "-L", str(root), "-E", folders, str(interpreters[-1]))


def make_root(root: Path) -> None:
    """Fill the new folder `root`. Packages are unpacked, and none of their programs is run."""
    packages = ["--variant=extract", "--architectures=arm64", "--include=python3-torch"]
    # Mirrors that stand still serve lists whose time is over. Their signatures are checked all the same.
    still = '--aptopt=Acquire::Check-Valid-Until "false"'
    run(["mmdebstrap", *packages, still, SUITE, root, MIRROR])
    (root / "lib").symlink_to("usr/lib")  # where a program of this processor looks for its loader
    (name,) = (path.name for path in root.glob("usr/bin/python3.*[0-9]"))
    target = root / "usr/local/lib" / name / "dist-packages"
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    for_it = [*platforms, "--python-version", name.removeprefix("python"), "--only-binary", ":all:"]
    clients = [f"{name}=={version(name)}" for name in CLIENTS]
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *for_it, "--target", target, *clients])


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        shutil.rmtree(ARM_ROOT, ignore_errors=True)
        make_root(ARM_ROOT)
        writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        print(run([*python(ARM_ROOT), "-c", IMPORT], environment=writing), end="")
    except BuildError as error:
        print(f"tools.emulation.debian: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
