"""Hugging Face's Trainer on unequal devices: ``from evener.hf import Trainer``.

The loop over micro-batches is evener's. Everything else is the Trainer's: arguments, collators,
``compute_loss``, callbacks, logs, evaluation and checkpoints. They meet at four places:

- ``TrainingArguments`` finds one process (Accelerate starts no process group), with this rank's
  device and number. The Trainer then computes as on one device, and only the main process writes.
- The epoch iterates over evener's loader, in the order of samples that one process would have.
- ``accelerator.backward`` is ``Ddp.backward``. ``compute_loss`` returns the mean of its
  micro-batch, whose weight is the number of its label tokens.
- Each optimizer step is committed at once, and its callbacks run then, on every rank.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, Sampler

from evener.config.settings import DdpConfig
from evener.ddp import Ddp
from evener.devices import count_accelerators
from evener.engine.loaders.dataset_arguments import is_stream
from evener.engine.loaders.evaluation import EvaluationLoader
from evener.engine.results import Progress, WindowResult
from evener.errors import ConfigError
from evener.protocol.formation import EVALUATING
from evener.team.environment import ELASTIC, DistributedTrainConfig
from evener.team.placement import choose_device, devices_of_host
from evener.team.starting import start_all_ranks

try:
    import transformers
    from accelerate.state import PartialState
    from transformers.trainer_callback import TrainerCallback, TrainerState
    from transformers.trainer_pt_utils import (
        LengthGroupedSampler,
        find_batch_size,
        nested_concat,
    )
except ImportError as error:
    raise ImportError(
        f"evener.hf needs transformers and accelerate, and {error.name or error} is missing: "
        "pip install 'evener[hf]'"
    ) from error

if not hasattr(transformers.Trainer, "_run_epoch"):
    # Otherwise each rank would train by the Trainer's loop, independently of the others.
    raise ImportError(
        "evener.hf takes the place of Trainer._run_epoch, which transformers "
        f"{transformers.__version__} does not have: pip install 'transformers>=5.23,<6'"
    )

__all__ = ["Trainer", "TrainerMixin"]

#: With these variables Accelerate would initialise a process group.
_TEAM: Final = (
    "LOCAL_RANK",
    "WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
#: Batches of the fastest rank in a round of an evaluation, whose rows are gathered together.
_EVALUATED_BATCHES: Final = 8
_Base: Any = object


# ── one process, as Transformers and Accelerate see it ───────────────────────────────────────────


@contextmanager
def _without_team() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in _TEAM if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _devices(args: Any) -> str:
    return "cpu" if args.use_cpu else "auto"


def _make_setup_devices(original: Any) -> Any:
    """Return a ``TrainingArguments._setup_devices`` that finds this rank, and one process."""

    def _setup_devices(self: Any) -> torch.device:
        with _without_team():
            original(self)
        place, state = DistributedTrainConfig.from_env(), self.distributed_state
        device = choose_device(_devices(self), place)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._n_gpu = min(self._n_gpu, 1)  # not nn.DataParallel: each GPU has its own rank
        state.device = device
        state.process_index, state.local_process_index = place.rank, max(place.local_rank, 0)
        return device

    found = functools.cached_property(functools.update_wrapper(_setup_devices, original))
    found.__set_name__(transformers.TrainingArguments, "_setup_devices")
    return found


# Users make their TrainingArguments before they make a Trainer.
transformers.TrainingArguments._setup_devices = _make_setup_devices(
    transformers.TrainingArguments._setup_devices.func
)


# ── refused options ──────────────────────────────────────────────────────────────────────────────


_WHOLE: Final = "each rank of evener holds the whole model on one device; leave it out"
#: Options that would have another effect, or none, in a team of unequal ranks: cause and remedy.
_REFUSED: Final = {
    "deepspeed": _WHOLE,
    "fsdp": _WHOLE,
    "parallelism_config": _WHOLE,
    "device_map": _WHOLE,
    "auto_find_batch_size": "one rank would start over with another batch size, and the others "
    "would not; set per_device_train_batch_size to fit the smallest device",
    "train_sampling_strategy": "it packs batches for equal ranks; use 'random'",
    "split_batches": "evener's loader splits batches, by speed; leave it and dispatch_batches out",
    "eval_use_gather_object": "ranks never unpickle data of other ranks; leave it out, and return "
    "tensors from prediction_step",
    "optim": "it updates parameters during backward, before gradients are averaged; use another "
    "optimizer, such as adamw_torch",
    "train_dataset": "a stream cannot be split by speed; give a data set with len and [index]",
    "hyperparameter_search": "its trials are drawn on one rank alone; search on one device",
    ELASTIC: "a worker that joins does not know where the Trainer is in its run; start a fixed "
    "team (evener launch --nproc N), and resume with another number of ranks",
}


def _refuse(**given: object) -> None:
    """Refuse the first of these options that is given.

    Raises:
        ConfigError: Names the value, the cause and the remedy.
    """
    for name, value in given.items():
        if value:
            raise ConfigError(f"evener.hf.Trainer: {name} is {value}, but {_REFUSED[name]}")


def _check_arguments(args: Any) -> None:
    optim = str(getattr(args.optim, "value", args.optim))
    strategy, accelerator, environ = (
        args.train_sampling_strategy,
        args.accelerator_config,
        os.environ,
    )
    _refuse(
        deepspeed=args.deepspeed or environ.get("ACCELERATE_USE_DEEPSPEED"),
        fsdp=args.fsdp or environ.get("ACCELERATE_USE_FSDP"),
        parallelism_config=args.parallelism_config,
        auto_find_batch_size=args.auto_find_batch_size,
        train_sampling_strategy=strategy == "batch_rebalance" and strategy,
        split_batches=accelerator.split_batches or accelerator.dispatch_batches,
        eval_use_gather_object=args.eval_use_gather_object,
        optim=("lomo" in optim or "layerwise" in optim) and optim,
        **{ELASTIC: environ.get(ELASTIC)},
    )


class _Order(Sampler[int]):
    """The order of samples that one process would have, which is the same on every rank."""

    is_seeded = True

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        return islice(iter(self._sampler), self._count)

    def __len__(self) -> int:
        return self._count


class _Batches(Dataset[Any]):
    """The batches of one process, as the samples of a data set."""

    def __init__(self, dataloader: DataLoader[Any], indices: Sequence[Sequence[int]]) -> None:
        self._dataset, self._indices = dataloader.dataset, indices
        self._collate = dataloader.collate_fn

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> Any:
        return self._collate([self._dataset[index] for index in self._indices[number]])


def _concatenated(parts: Sequence[Any]) -> Any:
    """Return rows of several batches; shorter ones are padded as the Trainer pads them."""
    if parts[0] is None:
        return None
    return functools.reduce(functools.partial(nested_concat, padding_index=-100), parts)


class _TrainerState:
    """Passes the Trainer's state to a rank that was parked."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        return {"state": json.dumps(dataclasses.asdict(self._trainer.state))}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self._trainer.state = TrainerState(**json.loads(state["state"]))


