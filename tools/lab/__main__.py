"""Prove, tune and measure the package on the GPU that is here, in stages that can be stopped and resumed.

    python -m tools.lab [--only prove|tune|measure] [--minutes 8] [--out DIR] [--build DIR]

Each stage is a process with a time limit. Results are written at once, to `records.jsonl` in the output folder,
and finished items are not repeated. Those of tests are in pytest's log while `prove` runs. If the lab is killed, its
next run takes them from there. A kernel that is wrong, hangs or kills its process is recorded, and the others go on.
`prove` runs the tests that need a GPU. `tune` writes configurations into the package after proving each of them. The
report goes into benchmarks/results, or into `--out` together with a copy of the configurations. Without a GPU the whole
flow runs on the CPU with tiny sizes; that proves nothing and writes no results.

In runs of ten minutes, each perhaps on a fresh machine:

    python -m tools.build.variants --backend cuda        once, where nvcc is; carry build/ along with the sources
    python -m tools.lab --out lab --only prove           again while tests are left
    python -m tools.lab --out lab --only tune            again while sizes are left
    python -m tools.lab --out lab --only measure         again while sweeps are left

At its end a run says what is left of the stages that it ran. Its exit status is

    0   if everything that was asked for is done;
    1   if something failed, whether or not something is left;
    2   if nothing failed, but time ended first. Arguments that it does not know give 2, too.

What time was too short for is recorded as `cut`, and the next run goes on with it. A sweep that was cut or has failed
keeps the rows that it has measured, and the next run measures the others.

Between two runs, carry what is listed here, in `lab`; all other files are written again:

    records*.jsonl      what was found
    prove.*.jsonl       what was found by tests of a run that was killed
    <device>.json       the device's configurations, which `measure` reads: put them into
                        torch-ext/optimizer/kernels/speeds/configs, too
    sweep_*.json        the rows of a sweep that was killed
    caches/optimizer    which candidates were wrong, hung, or made the GPU unusable

Records stay valid as long as device, commit, torch, triton and build are the same; otherwise they are put aside until
they are the same again, as is the log of a run that was killed. Failed items are tried again after all untried ones. A
test that takes more than a third of the time of `prove`, or more than three minutes, has failed, and so has one that
was running at the end of two runs. The static check of `tune` is done on each machine, because it fills the cache of
compiled kernels there. The user's cache of measurements is not used: the lab has its own in `--out`. Without it the
next run would launch again what made the GPU unusable, and lose the size that it was tuning. Peers are measured if they
are installed, or if they are in a folder on PYTHONPATH: `benchmarks/peers.py` says how to fill one. A missing peer is a
row `not installed`.
"""

import sys
from importlib.util import find_spec

# The import names of what requirements/gpu.txt installs.
NEEDED = ("torch", "pytest", "pytest_timeout", "xdist", "pytest_reportlog", "expecttest", "numpy", "hypothesis", "rich")


def main() -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"gpu-lab: {', '.join(missing)} must be installed: requirements/gpu.txt says how", file=sys.stderr)
        return 1
    # Imported here, because it needs all of these packages.
    from tools.lab.stages import run_stages

    return run_stages()


if __name__ == "__main__":
    sys.exit(main())
