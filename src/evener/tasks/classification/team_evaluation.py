"""Held-out texts classified by the whole team."""

import time
from collections.abc import Sequence

import torch

from evener.ddp import Ddp
from evener.planning.apportion import apportion
from evener.tasks.classification.encoding import Encoded, EncodedSamples
from evener.tasks.classification.metrics import Evaluation, add_confusions
from evener.tasks.classification.pipeline import ClassifyPipeline

_PIECE = 64


def evaluate_team(
    ddp: Ddp, pipeline: ClassifyPipeline, data: EncodedSamples, shares: Sequence[int]
) -> tuple[Evaluation, float] | None:
    """Classifies held-out texts, each on one rank; all ranks call it together.

    Args:
        ddp: The team.
        pipeline: This rank's classifier.
        data: The held-out texts, the same on every rank.
        shares: Relative amounts of work by rank; zeros are an equal split.

    Returns:
        The same on every rank, and the seconds it took here; ``None`` when a rank was told to stop.
    """
    split = apportion(len(data), shares if sum(shares) else [1] * ddp.world_size)
    first = sum(split[: ddp.rank])
    stop = first + split[ddp.rank]
    own: list[Encoded] = []
    logits = [pipeline.judge([])]
    began_s = time.perf_counter()
    for start in range(first, stop, _PIECE):
        if ddp.wants_stop():
            break
        with ddp.emulated_slowness():
            piece = [data[i] for i in range(start, min(start + _PIECE, stop))]
            logits.append(pipeline.judge(piece))
        own += piece
    part = pipeline.compare(own, torch.cat(logits))
    loss = ddp.weighted_mean(part.loss, pipeline.weight_of([label for _, label in own]))
    if ddp.stopping:
        return None
    parts = ddp.assembly.engine.team.introduce({"confusion": part.confusion})
    whole = add_confusions([other["confusion"] for other in parts])
    return Evaluation(loss=loss, confusion=whole), time.perf_counter() - began_s
