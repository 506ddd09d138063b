"""The options of a managed run, checked before anything is started."""

import os
import types
from collections.abc import Callable, Sequence
from dataclasses import field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

import torch
from pydantic import AfterValidator, BeforeValidator, InstanceOf, PlainValidator, ValidationInfo
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from evener.comm.existing import default_group
from evener.config.checks import MicroBatchSize, asks_for, checked, whole_number
from evener.config.folders import EVENTS
from evener.config.settings import DdpConfig
from evener.devices import count_accelerators
from evener.engine.schedule import ProgressSchedule
from evener.errors import CheckpointError, ConfigError
from evener.loop.event_stream import SinkMaker
from evener.loop.precision import choose_precision
from evener.managed.epoch_metrics import EpochContext, EpochMetrics
from evener.observe.events import Sink
from evener.observe.jsonl import JsonlSink
from evener.planning.policies import ApplyPolicy
from evener.protocol.formation import read_team_limits
from evener.team.backends import check_backend, check_policy
from evener.team.environment import ELASTIC, AverageBackend, DistributedTrainConfig
from evener.team.fixed import place_in
from evener.team.placement import Devices, devices_of_host

#: The loss of a micro-batch: a mean over its samples, or (mean, number of units behind it).
Loss = Tensor | tuple[Tensor, float | Tensor]
ModelFn = Callable[[torch.device], nn.Module]
OptimFn = Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]]
TrainFn = Callable[[Any, Any], Loss]
SchedulerFn = Callable[[Any], LRScheduler | Sequence[LRScheduler] | ProgressSchedule]
#: ``function(epoch, model)`` or ``function(window, model)``.
ModelHook = Callable[[int, Any], object]
#: ``function(epoch, model)`` or ``function(epoch, model, context)``.
EpochFn = ModelHook | Callable[[int, Any, EpochContext], object]
Data = Dataset[Any] | Callable[[], Dataset[Any]]
Sinks = Sequence[Sink | SinkMaker]

_MADE = {
    "model_fn": (nn.Module, "lambda device: Model()"),
    "optim_fn": (Optimizer, "lambda params: torch.optim.AdamW(params)"),
    "scheduler": (LRScheduler, "lambda optimizer: StepLR(optimizer, 10)"),
}


def _check_function(value: object, option: ValidationInfo) -> object:
    name = str(option.field_name)
    made, maker = _MADE.get(name, ((), ""))
    if isinstance(value, made):
        raise ConfigError(
            f"{name} is a {type(value).__name__}; give a function that makes one, since each "
            f"device gets its own: {maker}. Ddp.setup takes the object itself"
        )
    if not callable(value):
        raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}; give a function")
    return value


_Value = TypeVar("_Value")
_Function = Annotated[_Value, BeforeValidator(_check_function)]
_Folder = Annotated[
    InstanceOf[str] | InstanceOf[Path],
    AfterValidator(lambda folder: Path(folder).expanduser().absolute()),
    asks_for("give the path of a folder"),
]
_Index = Annotated[int, BeforeValidator(lambda n, info: whole_number(info.field_name, n, 0))]
_Count = Annotated[int, BeforeValidator(lambda n, info: whole_number(info.field_name, n, 1))]
#: Values that pydantic does not check; see below.
_AsGiven = Annotated[_Value, PlainValidator(lambda value: value)]

#: A managed elastic run ends when more workers than this have failed.
MAX_MANAGED_FAILURES = 3
#: Options that have no effect without another one.
_NEEDED = {
    "max_failures": ("elastic",),
    "checkpoint_fn": ("checkpoint_every",),
    "checkpoint_every": ("checkpoint_fn", "checkpoint_dir"),
    "eval_every": ("eval_fn", "eval_dataset"),
}
_STAYS = ("config", "metrics_fn", "sinks", "run_folder")


