"""What ranks tell each other about files: a few words each, and whether all of them succeeded."""

import json
from typing import Any

import torch

from lanewise.engine.transport.protocol import Transport


def tell_all(transport: Transport, word: Any, where: str) -> list[Any]:
    """Everybody's word, as JSON gives it back. Collective."""
    data = json.dumps(word).encode()
    lengths = transport.share(torch.tensor([len(data)]), where)
    longest = max(int(lengths.max()), 1)
    rows = transport.share(torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8), where)
    return [json.loads(bytes(row.numpy())) for row in rows]


def failures(transport: Transport, problem: str | None, where: str) -> list[str]:
    """What went wrong on any rank. Collective."""
    told = tell_all(transport, problem, where)
    return [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
