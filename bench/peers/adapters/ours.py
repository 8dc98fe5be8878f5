"""pure_loop itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import pure_loop as pl
from bench.peers.legs import Leg, Params, Step, Way, batch_trained, hooks
from bench.peers.problem import BATCH, LR, Network, loaders, step_data
from pure_loop import Event

__all__ = ["ADAPTER"]


class _Reads(pl.Callback):
    def batch_end(self, state: pl.State, logger: Any) -> None:
        sum(float(tensor.norm()) for tensor in state.params.values())


class PureLoop:
    name = "pure_loop"
    packages = ("pure_loop",)
    ways = (Way("pl.save and pl.load"),)
    step_ways = (Way("microbatch_size"),)

    def train(self, leg: Leg) -> Params:
        train, val = loaders(Leg(generators=leg.generators))
        path = Path(leg.folder) / "state.safetensors"
        interval = f"{leg.evaluate}ba" if isinstance(leg.evaluate, int) else "1ep"
        stream = pl.fit(
            pl.load(path, model=Network()) if leg.resume else Network(),
            train,
            loss=torch.nn.functional.cross_entropy,
            optimizer=pl.optim.adamw(lr=LR),
            max_duration=f"{leg.epochs}ep",
            microbatch_size=BATCH // leg.accumulate,
            evaluators={"val": val} if leg.evaluate else None,
            eval_interval=interval,
            callbacks=[_Reads()] if leg.observe else [],
        )
        saves = Event.EPOCH_CHECKPOINT if leg.kill_after in (5, 10) else Event.BATCH_CHECKPOINT
        for event, state in stream:
            if event is Event.BATCH_START:
                batch_trained(leg)
            if leg.log:
                hooks.append(event.name)
            if event is saves and state.timestamp.batch == leg.kill_after:
                pl.save(state, path)
        return state.params

    def step(self, step: Step) -> Params:
        stream = pl.fit(
            Network(dropout=0.0),
            [step_data(step)],
            loss=torch.nn.functional.cross_entropy,
            optimizer=pl.optim.sgd(lr=0.1),
            max_duration="1ba",
            microbatch_size=4 if step.split else None,
        )
        return pl.run(stream).params


ADAPTER = PureLoop()
