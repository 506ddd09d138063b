"""What a rank trains a causal language model with: model, optimizer, schedule, and the team."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from evener.comm.base import Communicator
from evener.config.checks import AboveZero, Positive, require
from evener.config.loading import load_config
from evener.config.runs import OptimizerConfig, TaskConfig
from evener.config.settings import DdpConfig
from evener.ddp import Ddp
from evener.engine.results import Progress, WindowResult
from evener.errors import DataError, UsageError
from evener.loop.arguments import unwrap_compiled
from evener.planning.policies import ApplyPolicy
from evener.tasks.blocks import gradient_buckets
from evener.tasks.language_model import mean_loss, vocabulary_size
from evener.tasks.lm_batch import IGNORED, LMBatch
from evener.tasks.optimization import WarmupCosine, make_optimizer
from evener.tasks.trainers.accumulator import Accumulator
from evener.team.environment import DistributedTrainConfig


class _Options(TaskConfig):
    """The options of a ``TransformerTrainer``, with the checks of a run's."""

    optimizer: OptimizerConfig
    max_steps: Positive | None = None
    total_tokens: AboveZero | None = None
    schedule: Callable[[Progress], float] | None = None


@final
class TransformerTrainer:
    """Trains a causal language model batch by batch.

    ``forward_backward_batch`` accumulates, ``apply_gradients`` makes the update: of the mean loss
    over all tokens since the update before, however they were split into batches. Alone it is a
    team of one. A ``DistributedTrainer`` makes it a rank of a team: then all ranks call
    ``apply_gradients`` together, and the mean is over the tokens of all of them. Optimizer, loss
    and learning rates are those of ``evener pretrain``.

    Args:
        model: Takes ``input_ids`` and returns an object with ``logits``, as causal language models
            of transformers do.
        optimizer: Keys of a run's ``optimizer`` section, such as ``{"lr": 3e-4}``; fused AdamW with
            weight decay on matrices.
        max_steps: Optimizer steps of the run; ``None`` for no end.
        total_tokens: Tokens of the run, over all ranks, by which the learning rate rises and
            falls. Without it, by steps up to ``max_steps``; without either it is constant.
        schedule: A function of ``Progress`` that gives the factor of the learning rate, instead.
        seed: Of dropout.
        max_grad_norm: 2-norm that the mean gradient is clipped to; ``None`` does not clip.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        max_steps: As given.
        total_tokens: As given.

    Raises:
        ConfigError: An option is unknown or out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        *,
        max_steps: int | None = None,
        total_tokens: float | None = None,
        schedule: Callable[[Progress], float] | None = None,
        seed: int = 0,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        remedy = "a torch.nn.Module, such as transformers' AutoModelForCausalLM makes"
        require("model", model, nn.Module, remedy)
        self.model = model
        self.max_steps = max_steps
        self.total_tokens = total_tokens
        given = {
            "optimizer": optimizer or {},
            "max_steps": max_steps,
            "total_tokens": total_tokens,
            "schedule": schedule,
            "max_grad_norm": max_grad_norm,
        }
        chosen = load_config(_Options, given, owner="TransformerTrainer")
        self.settings, self._max_grad_norm = chosen.optimizer, chosen.max_grad_norm
        self.optimizer: AdamW = make_optimizer(model, self.settings)
        self.schedule = schedule or _schedule(self.settings, max_steps, total_tokens)
        self._seed = seed
        self._ddp: Ddp | None = None
        self._window: Accumulator | None = None

    def join_team(
        self,
        *,
        environment: DistributedTrainConfig | None = None,
        communicator: Communicator | None = None,
        config: DdpConfig | None = None,
        policy: str = ApplyPolicy.SYNC,
        **options: Any,
    ) -> Ddp:
        """Make this a rank of a team, once; all its ranks call it together.

        Gradients are exchanged block by block, and clipped as the optimizer's settings say.

        Args:
            environment: This rank's place.
            communicator: The ranks, instead of connecting to them.
            config: Further options of ``Ddp.setup``; a ``max_grad_norm`` in it takes precedence
                over the trainer's.
            policy: See ``ApplyPolicy``; ``apply_gradients`` needs ``"sync"``.
            **options: ``backend``, ``devices`` and ``precision`` of ``Ddp.setup``.

        Raises:
            UsageError: It is in a team already.
            ConfigError: See ``Ddp.setup``.
            LaunchError: The ranks did not find one another.
        """
        if self._ddp is not None:
            raise UsageError(
                "this TransformerTrainer is in a team already, or has trained alone; make a new one"
            )
        config = config or DdpConfig()
        limit = self._max_grad_norm if config.max_grad_norm is None else config.max_grad_norm
        buckets = config.gradient_buckets or gradient_buckets(unwrap_compiled(self.model))
        self._ddp = Ddp.setup(
            self.model,
            self.optimizer,
            self.schedule,
            policy=policy,
            config=replace(config, max_grad_norm=limit, gradient_buckets=buckets),
            environment=environment,
            communicator=communicator,
            **options,
        )
        return self._ddp

    @property
    def ddp(self) -> Ddp:
        """The team: for evaluation, saving and ``on_commit``. Alone, a team of one."""
        if self._ddp is None:
            return self.join_team(
                environment=DistributedTrainConfig(), config=DdpConfig(quiet=True)
            )
        return self._ddp

    @property
    def step(self) -> int:
        """Optimizer steps so far; the same on every rank."""
        return self._ddp.progress.steps if self._ddp is not None else 0

    @property
    def reached_max_steps(self) -> bool:
        """Whether ``max_steps`` updates have been made, or left out as not finite."""
        optimizer_steps = self._ddp.assembly.engine.optimizer_steps if self._ddp is not None else 0
        return self.max_steps is not None and optimizer_steps >= self.max_steps

    def backward(self, batch: LMBatch) -> Tensor:
        """Forward and backward of a micro-batch that a loader of the team has handed out.

        Returns:
            The mean loss per counted token, in nats; still on the device.
        """
        loss = mean_loss(self.model, batch, self.ddp.device)
        self.ddp.backward(loss, batch.num_tokens)
        return loss.detach()

    def forward_backward_batch(self, batch: LMBatch) -> float:
        """Add a batch's gradient to the next update; exchange nothing.

        Dropout does not draw from torch's own random numbers on the CPU, from which callers may
        draw the order of their batches: they continue as if it had not been called.

        Returns:
            The mean loss per counted token, in nats; ``nan`` where none counts.

        Raises:
            ConfigError: It is not an ``LMBatch``.
            DataError: A token is not in the model's vocabulary.
            UsageError: ``max_steps`` has been reached, or a loader of the team hands out batches.
        """
        remedy = (
            "an LMBatch(input_ids, labels), whose labels are the tokens after those of input_ids"
        )
        require("batch", batch, LMBatch, remedy)
        self._check_tokens(batch)
        random_state = torch.get_rng_state()
        window, engine = self._open_window(), self.ddp.assembly.engine
        try:
            with window.micro_batch(batch.num_sequences):
                # Dropout is drawn from what the batch is, as everywhere else.
                engine.seed_draws(self._seed, engine.window, engine.rounds.rank, window.num_batches)
                return float(self.backward(batch).item())
        finally:
            torch.set_rng_state(random_state)

    def apply_gradients(self) -> WindowResult | None:
        """Make the update; in a team, all ranks call it together.

        A rank that has accumulated nothing takes part with nothing.

        Returns:
            The update, the same on every rank; ``None`` when no rank had anything.

        Raises:
            NonFiniteGradientError: On every rank, nothing applied.
            UsageError: ``max_steps`` has been reached.
        """
        return self._open_window().close_window()

    def close(self) -> None:
        """Leave the team; the model stays usable. Idempotent."""
        if self._ddp is not None:
            self._ddp.close()

    def _check_tokens(self, batch: LMBatch) -> None:
        if batch.input_ids.device.type != "cpu" or batch.labels.device.type != "cpu":
            return  # looking would wait for the device
        if getattr(self.model, "get_input_embeddings", None) is None:
            return  # not of transformers: how many tokens it has is not known
        size = vocabulary_size(self.model)
        # A label of -100 is none; any other must be a token, as those of input_ids.
        labels = batch.labels.where(batch.labels != IGNORED, 0)
        extremes = [int(x) for x in (*batch.input_ids.aminmax(), *labels.aminmax())]
        least, largest = min(extremes), max(extremes)
        if least < 0 or largest >= size:
            raise DataError(
                f"the batch holds token {least if least < 0 else largest}, and the model has "
                f"tokens 0 to {size - 1}; use the tokenizer that belongs to the model"
            )

    def _open_window(self) -> Accumulator:
        """Where batches are accumulated; makes a team of one if this is in none."""
        if self.reached_max_steps:
            raise UsageError(
                f"max_steps is {self.max_steps}, and as many updates have been made: end the loop "
                "where reached_max_steps is true, or give more steps"
            )
        if self._window is None:
            self._window = Accumulator(self.ddp)
        return self._window


def _schedule(
    settings: OptimizerConfig, max_steps: int | None, total_tokens: float | None
) -> Callable[[Progress], float] | None:
    if total_tokens is not None:
        return WarmupCosine(settings, "weight", float(total_tokens))
    return WarmupCosine(settings, "steps", max_steps) if max_steps is not None else None
