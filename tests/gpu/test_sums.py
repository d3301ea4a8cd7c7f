"""Kernels that add gradients: the bits of the CPU's tree, and notes of what is not finite."""

import math

import pytest
import torch

from lanewise.engine.report import NOTHING
from lanewise.engine.sum import carry_out, sum_of_squares
from lanewise.lanes.schedule import eager, owner_program_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
LENGTH = 64 * 1003


def leaves(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes, among them ones too small to be normal, and zeros of both signs."""
    sizes = torch.randint(-140, 100, (LENGTH,)).float().exp2()
    rows = torch.randn(count, LENGTH).mul_(sizes).to(dtype)
    rows[:, 6], rows[0, 5] = -0.0, -0.0
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("lanes", "ranks"), [(8, 3), (5, 5), (8, 2), (7, 3), (64, 64), (17, 17), (3, 1)])
def test_sums_have_the_bits_of_the_cpu(lanes, ranks, dtype):
    from lanewise.engine.kernels.adding import Round

    torch.manual_seed(lanes)
    share, more = divmod(lanes, ranks)
    schedule = eager([share + (rank < more) for rank in range(ranks)])
    program = owner_program_eager(schedule)
    on_cpu = [torch.zeros(LENGTH) for _ in range(program.num_registers)]
    on_gpu = [register.cuda() for register in on_cpu]
    flags = torch.full((1 + lanes,), NOTHING, device="cuda")
    for number, row in enumerate(schedule.table):
        hosted = [lane for lane in row if lane is not None]
        rows = leaves(len(hosted), dtype)
        instructions = program.rounds[number]
        carry_out(instructions, on_cpu, {(lane, lane + 1): rows[n] for n, lane in enumerate(hosted)})
        Round(instructions, hosted[0], dtype, torch.float32)(on_gpu, rows.cuda(), flags, 0)
    assert torch.equal(on_gpu[0].cpu().view(torch.int32), on_cpu[0].view(torch.int32))
    assert (flags == NOTHING).all()


def test_what_is_not_finite_is_noted_with_its_lane():
    from lanewise.engine.kernels.adding import Round

    schedule = eager([1] * 6)
    program = owner_program_eager(schedule)
    rows = torch.randn(6, LENGTH).bfloat16()
    rows[4, 777], rows[1, 50_000] = math.nan, math.inf
    registers = [torch.zeros(LENGTH, device="cuda") for _ in range(program.num_registers)]
    flags = torch.full((7,), NOTHING, device="cuda")
    Round(program.rounds[0], 0, torch.bfloat16, torch.float32)(registers, rows.cuda(), flags, 1000)
    assert flags.tolist() == [1777, NOTHING, 51_000, NOTHING, NOTHING, 1777, NOTHING]


def test_squares_of_a_slot_do_not_depend_on_its_neighbours():
    from lanewise.engine.kernels.squares import add_squares

    values = torch.randn(5 * LENGTH, device="cuda")
    together = torch.zeros(5, dtype=torch.float64, device="cuda")
    add_squares(values, LENGTH, together)
    for slot in range(5):
        part = values[slot * LENGTH : (slot + 1) * LENGTH]
        one = torch.zeros(1, dtype=torch.float64, device="cuda")
        add_squares(part, LENGTH, one)
        assert one[0] == together[slot]
        assert math.isclose(float(one), float(sum_of_squares(part.cpu())), rel_tol=1e-12)
