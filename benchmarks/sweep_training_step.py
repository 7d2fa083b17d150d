"""Time whole training steps of a small transformer: which share the optimizer takes, beside forward and backward.

    python -m benchmarks.sweep_training_step [--build DIR] [--device cpu] [--models decoder-4m] [--contestants NAME,...]
        [--peers DIR] [--minutes N] [--output FILE] [--tiny]

The model is a decoder with random weights on random tokens, with float32 parameters; on a GPU it computes under
autocast to bfloat16. Each contestant trains a copy. All take turns, each with forward and backward, then the
optimizer's step. The share is the step's time divided by that of both, in the same round, given as quartiles over the
rounds. Nothing is compiled. In a compiled model forward and backward take less time, and the optimizer's share is
larger.

Results are written after every model, and a second run with the same `--output` continues the first one. The row of a
case that raises has the error, and a later run tries it last. A peer that makes the GPU unusable ends the run with an
error, and no later one launches it: it is marked in its rows that are then measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import peers
from benchmarks.result_file import ResultFile, facts, has_error
from benchmarks.step_rivals import ADAMW, OWN, PEERS, SETTINGS, Weights, find_rival, step_of
from benchmarks.sweep_options import (
    TINY_ROUNDS,
    chosen,
    chosen_contestants,
    make_parser,
    measure_cases,
    path_of,
    prepare,
)
from benchmarks.terminal import print_results
from benchmarks.timing import Deadline, quartiles, run_rounds

TRAINED = ("torch.optim.Muon", ADAMW)
ROUNDS = {"cuda": 20, "cpu": 9}
BACK_AND_FORTH, STEP = "forward and backward", "step"


class Size(NamedTuple):
    """A decoder and its batch: `batch` sequences of `length` tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int


MODELS = {
    "decoder-4m": Size(4, 256, 4, 4096, 4, 128),
    "decoder-124m": Size(12, 768, 12, 50304, 8, 1024),
    "decoder-350m": Size(24, 1024, 16, 50304, 8, 1024),
}
TINY_MODEL = Size(2, 32, 2, 64, 2, 16)
DEFAULT = {"cuda": ("decoder-124m", "decoder-350m"), "cpu": ("decoder-4m",)}


class Bench(NamedTuple):
    """What stays the same for all models of a run."""

    kernel: ModuleType
    device: torch.device
    contestants: tuple[str, ...]
    rounds: int


class Block(nn.Module):
    """Causal attention and a perceptron, each applied after a norm and added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        q, k, v = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))


class Decoder(nn.Module):
    """Token and position embeddings, blocks, and a head."""

    def __init__(self, size: Size):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, size.width) for n in (size.vocabulary, size.length))
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores (batch, length, vocabulary) of each next token."""
        places = torch.arange(tokens.size(1), device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))

    def weights(self) -> Weights:
        """Return the blocks' matrices, and the parameters for AdamW."""
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        known = {id(p) for p in matrices}
        return Weights(matrices, [p for p in self.parameters() if id(p) not in known])


class Training(NamedTuple):
    """The two halves of a contestant's training step, of which the first returns the loss, and their parameters."""

    back_and_forth: Callable[[], Tensor]
    step: Callable[[], None]
    weights: Weights


def make_training(name: str, size: Size, bench: Bench) -> Training:
    """Return the training of a new copy of the model by the contestant called `name`, after a first step."""
    torch.manual_seed(0)
    with bench.device:
        model = Decoder(size)
        tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1))
    weights = model.weights()
    step = step_of(find_rival(name, bench.kernel, bench.device).build(weights))

    def back_and_forth() -> Tensor:
        model.zero_grad()
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.device.type == "cuda"):
            scores = model(tokens[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    training = Training(back_and_forth, step, weights)
    training.back_and_forth()
    training.step()
    return training


def measure(
    model: str, size: Size, bench: Bench, deadline: Deadline, lost: Mapping[str, str]
) -> Iterator[tuple[str, dict]]:
    """Yield each contestant's key and row. If a contestant cannot take part, its status is a mark that says why.

    Those that have `lost` the GPU before are not tried again: they have these marks.
    """
    trainings, marks = peers.admit(bench.contestants, lambda name: make_training(name, size, bench), lost)
    works, contestants = {}, {}
    for name, training in trainings.items():
        parts = {f"{name} {BACK_AND_FORTH}": training.back_and_forth, f"{name} {STEP}": training.step}
        works |= parts
        contestants |= dict.fromkeys(parts, name)
    times = run_rounds(works, bench.device, bench.rounds, deadline, contestants)
    for name, training in trainings.items():
        before, steps = times[f"{name} {BACK_AND_FORTH}"], times[f"{name} {STEP}"]
        yield (
            key_of(model, name),
            {
                "model": model,
                "contestant": name,
                "parameters": sum(p.numel() for p in (*training.weights.matrices, *training.weights.rest)),
                "tokens": size.batch * size.length,
                "forward_backward_milliseconds": [1e3 * t for t in quartiles(before)],
                "step_milliseconds": [1e3 * t for t in quartiles(steps)],
                "share": shares(before, steps),
                "rounds": len(steps),
            },
        )
    for name, mark in marks.items():
        yield key_of(model, name), {"status": mark, "model": model, "contestant": name}


def shares(before: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return the quartiles over rounds of the step's time divided by that of the whole."""
    return list(quartiles([step / (step + other) for other, step in zip(before, steps)]))


def key_of(model: str, name: str) -> str:
    return f"{model}, {name}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("Time the optimizer's share of a training step.", PEERS)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}")
    options = parser.parse_args(arguments)
    kernel, device = prepare(options)
    contestants = chosen_contestants(options.contestants, OWN, PEERS, TRAINED)
    bench = Bench(kernel, device, contestants, TINY_ROUNDS if options.tiny else ROUNDS[device.type])
    names = chosen(options.models, list(MODELS), DEFAULT[device.type], "models")
    models = {"tiny": TINY_MODEL} if options.tiny else {name: MODELS[name] for name in names}
    keys = {model: tuple(key_of(model, name) for name in contestants) for model in models}
    settings = {"settings": SETTINGS, "rounds": bench.rounds, "peers": peers.versions()}
    settings |= {"sizes": {name: size._asdict() for name, size in models.items()}}
    results = ResultFile(
        path_of("training-step", device, options), facts(kernel, device, settings), [*chain(*keys.values())]
    )
    deadline = Deadline(options.minutes)
    works = {
        keys[model]: partial(measure, model, size, bench, deadline, results.lost) for model, size in models.items()
    }
    measure_cases(results, works, deadline, contestants)
    rows = list(results.rows.values())
    print_results(rows)
    return int(any(map(has_error, rows)))


if __name__ == "__main__":
    sys.exit(main())
