"""Every exception that Lanewise raises on purpose.

LanewiseError
|-- SettingsError          a setting is unknown, misspelt or cannot be met
|-- ModelError             a model that cannot be prepared
|   `-- ShardedParameterError   a parameter was touched whose values are on other ranks
|-- OptimizerError         an optimizer that cannot be prepared
|-- DataError              a data set, batch size or partition that does not fit
|-- StepError              calls of a step in the wrong order, or a loss that is none
|-- NonFiniteError         a gradient with NaN or infinity
|-- HandshakeError         ranks that differ in what must be equal
|-- ExchangeError          the exchange between ranks failed
|   |-- PeerLostError      a rank died, stopped or stays away
|   `-- DivergedError      ranks do different things
|-- StateError             a saved state that is damaged or belongs to something else
`-- ProofError             a script that cannot be proven

An error says where, the rule, what was found, and what to do. Broken invariants of Lanewise itself are
asserts, not exceptions of this file.
"""


class LanewiseError(Exception):
    """The base of everything below."""


class SettingsError(LanewiseError, ValueError):
    """A setting is unknown, misspelt or cannot be met."""


class ModelError(LanewiseError):
    """A model that cannot be prepared."""


class ShardedParameterError(ModelError, RuntimeError):
    """A parameter was touched whose values are on other ranks."""


class OptimizerError(LanewiseError):
    """An optimizer that cannot be prepared."""


class DataError(LanewiseError, ValueError):
    """A data set, batch size or partition that does not fit."""


class StepError(LanewiseError, RuntimeError):
    """Calls of a step in the wrong order, or a loss that is none."""


class NonFiniteError(LanewiseError, ArithmeticError):
    """A gradient with NaN or infinity."""


class HandshakeError(LanewiseError):
    """Ranks differ in what must be equal."""


class ExchangeError(LanewiseError, RuntimeError):
    """The exchange between ranks failed."""


class PeerLostError(ExchangeError):
    """A rank died, stopped or stays away."""

    def __init__(self, ranks: tuple[int, ...], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks


class DivergedError(ExchangeError):
    """Ranks do different things."""


class StateError(LanewiseError):
    """A saved state that is damaged or belongs to something else."""


class ProofError(LanewiseError):
    """A script that cannot be proven."""
