"""The driver of jobs: everything that does not depend on the task."""

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset, default_collate

from evener.checkpoint import Checkpoint, fence_writers
from evener.config.folders import CHECKPOINTS, SUMMARY, FolderLock, release_folder
from evener.config.keys import Keys
from evener.config.options import PretrainOptions, TaskOptions
from evener.config.presets import resolve_job
from evener.config.runs import JobConfig
from evener.data.fetching import Prefetch
from evener.ddp import Ddp
from evener.engine.emulate import parse_emulation
from evener.engine.loaders.training import TeamLoader
from evener.engine.results import WindowResult
from evener.errors import EvenerError, RunEndedError
from evener.loop.arguments import Schedulers
from evener.loop.checkpointing import Checkpointer
from evener.loop.epochs import EpochLoop
from evener.tasks.recording import find_sinks, record, show, summarise
from evener.tasks.resuming import RUN_FOLDER, choose_checkpoint, find_run, is_finished
from evener.tasks.run_changes import MADE_OF, RUN, check_changes, require_same_parts
from evener.tasks.run_results import TaskResult
from evener.team.environment import DistributedTrainConfig
from evener.team.signals import StopSignals
from evener.team.terminal import say, warn

#: Longest wait for the main process while it compares and saves at the end, in seconds.
SUMMING_UP_S = 6 * 3600.0


