"""Every line of docs/migration: what is written here takes the steps of what was written there.

Both sides work in float64, there by telling the other package so, unless the test says otherwise.
"""

import copy
import inspect
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Parameter
from torch.optim import _muon

from benchmarks.peers import load_peer
from tests.support import published_steps
from tests.support.migrations import ORIGINS
from tests.support.migrations.table import Line, call_here, call_there
from tests.support.published_muons import CASES as PUBLISHED
from tests.support.published_muons import MATRICES, fresh
from tests.support.small_model import gradient_of, named_parameters

INSTALLED_APART = ("timm", "keller_jordan", "deepspeed")
STEPS = 3


def cases(choose):
    """Return each origin's lines that `choose` takes, of which the empty one is the page's call as it stands."""
    return list(_cases(choose))


def _cases(choose):
    for name, origin in ORIGINS.items():
        marks = pytest.mark.integrations if name in INSTALLED_APART else ()
        for line in filter(choose, (Line(""), *origin.lines)):
            yield pytest.param(origin, line, id=f"{name}: {line.arguments or 'as it stands'}", marks=marks)


@pytest.fixture(autouse=True)
def whole_timm():
    """`load_peer` leaves out what timm's package itself imports, which other tests need."""
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] == "timm":
            del sys.modules[name]


@pytest.fixture
def there(monkeypatch):
    """Make the optimizers of an origin's call; with `exact` their packages are told to iterate in float64."""

    def make(origin, line, halves, exact=True):
        namespace = {"torch": torch, "matrices": halves[0], "rest": halves[1]}
        names = {"Motif": "motif", "Dion": "dion", "NorMuon": "normuon", "Wrapper": "wrapper", "Moonlight": "moonlight"}
        namespace.update({name: getattr(published_steps, function) for name, function in names.items()})
        if origin.name == "deepspeed":
            namespace["DeepSpeed"] = partial(from_configuration, deepspeed_muons(monkeypatch if exact else None))
        if origin.name == "timm":
            module = load_peer("timm")
            if exact:
                iteration = partial(module.zeropower_via_newtonschulz, dtype=torch.float64)
                monkeypatch.setattr(module, "zeropower_via_newtonschulz", iteration)
        if origin.name in ("torch", "keller_jordan") and exact:
            monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
        if origin.name == "torch" and exact:  # newer torches name the dtype
            monkeypatch.setattr(_muon, "torch", SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64}))
        exec(call_there(origin, line), namespace)
        return [namespace[name] for name in ("opt", "muon", "adamw") if name in namespace]

    yield make
    torch.compiler.set_stance("default")


def deepspeed_muons(monkeypatch):
    """DeepSpeed's module of Muons, uncompiled; with `monkeypatch` it iterates in float64."""
    from deepspeed.runtime.zero.muon import original_muon

    torch.compiler.set_stance("force_eager")
    if monkeypatch is not None:
        monkeypatch.setattr(original_muon, "ns_compute_dtype", lambda *_: torch.float64)
    return original_muon


def from_configuration(module, matrices, rest, **params):
    """DeepSpeed's optimizer with the groups that its engine makes of `params` of the configuration."""
    muon = {key: params[key] for key in ("lr", "momentum", "weight_decay", "ns_method") if key in params}
    adamw = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if key in params}
    muon.update({"lr": params["muon_lr"]} if "muon_lr" in params else {})
    adamw.update({"lr": params["adam_lr"]} if "adam_lr" in params else {})
    groups = [dict(params=[p for _, p in matrices], use_muon=True, **muon)]
    return module.SingleDeviceMuonWithAuxAdam([*groups, dict(params=[p for _, p in rest], use_muon=False, **adamw)])


def halves_of(origin, dtype=torch.float64):
    """The (name, parameter) pairs of an origin's matrices, and of the rest."""
    params = named_parameters(dtype)
    matrices = [(name, params[name]) for name in MATRICES]
    if origin.convolutions:
        generator = torch.Generator().manual_seed(9)
        conv = torch.randn(8, 4, 3, 3, generator=generator, dtype=torch.float64)
        matrices.append(("conv.weight", Parameter(conv.to(dtype))))
    return matrices, [(name, p) for name, p in params.items() if name not in MATRICES]


