"""The lab's checks on the GPU that is here, one test each; `make gpu-lab` runs them with limits and keeps records."""

from __future__ import annotations

import pytest
import torch

from tools.lab import prove
from tools.lab.candidates import all_launches
from tools.lab.fitness import examine
from tools.lab.items import Lab, NotApplicableError

CHECKS = {**prove.checks(), **prove.layout_checks(tiny=False)}

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def lab(kernel, tmp_path_factory) -> Lab:
    folder = tmp_path_factory.mktemp("lab")
    return Lab(kernel, torch.device("cuda"), folder, folder, (folder,), tiny=False)


@pytest.mark.slow
def test_every_configuration_that_may_be_chosen_is_right(lab):
    refused = examine(lab)
    launches = [launch for launch in all_launches(lab) if launch.key not in refused]
    problems = {launch.key: prove.check_launch(lab, launch) for launch in launches}
    assert not {key: found for key, found in problems.items() if found}


@pytest.mark.parametrize("key", CHECKS)
def test_nothing_is_wrong_on_the_gpu(lab, key):
    check, arguments = CHECKS[key]
    try:
        assert check(lab, *arguments) == []
    except NotApplicableError as reason:
        pytest.skip(str(reason))
