"""The package with its CUDA kernels as the operations of the CPU: they run by the model of CUDA in tests/cuda_model/.

The sources of optimizer_cuda/ are compiled as C++ over the model's `cuda_runtime.h`, unchanged but for launches, which
are no C++. The variant is loaded as any other, and its operations take the same tensors on the CPU.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.build import compilers, variants
from tools.build.assembly import assemble
from tools.build.commands import run
from tools.build.generated_sources import REGISTRATION_H
from tools.build.recipe import GENERATED_HEADER, read_build
from tools.build.variant_metadata import write_metadata

MODEL = Path("tests/cuda_model")
SOURCES_OF_KERNELS = ("momentum_pack", "descend", "move_blocks", "normalize")
OPERATIONS = (*SOURCES_OF_KERNELS, "frobenius_norm")
SOURCES = ("optimizer_common", "optimizer_cpu", "optimizer_cuda", "torch-ext", MODEL)
# Launches are no C++. Parameters by value are shared by the threads of a GPU, and so they are here.
LAUNCH = re.compile(r"(\w+)<<<(.*)>>>\((.*)\);")
PARAMETERS = re.compile(r"const __grid_constant__ (\w+) (\w+)\)")
KERNEL = re.compile(r"void \(\*kernel\)\((\w+)\)")

# Every access of a kernel is reported to the model, with its alignment and the bounds of arrays; code is for this
# machine, so that fma is an instruction.
CHECKED = ["-fsanitize=kernel-address", "-fsanitize=alignment,bounds", "-march=native", "-O2"]
CHECKED += ["--param", "asan-instrumentation-with-call-threshold=0"]
CHECKED += ["--param", "asan-stack=0", "--param", "asan-globals=0"]
# What torch.cpp puts in the place of torch's functions.
WRAPPED = (
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
    "torch_get_mutable_data_ptr",
    "torch_get_const_data_ptr",
    "aoti_torch_create_device_guard",
    "aoti_torch_delete_device_guard",
    "aoti_torch_get_current_cuda_stream",
)


def build_modelled_variant(repository: Path, folder: Path) -> Path:
    """Return a variant in `folder`, named as that of the CPU, whose passes and copies are the CUDA kernels."""
    tree = folder / "tree"
    copy_sources(repository, tree)
    job = variants.plan(repository, read_build(repository), "cpu", folder / "work")
    revision = dataclasses.replace(job.revision, tree="model", dirty=True)
    job = dataclasses.replace(job, root=tree, revision=revision)
    job.work.mkdir(parents=True)
    (job.work / GENERATED_HEADER).write_text(REGISTRATION_H)
    kernels = [Path("optimizer_cuda", f"{name}.cpp") for name in SOURCES_OF_KERNELS]
    on_cpu = [Path("optimizer_cpu", f"{name}.cpp") for name in ("gemm", "threads", "tile_moves")]
    plain = [Path("torch-ext/torch_binding.cpp"), *on_cpu]
    library = job.work / f"{job.ops}.abi3.so"
    objects = compile_all(job, kernels, [*plain, *(MODEL / name for name in ("model.cpp", "memory.cpp", "torch.cpp"))])
    wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
    run([*compilers.link_line(job, objects, library), *wraps])
    variant = folder / "build" / job.variant_name
    assemble(variant, job, library)
    write_metadata(variant, job.recipe, job.ops, job.revision)
    return variant


def copy_sources(repository: Path, tree: Path) -> None:
    """Copy what is compiled, the CUDA sources as C++ sources."""
    for name in SOURCES:
        copy = shutil.copytree if (repository / name).is_dir() else shutil.copyfile
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        copy(repository / name, tree / name)
    launches = sum(as_cpp(file) for file in sorted(tree.rglob("*.cu*")))
    if launches == 0:
        raise RuntimeError(f"no launch `kernel<<<...>>>(parameters);` was found in {repository / 'optimizer_cuda'}")


def as_cpp(file: Path) -> int:
    """Write a CUDA source as C++, beside it where it is no header; return how many launches it has."""
    text, launches = LAUNCH.subn(r"cuda_model::launch(\1, \2, \3);", file.read_text())
    text = KERNEL.sub(r"void (*kernel)(const \1&)", PARAMETERS.sub(r"const \1& \2)", text))
    target = file.with_suffix(".cpp") if file.suffix == ".cu" else file
    target.write_text(f'#line 1 "{file.parent.name}/{file.name}"\n{text}')
    return launches


def compile_all(job: compilers.Job, kernels: Sequence[Path], others: Sequence[Path]) -> list[Path]:
    """Return the objects of kernels, which the model watches, and of other sources; paths are from the job's root."""
    plainly = [f"-I{MODEL}", "-DOPTIMIZER_CLONES="]  # for this machine alone
    watched = [*plainly, "-DUSE_CUDA=1", *CHECKED, *(f"-D{operation}_cuda={operation}_cpu" for operation in OPERATIONS)]
    options = {**{source: watched for source in kernels}, **{source: plainly for source in others}}
    targets = {source: job.work / f"{source.parent.name}_{source.stem}.o" for source in options}

    def compile_one(source: Path) -> Path:
        run([*compilers.compile_line(job, source, targets[source]), *options[source]], cwd=job.root)
        return targets[source]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, options))


def build_defects(repository: Path, folder: Path) -> Path:
    """Return a library with the model and the small kernels of `defects.cpp`, of whose defects it must tell."""
    model, library = repository / MODEL, folder / "defects.so"
    command = ["g++", "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{model}"]
    run([*command, *CHECKED, "-c", model / "defects.cpp", "-o", folder / "defects.o"])
    run([*command, "-shared", folder / "defects.o", model / "model.cpp", model / "memory.cpp", "-o", library])
    return library
