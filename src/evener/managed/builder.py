"""``Ddp.builder``: a managed run, described option by option and then started."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self

from evener.config.settings import hint_forms
from evener.errors import ConfigError
from evener.managed.description import (
    MAX_MANAGED_FAILURES,
    OPTIONS,
    ManagedRun,
    describe,
    find_launched_place,
)
from evener.managed.handle import DdpHandle, InlineRun
from evener.managed.workers import ProcessRun

_Arguments = ParamSpec("_Arguments")


def _takes_what(
    _description: Callable[_Arguments, object],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, _Arguments], None]]:
    """Give an ``__init__`` the arguments of a class, for type checkers."""
    return lambda init: init


class DdpBuilder:
    """Describes a managed run; made by ``Ddp.builder``.

    Every option is a method, and a keyword of ``Ddp.builder`` with the same name; the last value
    counts. ``dataset``, ``batch_size`` and one of ``num_epochs`` and ``num_steps`` must be given.
    All options of ``DdpConfig`` are among them, with the same meaning.

    With several devices, functions and data are pickled into a process for each device. There they
    work on copies, so changes outside of the model stay there. Numbers come back with
    ``record_scalar``, ``eval_fn`` and ``metrics_fn``.

    Args:
        model_fn: ``model_fn(device)`` returns the model; called once on each rank, with the same
            random numbers.
        optim_fn: ``optim_fn(params)`` returns an optimizer, or a list of them, over the model's
            parameters.
        train_fn: ``train_fn(model, batch)`` returns the loss of a micro-batch, a mean over its
            samples; or ``(loss, weight)`` if the mean is over ``weight`` units such as tokens.
            ``batch`` is on the model's device.
        config: Options of ``DdpConfig`` at once; options given by themselves take precedence.
        dataset: A map-style data set, or a function that makes it in each worker (for large ones).
        batch_size: Samples of one optimizer step: of all devices; without ``"sync"``, of each.
        micro_batch_size: Most samples of one forward and backward pass on one device.
        reduction: ``"sum"`` if the loss is a sum over its units instead, as in ``Ddp.backward``.
        num_epochs: Number of passes over the data after which the run ends.
        num_steps: Number of optimizer steps after which the run ends, also within an epoch.
        devices: ``"auto"`` (every accelerator, else one CPU rank), a number, or a list of names.
        policy: When devices average, and what; see ``ApplyPolicy``. ``"sync"`` by default.
        backend: How devices exchange; see ``AverageBackend``. ``"auto"`` by default.
        precision: As in ``Ddp.setup``: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        collate_fn: Makes a micro-batch of a list of samples; torch's default otherwise.
        num_workers: Processes that load data, for each device; 0 loads between steps.
        cache: Where each rank keeps samples of ``dataset`` for later epochs, as in ``Ddp.loader``;
            by default, they are not kept.
        scheduler: ``function(optimizer)`` returns a torch scheduler, stepped once per optimizer
            step.
        checkpoint_every: Optimizer steps from one checkpoint (or call of ``checkpoint_fn``) to the
            next, over all ranks and the whole run, those before a ``resume`` included. Without
            policy ``"sync"``, it is written at the end of the window that contains the step.
        checkpoint_fn: ``function(window, model)``, on the main process (rank 0, unless it is
            parked), with the committed model, every ``checkpoint_every`` steps, without gradients.
            The other ranks wait for it at the end of their part of the next window.
        checkpoint_dir: Receives checkpoints of the whole run: model, optimizers, schedule, data
            position. They are written every ``checkpoint_every`` steps, if that is given, and at
            the end; the newest three are kept. ``resume`` and ``Ddp.load`` continue from them.
        resume: Continue from a checkpoint, or from the newest complete one in a folder; written by
            ``checkpoint_dir`` or ``Ddp.save``, on any number of devices. ``num_epochs`` and
            ``num_steps`` count from the beginning of the run that wrote it.
        run_folder: Receives the run's events (``events.jsonl``), which ``evener report`` and
            ``evener dashboard`` read. Another run's folder is refused, except with ``resume``.
        epoch_fn: ``function(epoch, model)``, on every rank, before each epoch; or
            ``function(epoch, model, context)``, with an ``EpochContext``.
        eval_fn: ``function(model)``, on the main process after each epoch, in ``eval()`` and
            without gradients. It returns a number or a dict of numbers, which go into
            ``EpochMetrics.eval``. The other ranks wait for it. With ``eval_dataset`` it is
            ``function(model, batch)``, on every rank.
        eval_dataset: A map-style data set, or a function that makes it in each worker. After each
            epoch every sample is evaluated once, on one of the ranks, in micro-batches.
            ``eval_fn(model, batch)`` returns a mean over the batch, or a dict of means, or either
            with its weight as ``(means, weight)``; the means over the data set go into
            ``EpochMetrics.eval``. Without ``eval_fn`` they are the loss of ``train_fn``, named
            ``"loss"``, and what it records.
        eval_every: Epochs from one evaluation to the next; 1. The last epoch is always evaluated.
        metrics_fn: ``function(metrics)`` after each epoch, in the process that called ``run``. With
            several devices it is called in a separate thread.
        seed: Seed of initial weights, the order of samples, and the functions' random numbers; 0.
        sinks: Receive the run's events, in the process that called ``run``; closed with the run.
            Each is a ``Sink``, or a function without arguments that makes one. With several devices
            they are called in a separate thread.
        elastic: Fewest and most workers of a run that continues when one fails; see ``elastic``.
        max_failures: A run with ``elastic`` ends when more workers than this have failed; 3.
    """

    @_takes_what(ManagedRun)
    def __init__(self, model_fn: Any, optim_fn: Any, train_fn: Any, **options: Any) -> None:
        self._functions = (model_fn, optim_fn, train_fn)
        self._options = options

    if TYPE_CHECKING:

        def __getattr__(self, option: str) -> Callable[[Any], Self]:
            """Return the method that sets an option, and returns the builder."""

    def speed_hint(
        self, speeds: Sequence[float] | Mapping[int, float], ratio: float | None = None
    ) -> Self:
        """Set speeds of the devices, relative to one another; they replace the calibration.

        Args:
            speeds: One for each, such as ``(1.0, 0.33)``, or by rank, such as ``{1: 0.33}``.
            ratio: Only for an error that explains the difference from floDl's ``speed_hint``.

        Raises:
            ConfigError: A ratio was given.
        """
        if ratio is not None:
            raise ConfigError(f"speed_hint({speeds!r}, {ratio!r}): {hint_forms(speeds, ratio)}")
        return self.set_option("speed_hint", speeds)

    def elastic(self, least: int, most: int, *, max_failures: int = MAX_MANAGED_FAILURES) -> Self:
        """Replace workers that fail, while the others continue.

        With ``checkpoint_dir``, a run that has lost all its workers at once continues from its
        newest checkpoint.

        Args:
            least: Fewest workers with which the run continues.
            most: Most workers, each with its own device, or all on the CPU.
            max_failures: The run ends when more workers than this have failed.
        """
        return self.set_option("elastic", (least, most)).set_option("max_failures", max_failures)

    def no_divergence_guard(self) -> Self:
        """Let windows grow however much the devices diverge: ``divergence_guard("none")``."""
        return self.divergence_guard("none")

    def quiet(self, quiet: bool = True) -> Self:
        """Do not print the team to standard error; warnings are always printed."""
        return self.set_option("quiet", quiet)

    def set_option(self, name: str, value: object) -> Self:
        """Set an option by name; there is also a method for each."""
        self._options[name] = value
        return self

    def run(self) -> DdpHandle:
        """Start the run and return at once.

        With several devices a process is started for each. With one, the run happens in this
        process, in the call of ``join``, ``metrics`` or ``next_metrics`` of the handle.

        In a script that ``evener launch``, torchrun or SLURM has started, or that has made a
        process group of ``torch.distributed``, no process is started: this one joins as a rank of
        that team. All of its ranks call ``run`` together, with the same options, and ask their
        handles for results. ``metrics_fn`` and ``sinks`` are called on the main process.

        Raises:
            ConfigError: Options are missing, wrong, without effect or contradictory, or a function
                cannot be pickled for the workers.
            CheckpointError: There is nothing to resume from.
            LaunchError: A worker could not be started.
        """
        place = find_launched_place()
        run = describe(*self._functions, place=place, **self._options)
        if place is not None:
            return DdpHandle(InlineRun(run, place))
        if run.elastic is not None:
            return DdpHandle(ProcessRun(run))
        return DdpHandle(InlineRun(run) if len(run.device_names) == 1 else ProcessRun(run))


def _option_method(option: str) -> Callable[[DdpBuilder, object], DdpBuilder]:
    def set_it(self: DdpBuilder, value: object) -> DdpBuilder:
        return self.set_option(option, value)

    set_it.__name__, set_it.__doc__ = option, f"Set ``{option}``; see the class."
    return set_it


for _option in OPTIONS:  # options with more than one value have explicit methods
    if _option not in vars(DdpBuilder):
        setattr(DdpBuilder, _option, _option_method(_option))