@checked
class ManagedRun(DdpConfig):
    """A managed run: the options of ``DdpBuilder``, which documents them."""

    model_fn: _Function[ModelFn] = field(kw_only=False)
    optim_fn: _Function[OptimFn] = field(kw_only=False)
    train_fn: _Function[TrainFn] = field(kw_only=False)
    config: InstanceOf[DdpConfig] | None = None
    dataset: _AsGiven[Data | None] = None
    batch_size: _Count = None  # type: ignore[assignment]  # refused where it is left out
    micro_batch_size: MicroBatchSize = "auto"
    reduction: Literal["mean", "sum"] | None = None
    num_epochs: _Count | None = None
    num_steps: _Count | None = None
    devices: _AsGiven[Devices] = "auto"
    policy: _AsGiven[str | ApplyPolicy] = ApplyPolicy.SYNC
    backend: _AsGiven[str | AverageBackend] = AverageBackend.AUTO
    precision: _AsGiven[str] = "auto"
    collate_fn: _Function[Callable[[list[Any]], Any]] | None = None
    num_workers: _Index = 0
    cache: str | None = None
    scheduler: _Function[SchedulerFn] | None = None
    checkpoint_every: _Count | None = None
    checkpoint_fn: _Function[ModelHook] | None = None
    checkpoint_dir: _Folder | None = None
    resume: _Folder | None = None
    run_folder: _Folder | None = None
    epoch_fn: _Function[EpochFn] | None = None
    eval_fn: _Function[Callable[..., Any]] | None = None
    eval_dataset: _AsGiven[Data | None] = None
    eval_every: _Count | None = None
    metrics_fn: _Function[Callable[[EpochMetrics], object]] | None = None
    seed: _Index = 0
    sinks: _AsGiven[Sinks] = ()
    elastic: Annotated[tuple[int, int], BeforeValidator(read_team_limits)] | None = None
    max_failures: _Index = MAX_MANAGED_FAILURES

    @property
    def device_names(self) -> tuple[str, ...]:
        """The requested devices of this host, one for each rank."""
        return devices_of_host(self.devices, count_accelerators())

    def team_config(self, stop_when: Callable[[], bool]) -> DdpConfig:
        """Return the options that ``Ddp.setup`` takes in its ``config``."""
        options = {option.name: getattr(self, option.name) for option in fields(DdpConfig)}
        asked = self.stop_when
        also = stop_when if asked is None else lambda: stop_when() or asked()
        return DdpConfig(**options | {"stop_when": also})

    @property
    def event_sinks(self) -> Sinks:
        """The sinks of the run's events: the given ones, and the file in ``run_folder``."""
        if self.run_folder is None:
            return self.sinks
        return [*self.sinks, partial(JsonlSink, Path(self.run_folder) / EVENTS)]

    def parts(self) -> dict[str, Any]:
        """Return the options that are sent to the workers: all but those called in this process.

        ``sends_events`` is whether the workers send their events here.
        """
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _STAYS}
        return parts | {"sends_events": bool(self.event_sinks)}


#: Names of all options.
OPTIONS = frozenset(option.name for option in fields(ManagedRun))


def make_data(data: Any) -> Any:
    """Return the given data set, or the one that the given function makes."""
    return data() if _is_maker(data) else data


def find_launched_place() -> DistributedTrainConfig | None:
    """Return this process's place in a team that a launcher has started; ``None`` without one.

    The launcher is evener's, torchrun or SLURM; or the script has initialised a process group.
    """
    group = default_group()
    place = DistributedTrainConfig.from_env() if group is None else place_in(group)
    return None if place.launched_by == "alone" else place


