"""The portable operations refuse what the compiled ones refuse, in their words, and cut lists without a trace."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels import test_move_blocks_contract as moves
from tests.kernels import test_native_contract as passes
from tests.kernels import test_native_gemm_contract as products
from tests.kernels import test_newton_schulz_contract as iterations
from tests.kernels import test_normalize as norms
from tests.kernels import test_quantized_momentum as codes
from tests.kernels.test_native_ops import random
from tests.support.small_model import named_parameters, same_bits, set_gradients

SHAPES = (130, 70), (3, 5000), (0, 9), (64, 64), (300, 400)


def refused_calls() -> dict[str, tuple[str, dict]]:
    """Return each call that the compiled operations' own tests know to be refused: operation and arguments."""
    pack, descend = passes.pack_arguments(), passes.descend_arguments()
    calls = [
        ("momentum_pack_", {**pack, **bad}) for bad in [*passes.BAD_PACKS.values(), *passes.SHARING_PACKS.values()]
    ]
    calls += [("descend_", descend | bad) for bad in [*passes.BAD_DESCENTS.values(), *passes.SHARING_DESCENTS.values()]]
    calls += [("momentum_pack_", codes.arguments(**bad())) for bad in codes.BAD.values()]
    calls += [("gemm_", products.arguments(**bad)) for bad in [*products.BAD.values(), *products.SHARING.values()]]
    calls += [("newton_schulz_", iterations.arguments(**bad)) for bad in _with_portable(iterations.BAD)]
    calls += [("gram_newton_schulz_", iterations.gram_arguments(**bad)) for bad in _with_portable(iterations.BAD_GRAMS)]
    fields = [*moves.BEYOND_MATRICES.values(), *moves.BEYOND_BUFFER.values(), *({name: -1} for name in moves.FIELDS)]
    tables = [{"blocks": moves.table(moves.row(), moves.row(**bad))} for bad in fields]
    calls += [
        ("move_blocks_", {**moves.arguments(**bad), "to_buffer": to_buffer})
        for bad in [*tables, *moves.bad_arguments().values()]
        for to_buffer in (False, True)
    ]
    named = (dict(zip(("out", "X", "norms", "eps"), bad)) for bad in norms.BAD.values())
    calls += [("normalize_", {**bad, "scale": 1.0}) for bad in named]
    return {f"{i}-{name}": (name, arguments) for i, (name, arguments) in enumerate(calls)}


def _with_portable(bad: dict[str, dict]) -> list[dict]:
    """Return the changes that name no instructions: compiled ones have a list of others."""
    return [changes for changes in bad.values() if not {"instructions", "square_instructions"} & set(changes)]


CALLS = refused_calls()


def refusal(operation, arguments: dict) -> str:
    """Return what an operation says as it refuses; a compiled one adds where in the source that is."""
    before = passes.snapshot(arguments)
    with pytest.raises(RuntimeError) as refused:
        operation(**arguments)
    assert all(map(torch.equal, passes.snapshot(arguments), before))
    return str(refused.value)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("call", CALLS)
def test_what_the_compiled_operations_refuse_is_refused_in_the_same_words(both, call):
    name, arguments = CALLS[call]
    compiled, portable = (refusal(getattr(native, name), arguments) for native in both)
    assert portable and portable in compiled


def test_instructions_of_the_processor_are_refused_by_name(portable_kernel):
    native, X = portable_kernel.kernels.native, torch.ones(1, 4, 4).bfloat16()
    assert {native.gemm_instructions(dtype) for dtype in (torch.float32, torch.bfloat16)} == {"portable"}
    with pytest.raises(RuntimeError, match="dtype must be float32 or bfloat16, got float64"):
        native.gemm_instructions(torch.float64)
    for name in "amx", "avx512_bf16", "mmx", "":
        with pytest.raises(RuntimeError, match=rf"that this variant has, portable; got {name}"):
            native.gemm_(torch.empty_like(X), X, X, None, 1.0, 0.0, False, name)


