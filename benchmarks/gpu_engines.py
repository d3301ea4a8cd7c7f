"""Every engine of the GPU benchmark by name. Each makes a step: a function without arguments that starts work and
does not wait for it.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import TensorDataset

from benchmarks import gpu_models as models
from benchmarks import pretend
from benchmarks.gpu_models import Llama, Size
from lanewise.engine import device as devices

_RATE = 1e-5
_BATCHES = 4
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Case:
    """What is trained, and where."""

    size: str
    device: str = "cuda"
    backend: str = "silent"
    clip: float | None = None

    @property
    def shape(self) -> Size:
        return models.SIZES[self.size]

    @property
    def where(self) -> torch.device:
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device(self.device)


@dataclass
class Engine:
    """A prepared engine."""

    step: Callable[[], Any]
    run: Any = None
    end_warm_up: Callable[[], None] = lambda: None


Make = Callable[[Case], Engine]


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=_RATE, fused=True)


def _batches(case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches from pinned memory, round and round."""
    size = case.shape
    data = models.data(size, _BATCHES * size.batch)
    parts = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in data.split(size.batch)]
    if case.device == "cuda":
        parts = [(x.pin_memory(), y.pin_memory()) for x, y in parts]
    while True:
        for x, y in parts:
            yield x.to(case.where, non_blocking=True), y.to(case.where, non_blocking=True)


def _compile(model: Llama) -> None:
    for block in model.blocks:
        block.compile()


def _be_deterministic() -> None:
    """What `lw.start` does for an exact run."""
    devices.settle(torch.device("cuda" if torch.cuda.is_available() else "cpu", 0), threads=1, exact=True)


def bare(is_deterministic: bool = False, own_attention: bool = False, is_compiled: bool = False) -> Make:
    """Forward and backward in bf16, and nothing else."""

    def make(case: Case) -> Engine:
        if is_deterministic:
            _be_deterministic()
        if own_attention:
            from lanewise.engine import attention

            attention.install()
        model = models.build(case.shape, case.where, torch.bfloat16)
        if is_compiled:
            _compile(model)
        batches = _batches(case)

        def step() -> None:
            x, y = next(batches)
            models.loss_of(model(x), y).backward()
            for parameter in model.parameters():
                parameter.grad = None

        return Engine(step)

    return make


