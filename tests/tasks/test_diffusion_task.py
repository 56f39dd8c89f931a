"""The generator's task: pixels, seeds as examples, starts of its own, and training through a participant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation.tiny import CPU, same
from torch import Tensor, nn

from fl_lightning.callbacks.generator_pretraining import GeneratorPretraining
from fl_lightning.data.examples import Concatenated, DataInfo, TensorExamples
from fl_lightning.federation.participant import Participant
from fl_lightning.methods.base import Fit, Predict, Result
from fl_lightning.models.edm2 import EDM2UNet
from fl_lightning.rng import torch_generator
from fl_lightning.synthesis.samplers import integrate, latents, sample_seeds
from fl_lightning.tasks.base import Batch
from fl_lightning.tasks.diffusion import DiffusionTask

INFO = DataInfo(("bar", "dot", "blank"), (1, 4, 4), (0, 1, 2))


def small(input_shape: tuple[int, int, int], label_dim: int = 0) -> nn.Module:
    return EDM2UNet(input_shape, label_dim, width=8, multipliers=(1,), dropout=0.1)


def made(**options: object) -> DiffusionTask:
    task = DiffusionTask(**{"network": small, "steps": 5, "sampler": "heun", **options})  # type: ignore[arg-type]
    task.build(INFO, 0)
    return task


def bars(count: int = 64) -> TensorExamples:
    """A bright column at one of two places on a dark ground, with some noise."""
    images = torch.rand(count, 1, 4, 4, generator=torch_generator(0)) * 0.1
    images[: count // 2, :, :, 0] = 1
    images[count // 2 :, :, :, 2] = 1
    return TensorExamples(images, torch.zeros(count, dtype=torch.long))


def worker(task: DiffusionTask, **options: int) -> Participant:
    return Participant({"generator": task}, CPU, 16, seed=0, **options)


def request(task: DiffusionTask, steps: int, owner: str = "a", **options: object) -> Fit:
    callback = GeneratorPretraining(0.1, ramp_steps=10, reference_batches=100)
    return Fit(
        "generator",
        bars(),
        start=task.fresh(0, owner),
        callbacks=(callback,),
        overrides={"max_steps": steps, "max_epochs": 10**6},
        **options,  # type: ignore[arg-type]
    )


def held_out(task: DiffusionTask, params: dict[str, Tensor]) -> float:
    """The loss without its weighting, on noise that is the same each time."""
    task.load(params)
    task.eval()
    x = bars().inputs * 2 - 1
    sigma = torch.tensor([0.1, 0.3, 1.0, 3.0]).repeat(16)
    noise = torch.randn(x.shape, generator=torch_generator(7))
    with torch.no_grad():
        error = (task(x + noise * sigma.view(-1, 1, 1, 1), sigma) - x).square().mean((1, 2, 3))
        return float((task.edm.weight(sigma) * error).mean())


def draw(owner: Participant, result: Result | None, count: int = 6, label: int = 0) -> Tensor:
    data = TensorExamples(sample_seeds(0, "a", label, range(count)), torch.full((count,), label))
    start = None if result is None else result.params
    outputs = owner.execute(Predict("generator", data, start=start, output="sample"), 1, "a").outputs
    assert outputs is not None
    return outputs


def test_training_through_a_participant_lowers_the_loss_and_samples_look_like_the_data() -> None:
    task = made(steps=12)
    owner = worker(task)
    start = task.fresh(0, "a")
    result = owner.execute(request(task, 120), 1, "a")
    assert result.num_steps == 120
    assert held_out(task, result.params) < 0.5 * held_out(task, start)
    images = draw(owner, result, 32)
    assert images.shape == (32, 1, 4, 4)
    assert images.min() >= 0
    assert images.max() <= 1
    columns = images.mean((0, 1, 2))
    assert columns[[0, 2]].min() > 2 * columns[[1, 3]].max()


def test_a_fit_is_the_owners_and_repeats_to_the_last_bit() -> None:
    task = made()
    owner = worker(task)
    first = owner.execute(request(task, 3), 1, "a")
    other = owner.execute(request(task, 3, "b"), 1, "b")
    again = owner.execute(request(task, 3), 1, "a")
    assert same(first.params, again.params)
    assert not same(first.params, other.params)
    assert same(worker(made()).execute(request(task, 3), 1, "a").params, first.params)


def test_fresh_starts_have_owners_and_the_tasks_names() -> None:
    task = made()
    starts = [task.fresh(0, "client", k) for k in (0, 0, 1)]
    assert starts[0].keys() == task.trainable().keys() | task.persistent_buffers().keys()
    assert same(starts[0], starts[1])
    assert not torch.equal(starts[0]["denoiser.backbone.input.weight"], starts[2]["denoiser.backbone.input.weight"])
    state = torch.get_rng_state()
    task.fresh(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_pass_a_participant_whole_and_batches_do_not_matter() -> None:
    task = made()
    with torch.no_grad():
        task.denoiser.backbone.output_gain.fill_(0.5)
    seen: list[Tensor] = []
    original = task.sample
    task.sample = lambda seeds, labels=None: seen.append(seeds) or original(seeds, labels)  # type: ignore[method-assign]
    whole = draw(worker(task), None, 21)
    seeds = sample_seeds(0, "a", 0, range(21))
    assert torch.equal(torch.cat(seen), seeds)
    assert int(seeds.max()) > 2**53  # a float would lose digits
    assert torch.equal(draw(worker(task, eval_batch_size=5), None, 21), whole)
    halves = [TensorExamples(part, torch.zeros(len(part), dtype=torch.long)) for part in seeds.split(11)]
    joined = Predict("generator", Concatenated(halves), output="sample")
    assert torch.equal(worker(task).execute(joined, 1, "a").outputs, whole)


def test_pixels_are_doubled_and_centred() -> None:
    task = made(uncertainty=False)
    seen: list[Tensor] = []
    task.edm.forward = lambda denoiser, x, labels=None: seen.append(x) or x.sum()  # type: ignore[method-assign]
    task.loss(Batch(torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1), torch.zeros(3, dtype=torch.long)))
    assert seen[0].flatten().tolist() == [-1, 0, 1]


@pytest.mark.parametrize(("sampler", "steps"), [("euler", 7), ("dpm++", 4)])
def test_samples_are_what_the_tasks_sampler_integrates_in_the_unit_range(sampler: Any, steps: int) -> None:
    task = made(sampler=sampler, steps=steps, sample_batch_size=16)
    with torch.no_grad():
        task.denoiser.backbone.output_gain.fill_(2.0)
    rows: list[int] = []
    task.denoiser.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    seeds = sample_seeds(0, "a", 0, range(40))
    images = task.sample(seeds)
    assert set(rows) == {16}
    assert len(rows) == 3 * steps
    with torch.no_grad():
        x = integrate(task.eval().denoiser, latents(seeds[:16], (1, 4, 4)), sampler, steps)
    assert x.min() < -1  # there is something to clip
    assert x.max() > 1
    assert torch.equal(images[:16], ((x + 1) / 2).clamp(0, 1))


def test_noise_levels_of_training_are_the_tasks() -> None:
    task = made(p_mean=-2.0, p_std=0.1, sigma_data=0.25, uncertainty=False)
    assert task.denoiser.sigma_data == task.edm.sigma_data == 0.25
    seen: list[Tensor] = []
    task.denoiser.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    task.loss(Batch(torch.rand(512, 1, 4, 4, generator=torch_generator(0)), torch.zeros(512, dtype=torch.long)))
    assert float(seen[0].log().mean()) == pytest.approx(-2, abs=0.02)
    assert float(seen[0].log().std()) == pytest.approx(0.1, rel=0.1)


def test_a_conditional_task_tells_classes_apart() -> None:
    task = made(conditional=True)
    with torch.no_grad():
        for name, parameter in task.named_parameters():
            if parameter.ndim == 0:
                parameter.fill_(0.5)
            assert parameter.requires_grad, name
    seeds = sample_seeds(0, "a", 0, [0]).expand(2, 1)
    images = task.sample(seeds, torch.tensor([0, 2]))
    assert not torch.allclose(images[0], images[1], atol=1e-3)
    loss = task.loss(Batch(torch.rand(2, 1, 4, 4, generator=torch_generator(0)), torch.tensor([0, 2])))
    loss.backward()
    assert task.denoiser.backbone.embed_label.weight.grad.abs().sum() > 0


def test_sampling_is_without_dropout_and_leaves_the_mode() -> None:
    task = made()
    with torch.no_grad():
        task.denoiser.backbone.output_gain.fill_(0.5)
    seeds = sample_seeds(0, "a", 0, range(3))
    task.train()
    images = task.sample(seeds)
    assert task.training
    assert torch.equal(task.eval().sample(seeds), images)


def test_state_holds_what_a_sample_needs() -> None:
    task, other = made(), made()
    other.build(INFO, 1)
    with torch.no_grad():
        task.denoiser.backbone.output_gain.fill_(0.5)
    shipped = task.shipped(task.state())
    assert not any(name.startswith("edm.") for name in shipped)
    other.load(shipped)
    seeds = sample_seeds(0, "a", 0, range(2))
    assert torch.equal(other.sample(seeds), task.sample(seeds))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "ddim"}, "sampler is 'ddim'; allowed"),
        ({"steps": 1}, "steps is 1; it must be at least 2"),
        ({"sample_batch_size": 0}, "sample_batch_size is 0; it must be at least 1"),
    ],
)
def test_wrong_values_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionTask(**options)
