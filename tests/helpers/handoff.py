"""A run that goes on with other ranks: each leaves its slots in a folder, and those who follow take what they own.

For tests of resizes only: no format, no check, nothing that survives a crash.
"""

from pathlib import Path
from typing import Any

import torch

import lanewise as lw


def leave(run: lw.Run, folder: Path, scheduler: Any) -> None:
    """Write what this rank updates of its own. Collective."""
    engine = run.engine
    optimizer = engine.committer.optimizer
    state = optimizer.optimizer.state
    pieces = []
    for piece in optimizer.slices:
        if piece.owner == run.rank:
            values = piece.tensor.clone()
            pieces.append((piece.name, piece.part.start, piece.part.stop, values, dict(state[piece.tensor])))
    rest = {
        "position": run.position,
        "scheduler": scheduler.state_dict(),
        "lr": [group["lr"] for group in optimizer.optimizer.param_groups],
        "buffers": {name: buffer.clone() for name, buffer in engine.buffers.named},
        "scale": (engine.committer.scale.value, engine.committer.scale.good_steps),
    }
    folder.mkdir(exist_ok=True)
    torch.save((pieces, rest), folder / f"{run.rank}.pt")
    engine.world.transport.barrier("the end of leaving")


def follow(run: lw.Run, folder: Path, scheduler: Any) -> None:
    """Take over what others have left. Collective."""
    left = [torch.load(path, weights_only=True) for path in sorted(folder.iterdir())]
    engine = run.engine
    committer = engine.committer
    optimizer = committer.optimizer.optimizer
    for mine in committer.optimizer.slices:
        for name, start, stop, values, state in (piece for pieces, _ in left for piece in pieces):
            low, high = max(start, mine.part.start), min(stop, mine.part.stop)
            if name != mine.name or low >= high:
                continue
            target = slice(low - mine.part.start, high - mine.part.start)
            source = slice(low - start, high - start)
            with torch.no_grad():
                mine.tensor[target] = values[source]
                for key, tensor in state.items():
                    if tensor.shape == values.shape:
                        zeros = torch.zeros_like(mine.tensor, dtype=tensor.dtype)
                        whole = optimizer.state[mine.tensor].setdefault(key, zeros)
                        whole[target] = tensor[source]
                    else:
                        optimizer.state[mine.tensor][key] = tensor.clone()
    with torch.no_grad():
        for (number, owner), master in committer.masters.items():
            committer.stored(engine.flats[number], owner).copy_(master)
        rest = left[0][1]
        for name, buffer in engine.buffers.named:
            buffer.copy_(rest["buffers"][name])
    committer.scale.value, committer.scale.good_steps = rest["scale"]
    run.position = rest["position"]
    scheduler.load_state_dict(rest["scheduler"])
    for group, lr in zip(optimizer.param_groups, rest["lr"], strict=True):
        group["lr"] = lr
    engine.world.transport.barrier("the end of following")
    engine.home.publish()
    engine.original.remember()
