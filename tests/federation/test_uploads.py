"""Uploads in a folder: one run's serve others to the last bit, a market's need no clients, what does not fit is named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from federation.tiny import CPU, data, federation, numbers, same, task
from methods.test_distillation import STUDENT, single, small
from methods.test_federated_factory import SIZES, factory, linear
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl_lightning.__main__ import main
from fl_lightning.cli import config_hash
from fl_lightning.data.examples import Examples
from fl_lightning.federation.attacks import OneNaN
from fl_lightning.federation.generation import MemorisationMeter
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.federation.recorder import Recorder
from fl_lightning.federation.state import digest
from fl_lightning.methods import FedFTG, NoiseDistillation, OneShotEnsemble
from fl_lightning.methods.base import Method, Server, Training

CONFIGS = Path(__file__).parents[2] / "configs"


class Counted(NoiseDistillation):
    """A control that is sent the counts of classes."""

    wants_counts = True


def noise(kind: type[NoiseDistillation] = NoiseDistillation) -> NoiseDistillation:
    return kind(student=STUDENT, images=9)


def factories(mode: str, **options: Any) -> FederationLoop:
    return federation(factory(mode), SIZES, network=linear, data_options={"dtype": torch.float32}, **options)


def one_shot(method: Method, **options: Any) -> FederationLoop:
    return federation(method, network=single(linear), data_options={"dtype": torch.float32}, **options)


def scores(loop: FederationLoop, *but: str) -> list[dict[str, float]]:
    """The record without the clock and without what training and sending down cost."""
    hidden = ("comm/bytes_down", "round/gradients", *but)
    return [{k: v for k, v in row.items() if k not in hidden} for row in numbers(loop)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederationLoop, Path]:
    """A run with counts, and the folder of what its clients sent."""
    folder = tmp_path_factory.mktemp("saved")
    loop = one_shot(noise(Counted), save_uploads=True)
    loop.fit(folder)
    return loop, folder / "uploads"


@pytest.fixture
def folder(saved: tuple[FederationLoop, Path], tmp_path: Path) -> Path:
    """A copy of the folder."""
    copy = tmp_path / "uploads 0"
    copy.mkdir()
    for path in saved[1].iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_what_is_saved_is_a_model_and_its_facts(saved: tuple[FederationLoop, Path]) -> None:
    loop, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{k}.{kind}" for k in range(3) for kind in ("json", "safetensors")
    ]
    assert not folder.with_name("uploads.writing").exists()
    for client, model in loop.method.uploads.items():  # type: ignore[attr-defined]
        assert same(load_file(folder / f"{client}.safetensors"), model)
        facts = json.loads((folder / f"{client}.json").read_text())
        assert facts["num_examples"] == len(loop.data.train(client)) == sum(facts["counts"])
        assert facts["counts"] == torch.bincount(loop.data.train(client).labels, minlength=3).tolist()


def test_saved_uploads_give_the_run_that_trained_them(saved: tuple[FederationLoop, Path]) -> None:
    loop, folder = saved
    again = one_shot(noise(Counted), uploads=str(folder))
    again.fit()
    assert digest(again.method.state_dict()) == digest(loop.method.state_dict())
    assert scores(again) == scores(loop)
    row = again.history[-1]
    assert (row["comm/bytes_down"], row["round/gradients"]) == (0, 0)
    assert row["comm/bytes_up"] == loop.history[-1]["comm/bytes_up"]
    # And to a method that wants no counts, and to one of another kind.
    for method in (noise(), OneShotEnsemble()):
        trained, read = (one_shot(type(method)(**vars_of(method)), **o) for o in ({}, {"uploads": str(folder)}))
        trained.fit()
        read.fit()
        assert same(read.method.state_dict(), trained.method.state_dict())


def vars_of(method: Method) -> dict[str, Any]:
    return {"student": STUDENT, "images": 9} if isinstance(method, NoiseDistillation) else {}


@pytest.mark.parametrize("mode", ["server", "peer"])
def test_a_factory_run_from_saved_uploads_is_the_run_that_trained_them(mode: str, tmp_path: Path) -> None:
    trained = factories(mode, save_uploads=True)
    trained.fit(tmp_path)
    names = load_file(tmp_path / "uploads" / "0.safetensors")
    assert {"held:labels", "held:counts"} < set(names)
    assert any(name.startswith("factories:") for name in names)
    read = factories(mode, uploads=str(tmp_path / "uploads"))
    read.fit()
    assert same(read.method.state_dict(), trained.method.state_dict())
    assert scores(read) == scores(trained)
    assert read.history[1]["round/gradients"] == 0 < trained.history[1]["round/gradients"]
    if mode == "peer":  # later rounds are the clients' own
        assert read.history[2]["round/gradients"] == trained.history[2]["round/gradients"] > 0


def market(method: Method, folder: Path, run: Path | None = None, **options: Any) -> FederationLoop:
    """Only models and a test set."""
    loop = FederationLoop(progress=False, num_threads=None, uploads=str(folder), **options)
    module = data((7, 12, 5), dtype=torch.float32, val_fraction=0.2)
    module.num_clients = 0
    module.partitioner = None  # type: ignore[assignment]  # never asked
    loop.assemble(method, task(single(linear)), module, CPU, 0)
    if run is not None:
        loop.callbacks.append(Recorder(run))
    loop.fit(run)
    return loop


@pytest.mark.parametrize("key", ["class:class 1", "1"])
def test_uploads_older_than_a_withdrawal_are_not_used(key: str, tmp_path: Path) -> None:
    trained = factories("server", save_uploads=True)
    trained.fit(tmp_path)
    never = federation(factory("server", without=[key]), SIZES, network=linear, data_options={"dtype": torch.float32})
    never.fit()
    read = federation(
        factory("server", without=[key]),
        SIZES,
        network=linear,
        data_options={"dtype": torch.float32},
        uploads=str(tmp_path / "uploads"),
    )
    read.fit()
    assert digest(read.method.state_dict()) == digest(never.method.state_dict())
    assert digest(read.method.state_dict()) != digest(trained.method.state_dict())


def test_a_market_needs_no_clients(folder: Path, saved: tuple[FederationLoop, Path], tmp_path: Path) -> None:
    for path in folder.glob("*.json"):  # as somebody would write it
        path.write_text(json.dumps({"num_examples": json.loads(path.read_text())["num_examples"], "licence": "any"}))
    for path in folder.glob("*.safetensors"):  # and in half precision, with other metadata
        save_file({name: value.half() for name, value in load_file(path).items()}, path, {"format": "pt"})
    (folder / "0.json").rename(folder / "ward b.json")
    (folder / "0.safetensors").rename(folder / "ward b.safetensors")
    (folder / "README.md").write_text("Models of three wards.")
    run = tmp_path / "run"
    run.mkdir()
    loop = market(noise(), folder, run)
    assert loop.info.clients == ("1", "2", "ward b")
    assert loop.data.info.clients == ()
    uploads, trained = loop.method.uploads, saved[0].method.uploads  # type: ignore[attr-defined]
    torch.testing.assert_close(uploads["ward b"], trained["0"], atol=1e-3, rtol=1e-3)
    assert {value.dtype for value in uploads["1"].values()} == {torch.float32}
    row = loop.history[-1]
    assert row["global/acc"] > 0
    assert not [name for name in row if name.startswith(("client_", "val_", "local_"))]
    assert (run / "confusion.png").is_file()
    assert not (run / "partition.json").exists()


def test_the_clients_are_those_who_sent_something(folder: Path) -> None:
    for kind in ("json", "safetensors"):
        (folder / f"1.{kind}").unlink()
    loop = one_shot(noise(), uploads=str(folder))
    loop.fit()
    assert loop.info.clients == ("0", "2") == tuple(loop.method.uploads)  # type: ignore[attr-defined]
    assert loop.history[-1]["round/clients"] == 2
    for kind in ("json", "safetensors"):
        (folder / f"2.{kind}").rename(folder / f"7.{kind}")
    with pytest.raises(ValueError, match="has uploads of 7; the data's clients are 0, 1, 2"):
        one_shot(noise(), uploads=str(folder))


def change(path: Path, name: str, value: Tensor | None) -> None:
    tensors = load_file(path)
    tensors |= {name: value} if value is not None else {}
    if value is None:
        del tensors[name]
    save_file(tensors, path)


WEIGHT, BIAS = "network.1.weight", "network.1.bias"
NAN = torch.full((3,), float("nan"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (WEIGHT, None, f"1 misses {WEIGHT}"),
        ("network.9.bias", torch.zeros(3), "1 has unexpected network.9.bias"),
        (WEIGHT, torch.zeros(4, 3), rf"1 has {WEIGHT} as \(4, 3\) torch.float32, expected \(3, 4\) torch.float32"),
        (
            BIAS,
            torch.zeros(3, dtype=torch.int64),
            rf"1 has {BIAS} as \(3,\) torch.int64, expected \(3,\) torch.float32",
        ),
        (BIAS, NAN, f"1 is not finite: {BIAS}"),
        (
            "factories:0/mean",
            torch.zeros(3),
            r"1 has not the groups that the method expects: missing \[\], unexpected \['factories'\]",
        ),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, name: str, value: Tensor | None, message: str) -> None:
    change(folder / "1.safetensors", name, value)
    (folder / "2.json").write_text('{"num_examples": 0}')
    loop = one_shot(noise(), uploads=str(folder))
    with pytest.raises(
        ValueError, match=f"do not fit: ({message}); 2 has num_examples 0; it must be an integer of at least 1"
    ):
        loop.fit()
    assert loop.round == 0


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"counts": [4, -1, 2]}, r"has counts \[4, -1, 2\]; they must be integers of at least 0, not all of them 0"),
        ({"counts": [0, 0, 0]}, r"has counts \[0, 0, 0\]; they must be"),
        ({"counts": [2.5, 4.5, 0]}, r"has counts \[2.5, 4.5, 0\]; they must be"),
        ({"counts": ["7", 0, 0]}, r"has counts \['7', 0, 0\]; they must be"),
        ({"counts": [2**63, 0, 0]}, rf"has counts \[{2**63}, 0, 0\]; they must be"),
        ({"counts": 7}, r"has no facts with num_examples \(TypeError.*"),
        ({"num_examples": 2.7}, "has num_examples 2.7; it must be an integer of at least 1"),
        ({"num_examples": -3}, "has num_examples -3; it must be"),
        ({"num_examples": "7"}, "has num_examples '7'; it must be"),
        ({"num_examples": True}, "has num_examples True; it must be"),
        ({"scalars": {"s": "much", "t": 1}}, r"has scalars {'s': 'much'}; they must be numbers"),
        ({"metrics": {"loss": None}}, r"has metrics {'loss': None}; they must be numbers"),
        (
            {"counts": [-1, 2], "num_examples": 0, "scalars": {"s": []}},
            r"has num_examples 0; .*; has counts \[-1, 2\]; .*; has scalars {'s': \[\]}; .*; has counts as \(2,\) .*",
        ),
    ],
)
def test_facts_that_do_not_fit(folder: Path, facts: dict[str, Any], message: str) -> None:
    (folder / "1.json").write_text(json.dumps({**json.loads((folder / "1.json").read_text()), **facts}))
    change(folder / "2.safetensors", BIAS, NAN)
    loop = one_shot(noise(Counted), uploads=str(folder), on_client_error="skip")
    with pytest.raises(ValueError, match=f"do not fit: 1 {message}.*; 2 is not finite: {BIAS}$"):
        loop.fit()
    assert not loop.participant.trained


def test_a_class_that_nobody_has_is_no_fault(folder: Path) -> None:
    for client in "012":
        facts = json.loads((folder / f"{client}.json").read_text())
        (folder / f"{client}.json").write_text(json.dumps({**facts, "counts": [0, facts["num_examples"], 0]}))
    ftg = FedFTG(images=8, iterations=2, latent=4, width=4, student=Training(2, 4))
    loop = market(ftg, folder)
    assert loop.round == 1
    assert all(math.isfinite(value) for value in loop.history[-1].values())


def test_files_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    def message(method: NoiseDistillation | None = None) -> str:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            one_shot(method or noise(), uploads=str(folder)).fit()
        return str(error.value)

    facts = json.loads((folder / "0.json").read_text())
    (folder / "0.json").write_text(json.dumps({"num_examples": 7}))
    assert "0 has not the groups that the method expects: missing ['counts'], unexpected []" in message(noise(Counted))
    (folder / "0.json").write_text(json.dumps({**facts, "counts": [7]}))
    assert "0 has counts as (1,) torch.int64, expected (3,) torch.int64" in message(noise(Counted))
    (folder / "0.json").write_text('{"counts": [1, 2, 3]}')
    assert "0 has no facts with num_examples" in message()
    (folder / "0.json").write_text(json.dumps(facts))
    (folder / "0.safetensors").write_bytes(b"weights")
    assert "0 cannot be read" in message()
    (folder / "0.json").unlink()
    assert "uploads of 0 in" in message()
    for path in folder.iterdir():
        path.unlink()
    assert "holds no uploads" in message()
    folder.rmdir()
    assert "there is no such folder" in message()


def test_an_attack_has_nobody_to_corrupt_where_uploads_are_read() -> None:
    with pytest.raises(ValueError, match=r"federation.uploads is 'x', and federation.attack is given"):
        FederationLoop(uploads="x", attack=OneNaN(clients=["0"]))


def test_no_clients_and_no_uploads(tmp_path: Path) -> None:
    module = data((7, 12, 5))
    module.num_clients = 0
    loop = FederationLoop(progress=False, num_threads=None)
    with pytest.raises(ValueError, match=r"data.num_clients is 0; it must be at least 1 unless federation.uploads"):
        loop.assemble(noise(), task(single(linear)), module, CPU, 0)
    with pytest.raises(ValueError, match="unknown client '0'; num_clients is 0"):
        module.train("0")


def test_a_first_round_that_is_interrupted_leaves_no_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = one_shot(noise(), save_uploads=True)
    whole = loop.engine.replies  # type: ignore[attr-defined]

    def torn(*arguments: Any) -> Iterator[Any]:
        yield next(whole(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.engine, "replies", torn)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(tmp_path)
    assert not (tmp_path / "uploads").exists()
    resumed = one_shot(noise(), save_uploads=True)
    resumed.fit(tmp_path, tmp_path / "checkpoints" / "round_00000")
    assert len(list((tmp_path / "uploads").iterdir())) == 6
    assert not (tmp_path / "uploads.writing").exists()


class Guarded(Examples):
    """Examples that must not be fetched once the clients have replied."""

    def __init__(self, source: Examples, closed: list[bool]) -> None:
        self.source, self.closed = source, closed
        self.labels, self.domains = source.labels, source.domains

    def fetch(self, indices: Tensor) -> Tensor:
        if self.closed:
            raise AssertionError("the server has touched a client's images")
        return self.source.fetch(indices)


def guard(loop: FederationLoop) -> list[bool]:
    """Clients' training images raise when they are fetched after the upload."""
    closed: list[bool] = []
    train, update = loop.data.train, loop.method.server_update
    loop.data.train = lambda client: Guarded(train(client), closed)  # type: ignore[method-assign]
    # A meter compares images with the clients': a simulation's privilege.
    loop.callbacks = [callback for callback in loop.callbacks if not isinstance(callback, MemorisationMeter)]

    def after_the_upload(round: int, total: Any, server: Server) -> Any:
        closed.append(True)
        return update(round, total, server)

    loop.method.server_update = after_the_upload  # type: ignore[method-assign]
    return closed


