"""State that lives in host memory gives the bits of state that stays, and takes three chunks of the device's."""

import importlib

import pytest
import torch

from tests.support.inside import device_bytes

SHAPES = [[(3, 4), (7,), ()], [(16, 16)], [(0, 3), (5,)], [(2, 3, 4)], [(1,), (8, 8)]]
DTYPES = torch.float32, torch.bfloat16, torch.float64


@pytest.fixture(scope="module")
def offload(kernel):
    return importlib.import_module(".parameters.offload", kernel.__name__)


def examples(count=5):
    """Chunks of random tensors of several shapes and dtypes."""
    generator = torch.Generator("cpu").manual_seed(0)
    return [
        [
            torch.randn(shape, generator=generator, device="cpu").to(DTYPES[(i + k) % 3])
            for i, shape in enumerate(shapes)
        ]
        for k, shapes in enumerate(SHAPES[:count])
    ]


def on_host(offload, chunks, device):
    """The same chunks in host memory, as state of parameters on `device` is made there."""
    return [[offload.host_zeros_like(t.to(device)).copy_(t) for t in tensors] for tensors in chunks]


def update_(tensors, step):
    for t in tensors:
        t.mul_(0.75).add_(step + 1)


def bits(chunks):
    return [[t.cpu().contiguous().view(-1).view(torch.uint8).tolist() for t in tensors] for tensors in chunks]


def on_device(host):
    """The chunks that are on the device or on their way to it."""
    return {chunk for chunk in host._held if chunk is not None}


def range_of(tensor):
    """The first byte of a contiguous tensor in its memory, and the one behind its last."""
    first = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return first, first + tensor.numel() * tensor.itemsize


def rounded_up(tensors):
    return sum(-(-t.numel() * t.itemsize // 512) * 512 for t in tensors)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("left_out", [(), (1,), (0, 2, 3)], ids=str)
def test_offloaded_state_equals_state_that_stayed(offload, device, count, left_out):
    expected = examples(count=count)
    chunks = on_host(offload, expected, device)
    host = offload.HostChunks(chunks, torch.device(device))
    for step in range(3):
        for k in (k for k in range(count) if step != 1 or k not in left_out):
            with host.borrowed(k) as tensors:
                update_(tensors, step)
            update_(expected[k], step)
    host.synchronize()
    assert bits(chunks) == bits(expected)


def test_at_most_three_chunks_are_on_the_device(offload, device):
    chunks = on_host(offload, examples(), device)
    host = offload.HostChunks(chunks, torch.device(device))
    largest = max(map(rounded_up, chunks))
    assert device_bytes(host) == 3 * largest
    memory, seen = set(), []
    for k in range(len(chunks)):
        with host.borrowed(k) as tensors:
            seen.append(on_device(host))
            memory |= {t.untyped_storage().data_ptr() for t in tensors}
        assert on_device(host) == {k + 1} - {len(chunks)}
    assert len(memory) == 1
    assert seen == [{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4}]


def test_chunks_on_the_device_together_do_not_overlap(offload, device):
    chunks = on_host(offload, examples(), device)
    host = offload.HostChunks(chunks, torch.device(device))
    for k in range(len(chunks) - 2):
        ranges = []
        for j in (k, k + 1, k + 2):
            with host.borrowed(j) as tensors:
                assert all(t.is_contiguous() for t in tensors)
                ranges += [range_of(t) for t in tensors if t.numel()]
        assert all(first % 512 == 0 for first, _ in ranges)
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:]))
        host.synchronize()


def test_one_chunk_takes_one_slot(offload, device):
    (chunk, *_) = on_host(offload, examples(), device)
    assert device_bytes(offload.HostChunks([chunk], torch.device(device))) == rounded_up(chunk)


def test_changes_in_host_memory_count_after_synchronize(offload, device):
    chunks = on_host(offload, examples(), device)
    host = offload.HostChunks(chunks, torch.device(device))
    with host.borrowed(0):  # brings chunk 1 as well
        pass
    host.synchronize()
    for tensors in chunks[:2]:
        for t in tensors:
            t.fill_(3.0)
    for k in range(2):
        with host.borrowed(k) as tensors:
            assert all((t == 3.0).all() for t in tensors)


def test_strided_views_come_contiguous_and_go_back(offload, device):
    whole = offload.host_zeros_like(torch.zeros(6, 4, 3, device=device))
    views = [whole[:, :, i] for i in range(3)]
    host = offload.HostChunks([views[:2], views[2:]], torch.device(device))
    for k in range(2):
        with host.borrowed(k) as tensors:
            for i, t in enumerate(tensors):
                assert t.is_contiguous()
                t.copy_(torch.arange(24.0, device=device).view(6, 4) + 100 * (2 * k + i))
    host.synchronize()
    expected = torch.arange(24.0, device="cpu").view(6, 4, 1) + 100 * torch.arange(3.0, device="cpu")
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.mT, lambda t: t.to(memory_format=torch.channels_last)])
def test_host_zeros_have_the_layout_of_the_tensor(offload, device, layout):
    p = layout(torch.nn.Parameter(torch.ones(2, 4, 3, 5, device=device)))
    zeros = offload.host_zeros_like(p, torch.bfloat16)
    assert zeros.shape == p.shape and zeros.stride() == p.stride() and not zeros.any()
    assert zeros.device.type == "cpu" and zeros.dtype == torch.bfloat16 and not zeros.requires_grad
    assert zeros.is_pinned() == (device == "cuda")


def test_an_interrupted_chunk_can_be_borrowed_again(offload):
    momentum = torch.zeros(4)
    host = offload.HostChunks([[momentum]], torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt), host.borrowed(0) as (part,):
        part.add_(1.0)
        raise KeyboardInterrupt
    with host.borrowed(0) as (part,):
        part.add_(1.0)
    assert momentum.tolist() == [1.0] * 4
