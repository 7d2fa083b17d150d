"""Laws that hold for every set of parameters, groups, settings and missing gradients that hypothesis thinks of."""

import copy
import io
import pickle

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from tests.support.small_model import gradient_of, same_bits, state_of

STEPS = 5
# The same examples at every run; the fixture is the package, which no example changes.
repeatable = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

shapes = st.sampled_from(
    [(), (7,), (1, 5), (8, 8), (12, 20), (20, 12), (12, 20), (4, 30), (3, 64), (8, 4, 3, 3), (8, 1, 3, 3), (5, 8, 12)]
)
dtypes = st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64])
options = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([0.0, 0.02, 0.5]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "nesterov": st.booleans(),
        "maximize": st.booleans(),
        "ns_steps": st.integers(1, 7),
        "ns_coefficients": st.sampled_from(["quintic", "polar_express_safer"]),
        "ns_dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
        "adjust_lr_fn": st.sampled_from(["original", "rms_to_rms", None]),
        "decay_mode": st.sampled_from(["independent", "cautious"]),
        "conv_mode": st.just("batched"),
        "fallback": st.just("nadamw"),
        "stochastic_rounding": st.booleans(),
        "momentum_dtype": st.sampled_from(["float32", "bfloat16", "int8"]),
    },
)
# A parameter: its shape, its dtype, and the steps at which it has no gradient.
parameters = st.tuples(shapes, dtypes, st.sets(st.integers(0, STEPS - 1), max_size=3))
groups = st.lists(st.tuples(st.lists(parameters, min_size=1, max_size=4), options), min_size=1, max_size=3)
copies = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "state dict": None,
    "file": None,
}


class Run:
    """Named parameters in groups, an optimizer for them, and gradients that follow from names and steps."""

    def __init__(self, kernel, given_groups, offload=False):
        self.kernel, self.offload, self.missing, self.groups = kernel, offload, {}, []
        self.params = {}
        for i, (members, overrides) in enumerate(given_groups):
            names = []
            for j, (shape, dtype, missing) in enumerate(members):
                # Of the three-dimensional ones some are experts, by their names.
                name = f"{i}.experts.{j}" if len(shape) == 3 else f"{i}.layers.{j}.weight"
                generator = torch.Generator().manual_seed(10 * i + j)
                self.params[name] = Parameter(torch.randn(shape, generator=generator).to(dtype))
                self.missing[name] = missing
                names.append(name)
            self.groups.append((names, overrides))
        self.optimizer = self.build()

    def build(self):
        grouped = [
            {"params": [(name, self.params[name]) for name in names], **overrides} for names, overrides in self.groups
        ]
        return self.kernel.Muon(grouped, expert_keys=["experts"], offload=self.offload)

    def step(self, number):
        for name, p in self.params.items():
            p.grad = None if number in self.missing[name] else gradient_of(name, p, number)
        self.optimizer.step()

    def leave_and_return(self, way):
        """Go on with new objects that hold what was saved."""
        if copies[way] is not None:
            self.optimizer, self.params = copies[way]((self.optimizer, self.params))
            return
        saved = self.optimizer.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        self.params = {name: Parameter(p.detach().clone()) for name, p in self.params.items()}
        self.optimizer = self.build()
        self.optimizer.load_state_dict(saved)


@repeatable
@given(groups, st.dictionaries(st.integers(0, STEPS - 1), st.sampled_from(sorted(copies)), min_size=1), st.booleans())
def test_interrupted_run_equals_the_uninterrupted_one(kernel, given_groups, interruptions, offload):
    """Wherever it is interrupted, and wherever its state is."""
    straight, interrupted = Run(kernel, given_groups), Run(kernel, given_groups, offload)
    for number in range(STEPS):
        if number in interruptions:
            interrupted.leave_and_return(interruptions[number])
        for run in (straight, interrupted):
            run.step(number)
    assert same_bits(straight.params, interrupted.params)
    assert same_bits(state_of(straight.optimizer, straight.params), state_of(interrupted.optimizer, interrupted.params))


@repeatable
@given(groups)
def test_parameter_steps_alone_as_it_does_among_others(kernel, given_groups):
    """Bit for bit on a CPU, but for stochastic rounding, whose draws follow from the place among the others."""
    given_groups = [(members, {**overrides, "stochastic_rounding": False}) for members, overrides in given_groups]
    together = Run(kernel, given_groups)
    for number in range(2):
        together.step(number)
    for names, overrides in together.groups:
        for name in names:
            alone = Run(kernel, given_groups)
            alone.params, alone.groups = {name: alone.params[name]}, [([name], overrides)]
            alone.optimizer = alone.build()
            for number in range(2):
                alone.step(number)
            assert torch.equal(together.params[name], alone.params[name])


@repeatable
@given(groups)
def test_parameter_without_gradient_keeps_itself_and_state(kernel, given_groups):
    run = Run(kernel, given_groups)
    for number in range(STEPS):
        before, state = copy.deepcopy(run.params), copy.deepcopy(state_of(run.optimizer, run.params))
        run.step(number)
        after = state_of(run.optimizer, run.params)
        for name, p in run.params.items():
            if number in run.missing[name]:
                assert torch.equal(p, before[name])
                assert all(torch.equal(after[key], state[key]) for key in state if key.startswith(f"{name}/"))
