"""What every LightningModule of a federation shares: how it is built, loaded, stepped and asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.data.examples import DataInfo, Examples
from fl_lightning.message import cpu_copy
from fl_lightning.optim.rule_optimizer import RuleOptimizer
from fl_lightning.rules.base import LocalRule

_STEP = ("_current_fx_name", "_loss_counted", "_seen", "loss_sum", "num_losses", "lr_sum", "num_gradients")
_FIT = (
    "given",
    "examples",
    "rule",
    "criterion",
    "learning_rate",
    "lr_scale",
    "inputs_are_cached",
    "_trainer",
    "training",
)
_COUNTED = ("loss_sum", "num_losses", "lr_sum", "num_gradients")
_PLAIN = frozenset((*_STEP, *_FIT))


class Batch(NamedTuple):
    """One step's examples.

    Attributes:
        inputs: (B, ...) float32.
        labels: (B,) int64.
        scale: 1, except where several devices share a batch that does not divide evenly: then the factor that makes the
            mean over devices the mean over the batch.
        extras: Further columns of the examples, (B, ...) each: masks, soft labels. A forward pass alone (a `Predict`) takes
            them as keyword arguments.
    """

    inputs: Tensor
    labels: Tensor
    scale: float = 1.0
    extras: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Picture:
    """Small images in named rows, which a fit leaves for the record; no part of any message.

    Attributes:
        name: What is shown.
        step: Optimizer step of the fit.
        images: (N, C, H, W) uint8 on the CPU, N >= 1; C is 1 or 3.
        rows: (N,) int64, the row of each image.
        row_names: A name for every row.
    """

    name: str
    step: int
    images: Tensor
    rows: Tensor
    row_names: tuple[str, ...]


class FederatedTask(LightningModule):
    """A LightningModule that a participant loads, trains and asks.

    Attributes:
        request_seed: Of the request's owner, set by the participant: for draws beside the training, which must leave the
            global generators alone.
        pictures: What callbacks have drawn in the fit.
        examples: Those of the fit.
        resumes: Whether a killed fit can go on in its middle. A class says True in its own body, whatever its bases say:
            what a fit of it carries from step to step lies in parameters, buffers and `fit_state`.

    Args:
        optimizer: Builds the local optimizer from the trainable parameters. It is an argument of the task, not a section
            of its own, since a section's optimizer would stay bound to one copy of the parameters.
    """

    resumes = False

    def __init__(self, optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1)) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.examples: Examples | None = None
        self.given: Mapping[str, Mapping[str, Tensor]] = {}
        self.rule: LocalRule | None = None
        self.criterion: Callable[[FederatedTask, Batch], Tensor] | None = None  # in place of `loss`; a callback sets it
        self.learning_rate: float | None = None
        self.lr_scale = 1.0
        self.output = "logits"
        self.inputs_are_cached = False
        self.loss_sum = torch.zeros(())
        self.num_losses = 0
        self.lr_sum = 0.0
        self.num_gradients = 0
        self._loss_counted = False
        self.request_seed = 0
        self.pictures: list[Picture] = []

    def build(self, info: DataInfo, seed: int) -> None:
        """Make the network, once the data are known. Halves that are made from a built task have nothing to do here."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch, a scalar."""

    def example_losses(self, batch: Batch) -> Tensor:
        """Loss of every example, (B,), whose mean is `loss`, as a pure function of parameters and batch: what the
        vectorised engine needs, which refuses tasks without."""
        raise NotImplementedError(f"{type(self).__name__} has no example_losses")

    def cached(self, examples: Examples) -> Examples | None:
        """The examples with their inputs run through the part of the network that never trains, or None to use them as
        they are. Where examples are returned, ``inputs_are_cached`` is set while they are used."""
        return None

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name: what a fit changes and what `Result.params` holds."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def persistent_buffers(self) -> dict[str, Tensor]:
        """Buffers that belong to the model's state (BatchNorm statistics), by name."""
        return {
            f"{path}.{leaf}".lstrip("."): buffer
            for path, module in self.named_modules()
            for leaf, buffer in module._buffers.items()
            if buffer is not None and leaf not in module._non_persistent_buffers_set
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy values in place into the parameters and buffers of these names.

        Raises:
            KeyError: A name is unknown.
            ValueError: A shape differs.
        """
        modules = dict(self.named_modules())
        for name, value in tensors.items():
            path, _, leaf = name.rpartition(".")
            own = None
            if (module := modules.get(path)) is not None:
                own = module._parameters.get(leaf, module._buffers.get(leaf))
            if own is None:
                raise KeyError(f"{type(self).__name__} has no parameter or buffer {name!r}")
            if own.shape != value.shape:
                raise ValueError(f"{name!r} is {tuple(own.shape)} here and {tuple(value.shape)} in what is loaded")
            own.copy_(value)

    def state(self) -> dict[str, Tensor]:
        """Copies of the trainable parameters and persistent buffers, on the CPU."""
        own = {**self.trainable(), **self.persistent_buffers()}
        return {name: cpu_copy(value) for name, value in own.items()}

    def fit_state(self) -> dict[str, Any]:
        """What a fit carries from step to step beside parameters and buffers: tensors and JSON values."""
        counted = {name: getattr(self, name) for name in _COUNTED}
        return {**counted, "pictures": [vars(picture) for picture in self.pictures]}

    def load_fit_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a `fit_state`, in a fit that has just started from where that one had started."""
        for name in _COUNTED:
            setattr(self, name, state[name])
        self.pictures = [Picture(**picture) for picture in state["pictures"]]

    # ---- what Lightning calls

    def __setattr__(self, name: str, value: Any) -> None:
        # These change at every step, and nn.Module would look for parameters in them each time.
        if name in _PLAIN:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def on_fit_start(self) -> None:
        self.loss_sum, self.num_losses, self.lr_sum = torch.zeros((), device=self.device), 0, 0.0
        self.num_gradients, self.pictures = 0, []

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._loss_counted = False
        self._seen = batch

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch) if self.criterion is None else self.criterion(self, batch)
        if batch.scale != 1:
            loss = loss * batch.scale
        self.num_gradients += 1
        if not self._loss_counted:  # a rule may ask for several gradients; the batch counts once
            self.loss_sum += loss.detach()
            self.num_losses += 1
            self._loss_counted = True
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.lr_sum += optimizer.param_groups[0]["lr"]
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return getattr(self, self.output)(batch.inputs, **batch.extras)

    def setup(self, stage: str) -> None:
        # The strategy has not moved the module yet when this hook runs, but the trainer knows where it will be.
        device = self.trainer.strategy.root_device
        self.given = {
            group: {name: value.to(device) for name, value in tensors.items()} for group, tensors in self.given.items()
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        parameters = self.trainable()
        if not parameters:
            raise ValueError(f"{type(self).__name__} has no trainable parameter")
        base = self.optimizer(list(parameters.values()))
        for group in base.param_groups:
            group["lr"] = self.lr_scale * (group["lr"] if self.learning_rate is None else self.learning_rate)
        if self.rule is None:
            return base
        layers = [m for m in self.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if not layers:
            return RuleOptimizer(base, parameters, self.rule, self.given)
        return RuleOptimizer(
            base, parameters, self.rule, self.given, lambda: batch_statistics_only(layers), self._take_statistics
        )

    @torch.no_grad()
    def _take_statistics(self) -> None:
        """One more forward pass of the batch, for BatchNorm's running statistics alone."""
        with self.trainer.precision_plugin.train_step_context():
            self.loss(self._seen)

    def fit_metrics(self) -> dict[str, float]:
        """Means over the fit that just ended."""
        return {"loss": float(self.loss_sum) / max(self.num_losses, 1)}

    def export(self, path: str, half: bool = False) -> None:
        """Write the weights as they are now to a safetensors file, names as in the state dict; ``half``: as float16."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        if half:
            state = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
        save_file(state, path)

    def preprocessing(self) -> dict[str, Any]:
        """What images must look like for this task, for the checkpoint: JSON values."""
        return {}


@contextmanager
def batch_statistics_only(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    """BatchNorm layers in training mode normalise as ever, but their running statistics stay as they are."""
    for layer in layers:
        layer.track_running_stats = not layer.training
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
