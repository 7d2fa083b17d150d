"""Warnings point at the line of the user, whatever wraps the call."""

import warnings

import pytest
import torch
from torch.nn import Parameter

from tests.support.small_model import named_parameters


def alone(kernel, params):
    return kernel.Muon(params)


def with_scheduler(kernel, params):
    """Torch's schedulers put a function of their own around `step`."""
    optimizer = kernel.Muon(params)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


def with_hook(kernel, params):
    optimizer = kernel.Muon(params)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def of_a_subclass(kernel, params):
    class Named(kernel.Muon):
        def step(self, closure=None):
            return super().step(closure)

    return Named(params)


@pytest.mark.parametrize("make", [alone, with_scheduler, with_hook, of_a_subclass])
def test_a_step_warns_at_the_users_line_through_what_wraps_it(kernel, make):
    optimizer = make(kernel, named_parameters().items())
    with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient") as raised:
        optimizer.step()
    assert [warning.filename for warning in raised] == [__file__]


def test_duplicates_are_said_at_the_users_line(kernel):
    p = Parameter(torch.ones(8))
    with pytest.warns(UserWarning, match="duplicate parameters: each is optimized once") as raised:
        kernel.Muon([p, p])
    assert [warning.filename for warning in raised] == [__file__]


def test_a_file_of_measurements_that_is_ignored_is_said_at_the_users_line(kernel, measurements):
    key = kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    file = kernel.kernels.speeds.measurement_file.file_of(key)
    file.parent.mkdir()
    file.write_text("{")
    with pytest.warns(RuntimeWarning, match=f"{file.name} is ignored") as raised:
        kernel.Muon(named_parameters().items()).explain()
    assert [warning.filename for warning in raised] == [__file__]


def test_measurements_that_are_not_kept_are_said_at_the_users_line(kernel, measurements, monkeypatch, tmp_path):
    """By a caller inside the package: a folder below a file cannot be made."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    key = kernel.kernels.speeds.machine.key_of(torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="in this process only") as raised:
        measurements.record_failures(key, {("cpu_products", "float32"): {"SINGLE": "wrong"}})
    assert [warning.filename for warning in raised] == [__file__]


def steps_with_gradients(optimizer, params, number: int) -> None:
    for _ in range(number):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()


def test_parameters_that_never_had_a_gradient_are_named_once(kernel):
    """Not before ten steps, as an expert may wait; not those that had one once, or are frozen."""
    names = ("layers.0.up.weight", "layers.1.up.weight", "layers.2.up.weight", "layers.3.up.weight")
    params = [Parameter(torch.ones(4, 6)) for _ in names]
    trained, late, frozen, _ = params
    frozen.requires_grad_(False)
    optimizer = kernel.Muon(zip(names, params))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_with_gradients(optimizer, [trained, late], 1)
        optimizer.zero_grad()
        steps_with_gradients(optimizer, [trained], 8)
    with pytest.warns(UserWarning, match="no gradient in the first 10 steps") as raised:
        steps_with_gradients(optimizer, [trained], 1)
    (warning,) = raised
    assert warning.filename == __file__
    assert str(warning.message).startswith("layers.3.up.weight: no gradient in the first 10 steps")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_with_gradients(optimizer, [trained], 12)


def test_a_warning_that_is_an_error_stops_one_step(kernel):
    params = [Parameter(torch.ones(4, 6)) for _ in range(2)]
    optimizer = kernel.Muon(zip(("layers.0.up.weight", "layers.1.up.weight"), params))
    steps_with_gradients(optimizer, params[:1], 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no gradient in the first 10 steps"):
            optimizer.step()
        optimizer.step()


def test_steps_without_any_gradient_warn_of_that_alone(kernel):
    optimizer = kernel.Muon(named_parameters().items())
    with pytest.warns(UserWarning) as raised:
        for _ in range(12):
            optimizer.step()
    assert [str(warning.message)[:12] for warning in raised] == ["no parameter"]


@pytest.mark.parametrize("first", [0, 8, 11])
def test_steps_without_any_gradient_warn_once(kernel, first):
    """Also with others between them, or after the steps in which parameters without gradients are counted."""
    params = [Parameter(torch.ones(4, 6)) for _ in range(2)]
    optimizer = kernel.Muon(zip(("layers.0.up.weight", "layers.1.up.weight"), params))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps_with_gradients(optimizer, params, first)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step()
            steps_with_gradients(optimizer, params, 1)
    assert [str(warning.message)[:12] for warning in caught] == ["no parameter"]
