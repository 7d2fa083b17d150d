"""Warnings point at the line of the user, whatever wraps the call."""

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
    key = kernel.kernels.machine.key_of(torch.device("cpu"))
    file = kernel.kernels.measurement_file.file_of(key)
    file.parent.mkdir()
    file.write_text("{")
    with pytest.warns(RuntimeWarning, match=f"{file.name} is ignored") as raised:
        kernel.Muon(named_parameters().items()).explain()
    assert [warning.filename for warning in raised] == [__file__]


def test_measurements_that_are_not_kept_are_said_at_the_users_line(kernel, measurements, monkeypatch, tmp_path):
    """By a caller inside the package: a folder below a file cannot be made."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    key = kernel.kernels.machine.key_of(torch.device("cpu"))
    with pytest.warns(RuntimeWarning, match="in this process only") as raised:
        measurements.record_failures(key, {("cpu_products", "float32"): {"SINGLE": "wrong"}})
    assert [warning.filename for warning in raised] == [__file__]
