"""What the callback does to a fit: averages, norms, learning rates, broken gradients, early ends, pictures."""

from __future__ import annotations

import pytest
import torch
from federation.tiny import CPU, same
from lightning.pytorch import Callback
from torch import Tensor, nn

from fl_lightning.callbacks.generator_pretraining import GeneratorPretraining
from fl_lightning.data.examples import DataInfo, TensorExamples
from fl_lightning.federation.participant import Participant
from fl_lightning.methods.base import Fit, Result
from fl_lightning.models.edm2 import EDM2UNet, MPConv
from fl_lightning.optim.ema import lr_factor, power_beta, std_to_exp
from fl_lightning.rng import derive_seed, torch_generator
from fl_lightning.synthesis.samplers import latents, sample_seeds
from fl_lightning.tasks import ClassificationTask
from fl_lightning.tasks.diffusion import DiffusionTask

INFO = DataInfo(("one",), (1, 4, 4), (0,))
# Ten images in batches of 4: every epoch ends with a batch of 2.
DATA = TensorExamples(torch.rand(10, 1, 4, 4, generator=torch_generator(0)), torch.zeros(10, dtype=torch.long))
SIZES = (4, 4, 2)


def tiny(input_shape: tuple[int, int, int], label_dim: int = 0) -> nn.Module:
    return EDM2UNet(input_shape, label_dim, width=4, multipliers=(1,), dropout=0.1)


def made(info: DataInfo = INFO, **options: bool) -> DiffusionTask:
    task = DiffusionTask(tiny, steps=3, **options)
    task.build(info, 0)
    return task


