"""What a step takes on a GPU beside parameters, gradients and state: what is planned, and what docs/faq.md says."""

import threading

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame

from benchmarks.fake_gpu import fake_gpu, fake_optimizer
from benchmarks.shapes import MODELS, Parameter
from tests.support.allocations import Allocations
from tests.support.inside import plan_of

pytest.importorskip("triton")

# As docs/faq.md calls them, and in GiB.
SAID = {"gpt2-124m": ("GPT-2 124M", 0.7), "llama-1b": ("Llama 1B", 1.9)}


def planned_and_taken(kernel, model, way, **settings):
    """Return the bytes of the largest chain, the most that the second step holds at a time, and what is explained."""
    with fake_gpu(kernel, way):
        optimizer = fake_optimizer(kernel, MODELS[model], **settings)
        optimizer.step()
        with Allocations() as allocations:
            optimizer.step()
        planned = max(map(kernel.plan.batches.bytes_of_chain, plan_of(optimizer).chains()))
        return planned, allocations.peak, optimizer.explain()


@pytest.fixture
def compiling_thread():
    """Another thread that runs compiled code: then CPython's callers keep what they pass on, in every thread."""
    begun, ends = threading.Event(), threading.Event()

    def compiled() -> None:
        set_eval_frame(False)
        begun.set()
        ends.wait()
        set_eval_frame(None)

    thread = threading.Thread(target=compiled)
    thread.start()
    begun.wait()
    yield
    ends.set()
    thread.join()


ALIKE = {}, {"equalize": "rows"}, {"second_moment": "long_side"}
WAYS = [("torch", settings) for settings in ALIKE] + [("symmetric", settings) for settings in ALIKE]
# No native pass takes float64, and only torch multiplies it.
LINES = {"second_moment": "rows"}, {"equalize": "rows"}, {"renormalize": "rows"}, {"renormalize": "frobenius"}
WAYS += [("torch", {**settings, "ns_dtype": "float64"}) for settings in LINES]


@pytest.mark.parametrize("way, settings", WAYS, ids=str)
@pytest.mark.parametrize("model", SAID)
def test_a_step_takes_what_its_largest_chain_may(kernel, model, way, settings):
    """The plan counts a copy for norms, which the pass over momentum makes superfluous unless it equalizes.

    It does not count a norm of 8 bytes for each matrix.
    """
    planned, taken, explained = planned_and_taken(kernel, model, way, **settings)
    norms = 8 * sum(parameter.matrix for parameter in MODELS[model])
    assert taken - norms <= planned <= 1.6 * taken
    (note,) = [note for note in explained.notes if note.startswith("memory: ")]
    assert f" {kernel.explain.writing.bytes_text(planned)} of cuda:0 " in note


@pytest.mark.parametrize(
    "settings",
    [{"ns_method": "standard"}, {"ns_method": "gram_float32"}, {"ns_method": "gram", "ns_dtype": "float32"}],
    ids=str,
)
def test_a_step_of_a_chosen_method_takes_what_its_largest_chain_may(kernel, settings):
    """The plan counts two copies where `gram_float32` makes one batch of a chain after the other wider."""
    planned, taken, _ = planned_and_taken(kernel, "gpt2-124m", "torch", **settings)
    assert taken - 8 * sum(parameter.matrix for parameter in MODELS["gpt2-124m"]) <= planned <= 1.6 * taken


@pytest.mark.parametrize("method", ["gram", "gram_float32"])
def test_many_matrices_of_one_shape_take_what_is_planned(kernel, monkeypatch, method):
    """All of them are copied in float32 at once, for their Gram matrices; few are worked on together after that."""
    monkeypatch.setitem(MODELS, "alike", [Parameter(f"layers.{i}.weight", (1024, 2048), True) for i in range(64)])
    planned, taken, _ = planned_and_taken(kernel, "alike", "torch", ns_method=method)
    assert taken - 8 * 64 <= planned <= 1.6 * taken


@pytest.mark.parametrize("ns_dtype", ["float16", "float32", "float64"])
def test_a_step_takes_no_more_beside_a_thread_that_compiles(kernel, ns_dtype, request):
    alone = planned_and_taken(kernel, "llama-1b", "torch", ns_dtype=ns_dtype)
    request.getfixturevalue("compiling_thread")
    assert planned_and_taken(kernel, "llama-1b", "torch", ns_dtype=ns_dtype)[:2] == alone[:2]
    planned, taken, _ = alone
    assert taken <= planned <= 1.4 * taken


@pytest.mark.parametrize("way", ["torch", "symmetric"])
@pytest.mark.parametrize("model", SAID)
def test_the_faq_says_what_a_step_takes(kernel, repository, model, way):
    name, said = SAID[model]
    _, taken, _ = planned_and_taken(kernel, model, way)
    assert round(taken / 2**30, 1) == said
    limit = kernel.polar.packing.BATCH_BYTES // 2**20
    text = (repository / "docs/faq.md").read_text()
    assert f"{said} GiB for {name}" in text and f"up to {limit} MiB" in text


def test_parameters_without_memory_take_none(kernel):
    empty = torch.nn.Parameter(torch.empty(8, 16, device="meta"))
    assert not any(note.startswith("memory: ") for note in kernel.Muon([("up.weight", empty)]).explain().notes)