def fsdp2(reshard: bool, is_compiled: bool = False) -> Make:
    """torch's fully_shard, block by block. Gradients are reduced in bf16, which is its cheapest."""

    def make(case: Case) -> Engine:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        pretend.join(case.backend)
        pretend.keep_apart(case.where)
        mesh = init_device_mesh(case.device, (pretend.WORLD,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = models.on_meta(case.shape)
        if is_compiled:
            _compile(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        model.to_empty(device=case.where)
        for name, parameter in model.named_parameters():
            models.fill(name, parameter._local_tensor)
        return _plain(case, model, adamw(model.parameters()))

    return make


def ddp(case: Case) -> Engine:
    """torch's DistributedDataParallel on a bf16 model: no master in fp32, moments in bf16."""
    pretend.join(case.backend)
    model = models.build(case.shape, case.where, torch.bfloat16)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    return _plain(case, wrapped, adamw(wrapped.parameters()))


def _plain(case: Case, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    batches = _batches(case)

    def step() -> None:
        x, y = next(batches)
        models.loss_of(model(x), y).backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Engine(step)


def deepspeed(stage: int) -> Make:
    """DeepSpeed's ZeRO in a world of one: it has no pretended one. Masters and moments are whole."""

    def make(case: Case) -> Engine:
        from benchmarks.harness import free_port, place

        place(0, 1, free_port())
        os.environ["DS_BUILD_OPS"] = "0"
        import deepspeed as ds

        ds.init_distributed("nccl", auto_mpi_discovery=False, verbose=False)
        model = models.build(case.shape, case.where, torch.bfloat16)
        config = {
            "train_micro_batch_size_per_gpu": case.shape.batch,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if case.clip is not None:
            config["gradient_clipping"] = case.clip
        engine, *_ = ds.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
        batches = _batches(case)

        def step() -> None:
            x, y = next(batches)
            engine.backward(models.loss_of(engine(x), y))
            engine.step()

        return Engine(step)

    return make


def lanewise(
    strategy: str, reduction: str = "exact", free_kernels: bool = False, is_compiled: bool = False
) -> Make:
    """Lanewise with a lane a rank. `free_kernels`: exact sums of gradients whose bits are not stable."""

    def make(case: Case) -> Engine:
        size = case.shape
        run = pretend.start(
            case.backend, case.where, strategy=strategy, reduction=reduction, precision="bf16"
        )
        if free_kernels:
            torch.use_deterministic_algorithms(False)
        model = models.on_meta(size)
        if is_compiled:
            _compile(model)
        model, _ = run.prepare(model, adamw(model.parameters()), init=models.fill)
        _teach(run)
        data = models.data(size, _BATCHES * pretend.WORLD * size.batch)
        dataset = TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        loader = run.loader(dataset, batch_size=pretend.WORLD * size.batch)
        steps = run.steps(loader, total=10**9)

        def step() -> None:
            current = next(steps)
            for x, y in current:
                current.backward(models.loss_of(model(x), y))
            current.update(clip=case.clip)

        return Engine(step, run, lambda: run._transport.teach(None))

    return make


def _teach(run: Any) -> None:
    """Have the pretended gathers of the warm-up bring the values that the model began with."""
    truth = {}
    for flat in run.engine.flats:
        values = torch.zeros(flat.layout.length, dtype=flat.dtype, device=run.device)
        for place, parameter in zip(flat.layout.fields, flat.parameters, strict=True):
            models.fill(place.name, values[place.start : place.stop].view(parameter.shape))
        truth[flat.storage.untyped_storage()._cdata] = values
    run._transport.teach(truth)


BARE, STABLE, OWN = "bare", "bare deterministic", "bare deterministic own attention"
COMPILED = " compiled"
ENGINES: dict[str, Make] = {
    BARE: bare(),
    STABLE: bare(is_deterministic=True),
    OWN: bare(is_deterministic=True, own_attention=True),
    "FSDP2 reshard": fsdp2(True),
    "FSDP2 no reshard": fsdp2(False),
    "DDP": ddp,
    **{f"DeepSpeed ZeRO-{stage}": deepspeed(stage) for stage in (1, 2, 3)},
    **{f"lanewise {s}": lanewise(s) for s in STRATEGIES[::-1]},
    **{f"lanewise {s} free kernels": lanewise(s, free_kernels=True) for s in STRATEGIES[::-1]},
    "lanewise zero3 native": lanewise("zero3", "native"),
    "lanewise zero2 native": lanewise("zero2", "native"),
    BARE + COMPILED: bare(is_compiled=True),
    STABLE + COMPILED: bare(is_deterministic=True, is_compiled=True),
    OWN + COMPILED: bare(is_deterministic=True, own_attention=True, is_compiled=True),
    "FSDP2 reshard" + COMPILED: fsdp2(True, is_compiled=True),
    "lanewise zero3" + COMPILED: lanewise("zero3", is_compiled=True),
}


def is_here(engine: str) -> bool:
    """Whether what an engine needs can be imported."""
    if engine.startswith("DeepSpeed"):
        return importlib.util.find_spec("deepspeed") is not None
    if engine.startswith(OWN):
        return importlib.util.find_spec("lanewise.engine.attention") is not None
    return True


def is_stable(engine: str) -> bool:
    """Whether its kernels repeat their bits."""
    is_floor = engine.startswith(STABLE)
    return is_floor or (
        engine.startswith("lanewise") and "free kernels" not in engine and "native" not in engine
    )


def train_for_bits(cell: Any, size: str, steps: int, lanes: int, is_compiled: bool) -> dict[str, str]:
    """Train a small model as real ranks; the digest after the last step, by precision."""
    import warnings

    warnings.simplefilter("ignore")  # a test's rank makes errors of them, and they are torch's own
    found = {}
    for precision in ("model", "bf16"):
        run = cell.start(lanes=lanes, precision=precision, timeout=300.0)
        shape = models.SIZES[size]
        model = models.build(shape, run.device, torch.float32)
        if is_compiled:
            _compile(model)
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        data = models.data(shape, 4 * lanes * shape.batch)
        dataset = TensorDataset(data[:, :-1].contiguous(), data[:, 1:].contiguous())
        loader = run.loader(dataset, batch_size=lanes * shape.batch, shuffle=True)
        for step in run.steps(loader, total=steps):
            for x, y in step:
                step.backward(models.loss_of(model(x), y))
            step.update(clip=1.0)
        found[precision] = run.digest()
        run.close()
        del model, optimizer
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    return found
