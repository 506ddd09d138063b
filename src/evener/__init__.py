"""Data-parallel PyTorch training on unequal devices.

Each device works at its own speed, and the result is that of one device. ``import evener`` does not
import torch: the module of a public name is imported when the name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from evener.version import __version__

if TYPE_CHECKING:
    from evener.config.runs import ClassifyConfig as ClassifyConfig
    from evener.config.settings import DdpConfig as DdpConfig
    from evener.ddp import Ddp as Ddp
    from evener.engine.results import Progress as Progress
    from evener.engine.results import WindowResult as WindowResult
    from evener.errors import CheckpointError as CheckpointError
    from evener.errors import CollectiveError as CollectiveError
    from evener.errors import CollectiveMismatchError as CollectiveMismatchError
    from evener.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from evener.errors import ConfigError as ConfigError
    from evener.errors import CoordinatorLostError as CoordinatorLostError
    from evener.errors import DataError as DataError
    from evener.errors import EvenerError as EvenerError
    from evener.errors import LaunchError as LaunchError
    from evener.errors import LeftOutError as LeftOutError
    from evener.errors import NonFiniteGradientError as NonFiniteGradientError
    from evener.errors import PeerLostError as PeerLostError
    from evener.errors import ProtocolError as ProtocolError
    from evener.errors import ReplicasDifferError as ReplicasDifferError
    from evener.errors import RunEndedError as RunEndedError
    from evener.errors import TeamRefusedError as TeamRefusedError
    from evener.errors import UsageError as UsageError
    from evener.errors import UserError as UserError
    from evener.errors import WorkerError as WorkerError
    from evener.managed.builder import DdpBuilder as DdpBuilder
    from evener.managed.epoch_metrics import EpochContext as EpochContext
    from evener.managed.epoch_metrics import EpochMetrics as EpochMetrics
    from evener.managed.epoch_metrics import record_scalar as record_scalar
    from evener.managed.handle import DdpHandle as DdpHandle
    from evener.managed.trained import TrainedState as TrainedState
    from evener.manual import Replicas as Replicas
    from evener.observe.events import Sink as Sink
    from evener.observe.jsonl import JsonlSink as JsonlSink
    from evener.planning.elche import ElChe as ElChe
    from evener.planning.guard import DivergenceGuard as DivergenceGuard
    from evener.planning.guard import Verdict as Verdict
    from evener.planning.policies import ApplyPolicy as ApplyPolicy
    from evener.planning.report import RankRecord as RankRecord
    from evener.tasks.classification.command import classify as classify
    from evener.tasks.classification.coordinator import BatchResult as BatchResult
    from evener.tasks.classification.coordinator import (
        DataParallelCoordinator as DataParallelCoordinator,
    )
    from evener.tasks.classification.pipeline import ClassifyPipeline as ClassifyPipeline
    from evener.tasks.classification.samples import Sample as Sample
    from evener.tasks.job import Job as Job
    from evener.tasks.job import Task as Task
    from evener.tasks.job import run_task as run_task
    from evener.tasks.lm_batch import LMBatch as LMBatch
    from evener.tasks.pretraining import pretrain as pretrain
    from evener.tasks.run_results import ClassifyResult as ClassifyResult
    from evener.tasks.run_results import PretrainResult as PretrainResult
    from evener.tasks.run_results import TaskResult as TaskResult
    from evener.tasks.trainers.distributed import DistributedTrainer as DistributedTrainer
    from evener.tasks.trainers.distributed_comm import DistributedComm as DistributedComm
    from evener.tasks.trainers.sharding import shard_batches as shard_batches
    from evener.tasks.trainers.sharding import shard_files as shard_files
    from evener.tasks.trainers.transformer import TransformerTrainer as TransformerTrainer
    from evener.team.environment import AverageBackend as AverageBackend
    from evener.team.environment import DistributedBackend as DistributedBackend
    from evener.team.environment import DistributedRole as DistributedRole
    from evener.team.environment import DistributedTrainConfig as DistributedTrainConfig
    from evener.team.members import Member as Member

# Public name -> the module that defines it. To add a name: here, in the block above (for type
# checkers and editors), and in tests/contracts/test_public_names.py.
_MODULE_OF: Final = {
    "ApplyPolicy": "evener.planning.policies",
    "AverageBackend": "evener.team.environment",
    "BatchResult": "evener.tasks.classification.coordinator",
    "CheckpointError": "evener.errors",
    "ClassifyConfig": "evener.config.runs",
    "ClassifyPipeline": "evener.tasks.classification.pipeline",
    "ClassifyResult": "evener.tasks.run_results",
    "CollectiveError": "evener.errors",
    "CollectiveMismatchError": "evener.errors",
    "CollectiveTimeoutError": "evener.errors",
    "ConfigError": "evener.errors",
    "DataError": "evener.errors",
    "DataParallelCoordinator": "evener.tasks.classification.coordinator",
    "Ddp": "evener.ddp",
    "DdpBuilder": "evener.managed.builder",
    "DdpConfig": "evener.config.settings",
    "DdpHandle": "evener.managed.handle",
    "DistributedBackend": "evener.team.environment",
    "DistributedComm": "evener.tasks.trainers.distributed_comm",
    "DistributedRole": "evener.team.environment",
    "DistributedTrainConfig": "evener.team.environment",
    "DistributedTrainer": "evener.tasks.trainers.distributed",
    "DivergenceGuard": "evener.planning.guard",
    "ElChe": "evener.planning.elche",
    "EpochContext": "evener.managed.epoch_metrics",
    "EpochMetrics": "evener.managed.epoch_metrics",
    "EvenerError": "evener.errors",
    "Job": "evener.tasks.job",
    "JsonlSink": "evener.observe.jsonl",
    "LMBatch": "evener.tasks.lm_batch",
    "LaunchError": "evener.errors",
    "Member": "evener.team.members",
    "NonFiniteGradientError": "evener.errors",
    "PeerLostError": "evener.errors",
    "PretrainResult": "evener.tasks.run_results",
    "Progress": "evener.engine.results",
    "ProtocolError": "evener.errors",
    "RankRecord": "evener.planning.report",
    "Replicas": "evener.manual",
    "ReplicasDifferError": "evener.errors",
    "Sample": "evener.tasks.classification.samples",
    "Sink": "evener.observe.events",
    "Task": "evener.tasks.job",
    "TaskResult": "evener.tasks.run_results",
    "TrainedState": "evener.managed.trained",
    "TransformerTrainer": "evener.tasks.trainers.transformer",
    "UsageError": "evener.errors",
    "UserError": "evener.errors",
    "Verdict": "evener.planning.guard",
    "WindowResult": "evener.engine.results",
    "CoordinatorLostError": "evener.errors",
    "LeftOutError": "evener.errors",
    "RunEndedError": "evener.errors",
    "TeamRefusedError": "evener.errors",
    "WorkerError": "evener.errors",
    "classify": "evener.tasks.classification.command",
    "pretrain": "evener.tasks.pretraining",
    "record_scalar": "evener.managed.epoch_metrics",
    "run_task": "evener.tasks.job",
    "shard_batches": "evener.tasks.trainers.sharding",
    "shard_files": "evener.tasks.trainers.sharding",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'evener' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