def here(kernel, origin, line, halves):
    """Our optimizer: the page's call, or with a line's settings in the place of its."""
    namespace = {"optimizer": kernel, "torch": torch, "matrices": halves[0], "rest": halves[1]}
    if not line.muon and not line.rest:
        exec(call_here(origin), namespace)
        return namespace["opt"]
    muon, rest = (
        {key: value for text in texts for key, value in eval(f"dict({text})", namespace).items()}
        for texts in ((origin.muon, line.muon), (origin.rest, line.rest))
    )
    groups = [dict(params=halves[0], use_muon=True, **muon), dict(params=halves[1], use_muon=False, **rest)]
    return kernel.Muon(groups)


def take_steps(optimizers, halves, scale, seeds, scale_of_rest=1.0):
    for seed in seeds:
        for factor, half in zip((scale, scale_of_rest), halves):
            for name, p in half:
                p.grad = factor * gradient_of(name, p, seed)
        for each in optimizers:
            each.step()


def distances(halves, others, start):
    """By how much parameters differ, in parts of how far they moved, by name."""
    pairs = zip(*((*matrices, *rest) for matrices, rest in (halves, others, start)))
    return {name: ((p - q).norm() / (q - first).norm()).item() for (name, p), (_, q), (_, first) in pairs}


@pytest.mark.parametrize("origin, line", cases(lambda line: not line.refused))
def test_a_line_takes_the_steps_of_what_it_stands_for(kernel, there, origin, line):
    """Roundings of 1e-16 are multiplied by less than 1e3 at each step; eps is 1e-15 of norms, or the subject."""
    start, ours = halves_of(origin), halves_of(origin)
    theirs = copy.deepcopy(ours)
    take_steps(there(origin, line, theirs), theirs, line.scale, range(STEPS), origin.scale_of_rest)
    take_steps([here(kernel, origin, line, ours)], ours, line.scale, range(STEPS), origin.scale_of_rest)
    assert max(distances(ours, theirs, start).values()) <= STEPS * 1e-11, distances(ours, theirs, start)


@pytest.mark.parametrize("origin, line", cases(lambda line: line.refused))
def test_an_argument_without_counterpart_is_refused(kernel, origin, line):
    with pytest.raises((TypeError, ValueError), match=line.refused):
        kernel.Muon(halves_of(origin)[0], **eval(f"dict({line.arguments})"))


def marked(names):
    """Return origins by name, each with the mark of what its package needs."""
    return [case for case in cases(lambda line: not line.arguments) if case.values[0].name in names]


@pytest.mark.parametrize("origin, line", marked(("torch", "moonlight", *INSTALLED_APART)))
def test_a_checkpoint_taken_along_goes_on_as_it_would_have(kernel, there, origin, line):
    """By the page's code, into an optimizer that was made with other settings."""
    theirs, start = halves_of(origin), halves_of(origin)
    before = there(origin, line, theirs)
    take_steps(before, theirs, line.scale, range(STEPS), origin.scale_of_rest)
    ours, between = copy.deepcopy(theirs), copy.deepcopy(theirs)
    opt = here(kernel, origin, Line("", "lr=0.5, momentum=0.1", "lr=0.5, betas=(0.1, 0.2)"), ours)
    saved, saved_adamw = before[0].state_dict(), before[-1].state_dict()
    exec(origin.checkpoint, {"optimizer": kernel, "opt": opt, "saved": saved, "saved_adamw": saved_adamw})
    for optimizers, halves in ((before, theirs), ([opt], ours)):
        take_steps(optimizers, halves, line.scale, range(STEPS, 2 * STEPS), origin.scale_of_rest)
    assert max(distances(ours, theirs, between).values()) <= STEPS * 1e-11
    assert min(distances(between, theirs, start).values()) > 0.1


@pytest.mark.parametrize("name", ["motif", "dion", "dion_normuon"])
def test_a_checkpoint_of_a_formula_goes_on_as_it_would_have(kernel, name):
    """By the page's code, from state as the package would save it."""
    reference, saved, _, _, options = PUBLISHED[name if name != "dion_normuon" else "dion with second moments"]()
    params, opt = fresh(kernel, nesterov=not reference.nesterov, **options)
    exec(ORIGINS[name].checkpoint, {"optimizer": kernel, "opt": opt, "saved": saved})
    before = {each: p.detach().clone() for each, p in params.items()}
    for each, p in params.items():
        p.grad = 1e8 * gradient_of(each, p, 4)
    opt.step()
    for each, p in params.items():
        step = reference.matrix_step if each in MATRICES else reference.other_step
        expected = step(each, before[each], p.grad)
        assert (p - expected).norm() <= 1e-11 * (expected - before[each]).norm(), each


