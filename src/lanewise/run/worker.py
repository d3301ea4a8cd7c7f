"""The process of one rank under our launcher: runs the user's script as `python script.py` would.

It ends with its launcher, however that ends, and leaves word of the exception that ends it.
"""

import ctypes
import faulthandler
import io
import os
import signal
import sys
import time
import traceback
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from lanewise import env
from lanewise.errors import PeerLostError
from lanewise.run.failure import Failure

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel end this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script as the main module of this process."""
    path = Path(script).absolute()
    main = ModuleType("__main__")
    main.__file__ = str(path)
    main.__loader__ = SourceFileLoader("__main__", str(path))
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    sys.excepthook = partial(_leave_word, main.__file__)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    faulthandler.enable()
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))


def _leave_word(
    script: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    failure = Failure(
        env.launch().rank, time.time(), kind.__name__, str(error), text, issubclass(kind, PeerLostError)
    )
    try:
        failure.write(env.failures())
    except OSError:
        sys.stderr.write(text)


if __name__ == "__main__":
    end_with(env.launcher())
    run_script(sys.argv[1], sys.argv[2:])
