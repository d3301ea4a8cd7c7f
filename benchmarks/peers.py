"""What Lanewise is measured against: the same ranks without communication, and today's engines, each tuned.

DeepSpeed is an extra of the benchmark (`pip install deepspeed`); without it its rows are left out.
"""

import importlib.util
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks import models
from benchmarks.case import Case, StepFunction, adamw


def batches(case: Case, rank: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A rank's batches, one after the other, round and round."""
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
    return _plain(case, rank, model, adamw(model.parameters()), lambda is_last: None)


def ddp(case: Case, rank: int) -> StepFunction:
    """torch's DistributedDataParallel, tuned: gradients are views of buckets, and the graph is static."""
    model = _ddp(case, rank)
    return _plain(case, rank, model, adamw(model.parameters()), _sync_last(model))


def ddp_zero(case: Case, rank: int) -> StepFunction:
    """DDP with ZeroRedundancyOptimizer: torch's ZeRO-1."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp(case, rank)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
    )
    return _plain(case, rank, model, optimizer, _sync_last(model))


def fsdp2(reshard: bool) -> Callable[[Case, int], StepFunction]:
    """torch's fully_shard, block by block; accumulates without exchange, as its users do for speed."""

    def make(case: Case, rank: int) -> StepFunction:
        from torch.distributed.fsdp import fully_shard

        _join(case, rank)
        model = models.build(case.size)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        sync = model.set_requires_gradient_sync
        return _plain(case, rank, model, adamw(model.parameters()), sync)

    return make


def deepspeed(stage: int) -> Callable[[Case, int], StepFunction]:
    """DeepSpeed's ZeRO on CPU in fp32, with torch's fused AdamW."""

    def make(case: Case, rank: int) -> StepFunction:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(case.world), DS_BUILD_OPS="0")
        import deepspeed as ds

        ds.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        model = models.build(case.size)
        engine, *_ = ds.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": case.micro_batch,
                "gradient_accumulation_steps": case.lanes_per_rank,
                "zero_optimization": {"stage": stage, "overlap_comm": False},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "steps_per_print": 10**9,
            },
        )
        next_batch = batches(case, rank)

        def step() -> float:
            for _ in range(case.lanes_per_rank):
                x, y = next_batch()
                loss = models.loss_of(engine(x), y)
                engine.backward(loss)
                engine.step()
            return float(loss.detach())

        return step

    return make


def _plain(case: Case, rank: int, model, optimizer, sync: Callable[[bool], None]) -> StepFunction:
    next_batch = batches(case, rank)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        for number in range(case.lanes_per_rank):
            x, y = next_batch()
            sync(number == case.lanes_per_rank - 1)
            loss = models.loss_of(model(x), y)
            loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _join(case: Case, rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=case.world)


def _ddp(case: Case, rank: int) -> torch.nn.Module:
    _join(case, rank)
    return torch.nn.parallel.DistributedDataParallel(
        models.build(case.size), gradient_as_bucket_view=True, static_graph=case.lanes_per_rank == 1
    )


def _sync_last(wrapped) -> Callable[[bool], None]:
    def choose(is_last: bool) -> None:
        wrapped.require_backward_grad_sync = is_last

    return choose


PEERS = {
    "torch DDP": ddp,
    "torch DDP + ZeroRedundancyOptimizer": ddp_zero,
    "FSDP2, reshard False": fsdp2(False),
    "FSDP2, reshard True": fsdp2(True),
}
if importlib.util.find_spec("deepspeed") is not None:
    PEERS |= {f"DeepSpeed ZeRO-{stage}": deepspeed(stage) for stage in (1, 2, 3)}
