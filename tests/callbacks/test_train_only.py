"""The head alone is trained, and whatever ends the fit, the rest can be trained afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from federation.tiny import federation, normalised
from lightning.pytorch import Callback

from fl_lightning.callbacks.train_only import TrainHead
from fl_lightning.methods import FedAvg
from fl_lightning.methods.base import Fit


class Failing(Callback):
    runs_lean = True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("client_loop", ["lean", "trainer"])
@pytest.mark.parametrize("fails", [True, False])
def test_only_the_head_and_only_for_the_fit(fails: bool, client_loop: Any) -> None:
    loop = federation(FedAvg(rounds=1), network=normalised, client_loop=client_loop)
    start = {name: value.clone() for name, value in loop.model.state().items()}
    trained = list(loop.model.trainable())
    callbacks = (TrainHead(), *((Failing(),) if fails else ()))
    fit = Fit("model", loop.data.train("1"), start, callbacks=callbacks)
    if fails:
        with pytest.raises(OSError, match="the disk is gone"):
            loop.participant.execute(fit, 1, "1")
    else:
        assert set(loop.participant.execute(fit, 1, "1").params) <= set(trained)
        moved = [name for name, value in loop.model.state().items() if not value.equal(start[name])]
        assert moved == trained[-2:]
    assert list(loop.model.trainable()) == trained
    loop.participant.execute(Fit("model", loop.data.train("1"), start), 1, "1")
    assert all(not value.equal(start[name]) for name, value in loop.model.state().items())
