"""Other systems at the same task, by their own public interfaces: rounds of federated averaging, evaluation off.

Each function gives what runs one round more, after whatever the system does once. Nothing here is needed by the package.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Round = Callable[[], object]


def pfl_rounds(network: nn.Module, inputs: Tensor, labels: Tensor, clients: int, batch: int) -> Round:
    """pfl's simulated backend: all clients in every round, one epoch each over the same examples in their order.

    Args:
        network: Trained in place.
        inputs: (N, C, H, W) of every client.
        labels: (N,).
        clients: Clients of a round.
        batch: Examples of a step.
    """
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.network((x - 0.5) / 0.5), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict:
            return {}

    users = [str(number) for number in range(clients)]
    data = {user: PyTorchTensorDataset((inputs, labels), user_id=user) for user in users}
    federated = FederatedDataset(data.__getitem__, get_user_sampler("minimize_reuse", users))
    model = Classifier()
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    algorithm, backend = FederatedAveraging(), SimulatedBackend(federated, federated)
    training = NNTrainHyperParams(local_batch_size=batch, local_num_epochs=1, local_learning_rate=0.1)
    done = 0

    def another() -> None:
        nonlocal done
        done += 1
        # Evaluation would come in iteration 0 as well, which is a warm-up.
        rounds = NNAlgorithmParams(
            central_num_iterations=done, evaluation_frequency=10**9, train_cohort_size=clients, val_cohort_size=0
        )
        algorithm.run(rounds, backend, wrapped, training, None, [], send_metrics_to_platform=False)

    another()
    return another


def flower_round_seconds(
    make: Callable[[], nn.Module], inputs: Tensor, labels: Tensor, clients: int, batch: int, rounds: int
) -> list[float]:
    """Flower's simulation (its default backend, Ray, one CPU a client): seconds on the clock between one round's
    aggregation and the next one's, so that its start and its first round are not in it.

    Args:
        make: Makes the network.
        inputs: (N, C, H, W) of every client.
        labels: (N,).
        clients: Clients of a round.
        batch: Examples of a step.
        rounds: Rounds to take the time of, at least 1.
    """
    import os
    import time

    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server, ends = ClientApp(), ServerApp(), list[float]()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in torch.randperm(len(labels)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model((inputs[rows] - 0.5) / 0.5), labels[rows]).backward()
            optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
        return Message(RecordDict(content), reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, *arguments, **options):
            result = super().aggregate_train(*arguments, **options)
            ends.append(time.perf_counter())
            return result

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        strategy.start(grid, ArrayRecord(make().state_dict()), num_rounds=rounds + 1)

    resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, clients, backend_config=resources)
    return [after - before for before, after in pairwise(ends)]
