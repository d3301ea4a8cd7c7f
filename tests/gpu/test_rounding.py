"""The kernel that rounds moments has the bits of its twin in plain torch, on a CPU and on the GPU."""

import pytest
import torch

from lanewise.engine import moments
from lanewise.engine.moments import key_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def rounded(how, wide, step, place):
    found = torch.empty_like(wide, dtype=torch.bfloat16)
    how(wide, found, key_of(0, step, 3, "exp_avg"), place)
    return found.cpu().view(torch.int16)


@pytest.mark.parametrize("place", [0, 64, 2**17 - 64, 2**31 - 64, 2**33 - 64, 2**40 + 64])
def test_the_kernel_has_the_bits_of_plain_torch(place):
    kernel = moments.rounder(torch.device("cuda"))
    assert kernel is not moments.round_to_bf16
    every = torch.randint(-(2**31), 2**31, (300_001,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    ends = torch.tensor([0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0, 1], dtype=torch.int32)
    for wide in (torch.randn(70_001), every, ends.view(torch.float32), -ends.view(torch.float32)):
        for step in (0, 1):
            wanted = rounded(moments.round_to_bf16, wide, step, place)
            assert torch.equal(rounded(kernel, wide.cuda(), step, place), wanted)
            assert torch.equal(rounded(moments.round_to_bf16, wide.cuda(), step, place), wanted)
