"""What training costs a process, as the operating system counts it: its proportional set size (Linux).

Memory that n processes share counts 1/n for each. Pages of files (the code of libraries) are left out.
"""

import re
from pathlib import Path

import torch
from torch import nn

_KINDS = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


class Memory:
    """Remembers what a process that has trained next to nothing weighs: Python, torch, and what torch loads."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            block = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
            optimizer = torch.optim.AdamW(block.parameters())
            block(torch.zeros(1, 2, 8)).sum().backward()
            optimizer.step()
        self._before = _proportional_bytes()

    def grown_bytes(self) -> int:
        """What has come on top since then."""
        return _proportional_bytes() - self._before


def _proportional_bytes() -> int:
    kilobytes = _KINDS.findall(Path("/proc/self/smaps_rollup").read_text())
    if not kilobytes:
        raise RuntimeError("/proc/self/smaps_rollup has no Pss_Anon: this needs Linux 5.9 or later.")
    return sum(map(int, kilobytes)) * 1024
