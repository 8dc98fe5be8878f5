"""No-op model: a model that computes nothing, to measure what the loop and its data cost without one.

It has one parameter, and outputs of 0 in the shapes of those of the model: the model itself runs on the meta device,
which has no numbers.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pure_loop._internal.pytree import Batch, Outputs
from pure_loop.algorithm import Algorithm
from pure_loop.algorithms._surgery import copied, surgery
from pure_loop.data.batch import map_tensors, tensors_in
from pure_loop.ranges import checked

__all__ = ["NoOp", "apply_no_op_model", "no_op_model"]

SERVES = "no model"
_MOST_KNOWN = 64


class NoOp(nn.Module):
    """A module with one parameter and outputs of 0 in the shapes and dtypes of those of another module.

    Args:
        module: the other one. It is not trained, and not a submodule.

    >>> net = NoOp(nn.Linear(2, 3))
    >>> net(torch.ones(4, 2)).shape, len(list(net.parameters()))
    (torch.Size([4, 3]), 1)
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        tensor = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), torch.zeros(1))
        self.weight = nn.Parameter(torch.ones(1, device=tensor.device, dtype=tensor.dtype))
        # In a tuple, so that it is no submodule.
        self.shape_of = (copy.deepcopy(module).to("meta"),)
        # Outputs without numbers by shapes and dtypes of inputs: torch takes longer for shapes than a small model does
        # for numbers.
        self.known: dict[object, Outputs] = {}

    def forward(self, *args: Batch, **kwargs: Batch) -> Outputs:
        """What the module takes; what it returns, with 0 in each tensor."""
        key = None
        if all(type(item) is Tensor for item in (*args, *kwargs.values())):
            tensors = [(item.shape, item.dtype) for item in (*args, *kwargs.values())]
            key = (self.training, tuple(kwargs), *tensors)
        outputs = self.known.get(key)
        if outputs is None:
            outputs = self._shapes(args, kwargs)
            if key is not None:
                if len(self.known) >= _MOST_KNOWN:
                    self.known.clear()  # of text, each batch may have another length
                self.known[key] = outputs

        def zeros(tensor: Tensor) -> Tensor:
            empty = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.weight.device)
            return empty * self.weight.sum().to(tensor.dtype) if tensor.is_floating_point() else empty

        return map_tensors(zeros, outputs) if tensors_in(outputs) else outputs

    def _shapes(self, args: tuple[Batch, ...], kwargs: dict[str, Batch]) -> Outputs:
        module = self.shape_of[0]
        if module.training != self.training:
            module.train(self.training)
        with torch.no_grad():
            return module(*map_tensors(_on_meta, args), **map_tensors(_on_meta, kwargs))


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def apply_no_op_model(module: nn.Module) -> nn.Module:
    """A module that computes nothing in the place of another one, which stays as it was.

    Raises:
        ArgumentTypeError: not a module.

    >>> apply_no_op_model(nn.Linear(2, 3))(torch.ones(1, 2))
    tensor([[0., 0., 0.]], grad_fn=<MulBackward0>)
    """
    return NoOp(copied(module, "apply_no_op_model"))


@checked
def no_op_model(*, name: str = "no_op_model") -> Algorithm:
    """A model that computes nothing in the place of the model, put there at INIT.

    What is left of a run is the time of the dataloader, of the loop, of algorithms and callbacks: ``pl.profile`` shows
    which. The loss is that of outputs of 0. A forward that reads numbers of its tensors does not run on the meta
    device.

    Args:
        name: another one, if there are several.

    Raises:
        ArgumentTypeError: a name that is no text.

    >>> import pure_loop as pl
    >>> data = [(torch.ones(4, 2), torch.full((4, 1), 3.0))]
    >>> state = pl.run(pl.fit(nn.Linear(2, 1), data, loss=nn.functional.mse_loss, optimizer=pl.optim.sgd(lr=0.1),
    ...                       max_duration="1ep", algorithms=[no_op_model()]))
    >>> dict(state.params)
    {'weight': tensor([1.])}
    """
    return surgery(apply_no_op_model, **locals())
