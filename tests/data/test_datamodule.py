"""The data module keeps every example in one place, and gives the same federation for the same seed."""

import gc
import tracemalloc

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import TensorExamples
from fl_lightning.data.partition import IID, ByDomain, Dirichlet, Pathological, SingleClass
from fl_lightning.data.source import Source, Splits


class Numbered(Source):
    """Every example's single pixel is its own number, so that tests can follow it."""

    def __init__(self, num_classes=6, per_stratum=10, num_domains=1, with_val=False):
        self.num_classes, self.per_stratum, self.num_domains, self.with_val = (
            num_classes,
            per_stratum,
            num_domains,
            with_val,
        )
        self.loads = 0

    def load(self, *, image_size, channels, seed):
        self.loads += 1
        start = 0

        def part(count):
            nonlocal start
            labels = torch.arange(self.num_classes).repeat_interleave(count).repeat(self.num_domains)
            domains = torch.arange(self.num_domains).repeat_interleave(self.num_classes * count)
            pixels = torch.arange(start, start + len(labels)).float().reshape(-1, 1, 1, 1)
            start += len(labels)
            return TensorExamples(pixels, labels, domains)

        train, test = part(self.per_stratum), part(self.per_stratum // 2)
        val = part(self.per_stratum // 5) if self.with_val else None
        names = tuple("abcdefghijklmnopqrstuvwxyz"[: self.num_classes])
        return Splits(train, test, names, tuple(f"d{n}" for n in range(self.num_domains)), val)


def numbers(examples):
    """The examples' own numbers."""
    return examples.fetch(torch.arange(len(examples))).flatten().int().tolist() if len(examples) else []


CASES = {
    "plain": {},
    "skewed": {"partitioner": Dirichlet(0.05), "num_clients": 8},
    "silos": {"partitioner": SingleClass(), "num_clients": 6},
    "domains": {"source": Numbered(num_domains=3), "partitioner": ByDomain(), "num_clients": 6},
    "novel": {"base_fraction": 0.5, "partitioner": Pathological(1), "num_clients": 3},
    "few": {"shots": 2, "num_clients": 4, "unseen_clients": 1},
    "part": {"train_fraction": 0.4, "num_clients": 3, "val_fraction": 0.25},
    "own val": {"source": Numbered(with_val=True), "num_clients": 5, "base_classes": 4},
    "empty": {"partitioner": Dirichlet(1e-3), "num_clients": 30, "allow_empty": True},
}


def module(**arguments):
    return FederatedDataModule(**{"source": Numbered(), "num_clients": 4, "seed": 1, **arguments})


@pytest.mark.parametrize("case", CASES)
def test_no_example_is_in_two_places(case):
    data = module(**CASES[case])
    keys = data.partition.clients
    pieces = [numbers(part(key)) for part in (data.train, data.val, data.test) for key in keys]
    together = [number for piece in pieces for number in piece]
    assert len(together) == len(set(together))
    tested = {number for examples in data.test_sets().values() for number in numbers(examples)}
    trained = {number for part in (data.train, data.val) for key in keys for number in numbers(part(key))}
    assert not tested & trained
    assert {number for key in keys for number in numbers(data.test(key))} <= tested
    assert {number for examples in data.val_sets().values() for number in numbers(examples)} <= trained


@pytest.mark.parametrize("case", CASES)
def test_the_same_seed_gives_the_same_federation(case):
    def everything(data):
        parts = [numbers(part(key)) for part in (data.train, data.val, data.test) for key in data.partition.clients]
        return data.info, data.unseen, data.partition.hash, parts

    assert everything(module(**CASES[case])) == everything(module(**CASES[case]))
    assert module(**CASES[case]).partition.hash != module(**CASES[case], **{"seed": 2}).partition.hash


def test_plain_federation_uses_everything():
    data = module(val_fraction=0.2)
    assert data.info.clients == ("0", "1", "2", "3")
    assert (data.info.input_shape, data.num_classes, data.class_names) == ((1, 1, 1), 6, tuple("abcdef"))
    assert sum(len(data.train(key)) for key in data.info.clients) == 48
    assert len(data.server_val()) == 12
    assert data.server_val().labels.bincount().tolist() == [2] * 6
    assert sum(len(data.test(key)) for key in data.info.clients) == len(data.test_sets()["global"]) == 30
    assert list(data.test_sets()) == list(data.val_sets()) == ["global"]
    assert isinstance(data.partitioner, IID)
    assert data.counts().sum(0).tolist() == [8] * 6
    for row, key in zip(data.counts(), data.info.clients, strict=True):
        assert row.tolist() == data.train(key).labels.bincount(minlength=6).tolist()


def test_partition_indexes_the_sources_training_split():
    data = module(base_fraction=0.5, train_fraction=0.5)
    for key, part in data.partition.indices.items():
        assert numbers(data.train(key)) == part.tolist()  # the source numbers its training examples from 0


def test_clients_cost_nothing_until_somebody_asks_for_their_examples():
    """What is kept for ten times as many clients is little more than their keys, 60 bytes each."""

    def kept(num_clients: int) -> int:
        data = module(source=Numbered(per_stratum=1000), num_clients=num_clients)
        tracemalloc.start()
        data.setup()
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(data.train(str(num_clients - 1))) > 0
        return size

    assert kept(1000) - kept(100) < 900 * 160


def test_shares_follow_training_proportions():
    data = module(source=Numbered(per_stratum=100), partitioner=Pathological(2), num_clients=3, val_fraction=0.2)
    for key in data.info.clients:
        classes = set(data.train(key).labels.tolist())
        assert set(data.val(key).labels.tolist()) == set(data.test(key).labels.tolist()) == classes
        assert (len(data.train(key)), len(data.val(key)), len(data.test(key))) == (160, 40, 100)


def test_novel_classes_are_tested_and_never_trained():
    data = module(source=Numbered(num_classes=5), base_fraction=0.5)
    assert (data.info.base_classes, data.info.novel_classes) == ((0, 1, 2), (3, 4))
    for key in data.partition.clients:
        for part in (data.train, data.val, data.test):
            assert set(part(key).labels.tolist()) <= {0, 1, 2}
    sets = data.test_sets()
    assert list(sets) == ["global", "base", "novel"]
    assert numbers(sets["base"]) == numbers(sets["global"])
    assert sets["global"].labels.unique().tolist() == [0, 1, 2]
    assert sets["novel"].labels.bincount().tolist() == [0, 0, 0, 5, 5]
    assert list(data.val_sets()) == ["global", "base"]
    assert module(base_classes=2).info.base_classes == (0, 1)
    assert module(source=Numbered(num_classes=25), base_fraction=0.28).info.base_classes == tuple(range(7))


def test_domains_are_tested_one_by_one():
    data = module(source=Numbered(num_domains=2), base_classes=5, partitioner=ByDomain())
    sets = data.test_sets()
    assert list(sets) == ["global", "base", "novel", "domain/d0", "domain/d1"]
    assert sets["domain/d1"].domains.unique().tolist() == [1]
    assert sorted(numbers(sets["domain/d0"]) + numbers(sets["domain/d1"])) == numbers(sets["global"])
    assert list(data.val_sets()) == ["global", "base", "domain/d0", "domain/d1"]
    assert data.train("2").domains.unique().tolist() == [0]
    assert data.test("2").domains.unique().tolist() == [0]


def test_shots_are_counted_over_the_whole_federation():
    data = module(source=Numbered(num_domains=2), shots=3, num_clients=2, val_fraction=0.5)
    assert data.counts().sum(0).tolist() == [3] * 6
    assert data.server_val().labels.bincount().tolist() == [3] * 6
    assert module(shots=99, val_fraction=0).counts().sum(0).tolist() == [10] * 6


def test_train_fraction_is_stratified():
    data = module(source=Numbered(num_domains=2), train_fraction=0.5, val_fraction=0, num_clients=2)
    assert data.counts().sum(0).tolist() == [10] * 6
    assert sum(int((data.train(key).domains == 0).sum()) for key in data.info.clients) == 30
    assert len(data.server_val()) == 0
    assert len(data.val("0")) == 0


def test_the_sources_own_validation_split_is_used():
    data = module(source=Numbered(with_val=True), val_fraction=0.5)
    assert len(data.server_val()) == 12
    assert data.counts().sum() == 60
    assert min(numbers(data.server_val())) >= 90  # numbered after training and test examples


def test_unseen_clients_are_evaluated_but_not_trained():
    data = module(num_clients=6, unseen_clients=2)
    assert len(data.unseen) == 2
    assert sorted(data.info.clients + data.unseen) == list(data.partition.clients)
    assert all(len(data.test(key)) for key in data.unseen)
    hidden = {number for key in data.unseen for number in numbers(data.val(key))}
    assert hidden
    assert not hidden & set(numbers(data.server_val()))
    assert len(data.test_sets()["global"]) == 30
    assert module(unseen_clients=["3", 0]).unseen == ("0", "3")
    assert {module(num_clients=6, unseen_clients=1, seed=seed).unseen for seed in range(30)} == {
        (key,) for key in "012345"
    }


def test_empty_clients_take_no_part():
    data = module(partitioner=Dirichlet(1e-3), num_clients=20, allow_empty=True)
    sizes = dict(zip(data.partition.clients, data.partition.sizes.tolist(), strict=True))
    assert data.info.clients == tuple(key for key, size in sizes.items() if size)
    assert len(data.info.clients) < 20


def test_setup_loads_once_and_again_for_another_seed():
    source = Numbered()
    data = FederatedDataModule(source)
    data.setup()
    data.setup("fit")
    first = data.partition.hash
    assert source.loads == 1
    data.use_seed(0)  # what it was set up with by default
    assert data.partition.hash == first
    assert source.loads == 1
    other = FederatedDataModule(source)
    assert other.partition.hash == first
    other.use_seed(5)
    assert other.partition.hash != first
    other.use_seed(6)
    assert other.seed == 5
    assert module(seed=3).seed == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_clients": -1}, "num_clients must be at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"val_fraction": 1.0}, r"val_fraction must be in \[0, 1\), got 1.0"),
        ({"train_fraction": 0.0}, r"train_fraction must be in \(0, 1\], got 0.0"),
        ({"base_fraction": 1.5}, r"base_fraction must be in \(0, 1\], got 1.5"),
        ({"base_fraction": 0.5, "base_classes": 3}, "base_fraction must be 1"),
        ({"base_classes": 7}, r"base_classes must be in \[1, 6\], got 7"),
        ({"shots": 0}, "shots must be at least 1, or null, got 0"),
        ({"unseen_clients": 4}, r"unseen_clients must be in \[0, 3\], got 4"),
        ({"unseen_clients": ["9"]}, r"unseen_clients must be keys from '0' to '3', got \['9'\]"),
        ({"unseen_clients": ["0", "1", "2", "3"]}, "no client is left to train"),
        ({"num_clients": 70}, "54 examples cannot give 70 clients 1 each"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        module(**arguments).setup()


def test_unknown_client_is_named():
    with pytest.raises(ValueError, match="unknown client '4'; keys go from '0' to '3'"):
        module().train("4")


def test_command_line_builds_it(tmp_path):
    parser = ArgumentParser()
    parser.add_class_arguments(FederatedDataModule, "data")
    parser.add_argument("--config", action="config")
    (tmp_path / "data.yaml").write_text(
        "data:\n"
        "  source: {class_path: fl_lightning.data.sources.Digits, init_args: {test_fraction: 0.5}}\n"
        "  partitioner: {class_path: fl_lightning.data.partition.Dirichlet, init_args: {alpha: 0.3}}\n"
        "  image_size: 16\n"
        "  unseen_clients: [1]\n"
    )
    config = parser.parse_args([f"--config={tmp_path / 'data.yaml'}", "--data.num_clients=5"])
    data = parser.instantiate(config).data
    assert data.partitioner == Dirichlet(0.3)
    assert (data.info.clients, data.info.input_shape) == (("0", "2", "3", "4"), (1, 16, 16))
    short = parser.parse_args(["--data.source=FakeImages", "--data.partitioner=Pathological"])
    assert parser.instantiate(short).data.partitioner == Pathological(2)


def test_counts_have_a_row_for_every_key():
    data = module(partitioner=Dirichlet(1e-3), num_clients=20, allow_empty=True, unseen_clients=1)
    assert data.counts().shape == (20, 6)
    assert np.array_equal(data.counts().sum(1), data.partition.sizes)
