"""A model that computes nothing, in real training loops."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor, nn

import pure_loop as pl
from pure_loop import Event
from pure_loop.algorithms import apply_no_op_model, no_op_model
from tests.support.runs import convnet, images, mlp, points, stream, train


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        scores = self.net(x)
        return {"logits": scale * scores, "classes": scores.argmax(1)}


def test_outputs_have_the_shapes_of_the_models() -> None:
    outputs = apply_no_op_model(Named())(torch.ones(5, 4), scale=2.0)
    assert outputs["logits"].shape == (5, 3)
    assert outputs["classes"].dtype is torch.int64
    assert not outputs["logits"].any()
    assert outputs["logits"].requires_grad
    module = pickle.loads(pickle.dumps(apply_no_op_model(mlp())))
    assert module(torch.ones(2, 4)).shape == (2, 3)


def test_any_loss_and_its_own_metrics() -> None:
    for model, data in ((mlp(), points()), (convnet(), images())):
        losses = [state.loss for event, state in stream(model, data, [no_op_model()]) if event is Event.BATCH_END]
        torch.testing.assert_close(torch.stack(losses), torch.full((6,), torch.log(torch.tensor(3.0))))
    state = train(mlp(), points(), [no_op_model()], evaluators={"val": points()})
    assert list(state.params) == ["weight"]
    assert state.metrics["val"]["loss"].isfinite()
    assert pl.State.create(mlp()).params.keys() != state.params.keys()


def test_the_model_behind_it_evaluates_where_it_does() -> None:
    module = apply_no_op_model(nn.Sequential(nn.BatchNorm1d(3)))
    assert module.eval()(torch.ones(1, 3)).shape == (1, 3)  # one sample is too few in training
