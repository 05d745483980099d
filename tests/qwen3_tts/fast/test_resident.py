"""What the kernel for residual units of 96 channels is given; the kernel itself needs a Hopper GPU (tests/gpu/test_cuda_kernels.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

CHANNELS = 96


@pytest.fixture
def point() -> Tensor:
    """Each column is full of its own number."""
    return torch.arange(CHANNELS, dtype=torch.float32).expand(CHANNELS, CHANNELS).contiguous()


def arranged(taps: Tensor, point: Tensor) -> Tensor:
    from vgraph_lab.qwen3_tts.fast.resident_kernels import arranged

    return arranged(taps, point)


def test_columns_change_places_within_each_32(point: Tensor) -> None:
    """Column 8j + 2q + i lies at 8q + 2j + i, so that what the matrix unit leaves one thread are neighbours."""
    columns = arranged(torch.empty(0, CHANNELS, CHANNELS), point)[-1]
    assert torch.equal(columns, columns[:1].expand_as(columns)), "whole columns move"
    for start in range(0, CHANNELS, 32):
        for j in range(4):
            for q in range(4):
                for i in range(2):
                    assert int(columns[0, start + 8 * j + 2 * q + i]) == start + 8 * q + 2 * j + i
        assert sorted(columns[0, start : start + 32].tolist()) == list(range(start, start + 32))


@pytest.mark.parametrize(("start", "width"), [(0, 64), (64, 32)])
def test_what_the_kernel_does_to_products_brings_the_order_back(start: int, width: int) -> None:
    """Products with the arranged matrix, 64 and 32 columns at a time, reshaped as in the kernel: those with the plain one."""
    draw = torch.Generator().manual_seed(2)
    point, x = torch.randn(CHANNELS, CHANNELS, generator=draw).double(), torch.randn(5, CHANNELS, generator=draw).double()
    products = x @ arranged(point.new_empty(0, CHANNELS, CHANNELS), point)[-1][:, start : start + width]
    straight = products.view(5, width // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(5, width)
    torch.testing.assert_close(straight, x @ point[:, start : start + width], rtol=1e-12, atol=1e-12)


def test_the_dilated_convolution_stays_as_it_is(point: Tensor) -> None:
    taps = torch.randn(7, CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(1))
    found = arranged(taps, point)
    assert found.shape == (8, CHANNELS, CHANNELS)
    assert found.is_contiguous()
    assert torch.equal(found[:7], taps)
