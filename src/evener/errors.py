"""Every exception that evener raises on purpose.

A *user error* (``UserError`` and below) is caused by an input that the user can correct: the
command line prints its message without a traceback. Each message names the value, the cause and the
remedy.
"""


class EvenerError(Exception):
    """Base of all exceptions that evener raises on purpose."""


class UserError(EvenerError):
    """An input is wrong and the user can correct it; shown without a traceback."""


class ConfigError(UserError, ValueError):
    """An option, a configuration key or an argument has a bad value."""


class DataError(UserError):
    """Training data is missing, empty, damaged or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class LaunchError(UserError):
    """Ranks could not be started or could not find one another."""


class UsageError(UserError, RuntimeError):
    """The training loop calls evener in an order that would make the result wrong."""


class NonFiniteGradientError(UserError, ArithmeticError):
    """A loss or a gradient is not finite on some rank; raised on every rank, nothing applied.

    Attributes:
        rank: The first rank on which it happened.
        parameter: Name of the first such parameter, or ``None`` when it was the loss.
        window: The window, counted over the whole run.
    """

    def __init__(self, message: str, *, rank: int, parameter: str | None, window: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter
        self.window = window


class ReplicasDifferError(UserError, RuntimeError):
    """Ranks hold different state where all should hold the same; raised on every rank.

    Attributes:
        rank: The first rank whose state differs from that of most ranks.
        parameter: Name of the first such parameter or buffer, in the order of the model.
        window: The window that was applied last, counted over the whole run; -1 before the first.
    """

    def __init__(self, message: str, *, rank: int, parameter: str, window: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter
        self.window = window


class ProtocolError(EvenerError):
    """Ranks disagree about what is exchanged; a bug, or ranks running different code."""


class CollectiveError(EvenerError):
    """An exchange between ranks failed."""


class PeerLostError(CollectiveError):
    """A peer died or closed its connection during an exchange."""


class CollectiveTimeoutError(CollectiveError):
    """An exchange did not end before its deadline.

    Attributes:
        missing: Ranks that did not arrive, as far as that is known.
    """

    def __init__(self, message: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class CollectiveMismatchError(CollectiveError, UserError):
    """Ranks joined different collectives, such as an evaluation on a local step counter."""


class TeamRefusedError(UserError):
    """The coordinator of an elastic team refused this worker; the message says what differs."""


class RunEndedError(TeamRefusedError):
    """The run of an elastic team has ended, or was stopped, before this worker could contribute.

    Nothing is left to do: a process that it ends has exit code 0.
    """


class LeftOutError(EvenerError):
    """The team has formed a generation without this worker, which must drop what is uncommitted."""


class CoordinatorLostError(EvenerError):
    """The coordinator of an elastic team did not answer within ``patience_s``."""


class WorkerError(EvenerError):
    """A worker of a managed run failed; its cause shows the worker's own traceback.

    Attributes:
        rank: The rank that failed first.
        kind: Class name of what it raised; ``None`` when its process was killed without a message.
        state: The model as the surviving ranks hold it, a ``TrainedState``; ``None`` when no rank
            survived, or none had built it yet.
    """

    def __init__(self, message: str, *, rank: int, kind: str | None, state: object) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.state = state