@pytest.mark.parametrize("origin, line", marked(("torch", *INSTALLED_APART)))
def test_as_packages_run_both_are_a_few_hundredths_from_the_exact_step(kernel, there, origin, line):
    """Theirs iterate in bfloat16, or DeepSpeed's on a CPU in float32; ours in what it takes by default."""
    start = halves_of(origin, torch.float32)
    exact = tuple([(name, Parameter(p.detach().double())) for name, p in half] for half in start)
    before, theirs, ours = copy.deepcopy(exact), copy.deepcopy(start), copy.deepcopy(start)
    take_steps(there(origin, line, theirs, exact=False), theirs, 1.0, [0])
    take_steps([here(kernel, origin, line, ours)], ours, 1.0, [0])
    for (name, p), (_, q) in zip((*exact[0], *exact[1]), (*start[0], *start[1])):
        p.grad = gradient_of(name, q, 0).double()  # what the others had
    here(kernel, origin, line, exact).step()
    for halves in (theirs, ours):
        assert max(distances(halves, exact, before).values()) <= 0.05


@pytest.mark.parametrize("origin, line", marked(("keller_jordan", "deepspeed")))
def test_an_eps_that_is_added_there_bounds_the_norm_here(kernel, there, origin, line):
    """One step of one matrix, whose norm is of the size of eps: the sum of both as `eps` is what they divide by."""
    theirs, ours = halves_of(origin), halves_of(origin)
    for halves in (theirs, ours):
        del halves[0][1:]
    ((name, p),) = ours[0]
    before, scale = copy.deepcopy(theirs), 1e-7
    norm = scale * (1 + 0.95) * 0.05 * gradient_of(name, p, 0).norm().item()
    take_steps(there(origin, line, theirs), theirs, scale, [0])
    take_steps([here(kernel, origin, Line("", f"eps={norm + 1e-7!r}"), ours)], ours, scale, [0])
    assert 0.1 < norm / 1e-7 < 10 and max(distances(ours, theirs, before).values()) <= 1e-11


@pytest.mark.parametrize("origin, line", marked(("keller_jordan", "deepspeed")))
def test_a_parameter_without_a_gradient_is_left_alone_here(kernel, there, origin, line):
    """Keller Jordan's raises, DeepSpeed's goes on by its momentum."""
    theirs, ours = halves_of(origin), halves_of(origin)
    there_opts, opt = there(origin, line, theirs), here(kernel, origin, line, ours)
    take_steps(there_opts, theirs, 1.0, [0])
    take_steps([opt], ours, 1.0, [0])
    before, theirs_before = copy.deepcopy(ours), copy.deepcopy(theirs)
    for _, p in (*theirs[0], *theirs[1], *ours[0], *ours[1]):
        p.grad = None
    opt.step()
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(ours[0], before[0]))
    if origin.name == "keller_jordan":
        with pytest.raises((AttributeError, TypeError)):
            there_opts[0].step()
    else:
        there_opts[0].step()
        assert not any(torch.equal(p, q) for (_, p), (_, q) in zip(theirs[0], theirs_before[0]))


def arguments_of(function):
    return set(inspect.signature(function).parameters) - {"params"}


def with_lines(origin, *parts):
    """Return the arguments that lines of these parts of an origin name."""
    texts = [line.arguments for line in origin.lines if line.part in parts]
    return {key for text in texts for key in eval(f"dict({text})")}


def test_every_argument_has_a_line(kernel):
    """Of the packages that are here."""
    assert with_lines(ORIGINS["torch"], "muon") >= arguments_of(torch.optim.Muon)
    assert with_lines(ORIGINS["torch"], "rest") >= arguments_of(torch.optim.AdamW)
    assert with_lines(ORIGINS["motif"], "muon") == arguments_of(kernel.compat.Muon)


@pytest.mark.integrations
def test_every_argument_of_timm_has_a_line():
    assert with_lines(ORIGINS["timm"], "muon") == arguments_of(load_peer("timm").Muon)
