"""What a caller has set reaches no client of a Hub of ours; test_hub.py lets real clients run under all of it."""

from __future__ import annotations

import pytest

from tools.hub.client_environment import client_environment

FOREIGN = """
    LOCAL_KERNELS KERNELS_CACHE HF_TOKEN HF_HUB_OFFLINE HF_HUB_DISABLE_TELEMETRY HUGGINGFACE_HUB_CACHE
    HUGGING_FACE_HUB_TOKEN TRANSFORMERS_OFFLINE DO_NOT_TRACK DISABLE_TELEMETRY ALL_PROXY all_proxy https_proxy
"""


@pytest.mark.parametrize("name", FOREIGN.split())
def test_caller_settings_do_not_reach_the_client(name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "1")
    assert name not in client_environment("http://127.0.0.1:1", tmp_path)


def test_client_gets_given_hub_and_home_and_keeps_the_rest(monkeypatch, tmp_path):
    for name in ("HF_ENDPOINT", "HF_HOME", "UNHEARD_OF"):
        monkeypatch.setenv(name, "the caller's")
    variables = client_environment("http://127.0.0.1:1", tmp_path)
    assert (variables["HF_ENDPOINT"], variables["HF_HOME"]) == ("http://127.0.0.1:1", str(tmp_path))
    assert variables["UNHEARD_OF"] == "the caller's" and "PATH" in variables
