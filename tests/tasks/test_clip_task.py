"""CLIP tasks: what the shipped weights are, and that their configurations still make them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fl_lightning.__main__ import main
from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.federation.participant import Participant
from fl_lightning.losses.contrastive import symmetric_contrastive
from fl_lightning.methods.base import Fit
from fl_lightning.models.clip import LoRA
from fl_lightning.tasks.base import Batch
from fl_lightning.tasks.clip import ClipPretrainTask, ClipTask

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "fl_lightning" / "assets"
INFO = DataInfo(("zero", "one", "two"), (3, 32, 32), (0, 1, 2))


def test_shipped_weights_are_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.glob("*.safetensors")) < 5e6


def test_pretraining_takes_the_contrastive_loss_and_its_learning_rate_rises_and_falls() -> None:
    task = ClipPretrainTask(prompts=["a photo of a {}"], warmup_steps=2)
    task.build(INFO, seed=0)
    images = torch.rand((12, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(12) % 3
    expected = symmetric_contrastive(task.clip.visual(images), task.clip.text(task.tokens[1]), labels, 20.0)
    assert torch.allclose(task.loss(Batch(images, labels)), expected)
    rates: list[float] = []
    original = task.optimizer_step
    task.optimizer_step = lambda epoch, index, optimizer, closure: (  # type: ignore[method-assign, assignment, misc]
        rates.append(optimizer.param_groups[0]["lr"]),
        original(epoch, index, optimizer, closure),
    )
    worker = Participant({"model": task}, {"accelerator": "cpu", "devices": 1, "max_epochs": 2}, 4, seed=0)
    worker.execute(Fit("model", TensorExamples(images, labels)), 1, "0")
    assert rates[0] == pytest.approx(0.5e-3)
    assert rates[1] == max(rates)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.1e-3


def test_images_of_another_size_are_refused_with_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"set data.image_size: 32 and data.channels: 3"):
        ClipTask().build(DataInfo(("zero",), (1, 8, 8), (0,)), seed=0)


def test_prompt_without_braces_is_refused() -> None:
    with pytest.raises(ValueError, match="needs braces"):
        ClipTask(prompt="a photo")


def test_a_set_that_would_not_fit_is_not_cached() -> None:
    images = TensorExamples(torch.rand(8, 3, 32, 32), torch.zeros(8))
    for gib, cached in ((1.0, True), (1e-6, False), (0.0, False)):
        task = ClipTask(pretrained=None, cache_gib=gib)
        task.build(INFO, seed=0)
        assert (task.cached(images) is not None) == cached
    everything = ClipTask(pretrained=None, lora=LoRA(last_blocks=4))
    everything.build(INFO, seed=0)
    assert everything.cached(images) is None  # the first block trains: nothing is frozen


@pytest.mark.slow
@pytest.mark.parametrize("world", ["glyphs", "scenes"])
def test_the_configuration_still_makes_the_shipped_weights(
    world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some six minutes each. The same machine gives the same bits; others round differently over 1,800 steps."""
    monkeypatch.chdir(tmp_path)
    cli = main(["fit", "--config", str(ROOT / f"configs/pretrain/tiny_clip_{world}.yaml")])
    made, shipped = (load_file(folder / f"tiny-clip-32.{world}.safetensors") for folder in (tmp_path, ASSETS))
    assert made.keys() == shipped.keys()
    accuracy = cli.loop.history[-1]["global/acc"]  # type: ignore[attr-defined]
    assert accuracy == pytest.approx({"glyphs": 0.699, "scenes": 0.710}[world], abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fake"),
    [
        ("feddtl_cifar100", {"num_classes": 100}),
        ("feddtl_office_caltech10", {"num_classes": 10, "num_domains": 4}),
        ("feddtl_domainnet", {"num_classes": 10, "num_domains": 6}),
    ],
)
def test_the_papers_settings_pass_a_dry_run_on_fake_data(name: str, fake: dict[str, int]) -> None:
    """ViT-B/16 with random weights on invented images of the right shape, through the command line."""
    source = [f"--data.source.init_args.{key}={value}" for key, value in fake.items()]
    cli = main(
        [
            "fit",
            f"--config={ROOT / 'configs/paper' / name}.yaml",
            "--model.init_args.pretrained=null",
            "--data.source=FakeImages",
            *source,
            "--data.source.init_args.train_per_class=2",
            "--data.source.init_args.test_per_class=1",
            "--data.val_fraction=0",
            "--trainer.fast_dev_run=true",
            "--trainer.accelerator=cpu",
            "--federation.eval_batch_size=8",
        ]
    )
    loop = cli.loop  # type: ignore[attr-defined]
    policy = loop.participant.tasks["policy"]
    # Section 5 of the paper's arithmetic: r (d_in + d_out) for q, k, v of two blocks of width 768.
    assert sum(p.numel() for p in policy.trainable().values()) == 36_864
    assert sum(p.numel() for p in loop.participant.tasks["text"].trainable().values()) == 24_576
    assert policy.visual.embed_dim == 512
    assert [row["round"] for row in loop.history] == [0, 1, 2]
    assert {row.get("server/stage") for row in loop.history[1:]} == {0.0, 1.0}
