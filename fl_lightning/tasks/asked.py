"""Models that are only asked: one network under the weights of many."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.message import Tensors
from fl_lightning.tasks.base import FederatedTask


class Asked:
    """A task whose methods can be called with other weights than its own, in evaluation mode.

    No Module: a task that holds one neither trains nor ships it, and `functional_call` leaves all buffers as they are.

    Args:
        task: Built; its own weights are never used.
        own: Keep a copy that never requires gradients, for use within a fit of the task itself.
    """

    def __init__(self, task: FederatedTask, own: bool = False) -> None:
        self._caller = _Caller(copy.deepcopy(task).requires_grad_(False) if own else task)

    @property
    def network(self) -> nn.Module:
        """What is asked, for hooks."""
        return self._caller

    def __call__(self, state: Tensors, output: str, inputs: Tensor, **options: Tensor) -> Tensor:
        """What the task's method ``output`` says to a batch under these parameters and persistent buffers; gradients flow to
        the inputs."""
        self._caller.eval()
        if any(buffer.device != inputs.device for buffer in self._caller.buffers()):
            self._caller.to(inputs.device)
        return functional_call(
            self._caller, {f"task.{name}": value for name, value in state.items()}, (output, inputs), options
        )


class _Caller(nn.Module):
    def __init__(self, task: FederatedTask) -> None:
        super().__init__()
        self.task = task

    def forward(self, output: str, inputs: Tensor, **options: Tensor) -> Tensor:
        return getattr(self.task, output)(inputs, **options)
