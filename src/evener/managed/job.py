"""What a managed run is told: every option, checked before anything is started."""

import difflib
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from evener.config.checks import whole_number
from evener.config.settings import LOCAL_OPTIONS, DdpConfig
from evener.devices import count_accelerators
from evener.engine.schedule import ProgressSchedule
from evener.errors import CheckpointError, ConfigError
from evener.loop.precision import choose_precision
from evener.loop.reporting import SinkMaker, check_sinks
from evener.managed.metrics import EpochMetrics
from evener.observe.events import Sink
from evener.planning.guard import DivergenceGuard
from evener.planning.policies import ApplyPolicy
from evener.team.backends import check_backend, check_policy
from evener.team.environment import AverageBackend, DistributedTrainConfig
from evener.team.placement import Devices, devices_of_host

#: The loss of a micro-batch: a mean over its samples, or (mean, number of units behind it).
Loss = Tensor | tuple[Tensor, float | Tensor]
ModelFn = Callable[[torch.device], nn.Module]
OptimFn = Callable[[list[nn.Parameter]], Optimizer | Sequence[Optimizer]]
TrainFn = Callable[[Any, Any], Loss]
SchedulerFn = Callable[[Any], LRScheduler | Sequence[LRScheduler] | ProgressSchedule]


_MAKERS = {
    "model_fn": "lambda device: Model()",
    "optim_fn": "lambda params: torch.optim.AdamW(params)",
    "scheduler": "lambda optimizer: StepLR(optimizer, 10)",
}


