"""The loader of a team that makes local steps: each rank works off its own queue of batches."""

from collections import deque
from collections.abc import Generator
from typing import Any, final

from evener.data.cursor import Slice
from evener.data.loader import Pending
from evener.engine.loaders.intake import Indices
from evener.engine.loaders.planned import Feed, TeamLoader
from evener.engine.local import LocalEngine
from evener.engine.memory import MicroBatchTooLarge

_AHEAD = 3
"""Batches of the queue that are being fetched while one is computed."""


@final
class LocalLoader(TeamLoader):
    """Iterates over a map-style data set in CADENCE and ASYNC; see ``TeamLoader``.

    ``batch_size`` is the samples of one local step. A rank whose queue is empty takes part in
    windows inside ``__next__``.
    """

    def __init__(self, engine: LocalEngine, feed: Feed) -> None:
        super().__init__(engine, feed)
        self._engine = engine
        self._queued: dict[Slice, deque[tuple[int, int, Pending]]] = {}

    def _forget(self) -> None:
        self._queued.clear()

    def _train(self, permutation: Indices) -> Generator[Any, None, None]:
        engine = self._engine
        engine.limit = self._feed.max_steps
        engine.exchange_plan()
        while not engine.finished:
            piece = engine.take()
            if piece is None:
                engine.advance()
            else:
                yield from self._batch(piece, permutation)

    def _batch(self, piece: Slice, permutation: Indices) -> Generator[Any, None, None]:
        engine = self._engine
        wanted = [piece, *engine.upcoming(_AHEAD)]
        self._queued = {
            p: self._queued.get(p) or self._submit(p.epoch, range(p.start, p.stop), permutation)
            for p in wanted
        }
        micro_batches = self._queued.pop(piece)
        share = engine.open_share(len(micro_batches))
        while micro_batches:
            first, samples, pending = micro_batches.popleft()
            batch = self._received(pending)
            self._seed(engine.window, first)
            share.start_micro_batch(samples)
            try:
                yield batch
            except MicroBatchTooLarge:
                if samples == 1:
                    raise MicroBatchTooLarge(samples) from None
                # The whole batch again, which is one step whatever it is cut into.
                engine.limits.shrink(samples)
                engine.drop_share()
                self._queued.clear()
                micro_batches = self._submit(
                    piece.epoch, range(piece.start, piece.stop), permutation
                )
                share = engine.open_share(len(micro_batches))
                continue
            if share.in_micro_batch:
                raise share.not_ended()
