"""FederatedFactory: one upload, a balanced world, peers, exact forgetting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation.tiny import CPU, examples, federation, numbers, same
from federation.tiny import task as classifier
from federation.wire import recorded, replay
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from fl_lightning.callbacks.generator_pretraining import GeneratorPretraining
from fl_lightning.data.bank import Bank, Provenance, quotas
from fl_lightning.data.examples import Concatenated, TensorExamples
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.participant import Participant, ServerSide
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.state import CheckpointFolder, digest
from fl_lightning.message import Message
from fl_lightning.methods import FedAvg, FederatedFactory
from fl_lightning.methods.base import Fit, Predict, Training
from fl_lightning.methods.federated_factory import FactoryClient, wanted
from fl_lightning.models.edm2 import EDM2UNet
from fl_lightning.synthesis.samplers import sample_seeds
from fl_lightning.tasks.base import FederatedTask
from fl_lightning.tasks.diffusion import DiffusionTask
from fl_lightning.tasks.ensemble import EXPERT, EnsembleTask
from fl_lightning.tasks.generator import CVAETask, GaussianTask, GeneratorTask

SIZES = (9, 12, 7)


def linear(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, num_classes))


def factory(mode: Any = "server", generator: GeneratorTask | None = None, **options: Any) -> FederatedFactory:
    return FederatedFactory(
        mode,
        generator or GaussianTask(),
        Training(4, 4),
        samples_per_class=7,
        classifier=Training(6, 4, cosine=True),
        **options,
    )


def run(
    method: FederatedFactory, folder: Path | None = None, checkpoint: Path | None = None, **options: Any
) -> FederationLoop:
    loop = federation(method, SIZES, network=linear, data_options={"dtype": torch.float32}, **options)
    loop.fit(folder, checkpoint)
    return loop


def held(loop: FederationLoop) -> dict[str, dict[int, int]]:
    """Training images by client and class."""
    found = {}
    for client in loop.info.clients:
        labels = loop.data.train(client).labels
        found[client] = {label: int((labels == label).sum()) for label in labels.unique().tolist()}
    return found


# ---- generators that are no diffusion


def test_gaussian_factory_is_the_mean_and_covariance_of_its_images() -> None:
    task, data = GaussianTask(), examples(40, 3, torch.float32)
    data.inputs = (data.inputs * 0.1 + 0.5).clamp(0, 1)
    from federation.tiny import data as module

    task.build(module((4,)).info, 0)
    worker = Participant({"generator": task}, CPU, 7, 0)
    result = worker.execute(Fit("generator", data, overrides={"max_epochs": 3}), 1, "0")
    pixels = data.inputs.flatten(1).double()
    shipped = task.shipped({**result.params, **result.buffers})
    torch.testing.assert_close(shipped["total"] / shipped["count"], pixels.mean(0))
    covariance = shipped["outer"] / shipped["count"] - torch.outer(pixels.mean(0), pixels.mean(0))
    torch.testing.assert_close(covariance, torch.cov(pixels.T, correction=0))
    assert int(shipped["count"]) == 40  # three epochs are one look
    seeds = sample_seeds(0, "0", 1, range(4000))
    drawn = worker.execute(
        Predict("generator", TensorExamples(seeds, torch.ones(4000)), shipped, output="sample"), 1, "0"
    ).outputs
    assert drawn is not None
    torch.testing.assert_close(drawn.flatten(1).double().mean(0), pixels.mean(0), rtol=0, atol=0.01)
    torch.testing.assert_close(torch.cov(drawn.flatten(1).double().T), covariance, rtol=0.3, atol=1e-3)
    few = task.sample(seeds[5:9])
    assert torch.equal(few, drawn[5:9])  # whichever others are drawn beside


def test_cvae_learns_to_draw_what_it_is_told() -> None:
    from federation.tiny import data as module

    dark, light = torch.full((30, 1, 2, 2), 0.1), torch.full((30, 1, 2, 2), 0.9)
    data = TensorExamples(torch.cat([dark, light]), torch.arange(2).repeat_interleave(30))
    task = CVAETask(latent=2, hidden=(16,), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    task.build(module((4,)).info, 0)
    worker = Participant({"generator": task}, CPU, 60, 0)
    first = worker.execute(Fit("generator", data, task.fresh(0, "0")), 1, "0").metrics["loss"]
    result = worker.execute(Fit("generator", data, overrides={"max_epochs": 200}), 2, "0")
    assert result.metrics["loss"] < first
    shipped = task.shipped(result.params)
    assert {name.split(".")[0] for name in shipped} == {"decoder"}
    drawn = task.sample(sample_seeds(0, "0", 0, range(8)), torch.tensor([0, 1] * 4))
    assert float(drawn[::2].mean()) < 0.3 < 0.7 < float(drawn[1::2].mean())


# ---- quotas and bank


def test_quotas_sum_and_are_proportional_within_one() -> None:
    assert quotas({"a": 30, "b": 10}, 10) == {"a": 7, "b": 3}  # 7.5 and 2.5: the rest goes to the smallest
    for counts in ({"a": 5, "b": 3, "c": 1}, {"a": 1}, {"a": 0, "b": 7, "c": 7}):
        for total in (0, 1, 10, 101):
            shares = quotas(counts, total)
            assert sum(shares.values()) == total
            assert all(abs(shares[k] - total * n / sum(counts.values())) <= 1 for k, n in counts.items())
    with pytest.raises(ValueError, match="at least one must be above 0"):
        quotas({"a": 0}, 3)


def test_the_plan_is_balanced_whoever_owns_a_class() -> None:
    plan = wanted({0: {"a": 1, "b": 1}, 1: {"b": 1}}, {"a": {0: 30}, "b": {0: 10, 1: 5}, "c": {2: 9}}, 8)
    assert plan == [(0, "a", 6), (0, "b", 2), (1, "b", 8)]  # c sent no factory of class 2


def test_a_bank_knows_the_origin_of_every_image_and_comes_back() -> None:
    parts = [(Provenance("3", 1, (0, 1)), torch.rand(2, 1, 2, 2)), (Provenance("5", 0, (4,)), torch.rand(1, 1, 2, 2))]
    bank = Bank(parts)
    assert bank.labels.tolist() == [1, 1, 0]
    assert bank.inputs.dtype == torch.uint8
    again = Bank.from_state(bank.state_dict())
    assert again.provenance == bank.provenance
    assert torch.equal(again.inputs, bank.inputs)
    with pytest.raises(ValueError, match="has 2 indices for 1 images"):
        Bank([(Provenance("3", 1, (0, 1)), torch.rand(1, 1, 2, 2))])
    with pytest.raises(ValueError, match="no images"):
        Bank([])


# ---- server mode


@pytest.mark.parametrize("generator", [GaussianTask, lambda: CVAETask(hidden=(8,))], ids=["per class", "per client"])
def test_server_mode_uploads_once_and_trains_on_a_balanced_bank(generator: Any) -> None:
    method = factory(generator=generator())
    loop = run(method)
    assert [row.get("comm/bytes_up", 0.0) > 0 for row in loop.history] == [False, True, False]
    assert [row["round/clients"] for row in loop.history[1:]] == [3, 0]
    assert method.held == held(loop)
    assert method.bank is not None
    assert torch.bincount(method.bank.labels).tolist() == [7, 7, 7]
    for origin in method.bank.provenance:
        assert origin.label in method.held[origin.client]
    assert not same(method.model, method.initial)
    plain = federation(FedAvg(1), SIZES, network=linear, data_options={"dtype": torch.float32})
    assert same(dict(method.initial), plain.method.state())  # type: ignore[attr-defined]  # it starts where the seed says


def test_the_bank_is_drawn_again_bit_for_bit_from_the_uploaded_bytes() -> None:
    method = factory()
    loop = run(method)
    assert method.bank is not None
    server = ServerSide(loop.participant, 7)  # in another round, in another order
    offset = len(method.bank)
    for label, client, count in reversed(method.plan()):
        offset -= count
        again = Bank([(Provenance(client, label, tuple(range(count))), method.draw(server, label, client, count))])
        assert torch.equal(again.inputs, method.bank.inputs[offset : offset + count])


def test_a_client_never_reads_anothers_images_and_factories_do_not_depend_on_company() -> None:
    alone = factory(without=["1", "2"])
    together = factory()
    run(alone)
    run(together)
    assert same(alone.factories["0"], together.factories["0"])
    assert set(alone.factories) == {"0"}


@pytest.mark.parametrize("mode", ["server", "peer"])
def test_trainings_see_their_clients_images_alone_and_only_scores_see_the_test_set(mode: Any) -> None:
    method = factory(mode)
    loop = federation(method, SIZES, network=linear, data_options={"dtype": torch.float32})
    whole = loop.data.source.splits
    clients = {client: loop.data.train(client) for client in loop.info.clients}
    read: dict[str, list[int]] = {client: [] for client in clients}
    execute, evaluate, judging = loop.participant.execute, loop.evaluate, [False]
    fetch, guarded = whole.test.fetch, []

    def watched(request: Any, *owner: Any) -> Any:
        if isinstance(request, Fit) and owner[1] != "server":
            parts = request.data.parts[:1] if isinstance(request.data, Concatenated) else [request.data]
            assert all(part.source is whole.train for part in parts)
            read[owner[1]] += [int(i) for part in parts for i in part.indices]
        return execute(request, *owner)

    def only_while_judging(indices: Tensor) -> Tensor:
        assert judging[0], "a test image was looked at outside of an evaluation"
        guarded.append(len(indices))
        return fetch(indices)

    def judge(**options: Any) -> dict[str, float]:
        judging[0] = True
        row = evaluate(**options)
        judging[0] = False
        return row

    loop.participant.execute, loop.evaluate = watched, judge  # type: ignore[method-assign]
    whole.test.fetch = only_while_judging
    loop.fit()
    assert guarded
    for client, data in clients.items():  # all of its own (as an expert once more), nothing of another's
        assert sorted(set(read[client])) == sorted(data.indices.tolist())
        assert len(read[client]) == len(data) * (1 if mode == "server" else 2)
    together = [int(i) for data in clients.values() for i in data.indices]
    assert sorted(together) == list(range(len(whole.train)))


def build_linear() -> FederatedTask:
    return classifier(linear, still)


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_client_needs_its_message_and_its_data_only_and_every_byte_is_counted() -> None:
    method = factory("peer", GaussianTask(optimizer=still))
    loop = federation(method, SIZES, network=linear, optimizer=still, data_options={"dtype": torch.float32})
    with recorded(loop, build_linear, CPU) as parts:
        loop.fit()
    replay(parts)
    for round in (1, 2, 3):
        replies = [Message.from_bytes(part.reply) for part in parts if part.client.round == round]
        assert [reply.sender for reply in replies] == ["0", "1", "2"]
        assert loop.history[round]["comm/bytes_up"] == sum(len(p.reply) for p in parts if p.client.round == round)
        assert loop.history[round]["comm/bytes_down"] == sum(len(p.message) for p in parts if p.client.round == round)
        # Factories cross once, in round 1, one for each class of a client; nobody sends one again.
        sent = {r.sender: {name.split("/")[0] for name in r.tensors.get("factories", {})} for r in replies}
        expected = {c: {str(k) for k in own} if round == 1 else set() for c, own in method.held.items()}
        assert sent == expected


def test_small_classes_get_no_factory() -> None:
    method = factory(min_examples=4)
    loop = run(method)
    assert method.held == {c: {k: n for k, n in own.items() if n >= 4} for c, own in held(loop).items()}
    with pytest.raises(ValueError, match="no client sent a factory"):
        run(factory(min_examples=1000))


def test_resume_after_the_factories(tmp_path: Path) -> None:
    whole = run(factory(), tmp_path / "a", keep_last=5)
    resumed = run(factory(), tmp_path / "b", tmp_path / "a" / "checkpoints" / "round_00001")
    assert same(whole.method.state_dict(), resumed.method.state_dict())
    assert numbers(whole) == numbers(resumed)


def diffusion(info_shape: tuple[int, int, int], label_dim: int = 0) -> nn.Module:
    return EDM2UNet(info_shape, label_dim, width=4, multipliers=(1,))


def test_pictures_of_factories_go_to_the_record_and_nowhere_else(tmp_path: Path) -> None:
    def method(grid: int) -> FederatedFactory:
        task = DiffusionTask(diffusion, steps=2, sampler="euler")
        callback = GeneratorPretraining(ramp_images=0, grid=grid, every=3)
        return factory(generator=task, pretraining=[callback], without=["class:class 0", "class:class 2"])

    told: list[Any] = []

    class Listen(FederationCallback):
        def on_pictures(self, loop: FederationLoop, pictures: Any) -> None:
            told.append((loop.round, pictures))

    logger = TensorBoardLogger(tmp_path, name="", version="")
    loop = run(method(2), tmp_path, callbacks=[Recorder(tmp_path, [logger]), Listen()])
    plain = run(method(0))
    assert digest(loop.method.state_dict()) == digest(plain.method.state_dict())
    assert numbers(loop) == numbers(plain)  # bytes too
    ((round, pictures),) = told
    assert (round, list(pictures)) == (1, ["0", "1", "2"])
    expected = [("factory_1_samples", 3), ("factory_1_samples", 4), ("factory_1_denoised", 4)]
    for client in "012":
        assert [(p.name, p.step) for p in pictures[client]] == expected
        files = sorted(p.name for p in (tmp_path / "pictures" / f"client_{client}").iterdir())
        assert files == sorted(f"{name}_{step:07d}.png" for name, step in expected)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Images("pictures/client_1/factory_1_samples")] == [3, 4]
    shown = np.asarray(Image.open(tmp_path / "pictures" / "client_1" / "factory_1_denoised_0000004.png"))
    assert shown[..., :3].std() > 10


# ---- peers


def test_peers_draw_what_they_lack_and_vote() -> None:
    method = factory("peer")
    loop = run(method)
    assert set(method.experts) == {"0", "1", "2"}
    counts = held(loop)
    size = {c: sum(v.numel() * v.element_size() for v in e.values()) for c, e in method.experts.items()}
    sent = loop.history[3]["comm/bytes_down"]
    overhead = 3 * method.broadcast(3).only(("kept",)).nbytes
    assert 2 * sum(size.values()) < sent < 2 * sum(size.values()) + overhead + 6 * 500  # every expert to both others
    for client in "012":  # nobody is sent its own factories, nor those of classes that it holds
        names = method.addressed(2, client)
        assert names is not None
        labels = [int(n.split("/")[2]) for n in names if n.startswith("factory/")]
        assert not set(labels) & set(counts[client])
        assert not any(n.startswith(f"factory/{client}/") for n in names)
        assert EXPERT + client not in (method.addressed(3, client) or ())
    # The vote is the product of what the experts say.
    whole = loop.data.test_sets()["global"]
    inputs = whole.fetch(torch.arange(len(whole)))
    total: Tensor = torch.zeros(len(inputs), 3, dtype=torch.float64)
    for client in "012":
        loop.model.load(method.experts[client])
        total += loop.model.logits(inputs).detach().double().log_softmax(1).clamp_min(torch.tensor(1e-12).log())
    accuracy = float((total.argmax(1) == whole.labels).double().mean())
    assert loop.history[-1]["global/acc"] == pytest.approx(accuracy)
    assert "personal_mean/global_acc" in loop.history[-1]


def test_an_ensemble_is_permutation_invariant_and_of_one_is_the_model() -> None:
    member = classifier()
    from federation.tiny import data as module

    member.build(module((4,)).info, 0)
    states = [{n: torch.randn_like(p) for n, p in member.trainable().items()} for _ in range(3)]
    inputs = examples(9).inputs
    for combine in ("product", "mean", "mean_logits"):
        ensemble = EnsembleTask(member, combine)  # type: ignore[arg-type]
        ensemble.given = {EXPERT + str(k): s for k, s in enumerate(states)}
        forward = ensemble.logits(inputs)
        ensemble.given = {EXPERT + str(k): s for k, s in enumerate(reversed(states))}
        torch.testing.assert_close(ensemble.logits(inputs), forward)
        ensemble.given = {EXPERT + "0": states[0]}
        member.load(states[0])
        torch.testing.assert_close(
            ensemble.logits(inputs).log_softmax(1), member.logits(inputs).detach().log_softmax(1).double()
        )
        ensemble.given = {**ensemble.given, "mask": {"logits": torch.tensor([0.0, -torch.inf, 0.0])}}
        assert not (ensemble.logits(inputs).argmax(1) == 1).any()
    ensemble.given = {}
    with pytest.raises(ValueError, match="without members"):
        ensemble.logits(inputs)


# ---- forgetting


def forget(loop: FederationLoop, key: str, folder: Path) -> FederationLoop:
    """As the command does it."""
    loop.rewind(loop.method.unlearn(key))
    rewound = CheckpointFolder(folder / "checkpoints", keep_last=99).save(loop.round, loop.state_dict(), {})
    loop.fit(folder, rewound)
    return loop


@pytest.mark.parametrize("mode", ["server", "peer"])
@pytest.mark.parametrize("key", ["1", "class:class 2"])
def test_forgetting_is_never_having_joined(mode: Any, key: str, tmp_path: Path) -> None:
    loop = run(factory(mode), tmp_path / "a")
    before = {client: digest(own) for client, own in loop.method.factories.items()}  # type: ignore[attr-defined]
    drawn = loop.method.bank  # type: ignore[attr-defined]
    forget(loop, key, tmp_path / "a")
    never = run(factory(mode, without=[key]), tmp_path / "b")
    assert same(loop.method.state_dict(), never.method.state_dict())
    assert digest(loop.method.state_dict()) == digest(never.method.state_dict())
    assert same(loop.memory.state_dict(), never.memory.state_dict())
    assert numbers(loop)[2:] == numbers(never)[2:]
    method = loop.method
    assert isinstance(method, FederatedFactory)
    if key == "1":
        assert "1" not in method.factories
        assert before["0"] == digest(method.factories["0"])
        assert "1" not in {p.client for p in (method.bank.provenance if method.bank else ())}
        with pytest.raises(KeyError):
            method.draw(ServerSide(loop.participant, 9), 0, "1", 1)
    elif method.bank is not None:
        assert method.bank.labels.unique().tolist() == [0, 1]
        assert torch.equal(method.bank.inputs, drawn.inputs[drawn.labels != 2])  # the other classes' images
        assert method.bank.provenance == tuple(origin for origin in drawn.provenance if origin.label != 2)
    with pytest.raises(ValueError, match="has been forgotten already"):
        method.unlearn(key)


def enrol(loop: FederationLoop, key: str, folder: Path) -> None:
    """As the command does it."""
    loop.rewind(loop.method.enrol(key))
    rewound = CheckpointFolder(folder / "checkpoints", keep_last=99).save(loop.round, loop.state_dict(), {})
    loop.fit(folder, rewound)


@pytest.mark.parametrize("mode", ["server", "peer"])
@pytest.mark.parametrize("key", ["1", "class:class 2"])
def test_coming_late_is_having_been_there_from_the_start(mode: Any, key: str, tmp_path: Path) -> None:
    loop = run(factory(mode, without=[key]), tmp_path)
    before = {(c, k): digest(f) for c, own in loop.method.factories.items() for k, f in own.items()}  # type: ignore[attr-defined]
    fits: list[Any] = []
    execute = loop.participant.execute

    def watched(request: Any, *owner: object) -> Any:
        fits.extend([(owner[1], *request.key)] if isinstance(request, Fit) and owner[0] == 1 else [])
        return execute(request, *owner)

    loop.participant.execute = watched  # type: ignore[method-assign]
    enrol(loop, key, tmp_path)
    if key == "1":  # it trains its own; nobody else trains in round 1
        assert fits == [("1", "factory", label) for label in sorted(held(loop)["1"])]
    else:  # every owner trains the factory of that class
        assert fits == [(client, "factory", 2) for client, own in held(loop).items() if 2 in own]
    always = run(factory(mode))
    method = loop.method
    assert isinstance(method, FederatedFactory)
    assert {place: digest(method.factories[place[0]][place[1]]) for place in before} == before
    assert digest(method.state_dict()) == digest(always.method.state_dict())
    assert digest(loop.memory.state_dict()) == digest(always.memory.state_dict())
    assert numbers(loop)[2:] == numbers(always)[2:]
    with pytest.raises(ValueError, match="takes part already; left out are: none"):
        method.enrol(key)


def test_going_and_coming_in_any_order(tmp_path: Path) -> None:
    always = run(factory(), tmp_path / "a")
    loop = run(factory(without=["class:class 0", "2"]), tmp_path / "b")
    forget(loop, "0", tmp_path / "b")
    for key in ("2", "0", "class:class 0"):
        assert loop.method.enrol(key) == 0
        assert loop.method.synthetic() is None  # what depended on who takes part is gone at once
        assert same(loop.method.evaluations()[""].start, loop.method.initial)  # type: ignore[attr-defined]
        for other in loop.method.without:
            with pytest.raises(ValueError, match=f"'{key}' is not done with coming in"):
                loop.method.enrol(other)
        loop.rewind(0)
        loop.fit()
    assert digest(loop.method.state_dict()) == digest(always.method.state_dict())
    # A newcomer may go before it has come, and nobody may have sent anything yet.
    forget(loop, "1", tmp_path / "c")
    loop.method.enrol("1")
    forget(loop, "1", tmp_path / "d")
    assert digest(loop.method.state_dict()) == digest(run(factory(without=["1"])).method.state_dict())
    early = federation(factory(without=["1"]), SIZES, network=linear, data_options={"dtype": torch.float32})
    early.method.enrol("1")
    early.fit()
    assert digest(early.method.state_dict()) == digest(always.method.state_dict())


def test_who_cannot_come_late_is_refused() -> None:
    loop = run(factory(generator=CVAETask(hidden=(8,)), without=["class:class 1", "2"]))
    with pytest.raises(ValueError, match="one class cannot be added to it"):
        loop.method.enrol("class:class 1")
    with pytest.raises(ValueError, match="client '9'; allowed: 0, 1, 2"):
        loop.method.enrol("9")
    with pytest.raises(ValueError, match="'0' takes part already; left out are: class:class 1, 2"):
        loop.method.enrol("0")
    with pytest.raises(ValueError, match="FedAvg cannot enrol"):
        FedAvg(1).enrol("0")


def test_masking_is_approximate_and_says_so() -> None:
    loop = run(factory())
    model = loop.method.model  # type: ignore[attr-defined]
    assert loop.method.unlearn("class:class 1", approximate=True) == 2
    values = loop.evaluate()
    assert values["global/recall/class 1"] == 0
    assert same(model, loop.method.model)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="only a class can be masked"):
        loop.method.unlearn("0", approximate=True)
    loop.method.unlearn("class:class 1")
    loop.method.enrol("class:class 1")  # whoever takes part is named again
    assert loop.method.masked == []  # type: ignore[attr-defined]


def test_what_cannot_be_forgotten_is_refused() -> None:
    loop = run(factory(generator=CVAETask(hidden=(8,))))
    with pytest.raises(ValueError, match="one class cannot be deleted"):
        loop.method.unlearn("class:class 1")
    with pytest.raises(ValueError, match="client '9'; allowed: 0, 1, 2"):
        loop.method.unlearn("9")
    with pytest.raises(ValueError, match="class 'dog'; allowed: class 0"):
        loop.method.unlearn("class:dog")
    for key in "01":
        loop.method.unlearn(key)
    with pytest.raises(ValueError, match="no factory would be left"):
        loop.method.unlearn("2")
    with pytest.raises(ValueError, match="FedAvg cannot unlearn"):
        FedAvg(1).unlearn("0")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "both"}, "mode is 'both'; allowed: 'server', 'peer'"),
        ({"samples_per_class": 0}, "samples_per_class is 0; it must be at least 1"),
        ({"min_examples": 0}, "min_examples is 0; it must be at least 1"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FederatedFactory(generator=GaussianTask(), **arguments)
    with pytest.raises(ValueError, match="steps is 0; it must be at least 1"):
        Training(0, 4)
    assert FactoryClient
