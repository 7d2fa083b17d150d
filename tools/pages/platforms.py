"""Write docs/platforms.md and the table in README.md: which variant the Hub's loader takes on which platform.

python -m tools.pages.platforms [--check]

The answers are those of the installed loader, `kernels.variants`, which is told the platform instead of asking for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import kernels
from kernels import variants as loader
from kernels.backends import CPU, CUDA, TPU, XPU, Backend, Metal, ROCm
from packaging.version import Version

from tools.build.recipe import read_tables
from tools.build.released import COMPILED, RELEASED
from tools.pages.generated import newest, write_or_check
from tools.pages.markdown import fill, table

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs/platforms.md", ROOT / "README.md"

# Versions of torch that are resolved; within one of these the answer has to be the same.
NEW, OLD = ("2.11", "2.12", "2.13", "2.14", "2.15"), ("2.10",)


class Platform(NamedTuple):
    """What the loader asks of a machine; `backends` are versions of what torch is built for, with the same answer."""

    place: str
    built_for: str
    backends: tuple[Backend, ...]
    cpu: str = "x86_64"
    system: str = "linux"
    free_threaded: bool = False

    @property
    def name(self) -> str:
        return f"{self.place} with torch for {self.built_for}"


def cuda(*versions: str) -> tuple[Backend, ...]:
    return tuple(CUDA(Version(version)) for version in versions)


CPUS, MPS, INTEL = (CPU(),), (Metal(),), (XPU(Version("2025.3")),)
CUDA_12, CUDA_13 = cuda("12.6", "12.8", "12.9"), cuda("13.0", "13.2")
ROCM = tuple(ROCm(Version(version)) for version in ("6.4", "7.1", "7.2"))
INTEL_OR_AMD, ARM, MAC = "Linux on x86-64", "Linux on ARM (aarch64)", "macOS on Apple silicon"
PLATFORMS = (
    Platform(INTEL_OR_AMD, "CPUs", CPUS),
    Platform(INTEL_OR_AMD, "CUDA 13.0 or 13.2", CUDA_13),
    Platform(INTEL_OR_AMD, "CUDA 12.6, 12.8 or 12.9", CUDA_12),
    Platform(INTEL_OR_AMD, "ROCm 6.4, 7.1 or 7.2", ROCM),
    Platform(INTEL_OR_AMD, "XPU", INTEL),
    Platform(ARM, "CPUs", CPUS, "aarch64"),
    Platform(ARM, "CUDA 13.0 or 13.2", CUDA_13, "aarch64"),
    Platform(ARM, "CUDA 12.6, 12.8 or 12.9", CUDA_12, "aarch64"),
    Platform(MAC, "CPUs", CPUS, "aarch64", "darwin"),
    Platform(MAC, "MPS", MPS, "aarch64", "darwin"),
    Platform("Windows", "CPUs", CPUS, "x86_64", "windows"),
    Platform("Windows", "CUDA 12.6 to 13.2", CUDA_12 + CUDA_13, "x86_64", "windows"),
    Platform("Windows", "XPU", INTEL, "x86_64", "windows"),
)
FREE_THREADED = (
    Platform("any, free-threaded Python before 3.15", "CPUs", CPUS, free_threaded=True),
    Platform("any, free-threaded Python before 3.15", "CUDA 12.6 to 13.2", CUDA_12 + CUDA_13, free_threaded=True),
)
OTHERS = (Platform(INTEL_OR_AMD, "TPUs", (TPU(),)),)
ALL_PLATFORMS = (*PLATFORMS, *FREE_THREADED, *OTHERS)

INTRODUCTION = """\
# Platforms

`get_kernel` takes the variant of the package that fits the machine, its Python and its torch. It goes by what torch is
built for, not by whether there is a GPU; on macOS by whether MPS is available. A **compiled** variant has kernels in
machine code. A **portable** variant (*noarch* to the Hub) does the same in torch's own operations, slower. It is taken
where no compiled one fits. On CPUs torch multiplies there; on NVIDIA's GPUs the kernels in Triton compete with torch's
products, as beside compiled ones. The passes before and after the orthogonalization took {cost}.
`print(optimizer.build_info().variant)` says which one was loaded.