class ManagedOptions(TypedDict, total=False):
    """Options of ``Ddp.builder`` as keywords; ``DdpBuilder``'s methods say what each means."""

    dataset: Dataset[Any] | Callable[[], Dataset[Any]]
    batch_size: int
    micro_batch_size: int | Literal["auto"]
    num_epochs: int
    num_steps: int
    devices: Devices
    policy: str | ApplyPolicy
    backend: str | AverageBackend
    precision: str
    collate_fn: Callable[[list[Any]], Any]
    num_workers: int
    scheduler: SchedulerFn
    max_grad_norm: float
    non_finite: Literal["raise", "skip"]
    checkpoint_every: int
    checkpoint_fn: Callable[[int, Any], object]
    checkpoint_dir: str | Path
    resume: str | Path
    epoch_fn: Callable[[int, Any], object]
    eval_fn: Callable[[Any], Any]
    metrics_fn: Callable[[EpochMetrics], object]
    partition_ratios: Sequence[float]
    speed_hint: Sequence[float] | Mapping[int, float]
    anchor: int
    max_anchor: int
    overhead_target: float
    max_batch_diff: int
    divergence_guard: str | bool | DivergenceGuard | None
    divergence_threshold: float
    lr_scale_ratio: float
    seed: int
    timeout_s: float
    quiet: bool
    sinks: Sequence[Sink | SinkMaker]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A managed run, complete and checked; ``devices`` has been resolved to names.

    The attributes are the options of ``ManagedOptions``; ``None`` where one was not given. Those
    of parameter averaging are in ``cadence``, as far as they were given.
    """

    model_fn: ModelFn
    optim_fn: OptimFn
    train_fn: TrainFn
    dataset: Any
    batch_size: int
    micro_batch_size: int | Literal["auto"] = "auto"
    num_epochs: int | None = None
    num_steps: int | None = None
    devices: tuple[str, ...] = ("cpu",)
    policy: str | ApplyPolicy = ApplyPolicy.SYNC
    backend: str = "auto"
    precision: str = "auto"
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    scheduler: SchedulerFn | None = None
    max_grad_norm: float | None = None
    non_finite: Literal["raise", "skip"] = "raise"
    checkpoint_every: int | None = None
    checkpoint_fn: Callable[[int, Any], object] | None = None
    checkpoint_dir: Path | None = None
    resume: Path | None = None
    epoch_fn: Callable[[int, Any], object] | None = None
    eval_fn: Callable[[Any], Any] | None = None
    metrics_fn: Callable[[EpochMetrics], object] | None = None
    partition_ratios: Sequence[float] | None = None
    speed_hint: Sequence[float] | Mapping[int, float] | None = None
    cadence: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    quiet: bool = False
    sinks: Sequence[Sink | SinkMaker] = ()
    sends_events: bool = False

    def config(self, stop_when: Callable[[], bool]) -> DdpConfig:
        """The options that ``Ddp.setup`` takes in its ``config``."""
        return DdpConfig(
            max_grad_norm=self.max_grad_norm,
            non_finite=self.non_finite,
            speed_hint=self.speed_hint,
            partition_ratios=self.partition_ratios,
            timeout_s=self.timeout_s,
            stop_when=stop_when,
            quiet=self.quiet,
            **self.cadence,
        )

    def make_dataset(self) -> Any:
        """The data set: as it was given, or made by the function that was given."""
        return self.dataset() if _is_maker(self.dataset) else self.dataset

    def parts(self) -> dict[str, Any]:
        """What travels to the workers: all but ``metrics_fn`` and ``sinks``, which stay here."""
        stays = ("metrics_fn", "sinks")
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in stays}
        return parts | {"sends_events": bool(self.sinks)}


def make_job(
    model_fn: ModelFn, optim_fn: OptimFn, train_fn: TrainFn, options: ManagedOptions
) -> Job:
    """Checks the options of a managed run, and how they go together.

    Raises:
        ConfigError: Names the option, its value and what to do.
        CheckpointError: There is nothing to resume from.
    """
    # None stands for "not given", but for the guard, where it stands for none.
    given: dict[str, Any] = {
        n: value for n, value in options.items() if value is not None or n == "divergence_guard"
    }
    _check_names(given)
    _check_functions(model_fn=model_fn, optim_fn=optim_fn, train_fn=train_fn, **given)
    _check_complete(given)
    _check_numbers(given)
    _check_folders(given)
    check_sinks(given.get("sinks", ()))
    policy = check_policy(str(given.get("policy", ApplyPolicy.SYNC)))
    choose_precision(str(given.get("precision", "auto")), torch.device("cpu"))
    _check_place()
    devices = devices_of_host(given.get("devices", "auto"), count_accelerators())
    backend = _check_backend(str(given.get("backend", "auto")), devices)
    job = Job(
        model_fn=model_fn,
        optim_fn=optim_fn,
        train_fn=train_fn,
        cadence={n: given.pop(n) for n in LOCAL_OPTIONS if n in given},
        **{**given, "devices": devices, "policy": policy, "backend": backend},
    )
    # What these check should be known before workers start.
    config = job.config(lambda: False)
    config.check_policy(policy)
    config.check_team(len(devices))
    return job


def _check_names(given: dict[str, Any]) -> None:
    known = ManagedOptions.__annotations__
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"Ddp.builder has no option {name!r}{hint}; there are: {', '.join(known)}"
            )


def _check_functions(**given: Any) -> None:
    for name, value in given.items():
        if not (name.endswith("_fn") or name == "scheduler"):
            continue
        made = {"model_fn": nn.Module, "optim_fn": Optimizer, "scheduler": LRScheduler}.get(name)
        if made is not None and isinstance(value, made):
            raise ConfigError(
                f"{name} is a {type(value).__name__} that is made already; give a function that "
                f"makes one, since each device gets its own: {_MAKERS[name]}. Ddp.setup takes what "
                "is made"
            )
        if not callable(value):
            raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}; give a function")


def _check_complete(given: dict[str, Any]) -> None:
    missing = [name for name in ("dataset", "batch_size") if name not in given]
    if "num_epochs" not in given and "num_steps" not in given:
        missing.append("num_epochs (or num_steps)")
    if missing:
        raise ConfigError(f"the run is not complete: {', '.join(missing)} missing; give each")
    for one, other, remedy in (
        ("num_epochs", "num_steps", "the run has one end: give one of them"),
        ("partition_ratios", "speed_hint", "fixed shares need no speeds: give one of them"),
    ):
        if one in given and other in given:
            raise ConfigError(f"{one} and {other} are both given; {remedy}")
    if "checkpoint_fn" in given and "checkpoint_every" not in given:
        raise ConfigError(
            "checkpoint_fn is given without checkpoint_every and would do nothing; give both"
        )
    if "checkpoint_every" in given and not {"checkpoint_fn", "checkpoint_dir"} & given.keys():
        raise ConfigError(
            "checkpoint_every is given without checkpoint_fn or checkpoint_dir and would do "
            "nothing; give one of them"
        )
    dataset = given["dataset"]
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "dataset is a DataLoader, whose batches are cut already; give its data set and options "
            "instead: dataset=loader.dataset, batch_size, collate_fn, num_workers"
        )
    if not _is_maker(dataset):
        try:
            empty = len(dataset) == 0
        except TypeError:
            raise ConfigError(
                f"dataset is a {type(dataset).__name__} without a length; give a map-style data "
                "set (__len__ and __getitem__), or a function that makes one in each worker"
            ) from None
        if empty:
            raise ConfigError("dataset is empty; give at least one sample")


def _check_numbers(given: dict[str, Any]) -> None:
    least = {
        "batch_size": 1,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "num_steps": 1,
        "checkpoint_every": 1,
        "num_workers": 0,
        "seed": 0,
    }
    for name, lowest in least.items():
        value = given.get(name, lowest)
        if name == "micro_batch_size" and value == "auto":
            continue
        if name in given:
            given[name] = whole_number(name, value, lowest)


def _check_folders(given: dict[str, Any]) -> None:
    for name in ("checkpoint_dir", "resume"):
        if name not in given:
            continue
        if not isinstance(given[name], str | Path):
            raise ConfigError(f"{name} is {given[name]!r}; give the path of a folder")
        given[name] = Path(given[name]).expanduser().absolute()
    resume, folder = given.get("resume"), given.get("checkpoint_dir")
    if resume is not None and not resume.is_dir():
        raise CheckpointError(
            f"resume is {str(resume)!r}, and there is no such folder; give a checkpoint, or the "
            "checkpoint_dir of an earlier run"
        )
    if folder is None or folder in (resume, resume and resume.parent):
        return
    if found := sorted(folder.glob("step-*")):
        raise ConfigError(
            f"checkpoint_dir is {str(folder)!r}, which holds checkpoints of another run "
            f"({found[0].name}); resume from it, or name another folder"
        )


def _check_place() -> None:
    place = DistributedTrainConfig.from_env()
    if place.world_size > 1:
        raise ConfigError(
            f"this process is rank {place.rank} of {place.world_size} already (started by "
            f"{place.launched_by}), and Ddp.builder starts workers of its own; start the script "
            "plainly with python, or use Ddp.setup"
        )


def _check_backend(name: str, devices: Sequence[str]) -> str:
    backend = check_backend(name)
    unfit = "cpu" in devices or len(set(devices)) < len(devices)
    # One device exchanges nothing, whatever the backend: the run says so when it starts.
    if backend is AverageBackend.NCCL and unfit and len(devices) > 1:
        raise ConfigError(
            f"backend is 'nccl' for the devices {', '.join(devices)}; NCCL joins CUDA devices, one "
            "rank on each: use backend='gloo' or 'auto'"
        )
    return backend.value


def _is_maker(dataset: Any) -> bool:
    return isinstance(
        dataset, types.FunctionType | types.MethodType | functools.partial
    ) and not isinstance(dataset, Dataset)
