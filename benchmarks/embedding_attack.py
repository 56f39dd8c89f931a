"""Who is in an upload of FedDTL: membership inference on embeddings, before noise and at several epsilons.

    python benchmarks/embedding_attack.py

A federation as in `configs/feddtl.yaml` trains for some rounds; half of the digits are held out, so that there are enough
images that no client has. The attacker is the server of the last round: it knows each client's encoder (what it broadcast,
plus the update that it received) and a candidate image, embeds it, and asks whether the image is in the client's upload.
Members are a client's training images, the others are held-out images of the client's classes, so that a class gives nothing
away. Scores:

    nearest     the largest cosine of the candidate's embedding to an uploaded row
    likelihood  log of the sum over rows of the likelihood that a row is that embedding plus the noise, over the mean
                likelihood of other held-out images of the client's classes, which the attacker may have

The better of both counts, on the candidates of all clients together. "T uploads" gives the attacker the rows of T rounds of
one encoder, each with noise of its own, and it takes their mean: what an image that takes part in T rounds exposes. Bound:
no attack on one row has a true positive rate above e^epsilon FPR + delta.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.accounting import gaussian_epsilon, gaussian_noise
from fl_lightning.cli import quiet
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.partition import Pathological
from fl_lightning.data.sources import Digits
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.loop import FederationLoop
from fl_lightning.methods.base import Predict
from fl_lightning.methods.feddtl import SENSITIVITY, FedDTL
from fl_lightning.models.clip import LoRA
from fl_lightning.rng import torch_generator
from fl_lightning.tasks.clip import ClipTask

DELTA = 1e-5
NOISES = (0.0, 0.03, 0.06, 0.125, 0.25, 0.5)  # docs/results/feddtl.md has the accuracy at these
EPSILONS = (10.0, 3.0, 1.0)


class LastUpload(FederationCallback):
    """Keeps what the clients have sent in the last round, and the LoRA that they had been sent."""

    def __init__(self) -> None:
        self.updates: dict[str, dict[str, Tensor]] = {}

    def on_reply(self, loop: Any, reply: Any) -> None:
        self.lora, self.text = dict(loop.method.lora), loop.method.text
        self.updates[reply.message.sender] = reply.message.tensors["lora"]


def worlds(seed: int, rounds: int) -> list[tuple[Tensor, Tensor]]:
    """Of each client: embeddings of its training images, and of held-out images of the same classes, by its own encoder."""
    data = FederatedDataModule(
        Digits(test_fraction=0.5),
        Pathological(classes_per_client=1),
        num_clients=5,
        base_classes=5,
        batch_size=64,
        image_size=32,
        channels=3,
        val_fraction=0.0,
    )
    lora = LoRA(rank=4, alpha=4.0, projections=["q", "k", "v"], last_blocks=2)
    model = ClipTask("tiny-clip-32", "glyphs", lora=lora, optimizer=lambda p: torch.optim.Adam(p, lr=0.001))
    upload = LastUpload()
    loop = FederationLoop(progress=False, evaluate_every=rounds, callbacks=[upload])
    loop.assemble(FedDTL(rounds=rounds), model, data, {"accelerator": "cpu", "devices": 1, "max_epochs": 1}, seed)
    loop.fit()
    found, test = [], data.test_sets()["global"]
    for client, update in upload.updates.items():
        own = {name: value + update[name] for name, value in upload.lora.items()}
        given, train = {"text": {"embeddings": upload.text[:5]}}, data.train(client)
        asked = Predict("policy", None, own, given, "unit_embeddings", ("attack",))
        others = test.of_classes(sorted(set(train.labels.tolist())))
        found.append((loop.predict(asked, train), loop.predict(asked, others)))
    return found


def scores(members: Tensor, others: Tensor, sigma: float, uploads: int, draw: torch.Generator) -> dict[str, Any]:
    """Of each kind of score, those of a client's members and of the others."""
    noise = torch.randn((uploads, *members.shape), generator=draw)
    rows = F.normalize(F.normalize(members + sigma * noise, dim=-1).mean(0), dim=-1)
    public, outside = others[1::2], others[::2]  # the attacker's own images of the classes, and candidates
    candidates = torch.cat([members, outside])
    cosines = candidates @ rows.T
    found = {"nearest": cosines.amax(1)}
    if sigma > 0:
        # Of log p(y | c), y = e + s n, what depends on the candidate c is <c, y> / s^2; |y|^2 is nearly 1 + d s^2.
        deviation = sigma / math.sqrt(uploads)
        sharpness = math.sqrt(1 + members.shape[1] * deviation**2) / deviation**2
        typical = torch.logsumexp(sharpness * public @ rows.T, 0) - math.log(len(public))  # of each row
        found["likelihood"] = torch.logsumexp(sharpness * cosines - typical, 1)
    return {kind: value.split([len(members), len(outside)]) for kind, value in found.items()}


def judged(inside: Tensor, outside: Tensor) -> tuple[float, float]:
    """Area under the curve, and true positive rate where 1 % of the others pass."""
    above = (inside[:, None] > outside).double() + 0.5 * (inside[:, None] == outside).double()
    limit = outside.sort(descending=True).values[int(0.01 * len(outside))]
    return float(above.mean()), float((inside > limit).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--rounds", type=int, default=3, help="rounds before the attack")
    parser.add_argument("--uploads", type=int, default=20, help="T")
    options = parser.parse_args()
    quiet()
    found = [worlds(seed, options.rounds) for seed in range(options.seeds)]
    members, others = sum(len(a) for a, _ in found[0]), sum((len(b) + 1) // 2 for _, b in found[0])
    print(f"{len(found)} seeds, {members} members and {others} others each, delta {DELTA}, T = {options.uploads}")
    print(
        "| noise | epsilon, one upload | AUC | TPR at 1 % FPR | bound on it | epsilon, T uploads | AUC | TPR at 1 % FPR |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for sigma in (*NOISES, *(SENSITIVITY * gaussian_noise(epsilon, DELTA) for epsilon in EPSILONS)):
        cells = [f"{sigma:.3g}"]
        for uploads in (1, options.uploads):
            best: dict[str, list[tuple[float, float]]] = {}
            for seed, clients in enumerate(found):
                draw = torch_generator(seed, "attack", sigma, uploads)
                by_client = [scores(mine, theirs, sigma, uploads, draw) for mine, theirs in clients]
                for kind in by_client[0]:
                    sides = [torch.cat([each[kind][side] for each in by_client]) for side in (0, 1)]
                    best.setdefault(kind, []).append(judged(sides[0], sides[1]))
            means = {kind: torch.tensor(pairs, dtype=torch.float64).T for kind, pairs in best.items()}
            z = sigma / SENSITIVITY / math.sqrt(uploads)
            epsilon = gaussian_epsilon(z, DELTA) if z else math.inf
            area, caught = (max((m[i] for m in means.values()), key=lambda v: float(v.mean())) for i in (0, 1))
            cells += [f"{epsilon:.4g}", *(f"{v.mean():.3f} ± {v.std(correction=0):.3f}" for v in (area, caught))]
            if uploads == 1:
                cells.append(f"{min(1.0, math.exp(min(epsilon, 50)) * 0.01 + DELTA):.3f}")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