def test_the_product_for_gpus_of_compute_capability_9_is_nowhere(portable_kernel):
    native, X = portable_kernel.kernels.native, torch.ones(1, 8, 8).bfloat16()
    with pytest.raises(NotImplementedError, match="hopper_gemm_"):
        native.hopper_gemm_(torch.empty_like(X), X, X, None, 1.0, 0.0, 0.0)
    assert not portable_kernel.kernels.gpu.hopper_gemm.is_built()


def stepped(native, dtype: torch.dtype, options: dict) -> list[Tensor]:
    """Return momentum, packed directions and parameters of matrices of different shapes after one step."""
    momentum, gradient = ([random(shape, dtype, seed + i) for i, shape in enumerate(SHAPES)] for seed in (0, 10))
    offsets = list(itertools.accumulate((m.numel() for m in momentum), initial=0))
    parameter, packed = [m.clone() for m in momentum], torch.zeros(offsets[-1], dtype=torch.float16)
    number = torch.tensor(0.3, dtype=torch.float64)
    native.momentum_pack_(momentum, gradient, packed, 0.95, True, offsets=offsets[:-1])
    native.descend_(parameter, packed, number, number, number, 2, offsets=offsets[:-1], **options)
    return [*momentum, packed, *parameter]


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("elements", [1, 100, 4999, 2**14], ids=str)
def test_where_lists_are_cut_changes_no_bit(portable_kernel, monkeypatch, dtype, elements):
    native = portable_kernel.kernels.native
    options = {"row_scale": torch.linspace(0.5, 1.5, sum(rows for rows, _ in SHAPES))}
    options |= {"seeds": torch.arange(len(SHAPES))} if dtype == torch.bfloat16 else {}
    whole = stepped(native, dtype, options)
    monkeypatch.setattr(portable_kernel.kernels.portable.pieces, "_THREAD_ELEMENTS", elements)
    assert all(map(torch.equal, stepped(native, dtype, options), whole))


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_shard_has_the_bits_of_the_whole_wherever_it_is_cut(portable_kernel, dtype):
    """Lines of a few elements end within torch's vectors, where its functions that fuse a product give other bits."""
    native = portable_kernel.kernels.native
    values = random((40, 67), dtype, 0), random((40, 67), dtype, 1), random((40, 67), torch.float16, 2)
    number, whole = torch.tensor(0.3, dtype=torch.float64), [x.clone() for x in values]
    native.momentum_pack_([whole[0]], [whole[1]], whole[2][None], 0.95, True)
    native.descend_([whole[1]], whole[2][None], number, number, number)
    for row, col in itertools.product((1, 17, 39), (1, 15, 66)):
        for box in itertools.product((slice(0, row), slice(row, 40)), (slice(0, col), slice(col, 67))):
            part = [x[box].clone() for x in values]
            native.momentum_pack_([part[0]], [part[1]], part[2][None], 0.95, True)
            native.descend_([part[1]], part[2][None], number, number, number)
            assert all(torch.equal(x, y[box]) for x, y in zip(part, whole))


@pytest.mark.kernels_ci
def test_a_step_is_one_graph_with_the_bits_of_an_eager_step(portable_kernel):
    results = []
    for compiled in False, True:
        params = named_parameters()
        optimizer = portable_kernel.Muon(params.items())
        step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if compiled else optimizer.step
        for seed in range(3):
            set_gradients(params, seed)
            step()
        results.append(params)
    assert same_bits(*results)


@pytest.mark.kernels_ci
def test_a_variant_without_a_library_is_explained_by_one_line(kernel, portable_kernel):
    for package in kernel, portable_kernel:
        notes = package.Muon(named_parameters().items()).explain().notes
        said = [note for note in notes if note.startswith("portable operations: ")]
        assert len(said) == package.kernels.native.IS_PORTABLE
        assert all(f": {package.build_info().variant} has no" in note for note in said)