`python -m tools.pages.platforms` makes this page. It asks the loader, kernels {version}, for each platform with each
torch from {oldest} to {newest}. A row says what is loaded there, not that anybody has run it. Unless a page says
otherwise, speeds and losses in this repository are of the compiled variants on x86-64, for CPUs or for CUDA on an H200.
[processors.md](processors.md) has emulated processors. Tests train with the portable variants on CPUs of x86-64. On
CPUs of aarch64 torch multiplies, unless `warmup()` has found compiled products faster.
"""

NVIDIA = """\
## GPUs of NVIDIA

The compiled variants for CUDA have code for the compute capabilities {archs}. So they run on a T4 (7.5) and on every
newer GPU. Code also runs on newer capabilities with the same first number, as 8.0's does on 8.6. The driver translates
PTX for all that are newer still, and for a Jetson Orin (8.7), which runs code for 8.7 alone. The only GPU that has run
them is an H200, beside a CPU of x86-64. For Linux on ARM, as in a GH200 or a GB200, the variant has the same code for
GPUs, byte for byte: a test compares them. QEMU has run what it does on the CPU, with the bits of x86-64.

If the current device is older, `get_kernel` refuses to load. If another one is, the first optimizer, `orthogonalize` or
`tune` that meets it raises ValueError with its name and capability; an import must not touch a device, so it does not
ask. What runs torch's operations alone, such as AdamW without matrices, does not raise.
"""

WITHOUT_FLOAT64 = """\
## GPUs of Apple and of Intel

Apple's GPUs (MPS) have no float64, and some of Intel's (XPU) lack it, such as the Arc A770. What is float64 on other
devices is float32 there: norms of matrices, and numbers such as `lr * weight_decay`. A matrix is scaled by a power of
two before it is squared, so its norm neither overflows nor vanishes. `kernels/portable/norms.py` says how far norms
may be off. Intel's GPUs that have float64 use it.

No GPU of Apple or Intel has run this package. Tests take steps of every recipe on a model of such a device, which
refuses tensors of float64 and operands on two devices, and compare the results with those of float64. The model runs
torch's operations on the CPU, so it cannot show whether torch has each of them on the device, or how fast they are.

- The Newton-Schulz iteration runs in float32, and `explain()` says so. `ns_dtype` takes float16 and bfloat16, too.
  Nobody has measured what they gain there.
- `sum_gram` and `ranks_per_matrix` need float64 on the device. Without it, each matrix has one owner.
- `ns_dtype` and momentum of float64 raise ValueError.
- With `offload` the host waits for each copy of momentum.
- On Intel's GPUs without float64, torch's own `GradScaler` makes a tensor of float64, which fails there. bfloat16 needs
  none.

These variants serve parameters on the CPU as well, by the operations of `torch-cpu`. With torch for XPU on Linux,
`get_kernel(..., backend="cpu")` loads the compiled variant instead, which takes parameters on the CPU alone.
"""

NOTHING = """\
## Where nothing fits

No variant is for torch for other devices, such as {devices}. There `get_kernel` raises an error with a line for each
variant, in any order. On {platform}, with torch {torch}, it is

```
{message}
```

For parameters on the CPU, `get_kernel(..., backend="cpu")` loads `{way_out}` there.

A build of your own has only what that machine could compile, and the portable variants. The loader splits
`LOCAL_KERNELS` at colons, so it cannot hold a path with a drive letter, as on Windows: there load the folder with
`kernels.get_local_kernel(Path("build"))`.

On free-threaded Python the loader leaves out compiled variants, and logs:

