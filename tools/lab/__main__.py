"""Prove, tune and measure the package on the GPU that is here, in stages that can be stopped and resumed.

    python -m tools.lab [--only prove|tune|measure] [--minutes 8] [--out DIR] [--build DIR]

Each stage is a process with a time limit; what it finds is written at once, to `records.jsonl` in the output folder,
and what is there already is not done again. A kernel that is wrong, hangs or ends its process is recorded, and the rest
goes on. `prove` runs the tests that need a GPU; `tune` writes configurations into the package, each of which it has
proven; the report goes into benchmarks/results or, with a copy of the configurations, into `--out`. Without a GPU the
whole flow is walked through on the CPU, with tiny sizes: it proves nothing and writes no results.

In runs of ten minutes, each perhaps on a fresh machine:

    python -m tools.build.variants --backend cuda        once, where nvcc is; carry build/ along with the sources
    python -m tools.lab --out lab --only prove           again until no test is left
    python -m tools.lab --out lab --only tune            again until no size is left
    python -m tools.lab --out lab --only measure         again until every sweep has ended

Between two of them carry `records.jsonl` and the device's file of configurations in `lab`, and put that file into
torch-ext/optimizer/kernels/configs, too, from where `measure` takes it. All else is written again. What the records
have is not done again while device, commit, torch, triton and build are the same; else they are put aside. What failed
is tried again, after what was never tried. What the user's caches hold of this machine does not count: the lab has
caches of its own in `--out`, which need not be carried along. Peers are measured where they are installed, or lie in a
folder that PYTHONPATH names: `benchmarks/peers.py` says how one is filled. One that is missing is a row `not
installed`.
"""

import sys
from importlib.util import find_spec

# What requirements/gpu.txt installs, by the names under which it is imported.
NEEDED = ("torch", "pytest", "pytest_timeout", "xdist", "pytest_reportlog", "expecttest", "hypothesis", "rich")


def main() -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"gpu-lab: {', '.join(missing)} must be installed: requirements/gpu.txt says how", file=sys.stderr)
        return 1
    # Only now: it needs them all.
    from tools.lab.stages import run_stages

    return run_stages()


if __name__ == "__main__":
    sys.exit(main())