class Task(ABC):
    """What a job trains: model, data, loss, evaluation. The driver (``run_task``) does the rest.

    Every rank makes one. Its model moves to the rank's device and starts from rank 0's weights.

    Attributes:
        model: What is trained; in float32, on the CPU.
        optimizer: Over its trainable parameters.
        schedule: See ``scheduler`` of ``Ddp.setup``.
        gradient_buckets: See ``DdpConfig.gradient_buckets``.
        unit: What the weights of ``loss`` count, for messages.
        sample_weight: The weight of a held-out sample, for messages.
        prefetch: See ``Ddp.loader``; ``"thread"`` for data that draws no random numbers.
        results: Files and folders of a finished run, besides its checkpoints.
        lengths: Keys that lengthen a run, for messages.
        began: Optimizer steps and weight of the run when its present data began.
        made_from: Keys that determine parts of ``made_of``, by part, for messages.
    """

    model: nn.Module
    optimizer: Optimizer
    schedule: Schedulers = None
    gradient_buckets: Sequence[tuple[str, Sequence[str]]] | None = None
    unit: str = "samples"
    sample_weight: int = 1
    prefetch: Prefetch = "auto"
    results: tuple[str, ...] = ()
    lengths: str = "epochs or max_steps"
    began: tuple[int, float] = (0, 0.0)
    made_from: Mapping[str, Sequence[str]] = MappingProxyType({})

    # ── what every task defines ──────────────────────────────────────────────────────────────

    @abstractmethod
    def open_data(self, job: "Job") -> tuple[Dataset[Any], Dataset[Any]]:
        """Return the samples for training and the held-out ones, the same on every rank.

        All ranks call it together, before anything is trained or resumed.
        """

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, float]:
        """Return the mean loss of a micro-batch, with its graph, and the weight behind the mean."""

    @abstractmethod
    def measure(self, samples: list[Any]) -> Sequence[float]:
        """Return sums over some held-out samples; in ``eval()`` mode and without gradients.

        The first is the sum of losses, the second the sum of their weights. Further ones are up to
        the task, such as the number of correctly classified samples; their number is fixed.
        """

    # ── what a task may define ───────────────────────────────────────────────────────────────

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of samples; torch's ``default_collate`` unless overridden."""
        return default_collate(samples)

    def set_length(self, epochs: float) -> None:
        """Note how long the run trains on its present data, for a schedule."""
        return

    def begin(self, job: "Job") -> None:
        """Prepare the first window of this session; all ranks call it together."""
        return

    def judge(self, window: int, totals: Sequence[float]) -> str:
        """Note an evaluation, the same on every rank.

        Args:
            window: Windows so far.
            totals: The sums of ``measure`` over the held-out samples of evaluations during the run:
                always the same samples, as many as ``eval.time_fraction`` allows.

        Returns:
            What to print besides the loss.
        """
        return ""

    def conclude(self, window: int, totals: Sequence[float]) -> str:
        """Note the evaluation at the end, if only that one is over all held-out samples.

        Args:
            window: Windows so far.
            totals: The sums of ``measure`` over all of them, within ``showing_result``.

        Returns:
            What to print besides the loss; as ``judge`` unless overridden.
        """
        return self.judge(window, totals)

    def showing_result(self) -> AbstractContextManager[None]:
        """Load the run's result into the model during the block; by default, its last state."""
        return nullcontext()

    @property
    def is_done(self) -> bool:
        """Whether the evaluations so far end the run early; the same on every rank."""
        return False

    @property
    def best_loss(self) -> float | None:
        """Held-out loss of the result, if that is not the last state."""
        return None

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────

    def made_of(self, job: "Job") -> Mapping[str, Any]:
        """Return what determines the meaning of the weights, by name, in JSON types.

        Ranks or checkpoints with other values are refused.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state, the same on every rank; see ``Ddp.register``.

        Checkpoints hold it, and ranks that join, or were parked, receive it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict``."""
        return

    def assets(self) -> Mapping[str, bytes]:
        """Return further files for the checkpoints, by name."""
        return {}

    def resumed(self) -> None:
        """Adapt loaded state, such as learning rates, to the present keys."""
        return

    # ── the end, on the main process ─────────────────────────────────────────────────────────

    def figures(self, job: "Job", *, stopped: bool) -> Mapping[str, Any]:
        """Return further figures for ``summary.json``, in JSON types."""
        return {}

    def write_results(self, job: "Job", figures: Mapping[str, Any], *, stopped: bool) -> None:
        """Write files into the run's folder.

        Raises:
            EvenerError: They cannot be written.
        """
        return

    def in_words(self, figures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what is printed at the end, by name: texts, and numbers with four digits."""
        return figures


class Job(EpochLoop):
    """One rank's part of a job, from data to the closing table.

    Args:
        task: What is trained.
        config: What the user asked for.
        options: How it was started.
        ddp: The team, which trains the task's model.

    Attributes:
        config: As given.
        options: As given.
        team: The ranks.
        folder: The run's folder.
        resumed: The checkpoint that the run resumes from.
        num_evaluated: Held-out samples of the evaluations in the course of the run.
    """

    ddp: Ddp

    def __init__(self, task: Task, config: JobConfig, options: TaskOptions, ddp: Ddp) -> None:
        super().__init__(
            ddp,
            num_epochs=config.epochs,
            max_steps=config.max_steps,
            checkpoint_every=config.checkpoint.every,
        )
        self.config = config
        self.options = options
        self.team = ddp.assembly.team
        self.folder = options.out
        self.resumed: Checkpoint | None = None
        self._lock = FolderLock(self.folder)
        self._task = task
        self._engine = ddp.assembly.engine
        self._sinks = find_sinks(config.sinks)
        #: Windows after which the held-out loss was computed last, and that loss.
        self._evaluated: tuple[int, float] = (-1, math.nan)
        self._assets: dict[str, bytes] = {}
        #: Content of the document ``RUN`` of checkpoints.
        self._run: dict[str, Any] = {"config": config.model_dump(mode="json")}
        self._has_new_data = False

    def go(self) -> TaskResult:
        """Run the job to its end; all ranks call it together."""
        is_main = self.ddp.is_main_process
        self.folder, self.resumed = find_run(self.team, self.options, self.config, say=self.warn)
        self._lock = FolderLock(self.folder)
        with self._lock:
            if is_main:
                self._lock.require()
            self.team.membership.describe({RUN_FOLDER: str(self.folder)})
            try:
                self._prepare()
            except BaseException:
                if is_main:
                    release_folder(self.folder)
                raise
            if self._is_complete():
                return self._result(self.resumed.path if self.resumed else None)
            try:
                return self._carry_out()
            except Exception as error:  # recorded while the folder is locked
                self.ddp.events.end(failed=True, error=error)
                raise

    def say(self, text: str) -> None:
        """Print a line on the main process, unless the user has asked for quiet."""
        if not self.options.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a line on the main process."""
        if self.ddp.is_main_process:
            say(text)

    # ── the beginning ────────────────────────────────────────────────────────────────────────

    def _prepare(self) -> None:
        """Open the data, and load the checkpoint."""
        task, config = self._task, self.config
        train, self._heldout = task.open_data(self)
        self._train = train
        count: int = len(self._heldout)  # type: ignore[arg-type]  # loaders ask for it, too
        used = config.eval.num_samples(count, config.batch_size)
        self.num_evaluated, self._evaluates_part = used, used < count
        self._heldout_part = self._heldout
        if self._evaluates_part:
            chosen = sorted(random.Random(config.seed).sample(range(count), used))
            self._heldout_part = Subset(self._heldout, chosen)
            weight, unit = task.sample_weight, task.unit
            words = f" ({used * weight:,} of {count * weight:,} {unit})" if weight > 1 else ""
            self.say(
                f"evaluations use {used:,} of {count:,} held-out samples{words}, always the same, "
                f"to take about {100 * config.eval.time_fraction:.3g} % of the time "
                "(eval.time_fraction); the one at the end uses all"
            )
        loader = self.ddp.loader(
            train,
            batch_size=config.batch_size,
            seed=config.seed,
            collate_fn=task.collate,
            micro_batch_size=config.micro_batch_size,
            prefetch=task.prefetch,
            max_steps=config.max_steps,
        )
        assert isinstance(loader, TeamLoader)  # not a stream
        self.loader = loader
        self._run[MADE_OF] = parts = dict(task.made_of(self))
        require_same_parts(self.team, parts, task.made_from)
        self.ddp.register("evener/job", self)
        self._engine.generations.call_on_cold_restart(self._load_newest)
        if self.team.membership.is_joining:
            self.loader.join()
        elif self.resumed is not None:
            self._resume(self.resumed)
        per_epoch, (first, _) = len(self.loader), task.began
        self._num_windows = config.max_steps or first + config.epochs * per_epoch
        task.set_length((self._num_windows - first) / per_epoch)

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint of this run, perhaps to continue with other data."""
        ddp, options = self.ddp, self.options
        allow = options.allow if isinstance(options, PretrainOptions) else None
        changed, keys = check_changes(checkpoint, self._run, self._task.made_from, allow)
        if keys:
            self.say(f"changed since {checkpoint.path.name}: {'; '.join(keys)}")
        ddp.load(checkpoint.path, allow=allow or ())
        self._task.resumed()
        self._has_new_data = "data" in changed
        if self._has_new_data:
            self.loader.cursor.restart()
            self.say("continuing with other data, from its first epoch on")
            self._task.began = self._engine.optimizer_steps, ddp.progress.weight

    def _load_newest(self) -> None:
        """Load the newest checkpoint of the run, since no worker holds its state any more."""
        if self.ddp.is_main_process:  # a former one may be suspended while it writes a later window
            fence_writers(self.folder / CHECKPOINTS)
        found = choose_checkpoint(self.team, [self.folder], say=self.warn)
        if found is not None:
            self.resumed = found[1]
            self._resume(self.resumed)
        else:  # what earlier workers have written is void from the first window on
            self.ddp.events.learn(resumed_from=self.folder)

    def _is_complete(self) -> bool:
        """Return whether an earlier session has completed the run."""
        task = self._task
        if self.resumed is None or not self.has_ended:
            return False
        if not is_finished(self.team, self.folder, self.ddp.window, task.results):
            return False
        self.say(
            f"{self.folder} has been completed ({self._engine.optimizer_steps} steps): nothing to "
            f"do. Raise {task.lengths} to train on, or start a new run without --resume"
        )
        return True

    def _carry_out(self) -> TaskResult:
        task, config = self._task, self.config
        record(
            self.ddp,
            self.folder,
            terminal=not self.options.quiet,
            tensorboard=config.tensorboard,
            sinks=self._sinks,
        )
        self.ddp.events.start(
            run=self.folder.name,
            unit=task.unit,
            total_windows=self._num_windows,
            new_data=self._has_new_data,
        )
        self.checkpointer = Checkpointer(
            self.ddp,
            self.folder / CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            retry_s=config.checkpoint.retry_s,
            assets=self._assets,
            documents={RUN: self._run},
        )
        with closing(self.checkpointer):
            if not self._engine.generations.has_just_joined:
                task.begin(self)
                # A run that is killed before its first window continues in this folder.
                if self.resumed is None and config.checkpoint.every:
                    self.save()
            for _ in self.epochs():
                pass
            return self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the job for ranks that resume, join, or were parked."""
        task = self._task
        return {"evaluated": self._evaluated, "began": task.began, "task": task.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the job."""
        self._evaluated, self._task.began = state["evaluated"], state["began"]
        self._task.load_state_dict(state["task"])

    # ── the run ──────────────────────────────────────────────────────────────────────────────

    @property
    def has_ended(self) -> bool:
        """Whether the run has no further window."""
        return self._task.is_done or super().has_ended

    @property
    def heldout_loss(self) -> float | None:
        """Held-out loss of the result; ``None`` if it was not computed after the last step."""
        (window, loss), best = self._evaluated, self._task.best_loss
        return best if best is not None else loss if window == self.ddp.window else None

    def train_micro_batch(self, batch: Any) -> None:
        """Compute forward and backward."""
        self.ddp.backward(*self._task.loss(batch))

    def on_commit(self, result: WindowResult) -> None:
        """Evaluate and save if that is due; the window has been recorded."""
        if self.team.is_elastic:  # the main process may be lost, and its lock with it
            self._lock.share()
        if self.ddp.is_main_process:
            self._lock.take()
        every = self.config.eval.every
        if every and result.progress.window % every == 0 and not self.ddp.stopping:
            self._evaluate()
            if self._task.is_done:
                self.ddp.stop()
        super().on_commit(result)

    def prepare_save(self) -> None:
        """Update the task's files in checkpoints."""
        if self.ddp.is_main_process:
            self._assets.update(self._task.assets())

    def totals(self, *, whole: bool = False) -> list[float] | None:
        """Evaluate held-out samples, each on one rank; all ranks call it together.

        Args:
            whole: Evaluate all of them, however long that takes; see ``eval.time_fraction``.

        Returns:
            The sums of ``Task.measure``, the same on every rank; ``None`` if a rank was asked to
            stop meanwhile.
        """
        batches = self.ddp.eval_loader(
            self._heldout if whole else self._heldout_part,
            batch_size=self.loader.micro_batch_size,
            collate_fn=list,
        )
        # Sums, not a list of the batches' numbers: with 1,000 classes a task may return a million
        # numbers for each batch.
        own: list[NDArray[np.float64]] = []

        def measure(samples: list[Any]) -> None:
            numbers = np.asarray(self._task.measure(samples), np.float64)
            own[:] = [own[0] + numbers] if own else [numbers]

        measured = self.evaluate_parts(
            batches,
            measure,
            lambda: own[0].tolist() if own else [],
            # If the task has ended the run itself, this is the evaluation at its end.
            heed_stop=not self._task.is_done,
        )
        if measured is None:
            return None
        sums = [numbers for numbers in measured.values() if numbers]
        return [math.fsum(numbers) for numbers in zip(*sums, strict=True)]

    def _evaluate(self, *, at_end: bool = False) -> None:
        task, began_s = self._task, time.perf_counter()
        with task.showing_result() if at_end else nullcontext():
            totals = self.totals(whole=at_end)
        if not totals:  # a stop, or nothing is held out
            return
        elapsed_s, window = time.perf_counter() - began_s, self.ddp.window
        loss = totals[0] / totals[1] if totals[1] else math.nan
        self._evaluated = window, loss
        words = task.conclude(window, totals) if at_end else task.judge(window, totals)
        name = "heldout_all" if at_end else "heldout"
        numbers = {"loss": loss, "weight": totals[1], "elapsed_s": elapsed_s}
        self.ddp.events.emit("eval", window=window, name=name, **numbers)
        if words:
            self.say(f"step {window}: {words}")

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _close(self) -> TaskResult:
        """Save, and report the results of the run."""
        task = self._task
        if not self.ddp.stopping and self._evaluated[0] != self.ddp.window:
            self._evaluate()
        covered = self.num_evaluated
        if self._evaluates_part and (task.is_done or not self.ddp.stopping):
            self._evaluate(at_end=True)
            if task.is_done or not self.ddp.stopping:  # not stopped meanwhile
                covered = len(self._heldout)  # type: ignore[arg-type]
        stopped = self.ddp.stopping and not task.is_done
        checkpoint = self.finish()

        def sum_up() -> bool:
            self._sum_up(checkpoint, covered, stopped=stopped)
            return True

        # If the main process is lost meanwhile, the next one writes the files.
        self._engine.collectives.ask_main("summing up the run", sum_up, timeout_s=SUMMING_UP_S)
        return self._result(checkpoint, stopped=stopped)

    def _sum_up(self, checkpoint: Path | None, covered: int, *, stopped: bool) -> None:
        """Report the results of the run, on the main process; the others wait for it."""
        task = self._task
        figures = task.figures(self, stopped=stopped)
        summary = summarise(
            self.ddp,
            self.folder,
            unit=task.unit,
            heldout_loss=self.heldout_loss,
            heldout_samples=None if self.heldout_loss is None else covered,
            checkpoint=checkpoint,
            details=figures,
        )
        try:
            summary.write(self.folder / SUMMARY)
            task.write_results(self, figures, stopped=stopped)
        except EvenerError as error:  # the checkpoint is written, so this is only a warning
            self.warn(f"warning: {error}")
        if stopped:
            self.ddp.events.finish(self.ddp.window, "stopped", "continue with --resume")
        else:
            self.ddp.events.finish(self.ddp.window, "completed")
        if not self.options.quiet:
            show(summary)
            for name, value in task.in_words(figures).items():
                say(f"{name}: {f'{value:.4g}' if isinstance(value, float) else value}")

    def _result(self, checkpoint: Path | None, *, stopped: bool = False) -> TaskResult:
        if checkpoint is None:
            raise RunEndedError(
                f"the team ended the run without rank {self.ddp.rank}, which did not answer in "
                f"time; the results are in {self.folder}"
            )
        return TaskResult(
            run_folder=self.folder,
            checkpoint=checkpoint,
            heldout_loss=self.heldout_loss,
            stopped=stopped,
        )


def run_task(
    task: Task,
    config: Keys = None,
    *,
    out: str | Path = "runs",
    resume: bool = False,
    quiet: bool = False,
) -> TaskResult:
    """Train your own task with the driver of ``evener pretrain``; all ranks call it together.

    If the script was started plainly and the keys ask for several devices, it is started once for
    each of them, as by ``Ddp.setup``. On Ctrl-C, SIGTERM and SIGUSR1 a checkpoint is written and
    the call ends.

    Args:
        task: What to train.
        config: The keys of the run, or a YAML file with them; see ``docs/tasks.md``.
        out: Folder of runs.
        resume: Continue from the newest complete checkpoint of the run's name.
        quiet: Print neither the team nor progress.

    Returns:
        Where the run is and how good its model is, the same on every rank.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    options = TaskOptions(config=config, out=Path(out), resume=resume, quiet=quiet)
    keys = resolve_job(options, type(task).__name__.lower())
    return run_job(task, keys, options, StopSignals())


def run_job(
    task: Task,
    config: JobConfig,
    options: TaskOptions,
    signals: StopSignals,
    environment: DistributedTrainConfig | None = None,
) -> TaskResult:
    """Join the team and do this rank's part of a job; all ranks call it together.

    Args:
        task: What is trained.
        config: What the user asked for.
        options: How it was started.
        signals: Context that is entered while there is something to save.
        environment: This rank's place; then no further ranks are started.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    place = environment or DistributedTrainConfig.from_env()
    if config.idle_options and place.rank == 0:
        warn(f"{', '.join(config.idle_options)}: no effect with policy 'sync'")
    ddp = Ddp.setup(
        task.model,
        task.optimizer,
        task.schedule,
        policy=config.policy,
        backend=config.backend,
        devices=config.devices,
        precision=config.precision,
        config=replace(
            config.ddp_config(
                emulate_slow=parse_emulation(options.emulate_slow, place.world_size),
                stop_when=lambda: signals.requested is not None,
                quiet=options.quiet,
            ),
            gradient_buckets=task.gradient_buckets,
        ),
        environment=environment,
    )
    # Not before: until here there is nothing to save, and a signal ends the process at once.
    with signals, ddp:
        return Job(task, config, options, ddp).go()
