"""The Hub's benchmark: orthogonalize GPT-2's hidden matrices, compared with the function inside `torch.optim.Muon`.

Both run Jordan's five steps in bfloat16: 5 (4 m² n + 2 m³) FLOP for short side m and long side n. The harness times the
reference only once, so its ratio says little; `sweep_*.py` are the real measurements.
"""

import torch
from kernels.benchmark import Benchmark
from torch.optim._muon import _zeropower_via_newtonschulz

JORDAN = (3.4445, -4.7750, 2.0315)


class OrthogonalizeBenchmark(Benchmark):
    seed = 0

    def _make(self, rows, cols):
        self.G = torch.randn(rows, cols, device=self.device)
        self.out = torch.empty_like(self.G)

    def _run(self):
        self.out = self.kernel.orthogonalize(self.G, JORDAN, dtype=torch.bfloat16)

    def _reference(self):
        return _zeropower_via_newtonschulz(self.G, JORDAN, 5, 1e-7).float()

    def setup_attention_projection(self):
        self._make(768, 768)

    def benchmark_attention_projection(self):
        self._run()

    def verify_attention_projection(self):
        return self._reference()

    def setup_attention_qkv(self):
        self._make(2304, 768)

    def benchmark_attention_qkv(self):
        self._run()

    def verify_attention_qkv(self):
        return self._reference()

    def setup_mlp(self):
        self._make(768, 3072)

    def benchmark_mlp(self):
        self._run()

    def verify_mlp(self):
        return self._reference()
