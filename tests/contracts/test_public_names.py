"""What is public is public on purpose."""

import ast
import importlib
import inspect

import pytest

import evener
from helpers.source import PACKAGE

# The interface that users may rely on (DESIGN §4). Adding a name is a decision; removing one breaks
# somebody's program and belongs into the changelog.
NAMES = """
ApplyPolicy AverageBackend BatchResult CheckpointError ClassifyConfig ClassifyPipeline
ClassifyResult CollectiveError CollectiveMismatchError CollectiveTimeoutError ConfigError
CoordinatorLostError DataError DataParallelCoordinator Ddp DdpBuilder DdpConfig DdpHandle
DistributedBackend DistributedComm DistributedRole DistributedTrainConfig DistributedTrainer
DivergenceGuard ElChe EpochContext EpochMetrics EvenerError Job JsonlSink LMBatch LaunchError
LeftOutError Member NonFiniteGradientError PeerLostError PretrainResult Progress ProtocolError
RankRecord Replicas ReplicasDifferError RunEndedError Sample Sink Task TaskResult TeamRefusedError
TrainedState TransformerTrainer UsageError UserError Verdict WindowResult WorkerError classify
pretrain record_scalar run_task shard_batches shard_files __version__
"""
PUBLIC = set(NAMES.split())


def test_all_is_the_public_interface():
    assert set(evener.__all__) == PUBLIC
    assert len(evener.__all__) == len(PUBLIC), "a name is there twice"
    assert set(dir(evener)) >= PUBLIC


def test_each_name_is_documented_and_at_home_where_it_is_said_to_be():
    for name in PUBLIC - {"__version__"}:
        value, home = getattr(evener, name), importlib.import_module(evener._MODULE_OF[name])
        assert value is getattr(home, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ == home.__name__, "name the module that defines it"
            assert inspect.getdoc(value), name


def test_type_checkers_see_the_same_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert seen == evener._MODULE_OF


def test_an_unknown_name_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="module 'evener' has no attribute 'Dpp'"):
        evener.Dpp  # noqa: B018


def test_every_exception_is_public():
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    assert {node.name for node in tree.body if isinstance(node, ast.ClassDef)} <= PUBLIC


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("hf", "Trainer TrainerMixin"),
        ("ray", "EvenerConfig join_actor load_checkpoint report report_commits"),
    ],
)
def test_the_names_of_modules_for_other_libraries_are_public_on_purpose(module, names):
    """Read, not imported: these libraries are extras."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assert {name for name in defined if not name.startswith("_")} == set(names.split())