class TrainerMixin(_Base):  # type: ignore[misc]  # any Trainer
    """Makes a subclass of ``transformers.Trainer`` train on evener's team; list it first.

    For example ``class MyTrainer(TrainerMixin, trl.SFTTrainer): pass``. The arguments are those of
    the Trainer. ``evener.hf.Trainer`` is ``transformers.Trainer`` with it.

    Attributes:
        ddp: The team, from the start of ``train`` on.
        ddp_config: Further options of the team. Set it on the class, or before ``train``.

    Raises:
        ConfigError: An option is not possible on unequal ranks.
    """

    ddp: Any = None  # a Ddp
    ddp_config: DdpConfig = DdpConfig()

    # The Trainer's own.
    control: Any
    _created_lr_scheduler: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        data = self.train_dataset
        _refuse(
            train_dataset=is_stream(data) and type(data).__name__,
            device_map=self.is_model_parallel and self.model.hf_device_map,
        )
        place = DistributedTrainConfig.from_env()
        if place.launched_by == "alone":
            devices = devices_of_host(_devices(self.args), count_accelerators())
            start_all_ranks(devices, optional=True, quiet=self.ddp_config.quiet)
        # So the Trainer counts steps like one process whose batches have samples for all ranks.
        self._train_batch_size *= place.world_size
        self._world_size = place.world_size
        self._weight: float | None = None
        self._own_flos = self._own_tokens = 0
        #: Of the last optimizer step, for logs.
        self._newest: dict[str, float | None] = {"grad_norm": None, "learning_rate": None}
        self._hook: Any = None

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments, and let the Trainer make its Accelerator: of one process."""
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's sampler; groups by length are the same for any number of ranks."""
        sampler = super()._get_train_sampler(*args, **kwargs)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self._world_size
        return sampler

    # ── the parts of a run ───────────────────────────────────────────────────────────────────────

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        if self.ddp is not None:
            self.ddp.close()
            self.ddp = None
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.model_wrapped = model = self.accelerator.prepare_model(self.model)
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        self.ddp = self._set_up()
        self._loader = self._make_loader(train_dataloader)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return model, train_dataloader

    def _set_up(self) -> Ddp:
        args, follows_metric = self.args, isinstance(self.lr_scheduler, ReduceLROnPlateau)
        follows_metric |= type(self.lr_scheduler).__name__ == "GreedyLR"
        ddp = Ddp.setup(
            self.model,
            self.optimizer,
            None if follows_metric else self.lr_scheduler,
            devices=str(args.device),
            precision="fp16" if args.fp16 else "bf16" if args.bf16 else "fp32",
            config=dataclasses.replace(self.ddp_config, max_grad_norm=args.max_grad_norm or None),
        )
        ddp.assembly.engine.commits_at_once = True
        ddp.on_commit(self._after_step)
        ddp.register("trainer", _TrainerState(self))
        self.accelerator.backward = lambda loss, **_: ddp.backward(loss, weight=self._weight)
        if self._hook is not None:
            self._hook.remove()
        plain, callbacks = TrainerCallback.on_pre_optimizer_step, self.callback_handler.callbacks
        if any(type(one).on_pre_optimizer_step is not plain for one in callbacks):
            self._hook = self.optimizer.register_step_pre_hook(self._before_update)
        return ddp

    def _make_loader(self, dataloader: DataLoader[Any]) -> Any:
        """Return evener's loader in place of the Trainer's, at the position of ``state``."""
        args, batches = self.args, dataloader.batch_sampler
        sampler: Any = getattr(batches, "sampler", None) or dataloader.sampler
        count = len(sampler)
        if args.dataloader_drop_last:
            count -= count % self._train_batch_size
        self._order = _Order(sampler, count)
        size = self.get_total_train_batch_size(args)
        seed = args.seed if args.data_seed is None else args.data_seed
        steps, epoch_steps = self.state.global_step, -(-count // size)
        epoch, in_epoch = divmod(steps, epoch_steps)
        done = 0 if args.ignore_data_skip else in_epoch * size
        position = {"num_samples": count, "seed": seed, "epoch": epoch}
        position["committed"] = [[0, done]] if done else []
        engine = self.ddp.assembly.engine
        engine.run.positions.restore([position])
        engine.run.progress = Progress(window=steps, steps=steps)
        engine.rounds.state = engine.rounds.state._replace(window=steps)
        kept = {
            name: getattr(dataloader, name) for name in ("collate_fn", "num_workers", "pin_memory")
        }
        ordered = DataLoader(dataloader.dataset, size, sampler=self._order, **kept)
        return self.ddp.loader(
            ordered, seed=seed, micro_batch_size=args.per_device_train_batch_size
        )

    def _run_epoch(self, *, model: nn.Module, epoch: int, **run: Any) -> None:
        """Train an epoch by evener's plans: a rank has as many micro-batches as its share needs."""
        ddp, handler, opens = self.ddp, self.callback_handler, True
        self._steps_in_epoch = run["steps_in_epoch"]
        self._log_save_evaluate = functools.partial(
            self._maybe_log_save_evaluate,
            self._tr_loss,
            model=model,
            epoch=epoch,
            **{name: run[name] for name in ("trial", "ignore_keys_for_eval", "start_time")},
        )
        self.current_gradient_accumulation_steps = 1  # losses are not divided: they have weights
        self._order.epoch = epoch
        for inputs in self._loader.epoch(epoch):
            if self.control.should_epoch_stop:
                break
            if opens:
                self.control = handler.on_step_begin(self.args, self.state, self.control)
            items = self._get_num_items_in_batch([inputs], torch.device("cpu"))
            self._weight = None if items is None else float(items)
            if items is not None:
                items = items.clamp(min=1).to(self.args.device)
            self.training_step(model, inputs, items)
            self._count(inputs)
            opens = ddp.step() is not None
            if not opens:
                self.control = handler.on_substep_end(self.args, self.state, self.control)
        self.control = handler.on_epoch_end(self.args, self.state, self.control)
        self._report(is_end=True)

    def _before_update(self, *args: Any) -> None:
        handler = self.callback_handler
        self.control = handler.on_pre_optimizer_step(self.args, self.state, self.control)

    def _after_step(self, result: WindowResult) -> None:
        """Update the Trainer after an optimizer step; on every rank that is not parked."""
        ddp, state, handler = self.ddp, self.state, self.callback_handler
        if ddp.is_main_process != self.args.should_save and not self.args.save_on_each_node:
            self._follow_main()
        self.control = handler.on_optimizer_step(self.args, state, self.control)
        if math.isfinite(result.loss):
            self._tr_loss += result.loss
        state.global_step += 1
        done = -(-result.committed[1] // self.get_total_train_batch_size(self.args))
        done = min(done * self.args.gradient_accumulation_steps, self._steps_in_epoch)
        state.epoch = result.epoch + done / self._steps_in_epoch
        self.control = handler.on_step_end(self.args, state, self.control)
        self._newest = {"grad_norm": result.grad_norm, "learning_rate": result.lr}
        self._report()
        if self.control.should_training_stop:
            ddp.stop()
            self._sum("stopping (TrainerControl.should_training_stop)")

    def _follow_main(self) -> None:
        """Let another rank write and log if the main process is parked."""
        is_main, state = self.ddp.is_main_process, PartialState()
        state.process_index = 0 if is_main else max(self.ddp.rank, 1)
        self.state.is_world_process_zero = is_main

    def _report(self, *, is_end: bool = False) -> None:
        """Log, evaluate and save if that is due; all ranks call it together."""
        if is_end or self.control.should_log or self.control.should_save:
            flos, tokens = self._sum("counting operations", self._own_flos, self._own_tokens)
            self.current_flos += flos
            self.state.num_input_tokens_seen += tokens
            self._own_flos = self._own_tokens = 0
        self._log_save_evaluate(**self._newest)

    def _count(self, inputs: Mapping[str, Any]) -> None:
        self._own_flos += int(self.floating_point_ops(inputs))
        before = self.state.num_input_tokens_seen
        self._track_num_input_tokens(inputs)
        self._own_tokens += int(self.state.num_input_tokens_seen) - int(before)
        self.state.num_input_tokens_seen = before

    def _sum(self, what: str, *values: int) -> list[int]:
        """Return the sums over ranks; all present ranks call it together."""
        gathered = self.ddp.assembly.engine.collectives.ask(what, values)
        return [sum(column) for column in zip(*gathered.values(), strict=True)]

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loader; in a team one that hands out each sample once."""
        return self._divided(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loader; in a team one that hands out each sample once."""
        return self._divided(super().get_test_dataloader(*args, **kwargs))

    def _divided(self, dataloader: DataLoader[Any]) -> Any:
        """Return a loader that hands out whole batches of one process, several in a round."""
        args, team, batches = self.args, self._world_size, dataloader.batch_sampler
        needs_one = args.batch_eval_metrics or "inputs" in args.include_for_metrics
        if self.ddp is None or team == 1 or is_stream(dataloader) or needs_one or batches is None:
            return dataloader
        whole = _Batches(dataloader, list(batches))
        if len(whole) < team:
            return dataloader
        size, workers = max(team, _EVALUATED_BATCHES), args.dataloader_num_workers
        loader = self.ddp.eval_loader(whole, batch_size=size, collate_fn=list, num_workers=workers)
        loader.dataset = dataloader.dataset  # the Trainer reads its length
        return loader

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate, in a team each rank its part; then every rank has the rows of all."""
        if not isinstance(dataloader, EvaluationLoader) or self.ddp is None:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        ddp, step, num_rows = self.ddp, self.prediction_step, 0

        def predict(model: nn.Module, batches: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal num_rows
            found, num_rows = [], 0
            for batch in batches:
                with ddp.emulated_slowness():
                    loss, *rows = step(model, batch, *args, **kwargs)
                size = find_batch_size(batch)
                num_rows += size
                found.append([None if loss is None else loss.repeat(size), *rows])
            return [_concatenated(parts) for parts in zip(*found, strict=True)]

        def gather(values: Any) -> Any:
            # evaluation_loop repeats the loss, which here has a row for each sample already.
            return ddp.gather(tree_map(lambda rows: rows[:num_rows], values))

        self.__dict__.update(prediction_step=predict, gather_function=gather)
        self.accelerator.__dict__["pad_across_processes"] = self._pad
        try:
            with ddp.assembly.engine.team.in_phase(EVALUATING):
                return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            del self.__dict__["prediction_step"], self.accelerator.__dict__["pad_across_processes"]

    def _pad(self, values: Any, dim: int = 0, pad_index: int = 0) -> Any:
        """Pad tensors to the longest of all ranks; all call it together."""
        ddp = self.ddp

        def pad(rows: Tensor) -> Tensor:
            if rows.dim() <= dim:
                return rows
            longest = int(ddp.gather(torch.tensor([rows.shape[dim]])).max())
            behind = [0, 0] * (rows.dim() - 1 - dim)
            return F.pad(rows, [*behind, 0, longest - rows.shape[dim]], value=pad_index)

        return tree_map(pad, values)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save; ranks that write do so first, then all continue."""
        written = "writing the Trainer's checkpoint"
        # Optimizer state may be divided among ranks, which must gather it together.
        whole, kept = self.optimizer.state_dict(), self.optimizer.__dict__.get("state_dict")
        self.optimizer.__dict__["state_dict"] = lambda: whole
        try:
            if not self.args.should_save:
                self._sum(written)
            with self.ddp.assembly.engine.team.in_phase("saving"):
                super()._save_checkpoint(model, trial)
            if self.args.should_save:
                self._sum(written)
        finally:
            del self.optimizer.__dict__["state_dict"]
            if kept is not None:
                self.optimizer.__dict__["state_dict"] = kept

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks have one file: evener derives its random numbers
            super()._save_rng_state(output_dir)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search on one rank; refused in a team."""
        team = f"called on {self._world_size} ranks"
        _refuse(hyperparameter_search=team if self._world_size > 1 else None)
        return super().hyperparameter_search(*args, **kwargs)


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]  # has no types
    """``transformers.Trainer`` on evener's team; see ``TrainerMixin``."""
