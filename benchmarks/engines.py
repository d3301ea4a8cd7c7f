"""One training step on each engine, as a function that the harness calls: ours, the peers', and the floor."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from benchmarks import models

StepFunction = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """What is trained: a model, a micro-batch a rank, and how many lanes (or accumulation steps) a rank has."""

    size: str
    micro_batch: int
    world: int
    lanes_per_rank: int = 1


def _adamw(parameters) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _batches(case: Case, rank: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    data = models.tokens(case.size, 64 * case.micro_batch)
    position = [rank * case.micro_batch]

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        start = position[0] % (len(data) - case.micro_batch + 1)
        position[0] += case.world * case.micro_batch
        rows = data[start : start + case.micro_batch]
        return rows[:, :-1], rows[:, 1:]

    return next_batch


def floor(case: Case, rank: int) -> StepFunction:
    """The same ranks without any communication: what the hardware does if exchange were free."""
    model = models.build(case.size)
    optimizer = _adamw(model.parameters())
    return _plain(case, rank, model, model, optimizer)


def _plain(case: Case, rank: int, model, called, optimizer, no_sync=None) -> StepFunction:
    batches = _batches(case, rank)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        for number in range(case.lanes_per_rank):
            x, y = batches()
            if no_sync is not None:
                no_sync(number < case.lanes_per_rank - 1)
            loss = models.loss_of(called(x), y)
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _join(case: Case, rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=case.world)


def ddp(case: Case, rank: int) -> StepFunction:
    """torch's DistributedDataParallel, tuned: gradients are views of buckets, and the graph is static."""
    _join(case, rank)
    model = models.build(case.size)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=case.lanes_per_rank == 1
    )
    return _plain(case, rank, model, wrapped, _adamw(model.parameters()), _no_sync(wrapped))


def _no_sync(wrapped):
    def choose(skip: bool) -> None:
        wrapped.require_backward_grad_sync = not skip

    return choose


def ddp_zero(case: Case, rank: int) -> StepFunction:
    """DDP with ZeroRedundancyOptimizer: torch's ZeRO-1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _join(case, rank)
    model = models.build(case.size)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=case.lanes_per_rank == 1
    )
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
    )
    return _plain(case, rank, model, wrapped, optimizer, _no_sync(wrapped))


def _fsdp2(reshard: bool):
    def make(case: Case, rank: int) -> StepFunction:
        from torch.distributed.fsdp import fully_shard

        _join(case, rank)
        model = models.build(case.size)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        return _plain(
            case,
            rank,
            model,
            model,
            _adamw(model.parameters()),
            model.set_requires_gradient_sync_inverse
            if hasattr(model, "set_requires_gradient_sync_inverse")
            else None,
        )

    return make


def _lanewise(strategy: str, exchange: str, reduction: str = "exact"):
    def make(case: Case, rank: int) -> StepFunction:
        import lanewise as lw

        lanes = case.world * case.lanes_per_rank
        run = lw.start(lanes=lanes, strategy=strategy, exchange=exchange, reduction=reduction, sinks=[])
        model = models.build(case.size)
        model, _ = run.prepare(model, _adamw(model.parameters()))
        data = models.tokens(case.size, 64 * case.micro_batch)
        dataset = TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        loader = run.loader(dataset, batch_size=lanes * case.micro_batch)
        steps = run.steps(loader, total=10**9)

        def step() -> float:
            current = next(steps)
            for x, y in current:
                current.backward(models.loss_of(model(x), y))
            current.update()
            return current.loss

        step.run = run
        return step

    return make


ENGINES = {
    "floor": floor,
    "torch DDP": ddp,
    "torch DDP + ZeroRedundancyOptimizer": ddp_zero,
    "FSDP2, reshard False": _fsdp2(False),
    "FSDP2, reshard True": _fsdp2(True),
    **{
        f"lanewise {strategy}, {exchange}": _lanewise(strategy, exchange)
        for exchange in ("shared", "gloo")
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    },
    **{
        f"lanewise {strategy}, gloo, native": _lanewise(strategy, "gloo", "native")
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    },
}
