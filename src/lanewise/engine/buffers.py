"""Buffers that a forward changes: every lane starts from the step's, and what lanes did is averaged once.

Floating-point buffers move by the canonical mean of the lanes' differences. Integer buffers (a counter of
batches) take the value that every lane which changed them agrees on. Anything else is an error by name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from lanewise.engine.sum import carry_out
from lanewise.engine.transport.protocol import Transport
from lanewise.errors import ModelError
from lanewise.lanes.program import Program, plan
from lanewise.lanes.schedule import Schedule
from lanewise.lanes.tree import leaf

_WHERE = "the exchange of buffers"


@dataclass
class _Watched:
    """One buffer, with the value it has between steps."""

    name: str
    module: nn.Module
    key: str
    tensor: torch.Tensor
    kept: torch.Tensor
    version: int

    @property
    def is_statistic(self) -> bool:
        """Whether kernels change it without a trace in its version (batch norm's running statistics)."""
        return isinstance(self.module, nn.modules.batchnorm._NormBase) and self.module.training

    @property
    def now(self) -> torch.Tensor | None:
        """The buffer that the module holds now: perhaps another object."""
        return self.module._buffers.get(self.key)

    def remember(self) -> None:
        """Take the present value as the one between steps."""
        current = self.now
        if current is None:
            raise ModelError(
                f"buffer {self.name!r} has been removed since prepare. Keep the model's buffers."
            )
        if current is not self.tensor or current._version != self.version or self.is_statistic:
            self.tensor, self.kept, self.version = current, current.detach().clone(), current._version

    def has_changed(self) -> bool:
        """Whether a lane may have changed it."""
        return self.now is not self.tensor or self.tensor._version != self.version or self.is_statistic

    def put_back(self) -> None:
        """Have the value between steps again."""
        self.module._buffers[self.key] = self.tensor
        self.tensor.copy_(self.kept)
        self.version = self.tensor._version


class Buffers:
    """Watches a model's buffers through the lanes of a step."""

    def __init__(self, model: nn.Module, transport: Transport) -> None:
        self._transport = transport
        self._all: list[_Watched] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    name = f"{prefix}.{key}" if prefix else key
                    self._all.append(
                        _Watched(name, module, key, tensor, tensor.detach().clone(), tensor._version)
                    )
        self._lanes: dict[int, dict[int, torch.Tensor]] = {}
        self.have_changed = False
        """Whether any lane of any rank has ever changed one."""

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Every buffer with its value between steps."""
        return [(buffer.name, buffer.tensor) for buffer in self._all]

    def begin_step(self) -> None:
        """Take the buffers as they are; the user may have changed them since the last step."""
        self._lanes = {}
        for buffer in self._all:
            buffer.remember()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Whatever is done to the buffers inside, they have their values again afterwards."""
        for buffer in self._all:
            buffer.remember()
        try:
            yield
        finally:
            for buffer in self._all:
                if buffer.has_changed():
                    buffer.put_back()

    def end_lane(self, lane: int) -> None:
        """Note what a lane did to the buffers, and undo it."""
        with torch.no_grad():
            self._end_lane(lane)

    def _end_lane(self, lane: int) -> None:
        changes: dict[int, torch.Tensor] = {}
        for number, buffer in enumerate(self._all):
            if not buffer.has_changed():
                continue
            current = buffer.now
            if current is None:
                raise ModelError(
                    f"buffer {buffer.name!r} was removed in lane {lane}. Keep the model's buffers."
                )
            if current.shape != buffer.kept.shape or current.dtype != buffer.kept.dtype:
                raise ModelError(
                    f"buffer {buffer.name!r} of shape {tuple(buffer.kept.shape)} and type {buffer.kept.dtype} became "
                    f"{tuple(current.shape)}, {current.dtype} in lane {lane}. Lanes are averaged, so a "
                    "buffer must keep both; hold such a value in a plain attribute instead."
                )
            if not torch.equal(current, buffer.kept):
                changes[number] = self._change(buffer, current, lane)
            buffer.put_back()
        self._lanes[lane] = changes

    def changed(self) -> torch.Tensor:
        """Which buffers the lanes of this rank changed, as one number each."""
        touched = set().union(*self._lanes.values()) if self._lanes else set()
        return torch.tensor([number in touched for number in range(len(self._all))], dtype=torch.int64)

    def commit(self, touched: Sequence[bool], schedule: Schedule, real_lanes: Sequence[bool]) -> None:
        """Give every buffer its value after the step. Collective; `touched` is over all ranks."""
        numbers = [n for n, is_touched in enumerate(touched) if is_touched]
        moved = [n for n in numbers if self._all[n].kept.is_floating_point()]
        counted = [n for n in numbers if not self._all[n].kept.is_floating_point()]
        if moved:
            self._commit_moved(moved, schedule, real_lanes)
        if counted:
            self._commit_counted(counted, real_lanes)

    def _change(self, buffer: _Watched, current: torch.Tensor, lane: int) -> torch.Tensor:
        if current.is_floating_point():
            wide = torch.promote_types(current.dtype, torch.float32)
            return current.to(wide).sub(buffer.kept.to(wide)).reshape(-1).double()
        if current.dtype == torch.bool or current.is_complex():
            raise ModelError(
                f"buffer {buffer.name!r} of type {current.dtype} changed in lane {lane}. Lanes are averaged, and "
                "there is no mean of such values; hold it in a plain attribute instead."
            )
        return current.reshape(-1).clone()

    def _commit_moved(self, numbers: list[int], schedule: Schedule, real_lanes: Sequence[bool]) -> None:
        sizes = [self._all[n].kept.numel() for n in numbers]
        programs = [_own(schedule, rank) for rank in range(self._transport.size)]
        mine = programs[self._transport.rank]
        rows = max(len(program.outputs) for program in programs)
        sent = torch.zeros(rows, sum(sizes), dtype=torch.float64)
        registers = [torch.zeros(sum(sizes), dtype=torch.float64) for _ in range(mine.num_registers)]
        for number, lane in enumerate(schedule.lanes_of(self._transport.rank)):
            changes = self._lanes[lane] if real_lanes[lane] else {}
            whole = torch.cat(
                [
                    changes[n].cpu() if n in changes else torch.zeros(size, dtype=torch.float64)
                    for n, size in zip(numbers, sizes, strict=True)
                ]
            )
            carry_out(mine.rounds[number], registers, {leaf(lane): whole})
        for row, (_, register) in enumerate(mine.outputs):
            sent[row] = registers[register]
        received = self._transport.share(sent, _WHERE)
        nodes = {
            node: received[rank, row]
            for rank, program in enumerate(programs)
            for row, (node, _) in enumerate(program.outputs)
        }
        final = plan(schedule.lanes, [list(nodes)])
        sums = [torch.zeros(sum(sizes), dtype=torch.float64) for _ in range(final.num_registers)]
        carry_out(final.rounds[0], sums, nodes)
        mean = sums[final.root_register] / sum(real_lanes)
        for n, part in zip(numbers, mean.split(sizes), strict=True):
            buffer = self._all[n]
            wide = buffer.kept.double() + part.view(buffer.kept.shape).to(buffer.kept.device)
            self._set(buffer, wide.to(buffer.kept.dtype))

    def _commit_counted(self, numbers: list[int], real_lanes: Sequence[bool]) -> None:
        """Every rank sends, for each buffer, how many values its lanes came to (0, 1, more) and one of them."""
        found: list[torch.Tensor] = []
        for n in numbers:
            values = [c[n] for lane, c in self._lanes.items() if n in c and real_lanes[lane]]
            others = any(not torch.equal(value, values[0]) for value in values)
            value = values[0] if values else self._all[n].kept.reshape(-1)
            count = torch.tensor([2 if others else min(len(values), 1)])
            found.append(torch.cat([count, value.cpu().to(torch.int64)]))
        sizes = [value.numel() for value in found]
        received = self._transport.share(torch.cat(found), _WHERE)
        for n, columns in zip(numbers, received.split(sizes, dim=1), strict=True):
            buffer = self._all[n]
            rows = [row for row in columns if row[0]]
            if any(row[0] > 1 or not torch.equal(row, rows[0]) for row in rows):
                self._disagree(buffer)
            if rows:
                value = rows[0][1:].to(buffer.kept.dtype).to(buffer.kept.device)
                self._set(buffer, value.view(buffer.kept.shape))

    def _disagree(self, buffer: _Watched) -> None:
        raise ModelError(
            f"integer buffer {buffer.name!r} got different values in different lanes. Integers cannot be averaged: "
            "such a buffer must advance alike in every lane, as a counter of batches does."
        )

    def _set(self, buffer: _Watched, value: torch.Tensor) -> None:
        buffer.kept = value.clone()
        buffer.put_back()


def _own(schedule: Schedule, rank: int) -> Program:
    """The sums of a rank over its own lanes, whether neighbours or not."""
    return plan(schedule.lanes, [[leaf(lane)] for lane in schedule.lanes_of(rank)])
