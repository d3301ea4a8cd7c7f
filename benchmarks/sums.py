"""The kernel that adds the gradients of 64 lanes, beside a plain copy: python -m benchmarks.sums (needs a GPU)."""

from collections.abc import Callable

import torch

from lanewise.engine.kernels.adding import Round
from lanewise.engine.report import NOTHING
from lanewise.lanes.schedule import eager, owner_program_eager

LANES = 64
SIZES = {"350M": 196_608, "1.3B": 786_432, "7B": 3_145_728}
"""What one of 64 ranks owns of a block, about, in elements."""
_SETS = 4
"""Sets of data used in turn, so that none is in the cache when its turn comes."""


def seconds(work: Callable[[int], object], count: int = 20) -> float:
    """Of one run; all are queued before the first begins, so that the host's time does not count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(3):
        work(number)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    begin.record()
    for number in range(count):
        work(number)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count / 1e3


def main() -> None:
    sources = [torch.randn(1 << 26, device="cuda") for _ in range(_SETS)]
    target = torch.empty_like(sources[0])
    copy = 2 * target.nbytes / seconds(lambda n: target.copy_(sources[n % _SETS]))
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy / 1e12:.2f} TB/s")
    program = owner_program_eager(eager((1,) * LANES))
    add = Round(program.rounds[0], 0, torch.bfloat16, torch.float32)
    flags = torch.full((1 + LANES,), NOTHING, device="cuda")
    for name, length in SIZES.items():
        rows = [torch.randn(LANES, length, device="cuda", dtype=torch.bfloat16) for _ in range(_SETS)]
        registers = [torch.zeros(length, device="cuda") for _ in range(program.num_registers)]
        num_bytes = rows[0].nbytes + registers[0].nbytes

        def once(n: int, rows=rows, registers=registers) -> None:
            add(registers, rows[n % _SETS], flags, 0)

        speed = num_bytes / seconds(once)
        print(
            f"{name}: {LANES} x {length} elements at {speed / 1e12:.2f} TB/s, {speed / copy:.2f} of the copy"
        )


if __name__ == "__main__":
    main()
