"""`lw.start`: from a launch and its settings to a run."""

from collections.abc import Sequence
from datetime import timedelta

from lanewise import config, env
from lanewise.config import ExchangeKind, Moments, NonFinite, Precision, Reduction, Strategy
from lanewise.engine import device as devices
from lanewise.events import Notice, Reporter, Sink, console
from lanewise.run.connect import connect
from lanewise.run.session import Run


def start(
    *,
    lanes: int = 8,
    strategy: Strategy = "ddp",
    seed: int = 0,
    reduction: Reduction = "exact",
    precision: Precision = "model",
    moments: Moments = "fp32",
    micro_batches: int = 1,
    nonfinite: NonFinite = "raise",
    exchange: ExchangeKind = "auto",
    hosting: str | Sequence[float] = "even",
    threads: int = 1,
    timeout: timedelta | float = timedelta(seconds=30),
    allow_mixed: bool = False,
    sinks: Sequence[Sink] | None = None,
) -> Run:
    """Start a run: connect the ranks of this launch and agree on its settings.

    Settings that `lanewise run` was given win over these, with a notice. Without a launcher this process
    is a world of its own.

    >>> import lanewise as lw
    >>> run = lw.start(lanes=8, strategy="zero3", seed=0)      # doctest: +SKIP
    """
    script = {name: value for name, value in locals().items() if name != "sinks"}
    settings, notices = config.settings(script, env.overrides())
    launch = env.launch()
    device = devices.choose(launch.local_rank)
    devices.settle(device, settings.threads, settings.reduction == "exact")
    if device.type == "cpu":
        devices.keep_freed_memory()
    report = Reporter([])
    if launch.rank == 0:
        report.sinks.extend([console] if sinks is None else sinks)
    for text in notices:
        report(Notice(text))
    transport = connect(launch, settings, device, lambda text: report(Notice(text)))
    return Run(settings, transport, device, report)