class Watch(Callback):
    """Notes what the optimizer is about to use, and the weights after each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.weights: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:  # type: ignore[no-untyped-def]
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:  # type: ignore[no-untyped-def]
        self.weights.append({name: p.detach().clone() for name, p in module.named_parameters()})


def fitted(callback: GeneratorPretraining, steps: int = 7, trainer: dict | None = None, *more: Callback) -> Result:
    task = made()
    worker = Participant({"g": task}, {**CPU, **(trainer or {})}, 4, seed=0)
    overrides = {"max_steps": steps, "max_epochs": 100}
    return worker.execute(Fit("g", DATA, task.fresh(0), callbacks=(callback, *more), overrides=overrides), 1, "a")


def test_the_average_is_what_is_handed_out() -> None:
    watch = Watch()
    result = fitted(GeneratorPretraining(0.1, ramp_images=0), 7, None, watch)
    average, seen = {}, 0
    for step, weights in enumerate(watch.weights):
        size = SIZES[step % 3]
        seen += size
        beta = power_beta(std_to_exp(0.1), seen, size)
        average = {
            name: value if not step else beta * average[name] + (1 - beta) * value for name, value in weights.items()
        }
    assert seen == 4 + 4 + 2 + 4 + 4 + 2 + 4
    for name, value in average.items():
        assert torch.allclose(result.params[name], value, atol=1e-6), name
    last = fitted(GeneratorPretraining(None, ramp_images=0))
    assert same(last.params, watch.weights[-1])
    assert not same(result.params, last.params)
    assert same(fitted(GeneratorPretraining(0.1, ramp_images=0), 1).params, watch.weights[0])


@pytest.mark.parametrize("normalise", [True, False])
def test_weights_have_unit_rows_after_every_step(normalise: bool) -> None:
    watch = Watch()
    fitted(GeneratorPretraining(ramp_images=0, normalise=normalise), 4, None, watch)
    rows = {f"{name}.weight" for name, layer in made().named_modules() if isinstance(layer, MPConv)}
    assert len(rows) > 10
    worst = max(
        float((weights[name].flatten(1).square().mean(1).sqrt() - 1).abs().max())
        for weights in watch.weights
        for name in rows
    )
    assert (worst < 1e-3) == normalise


def test_weights_have_unit_rows_before_the_first_step() -> None:
    class First(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer) -> None:  # type: ignore[no-untyped-def]
            for layer in module.modules():
                if isinstance(layer, MPConv):
                    rows = layer.weight.detach().flatten(1).square().mean(1).sqrt()
                    assert torch.allclose(rows, torch.ones(()), atol=1e-3)

    fitted(GeneratorPretraining(), 1, None, First())


@pytest.mark.parametrize("options", [{"ramp_images": 12}, {"ramp_steps": 3}])
def test_learning_rate_follows_the_images_seen(options: dict) -> None:
    watch = Watch()
    result = fitted(GeneratorPretraining(reference_batches=4, **options), 9, None, watch)
    expected = [0.01 * lr_factor(sum((SIZES * 3)[:step]), 4, 12, 4) for step in range(9)]
    assert watch.rates == pytest.approx(expected)
    assert expected[0] == 0
    assert expected[-1] < max(expected)
    assert result.lr_sum == pytest.approx(sum(expected))


def test_the_fits_learning_rate_is_the_base() -> None:
    watch, task = Watch(), made()
    worker = Participant({"g": task}, CPU, 4, seed=0)
    callback = GeneratorPretraining(ramp_images=0, reference_batches=None)
    worker.execute(Fit("g", DATA, callbacks=(callback, watch), overrides={"lr": 0.002}), 1, "a")
    assert watch.rates == [0.002] * 3


def test_broken_gradients_become_0() -> None:
    class Break(Callback):
        def on_after_backward(self, trainer, module) -> None:  # type: ignore[no-untyped-def]
            gradient = module.denoiser.backbone.input.weight.grad
            gradient[0, 0, :2] = torch.tensor([[torch.nan, torch.inf, -torch.inf], [7.0, 0.0, 0.0]])

        def on_before_optimizer_step(self, trainer, module, optimizer) -> None:  # type: ignore[no-untyped-def]
            gradient = module.denoiser.backbone.input.weight.grad
            assert gradient[0, 0, :2].tolist() == [[0, 0, 0], [7, 0, 0]]  # what is a number stays

    result = fitted(GeneratorPretraining(None, ramp_images=0), 1, None, Break())
    assert all(value.isfinite().all() for value in result.params.values())


def test_a_criterion_ends_the_fit_and_sees_averaged_weights() -> None:
    asked: list[tuple[int, dict[str, Tensor]]] = []

    def stop(task: DiffusionTask, step: int) -> bool:
        assert not task.training
        asked.append((step, {name: p.clone() for name, p in task.named_parameters()}))
        return step >= 6

    callback = GeneratorPretraining(0.1, ramp_images=0, stop=stop, every=2)
    result = fitted(callback, 100)
    assert result.num_steps == callback.stopped_at == 6
    assert [step for step, _ in asked] == [2, 4, 6]
    assert same(result.params, asked[-1][1])
    # Asking changes nothing.
    assert same(fitted(GeneratorPretraining(0.1, ramp_images=0), 6).params, result.params)


def test_samples_are_drawn_through_training_and_change_nothing() -> None:
    result = fitted(GeneratorPretraining(0.1, ramp_images=0, grid=3, every=3))
    pictures = result.pictures
    assert [(p.name, p.step) for p in pictures] == [("samples", 3), ("samples", 6), ("samples", 7), ("denoised", 7)]
    plain = fitted(GeneratorPretraining(0.1, ramp_images=0))
    assert plain.pictures == ()
    assert same(result.params, plain.params)
    assert (result.lr_sum, result.num_gradients, result.metrics) == (plain.lr_sum, plain.num_gradients, plain.metrics)
    # They are of the averaged weights, and their seeds are the request's.
    task = made()
    task.load({**result.params, **result.buffers})
    seeds = sample_seeds(derive_seed(0, 1, "a", "fit"), "grid", 0, range(3))
    expected = (task.sample(seeds) * 255).round()
    assert torch.equal(pictures[2].images.float(), expected)
    early = fitted(GeneratorPretraining(0.1, ramp_images=0), 3)
    task.load({**early.params, **early.buffers})
    assert torch.equal(pictures[0].images.float(), (task.sample(seeds) * 255).round())
    # A step that falls on the last is drawn once.
    assert [p.step for p in fitted(GeneratorPretraining(grid=1, every=7)).pictures] == [7, 7]


def test_training_images_are_shown_denoised_from_every_level() -> None:
    result = fitted(GeneratorPretraining(0.1, ramp_images=0, grid=2))
    shown = result.pictures[-1]
    assert shown.row_names == ("image", "sigma 0.05", "sigma 0.2", "sigma 0.8", "sigma 3.2", "sigma 12.8")
    assert shown.rows.tolist() == [row for row in range(6) for _ in range(2)]
    x = DATA.inputs[[0, 9]]
    assert torch.equal(shown.images[:2].float(), (x * 255).round())
    task = made().eval()
    task.load({**result.params, **result.buffers})
    noise = latents(sample_seeds(derive_seed(0, 1, "a", "fit"), "denoised", 0, range(2)), (1, 4, 4))
    for row, sigma in enumerate((0.05, 0.2, 0.8, 3.2, 12.8), 1):
        with torch.no_grad():
            denoised = (task(2 * x - 1 + sigma * noise, torch.tensor(sigma)) + 1) / 2
        found = shown.images[2 * row : 2 * row + 2].float()
        assert float((found - denoised.clamp(0, 1) * 255).abs().max()) < 0.51  # grey levels are rounded


def test_a_conditional_generator_is_drawn_class_by_class() -> None:
    task = made(DataInfo(("a", "b", "c"), (1, 4, 4), (0, 1, 2)), conditional=True)
    data = TensorExamples(DATA.inputs, torch.tensor([0, 2]).repeat(5))
    worker = Participant({"g": task}, CPU, 4, seed=0)
    fit = Fit("g", data, task.fresh(0), callbacks=(GeneratorPretraining(ramp_images=0, grid=2),))
    result = worker.execute(fit, 1, "a")
    samples, denoised = result.pictures
    assert (samples.row_names, samples.rows.tolist()) == (("class 0", "class 2"), [0, 0, 1, 1])
    assert len(denoised.images) == 12
    task.load({**result.params, **result.buffers})
    seeds = sample_seeds(derive_seed(0, 1, "a", "fit"), "grid", 2, range(2))
    assert torch.equal(samples.images[2:].float(), (task.sample(seeds, torch.tensor([2, 2])) * 255).round())
    assert task.pictures == []


def test_accumulated_batches_count_as_one_step() -> None:
    watch, callback = Watch(), GeneratorPretraining(0.1, ramp_images=0)
    result = fitted(callback, 4, {"accumulate_grad_batches": 3}, watch)
    assert (result.num_steps, callback.seen) == (4, 40)
    average = watch.weights[2]
    for step in (2, 3, 4):  # three batches, of ten images together
        beta = power_beta(std_to_exp(0.1), 10 * step, 10)
        average = {n: beta * average[n] + (1 - beta) * value for n, value in watch.weights[3 * step - 1].items()}
    for name, value in average.items():
        assert torch.allclose(result.params[name], value, atol=1e-6), name


def test_a_second_fit_needs_a_new_one() -> None:
    callback = GeneratorPretraining()
    fitted(callback, 1)
    with pytest.raises(ValueError, match="second fit; it holds state"):
        fitted(callback, 1)


def test_another_task_is_refused() -> None:
    task = ClassificationTask()
    task.build(INFO, 0)
    worker = Participant({"g": task}, CPU, 4, seed=0)
    with pytest.raises(ValueError, match="ClassificationTask; it must be a DiffusionTask"):
        worker.execute(Fit("g", DATA, callbacks=(GeneratorPretraining(),)), 1, "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ramp_images": -1}, "ramp_images is -1; it must be at least 0"),
        ({"ramp_steps": -1}, "ramp_steps is -1; it must be at least 0"),
        ({"reference_batches": 0}, "reference_batches is 0; it must be above 0"),
        ({"every": 0}, "every is 0; it must be at least 1"),
        ({"grid": -1}, "grid is -1; it must be at least 0"),
    ],
)
def test_wrong_values_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GeneratorPretraining(**options)