def describe(
    *functions: Callable[..., Any], place: DistributedTrainConfig | None = None, **options: Any
) -> ManagedRun:
    """Check the options of a managed run, and how they go together.

    Args:
        *functions: Make the model and the optimizers, and compute the loss.
        place: The place of this process in a launched team; ``None`` if the run starts workers.
        **options: By name.

    Raises:
        ConfigError: Names the option, its value and what to do.
        CheckpointError: There is nothing to resume from.
    """
    # None means "not given", except for the guard, for which it means none.
    given = {n: v for n, v in options.items() if v is not None or n == "divergence_guard"}
    if isinstance(config := given.get("config"), DdpConfig):
        given = {option.name: getattr(config, option.name) for option in fields(config)} | given
    run = ManagedRun(*functions, **given)
    _check_complete(run)
    choose_precision(run.precision, torch.device("cpu"))
    policy, backend = check_policy(run.policy), check_backend(run.backend).value
    run.check_policy(policy)
    if place is not None:
        if run.elastic:
            raise ConfigError(
                f"elastic is {run.elastic}, but this process is rank {place.rank} of a team that "
                f"{place.launched_by} has started; leave it out, and let evener launch --elastic "
                "MIN:MAX start the script"
            )
        # Other ranks may have written there already, and so may earlier workers.
        if place.rank == 0 and ELASTIC not in os.environ:
            _check_folders(run)
        return replace(run, policy=policy, backend=backend)
    _check_folders(run)
    devices = _elastic_devices(run) if run.elastic else run.device_names
    run.check_team(len(devices))
    if run.elastic:
        run.check_elastic()
    return replace(run, devices=devices, policy=policy, backend=backend)


def _elastic_devices(run: ManagedRun) -> tuple[str, ...]:
    """Return a device for each worker that an elastic run may have."""
    devices, most = run.device_names, run.elastic[1] if run.elastic else 0
    if devices == ("cpu",):
        return devices * most
    if len(devices) != most:
        raise ConfigError(
            f"elastic is {run.elastic}, and the run has {len(devices)} devices "
            f"({', '.join(devices)}); give as many as there may be workers, {most}, in devices"
        )
    return devices


def _check_complete(run: ManagedRun) -> None:
    missing = [name for name in ("dataset", "batch_size") if getattr(run, name) is None]
    if run.num_epochs is None and run.num_steps is None:
        missing.append("num_epochs (or num_steps)")
    if missing:
        raise ConfigError(f"the run is not complete: {', '.join(missing)} missing; give each")
    if run.num_epochs is not None and run.num_steps is not None:
        raise ConfigError(
            "num_epochs and num_steps are both given; the run has one end: give one of them"
        )
    default = {option.name: option.default for option in fields(run)}
    for name, others in _NEEDED.items():
        if getattr(run, name) != default[name] and not any(getattr(run, o) for o in others):
            needed = " or ".join(others)
            raise ConfigError(
                f"{name} has no effect without {needed}; give {needed} as well, or leave {name} out"
            )


def _check_folders(run: ManagedRun) -> None:
    resume, folder = (f and Path(f) for f in (run.resume, run.checkpoint_dir))
    if resume and not os.path.isdir(resume):  # noqa: PTH112 - False also without access
        raise CheckpointError(
            f"resume is {str(resume)!r}, and there is no such folder; give a checkpoint, or the "
            "checkpoint_dir of an earlier run"
        )
    events = run.run_folder and Path(run.run_folder) / EVENTS
    if events and not resume and events.exists() and events.stat().st_size:
        raise ConfigError(
            f"run_folder is {str(run.run_folder)!r}, which holds the events of another run; "
            "name another folder, or continue that run with resume"
        )
    if not folder or (resume and folder in (resume, resume.parent)):
        return
    if found := sorted(folder.glob("step-*")):
        raise ConfigError(
            f"checkpoint_dir is {str(folder)!r}, which holds checkpoints of another run "
            f"({found[0].name}); resume from it, or name another folder"
        )


def _is_maker(dataset: object) -> TypeGuard[Callable[[], Any]]:
    return isinstance(dataset, types.FunctionType | types.MethodType | partial) and not isinstance(
        dataset, Dataset
    )
