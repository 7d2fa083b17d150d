"""The Hub's benchmark of a step: the matrices of one block of GPT-2, compared with `torch.optim.Muon`.

Both run Jordan's five steps in bfloat16, without momentum and decay. With the same gradients every step is the same.
`out` is the mean of the updates so far, because the harness takes many steps of ours and one of the reference. It times
the reference only once, so its ratio says little; `sweep_step.py` is the real measurement.
"""

import torch
from kernels.benchmark import Benchmark

SETTINGS = dict(lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, ns_coefficients=(3.4445, -4.7750, 2.0315))
SHAPES = {"qkv": (2304, 768), "projection": (768, 768), "up": (3072, 768), "down": (768, 3072)}


class Steps:
    """One optimizer with its own parameters and gradients."""

    def __init__(self, make, device):
        drawn = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in SHAPES.values()]
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=drawn).to(device)
        self.optimizer, self.count = make(self.params), 0

    def step(self):
        self.optimizer.step()
        self.count += 1
        return self.params[1].detach() / -self.count


class MuonStepBenchmark(Benchmark):
    seed = 0

    def setup_gpt2_block(self):
        recipe = dict(**SETTINGS, adjust_lr_fn="original", ns_dtype="bfloat16")
        self.ours = Steps(lambda params: self.kernel.Muon(params, **recipe), self.device)
        self.theirs = Steps(lambda params: torch.optim.Muon(params, **SETTINGS), self.device)
        self.out = torch.zeros(SHAPES["projection"], device=self.device)

    def benchmark_gpt2_block(self):
        self.out = self.ours.step()

    def verify_gpt2_block(self):
        return self.theirs.step()
