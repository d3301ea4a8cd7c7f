"""The processes that fork ranks for a proof: what is said when one of them ends."""

import pytest

from lanewise.errors import ProofError
from lanewise.run.warm import Start, WarmProcess


@pytest.mark.parametrize("when", ["before an order", "after it"])
def test_a_process_that_starts_ranks_has_ended(when, tmp_path):
    process = WarmProcess()
    order = Start(str(tmp_path / "script.py"), (), {}, str(tmp_path / "output"))
    process._process.kill()
    if when == "before an order":
        process._process.wait()
    rule = r"a process that starts ranks has ended \(-9\)\. Memory may have run out; prove smaller --worlds\."
    with pytest.raises(ProofError, match=rule):
        process.start(order)
    process.close()
