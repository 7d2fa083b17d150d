"""A git repository with the smallest kernel that meets every trap of linking; no torch header, so it compiles fast."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FILES = {
    "build.toml": """\
[general]
name = "toy"
version = 3
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "org/toy"

[torch]
src = ["torch-ext/torch_binding.cpp"]
pyext = ["py", "json"]

[torch.stable-abi]
cpu = "2.11"
cuda = "2.11"

[kernel.toy_cpu]
backend = "cpu"
depends = ["torch"]
src = ["toy_cpu/toy.cpp", "toy_cpu/toy.h"]

[kernel.toy_cuda]
backend = "cuda"
depends = ["torch"]
cuda-capabilities = ["8.0", "9.0", "10.0+PTX"]
src = ["toy_cuda/toy.cu"]
""",
    "CARD.md": "{{ repo_id }} {{ version }} {{ functions }}\n",
    "torch-ext/torch_binding.cpp": '#include "registration.h"\n\nREGISTER_EXTENSION(TORCH_EXTENSION_NAME)\n',
    "torch-ext/toy/__init__.py": 'from . import _ops\n\n__all__ = ["_ops"]\n',
    "torch-ext/toy/data/sizes.json": "{}\n",
    "torch-ext/toy/notes.txt": "Not of an extension that is packed.\n",
    "toy_cpu/toy.h": "#include <memory>\n#include <string>\n",
    # Copying a shared_ptr asks for glibc 2.32, viewing a stream's text for a newer libstdc++ than manylinux_2_28's.
    "toy_cpu/toy.cpp": """\
#include "toy.h"

#include <sstream>
#include <string_view>

std::shared_ptr<int> share(const std::shared_ptr<int>& value) { return value; }

// Its address is taken, so that the call is not inlined.
using View = std::string_view (std::ostringstream::*)() const noexcept;
View view() { return &std::ostringstream::view; }

const char* name() { return __FILE__; }
""",
    "toy_cuda/toy.cu": """\
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }

void launch(float* x) { twice<<<1, 32>>>(x); }
""",
}


def write_toy_kernel(root: Path) -> Path:
    """Write the toy into the new folder `root`, commit it, and return `root`."""
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    commit(root)
    return root


def commit(root: Path) -> None:
    """Commit everything there is."""
    git(root, "add", "--all")
    git(root, "-c", "user.name=toy", "-c", "user.email=toy@localhost", "commit", "--quiet", "--message", "Toy")


def git(root: Path, *arguments: str) -> str:
    """Return what git prints in `root`, whatever a hook's variables name and the user has configured, as to sign."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_CONFIG_GLOBAL"] = os.devnull
    done = subprocess.run(["git", *arguments], cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout
