"""``Ddp.builder``: a managed run, described option by option and then started."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

from torch.utils.data import Dataset

from evener.errors import ConfigError
from evener.managed.job import (
    ManagedOptions,
    ModelFn,
    OptimFn,
    SchedulerFn,
    TrainFn,
    make_job,
)
from evener.managed.metrics import EpochMetrics
from evener.observe.events import Sink
from evener.planning.guard import DivergenceGuard
from evener.planning.policies import ApplyPolicy
from evener.team.environment import AverageBackend
from evener.team.placement import Devices

if TYPE_CHECKING:
    from evener.managed.handle import DdpHandle


class DdpBuilder:
    """Describes a managed run; made by ``Ddp.builder``.

    Every option is a method, and a keyword of ``Ddp.builder`` with the same name; the last word
    counts. ``dataset``, ``batch_size`` and one of ``num_epochs`` and ``num_steps`` must be given.

    With several devices, functions and data travel by value into a process for each device: there
    they work on copies, so what they change outside of the model stays there. Numbers come back
    with ``record_scalar``, ``eval_fn`` and ``metrics_fn``.

    Args:
        model_fn: ``model_fn(device)`` returns the model; called once on each rank, with the same
            random numbers.
        optim_fn: ``optim_fn(params)`` returns an optimizer, or a list of them, over the model's
            parameters.
        train_fn: ``train_fn(model, batch)`` returns the loss of a micro-batch, a mean over its
            samples; or ``(loss, weight)``, where the mean is over ``weight`` units such as tokens.
            ``batch`` is on the model's device.
        **options: Any option below.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        optim_fn: OptimFn,
        train_fn: TrainFn,
        **options: Unpack[ManagedOptions],
    ) -> None:
        self._functions = (model_fn, optim_fn, train_fn)
        self._options: dict[str, Any] = dict(options)

    def run(self) -> "DdpHandle":
        """Starts the run and returns at once.

        With several devices a process is started for each. With one, the run happens in this
        process, when ``join``, ``metrics`` or ``poll_metrics`` of the handle is called.

        Raises:
            ConfigError: Something is missing, wrong, of no effect or a contradiction, or a function
                cannot travel to the workers.
            CheckpointError: There is nothing to resume from.
            LaunchError: A worker could not be started.
        """
        from evener.managed.handle import DdpHandle, InlineRun  # which stand on Ddp
        from evener.managed.processes import WorkerTeam

        job = make_job(*self._functions, cast("ManagedOptions", self._options))
        return DdpHandle(InlineRun(job) if len(job.devices) == 1 else WorkerTeam(job))

    # ── data ─────────────────────────────────────────────────────────────────────────────────

    def dataset(self, dataset: Dataset[Any] | Callable[[], Dataset[Any]]) -> Self:
        """A map-style data set, or a function that makes it in each worker (for large ones)."""
        return self._set("dataset", dataset)

    def batch_size(self, num_samples: int) -> Self:
        """Samples of one optimizer step: of all devices; without ``"sync"``, of each."""
        return self._set("batch_size", num_samples)

    def micro_batch_size(self, num_samples: int | Literal["auto"]) -> Self:
        """Most samples of one forward and backward pass on one device."""
        return self._set("micro_batch_size", num_samples)

    def collate_fn(self, function: Callable[[list[Any]], Any]) -> Self:
        """Makes a micro-batch of a list of samples; torch's default otherwise."""
        return self._set("collate_fn", function)

    def num_workers(self, number: int) -> Self:
        """Processes that load data, for each device; 0 loads between steps."""
        return self._set("num_workers", number)

    def seed(self, seed: int) -> Self:
        """Decides initial weights, the order of samples, and what the functions draw; 0."""
        return self._set("seed", seed)

    # ── length ───────────────────────────────────────────────────────────────────────────────

    def num_epochs(self, number: int) -> Self:
        """Ends the run after so many passes over the data."""
        return self._set("num_epochs", number)

    def num_steps(self, number: int) -> Self:
        """Ends the run after so many optimizer steps of all devices, wherever the epoch is."""
        return self._set("num_steps", number)

    # ── devices and exchange ─────────────────────────────────────────────────────────────────

    def devices(self, devices: Devices) -> Self:
        """``"auto"`` (every accelerator, else one CPU rank), a number, or a list of names."""
        return self._set("devices", devices)

    def policy(self, policy: str | ApplyPolicy) -> Self:
        """When devices average, and what; see ``ApplyPolicy``. ``"sync"`` otherwise."""
        return self._set("policy", policy)

    def backend(self, backend: str | AverageBackend) -> Self:
        """How devices exchange; see ``AverageBackend``. ``"auto"`` otherwise."""
        return self._set("backend", backend)

    def precision(self, precision: str) -> Self:
        """As ``Ddp.setup`` takes it: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``."""
        return self._set("precision", precision)

    def partition_ratios(self, ratios: Sequence[float]) -> Self:
        """Fixed shares of the devices, relative to one another; replaces planning."""
        return self._set("partition_ratios", ratios)

    def speed_hint(
        self, speeds: Sequence[float] | Mapping[int, float], ratio: float | None = None
    ) -> Self:
        """Speeds of the devices, relative to one another; replaces the calibration at the start.

        Args:
            speeds: One for each, such as ``(1.0, 0.33)``, or by rank, such as ``{1: 0.33}``.
            ratio: Only so that floDl's ``speed_hint(slow_rank, ratio)`` is told its form here.

        Raises:
            ConfigError: A ratio was given.
        """
        if ratio is not None:
            raise ConfigError(
                f"speed_hint({speeds!r}, {ratio!r}) is floDl's form; give "
                f"speed_hint({{{speeds!r}: 1 / {ratio!r}}}), the speed of the slow rank against "
                "the others, which are 1"
            )
        return self._set("speed_hint", speeds)

    def timeout_s(self, seconds: float) -> Self:
        """Longest wait of one device for another; 600."""
        return self._set("timeout_s", seconds)

    # ── optimization ─────────────────────────────────────────────────────────────────────────

    def scheduler(self, function: SchedulerFn) -> Self:
        """``function(optimizer)`` returns a torch scheduler, stepped once per optimizer step."""
        return self._set("scheduler", function)

    def max_grad_norm(self, norm: float) -> Self:
        """Clips the averaged gradient to this 2-norm."""
        return self._set("max_grad_norm", norm)

    def non_finite(self, what: Literal["raise", "skip"]) -> Self:
        """``"raise"`` ends the run on a non-finite gradient, ``"skip"`` leaves the window out."""
        return self._set("non_finite", what)

    # ── parameter averaging ──────────────────────────────────────────────────────────────────

    def anchor(self, steps: int) -> Self:
        """Local steps of the slowest device in a window, at the start."""
        return self._set("anchor", steps)

    def max_anchor(self, steps: int) -> Self:
        """Most local steps of the slowest device in a window; 0: no more than at the start."""
        return self._set("max_anchor", steps)

    def overhead_target(self, fraction: float) -> Self:
        """Part of the time that averaging may cost before windows get longer; 0.01 to 0.50."""
        return self._set("overhead_target", fraction)

    def max_batch_diff(self, steps: int) -> Self:
        """Most local steps by which the fastest device may be ahead of the slowest."""
        return self._set("max_batch_diff", steps)

    def divergence_guard(self, guard: str | bool | DivergenceGuard | None) -> Self:
        """Decides whether windows may grow: ``"level"``, ``"none"``, or a guard of your own."""
        return self._set("divergence_guard", guard)

    def no_divergence_guard(self) -> Self:
        """Lets windows grow however far the devices diverge: ``divergence_guard("none")``."""
        return self.divergence_guard("none")

    def divergence_threshold(self, threshold: float) -> Self:
        """Divergence of the devices from which windows no longer grow."""
        return self._set("divergence_threshold", threshold)

    def lr_scale_ratio(self, ratio: float) -> Self:
        """Multiplies the learning rate by ``1 + (world_size - 1) * ratio``."""
        return self._set("lr_scale_ratio", ratio)

    # ── what is called on the way ────────────────────────────────────────────────────────────

    def epoch_fn(self, function: Callable[[int, Any], object]) -> Self:
        """``function(epoch, model)``, on every rank, before each epoch."""
        return self._set("epoch_fn", function)

    def eval_fn(self, function: Callable[[Any], Any]) -> Self:
        """``function(model)``, on rank 0 after each epoch, in ``eval()`` and without gradients.

        It returns a number or a dict of numbers, which go into ``EpochMetrics.eval``. The other
        ranks wait for it.
        """
        return self._set("eval_fn", function)

    def checkpoint_fn(self, function: Callable[[int, Any], object]) -> Self:
        """``function(window, model)``, on rank 0, with the model as it was committed.

        Called every ``checkpoint_every`` windows, without gradients. The other ranks wait for it at
        the end of their part of the next window.
        """
        return self._set("checkpoint_fn", function)

    def checkpoint_dir(self, folder: str | Path) -> Self:
        """Receives checkpoints of the whole run: model, optimizers, schedule, data position.

        They are written every ``checkpoint_every`` windows, if that is given, and at the end; the
        newest three are kept. ``resume`` and ``Ddp.load`` continue from them.
        """
        return self._set("checkpoint_dir", folder)

    def checkpoint_every(self, windows: int) -> Self:
        """Windows from one checkpoint (or call of ``checkpoint_fn``) to the next.

        Windows are counted over the whole run, those before a ``resume`` included, and whatever
        the policy: with ``"sync"`` a window is an optimizer step, otherwise the local steps between
        two averages.
        """
        return self._set("checkpoint_every", windows)

    def resume(self, path: str | Path) -> Self:
        """Continues from a checkpoint: model, optimizers, schedule and data position.

        ``path`` is a checkpoint, or a folder of which the newest complete one is taken; written by
        ``checkpoint_dir`` or ``Ddp.save``, on any number of devices. ``num_epochs`` and
        ``num_steps`` count from the beginning of the run that wrote it.
        """
        return self._set("resume", path)

    def metrics_fn(self, function: Callable[[EpochMetrics], object]) -> Self:
        """``function(metrics)`` after each epoch, in the process that called ``run``.

        With several devices it is called from a thread of its own.
        """
        return self._set("metrics_fn", function)

    def sinks(self, sinks: Sequence[Sink | Callable[[], Sink]]) -> Self:
        """Take the run's events, in the process that called ``run``; closed with the run.

        Each is a ``Sink``, or a function without arguments that makes one. With several devices
        they are called from a thread of their own.
        """
        return self._set("sinks", sinks)

    def quiet(self, quiet: bool = True) -> Self:
        """Does not print the team to standard error; warnings are always printed."""
        return self._set("quiet", quiet)

    def _set(self, name: str, value: Any) -> Self:
        self._options[name] = value
        return self
