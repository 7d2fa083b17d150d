"""What tests of several libraries share."""

from __future__ import annotations

import pytest

from tests.support.torchvision_operators import declare_missing


@pytest.fixture(scope="module")
def transformers():
    """The real package, silent but for errors; a test that asks for it is skipped without it."""
    declare_missing()
    module = pytest.importorskip("transformers", reason="`make test-integrations` installs transformers")
    module.logging.set_verbosity_error()
    return module
