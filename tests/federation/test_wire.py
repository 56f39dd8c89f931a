"""Nothing crosses the wire but messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from federation.tiny import CPU, federation, normalised, task
from federation.wire import Part, recorded, replay

from fl_lightning.methods import FedAvg, FedProx, LocalOnly
from fl_lightning.methods.averaging import AveragingClient
from fl_lightning.tasks import FederatedTask

TRAINER = {**CPU, "max_epochs": 2}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build() -> FederatedTask:
    return task(normalised, adam)


def parts_of(method: Any) -> list[Part]:
    loop = federation(
        method, (6, 12), network=normalised, optimizer=adam, trainer=TRAINER, batch_size=3, validate=False
    )
    with recorded(loop, build, TRAINER) as parts:
        loop.fit()
    assert len(parts) == 2 * method.rounds
    return parts


def test_a_client_needs_its_message_its_data_and_its_memory_only() -> None:
    replay(
        [
            *parts_of(FedAvg(rounds=2)),
            *parts_of(FedAvg(rounds=2, buffers="local")),
            *parts_of(FedProx(rounds=2, mu=0.5)),
            *parts_of(LocalOnly(rounds=2)),
        ]
    )


LEAK: list[float] = []


@dataclass(frozen=True)
class LeakyClient(AveragingClient):
    """Looks at something that never crossed the wire."""

    def sent(self, update: Any, memory: Any) -> Any:
        LEAK.append(1.0)
        return {n: v + len(LEAK) for n, v in update.items()}


class Leaky(FedAvg):
    def client(self) -> LeakyClient:
        return LeakyClient()


@pytest.mark.slow
def test_the_proof_notices_a_leak() -> None:
    with pytest.raises(AssertionError, match="another reply"):
        replay(parts_of(Leaky(rounds=2)))