```
{warning}
```
"""


def resolve(platform: Platform, backend: Backend, torch: str) -> tuple[str | None, list[loader.Decision], list[str]]:
    """Return the name of the variant that is loaded, None if there is none, every decision, and what is logged."""
    named = [loader.parse_variant(name) for name in RELEASED]
    with (
        mock.patch.object(loader, "_is_unsupported_free_threaded_build", lambda: platform.free_threaded),
        mock.patch.object(loader, "logger") as logger,
    ):
        accepted, trace = loader._resolve_variant_for_system(
            variants=named,
            selected_backend=backend,
            cpu=platform.cpu,
            os=platform.system,
            torch_version=Version(torch),
            torch_cxx11_abi=True,
            tvm_ffi_version=None,
        )
    return accepted[0].variant_str if accepted else None, trace, [call.args[0] for call in logger.warning.mock_calls]


def taken(platform: Platform, torches: Sequence[str]) -> str | None:
    """Return the variant that is loaded with each of `torches` and each backend of a platform.

    Raises ValueError if they differ: then the platform is several.
    """
    variants = {resolve(platform, backend, torch)[0] for backend in platform.backends for torch in torches}
    if len(variants) > 1:
        raise ValueError(f"{platform.name} takes {variants}: it has to be several platforms")
    return variants.pop()


def message(platform: Platform, torch: str, revision: str) -> str:
    """Return what `get_kernel` raises where no variant fits, with the last of the backends of a platform."""
    _, trace, _ = resolve(platform, platform.backends[-1], torch)
    start = f"Cannot find a build variant for this system in org/optimizer (revision: {revision}):"
    return f"{start}\n\n{loader.variants_trace_str(trace)}"


def page() -> str:
    """Return docs/platforms.md."""
    headings = ("system", "torch for", f"torch {NEW[0]} or newer", f"torch {OLD[-1]}")
    rows = [(each.place, each.built_for, cell(taken(each, NEW)), cell(taken(each, OLD))) for each in ALL_PLATFORMS]
    introduction = INTRODUCTION.format(version=kernels.__version__, oldest=OLD[0], newest=NEW[-1], cost=cost())
    archs = ", ".join(read_tables(ROOT)["kernel"]["optimizer_cuda"]["cuda-capabilities"])
    sections = NVIDIA.format(archs=archs), WITHOUT_FLOAT64, where_nothing_fits()
    return "\n".join([introduction, table(headings, rows) + "\n", *sections])


def cost() -> str:
    """Return what portable operations took, as multiples of the compiled ones' time, in the newest file of results."""
    file = newest(ROOT / "benchmarks/results", "portable-cpu", "benchmarks.sweep_portable")
    content = json.loads(file.read_text())
    ratios = [row["ratio"] for row in content["results"] if "ratio" in row]
    place = f"../{file.relative_to(ROOT).as_posix()}"
    return f"{min(ratios):.1f} to {max(ratios):.1f}\ntimes as long on an [{content['device']}]({place})"


def cell(variant: str | None) -> str:
    return f"{kind(variant)}: `{variant}`" if variant else "nothing"


def kind(variant: str | None) -> str:
    return "nothing" if variant is None else "compiled" if variant in COMPILED else "portable"


def where_nothing_fits() -> str:
    """Return the part of the page about platforms that load nothing, with what is said on the first of them."""
    without = [each for each in ALL_PLATFORMS if taken(each, NEW) is None]
    return NOTHING.format(
        devices=", ".join(each.built_for for each in without),
        platform=without[0].place,
        message=f"FileNotFoundError: {message(without[0], NEW[-1], '<commit>')}",
        torch=NEW[-1],
        way_out=taken(without[0]._replace(backends=CPUS), NEW),
        warning=resolve(FREE_THREADED[0], CPU(), NEW[-1])[2][0],
    )


def summary() -> str:
    """Return the table in README.md: the platforms by what they load."""
    kinds = {
        "compiled": "compiled kernels",
        "portable": "portable variants: the same in torch's own operations, slower",
    }
    rows = [(what, "; ".join(places_with(name))) for name, what in kinds.items()]
    return table(("what is loaded", f"with torch {NEW[0]} or newer"), rows)


def places_with(name: str) -> Iterator[str]:
    """Yield the systems on which a kind of variant is loaded, each with what torch is built for."""
    platforms = [each for each in PLATFORMS if kind(taken(each, NEW)) == name]
    for place in dict.fromkeys(each.place for each in platforms):
        yield f"{place}: {', '.join(each.built_for for each in platforms if each.place == place)}"


def main() -> int:
    description = "Make docs/platforms.md and the table in README.md by asking the loader."
    readme = fill(README.read_text(), {"platforms": summary()})
    return write_or_check({PAGE: page(), README: readme}, description)


if __name__ == "__main__":
    sys.exit(main())
