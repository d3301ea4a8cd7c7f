"""Every engine of a benchmark by name: the floor, the peers, and Lanewise in all its ways."""

from collections.abc import Callable

from torch.utils.data import TensorDataset

from benchmarks import models, peers
from benchmarks.case import Case, StepFunction, adamw

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def lanewise(
    strategy: str, exchange: str, reduction: str = "exact", clip: float | None = None
) -> Callable[[Case, int], StepFunction]:
    def make(case: Case, rank: int) -> StepFunction:
        import lanewise as lw

        lanes = case.world * case.lanes_per_rank
        run = lw.start(lanes=lanes, strategy=strategy, exchange=exchange, reduction=reduction, sinks=[])
        model = models.build(case.size)
        model, _ = run.prepare(model, adamw(model.parameters()))
        data = models.tokens(case.size, 64 * case.micro_batch)
        dataset = TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        loader = run.loader(dataset, batch_size=lanes * case.micro_batch)
        steps = run.steps(loader, total=10**9)

        def step() -> float:
            current = next(steps)
            for x, y in current:
                current.backward(models.loss_of(model(x), y))
            current.update(clip=clip)
            return current.loss

        step.run = run
        return step

    return make


ENGINES = {
    "floor": peers.floor,
    **peers.PEERS,
    **{
        f"lanewise {strategy}, {exchange}": lanewise(strategy, exchange)
        for exchange in ("shared", "gloo")
        for strategy in STRATEGIES
    },
    **{f"lanewise {strategy}, gloo, native": lanewise(strategy, "gloo", "native") for strategy in STRATEGIES},
}