def test_the_server_never_touches_client_data() -> None:
    loop = small(noise())
    closed = guard(loop)
    loop.fit()
    assert closed == [True]
    with pytest.raises(AssertionError, match="touched"):
        loop.data.train("0").fetch(torch.tensor([0]))


SMALL = [
    *("--data.num_clients", "3", "--data.train_fraction", "0.2", "--trainer.max_epochs", "1"),
    *("--method.init_args.student", '{"steps": 2, "batch_size": 8}', "--method.init_args.images", "8"),
]


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(CONFIGS / "noise_distillation.yaml"), *SMALL]
    trained: Any = main(["fit", *config, "--federation.save_uploads", "true"])
    (tmp_path / "shared").mkdir()
    (trained.run_folder / "uploads").rename(tmp_path / "shared" / "seed 0")
    market = [*config, "--data.num_clients", "0", "--federation.uploads"]
    read: Any = main(["fit", *market, "shared/seed {seed}"])
    assert same(read.method.state_dict(), trained.method.state_dict())
    # The same contents elsewhere are the same run, and other contents another one.
    (tmp_path / "shared").rename(tmp_path / "moved")
    found: Any = main(["test", *market, "moved/seed 0"])
    assert found.scores["global/acc"] == read.loop.history[-1]["global/acc"]
    change(tmp_path / "moved" / "seed 0" / "1.safetensors", BIAS, None)
    for verb, message in (
        ("test", "no checkpoint of this configuration"),
        ("fit", "1 misses network.1.bias"),
        ("partition", "data.num_clients is 0; there is nothing to divide"),
    ):
        with pytest.raises(SystemExit):
            main([verb, *market, "moved/seed 0"])
        assert message in capsys.readouterr().err


def test_what_a_configuration_means(folder: Path) -> None:
    def named(uploads: str | None, seed: int = 0) -> str:
        return config_hash({"seed_everything": seed, "federation": {"uploads": uploads}})

    assert named(str(folder)) == named(str(folder.with_name("uploads {seed}"))) != named(None)
    assert named("nowhere/0") == named("nowhere/0") != named("nowhere/1")
    assert named(str(folder)) != named(str(folder), 1)
    before = named(str(folder))
    change(folder / "2.safetensors", BIAS, torch.ones(3))
    assert named(str(folder)) != before
