"""Networks have the shapes and the numbers of parameters that their papers and code state, and refuse what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.federation.participant import Participant
from fl_lightning.methods.base import Fit
from fl_lightning.models import MLP, VGG11, LeNet5, ResNet8, ResNet18, TimmModel
from fl_lightning.tasks import ClassificationTask

CIFAR, MNIST, DIGITS = (3, 32, 32), (1, 28, 28), (1, 8, 8)


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def built(network, shape, classes=10, seed=0) -> ClassificationTask:
    task = ClassificationTask(network)
    names = tuple(map(str, range(classes)))
    task.build(DataInfo(names, shape, tuple(range(classes))), seed)
    return task


@pytest.mark.parametrize(
    ("network", "shape", "parameters"),
    [
        # By hand: 25 * 3 * 64 + 64, 25 * 64 * 64 + 64, 1600 * 384 + 384, 384 * 192 + 192, 192 * 10 + 10.
        (lambda *a: LeNet5(*a), CIFAR, 4_864 + 102_464 + 614_784 + 73_920 + 1_930),
        (lambda *a: LeNet5(*a), MNIST, 573_578),
        (lambda *a: LeNet5(*a, width=8, padding=2), DIGITS, 208 + 1_608 + 1_584 + 1_176 + 250),
        (lambda *a: VGG11(*a), CIFAR, 9_220_480 + 512 * 100 + 100 + 100 * 10 + 10),
        (lambda *a: VGG11(*a, hidden=[512]), (1, 32, 32), 9_487_114),
        (lambda *a: ResNet18(*a), CIFAR, 11_173_962),
        (lambda *a: ResNet18(*a, norm="group"), CIFAR, 11_173_962),
        (lambda *a: ResNet8(*a), CIFAR, 78_042),
        (lambda *a: ResNet8(*a, width=8, norm="batch"), DIGITS, 19_810),
        (lambda *a: MLP(*a, hidden=[64, 32]), DIGITS, 6_570),  # section 8.1 of FedNSAM's specification
    ],
)
def test_shapes_and_parameter_counts(network, shape, parameters):
    made = network(shape, 10)
    assert size(made) == parameters
    scores = made(torch.rand(2, *shape))
    assert scores.shape == (2, 10)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_vgg11_and_resnet18_are_torchvisions():
    from torchvision.models import resnet18

    ours = ResNet18(CIFAR, 10).state_dict().values()
    theirs = resnet18(num_classes=10)
    theirs.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    theirs.maxpool = nn.Identity()
    expected = theirs.state_dict().values()
    # torchvision lists the shortcut's tensors where we do: the same tensors in the same order make the same network.
    assert [value.shape for value in ours] == [value.shape for value in expected]
    copy = ResNet18(CIFAR, 10)
    copy.load_state_dict(dict(zip(copy.state_dict(), expected, strict=True)))
    images = torch.rand(2, *CIFAR)
    assert torch.equal(copy.eval()(images), theirs.eval()(images))


def test_group_norm_has_no_buffers_and_batch_norm_has():
    for network in (ResNet8, ResNet18):
        assert not list(network(CIFAR, 10, 8, norm="group").buffers())
        assert list(network(CIFAR, 10, 8, norm="batch").buffers())
    wide = ResNet8(CIFAR, 10, 8, norm="group", groups=4)
    assert {m.num_groups for m in wide.modules() if isinstance(m, nn.GroupNorm)} == {4}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: LeNet5(DIGITS, 10), r"\(1, 8, 8\); with padding 0 height and width must be at least 16, padding 2"),
        (lambda: LeNet5((1, 3, 9), 10, padding=2), "with padding 2 height and width must be at least 4"),
        (lambda: LeNet5(CIFAR, 10, padding=3), r"padding is 3; it must be in \[0, 2\]"),
        (lambda: LeNet5(CIFAR, 10, width=0), "width is 0; it must be at least 1"),
        (lambda: VGG11(MNIST, 10), r"\(1, 28, 28\); height and width must be at least 32"),
        (lambda: ResNet8(CIFAR, 10, norm="layer"), "norm is 'layer'; allowed: 'batch', 'group'"),
        (lambda: ResNet8(CIFAR, 10, width=6, groups=4), "groups is 4; it must be at least 1 and divide width 6"),
        (lambda: TimmModel(CIFAR, 10, "nope"), "name is 'nope'; it must be a model of timm"),
        (lambda: TimmModel(CIFAR, 10, "test_vit"), r"test_vit takes 160 x 160: set data.image_size: 160"),
        (lambda: TimmModel(CIFAR, 10, "test_resnet", img_size=32), "img_size is 32; test_resnet takes none"),
        (lambda: TimmModel(CIFAR, 10, "test_vit", lora_rank=-1), "lora_rank is -1; it must be at least 0"),
        (lambda: TimmModel(CIFAR, 10, "test_vit", lora_alpha=0), "lora_alpha is 0; it must be above 0"),
        (lambda: TimmModel(CIFAR, 10, "test_vit", lora_dropout=1), r"lora_dropout is 1; it must be in \[0, 1\)"),
    ],
)
def test_wrong_values_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


@pytest.mark.parametrize("targets", [["attn.qkv", "gate"], []])
def test_targets_that_name_no_layer_are_refused(targets):
    with pytest.raises(ValueError, match=r"lora_targets (has 'gate'; each must end|is empty)"):
        TimmModel(CIFAR, 10, "test_vit", img_size=32, lora_rank=2, lora_targets=targets)


def test_timm_models_with_and_without_lora():
    images = torch.rand(2, *CIFAR)
    whole = TimmModel(CIFAR, 7, "test_resnet")
    assert whole(images).shape == (2, 7)
    assert all(parameter.requires_grad for parameter in whole.parameters())
    grey = TimmModel((1, 32, 32), 7, "vit_tiny_patch16_224", img_size=32)
    assert grey(images[:, :1]).shape == (2, 7)


def lora(shape, classes):
    return TimmModel(shape, classes, "test_vit", img_size=32, lora_rank=2)


def test_only_lora_and_the_classifier_train_and_the_rest_comes_from_the_seed():
    task, again, other = (built(lora, CIFAR, 7, seed) for seed in (0, 0, 1))
    trunk = "network.model."
    factors = {
        f"{trunk}blocks.{block}.attn.{layer}.lora_{matrix}.default.weight"
        for block in range(6)
        for layer in ("qkv", "proj")
        for matrix in "AB"
    }
    assert set(task.trainable()) == factors | {f"{trunk}head.weight", f"{trunk}head.bias"}
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in task.state_dict().items())
    frozen = f"{trunk}blocks.0.attn.qkv.base_layer.weight"
    assert not torch.equal(task.state_dict()[frozen], other.state_dict()[frozen])

    before = {name: value.clone() for name, value in task.state_dict().items()}
    examples = TensorExamples(torch.rand(8, *CIFAR), torch.arange(8) % 7)
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 2}
    participant = Participant({"model": task}, trainer, batch_size=4, seed=0)
    result = participant.execute(Fit("model", examples), 1, "0")
    assert set(result.params) == set(task.trainable())
    moved = {name for name, value in task.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(task.trainable())  # lora_A from the second step on


def test_importing_the_models_imports_no_library_of_models():
    import subprocess
    import sys

    code = "import sys, fl_lightning.models; print({'timm', 'peft', 'torchvision', 'open_clip'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "trained"),
    [
        # r (d_in + d_out) for qkv and proj of twelve blocks of width 768, and the classifier.
        ("vit_base_patch16_224", (3, 224, 224), 12 * 16 * (768 * 4 + 768 * 2) + 768 * 100 + 100),
        ("swin_small_patch4_window7_224", (3, 224, 224), None),
        ("swin_base_patch4_window7_224", (3, 224, 224), None),
    ],
)
def test_the_papers_transformers(name, shape, trained):
    network = TimmModel(shape, 100, name, lora_rank=16)
    assert network(torch.rand(1, *shape)).shape == (1, 100)
    count = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert count == trained or trained is None
    assert count < size(network) / 20


def test_resnet50_has_a_small_stem_for_small_images() -> None:
    from fl_lightning.models import ResNet50

    small, large = ResNet50((3, 32, 32), 10), ResNet50((1, 128, 128), 10)
    assert sum(p.numel() for p in small.parameters()) == 23_520_842
    assert small.body.conv1.stride == (1, 1)
    assert large.body.conv1.stride == (2, 2)
    assert small.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert large.eval()(torch.zeros(1, 1, 128, 128)).shape == (1, 10)
