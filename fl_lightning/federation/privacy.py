"""Client-level differential privacy: the server takes a noisy sum of clipped updates from a round (McMahan et al., 2018).

Two federations are neighbours if one has one client more. The figures hold for what the server's state is made from, that is
for a reader of the model. The record's ``client/`` columns, ``round/clients`` and ``server/client_drift`` are a simulator's
privilege and are not covered. The noise is drawn from the run's seed, so that a run can be repeated: who knows the seed can
take it away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.accounting import Accountant, Event, epsilon_of, noise_for, spend
from fl_lightning.aggregation import Aggregator, Vector
from fl_lightning.message import Group
from fl_lightning.rng import torch_generator


class PrivateMean(Aggregator):
    """sum_k clip(u_k) + noise, over the expected number of clients q N (McMahan et al., 2018, section 2).

    All that a client sends (the model's update, control variates, buffers) is one vector and clipped as one. Clients weigh
    alike. Integers (BatchNorm's counter) are not released: the server's stay as they are. The sampler must draw every client
    by itself (`PoissonSampler`), or take all. A method that sends anything else, numbers or rows, is refused.

    Args:
        clip: Largest norm of a client's vector, above 0; the first one where it adapts.
        noise_multiplier: z; the noise on every number of the sum has the standard deviation z times the norm. Above 0; null
            where ``epsilon`` sets it.
        epsilon: What the whole run may spend, above 0; null where ``noise_multiplier`` is given. A run that goes on under
            changed rounds, sampler or budget has its noise solved for anew, from what is left.
        delta: In (0, 1 / number of clients).
        adapt: Let the norm follow this quantile of the clients' norms (Andrew et al., 2021), in (0, 1); null keeps it.
        adapt_rate: eta_C of it, above 0. 0.2 in the paper.
        adapt_noise: sigma_b of it, the noise on the count of short updates, above 0; null takes the paper's q N / 20, and
            z / 2 at least times 1.1, since the count's noise comes out of the same budget.
        accountant: "rdp" (Renyi, fast) or "pld" (privacy loss distributions, tighter, seconds a round).
    """

    serves_empty = True

    def __init__(
        self,
        clip: float = 1.0,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        adapt: float | None = None,
        adapt_rate: float = 0.2,
        adapt_noise: float | None = None,
        accountant: Accountant = "rdp",
    ) -> None:
        if (noise_multiplier is None) == (epsilon is None):
            raise ValueError(
                f"PrivateMean: give either noise_multiplier or epsilon; got {noise_multiplier} and {epsilon}"
            )
        given = {"clip": clip, "noise_multiplier": noise_multiplier, "epsilon": epsilon}
        for name, value in {**given, "adapt_rate": adapt_rate, "adapt_noise": adapt_noise}.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"PrivateMean.{name} is {value}; it must be above 0 and finite")
        if not 0 < delta < 1:
            raise ValueError(f"PrivateMean.delta is {delta}; it must be in (0, 1)")
        if adapt is not None and not 0 < adapt < 1:
            raise ValueError(f"PrivateMean.adapt is {adapt}; it must be in (0, 1)")
        if accountant not in ("rdp", "pld"):
            raise ValueError(f"PrivateMean.accountant is {accountant!r}; allowed: 'rdp', 'pld'")
        self.clip, self.noise_multiplier, self.epsilon, self.delta = clip, noise_multiplier, epsilon, delta
        self.adapt, self.adapt_rate, self.adapt_noise = adapt, adapt_rate, adapt_noise
        self.accountant: Accountant = accountant
        self.spent: list[Event] = []
        self.plan: list[Any] = []  # what z was solved for
        self.z = 0.0
        self.numbers: dict[str, float] = {}

    def setup(self, clients: int, rounds: int, rate: float | None, seed: int) -> None:
        if rate is None:
            raise ValueError(
                "PrivateMean needs a sampler that draws every client by itself, as its accountant assumes; "
                "federation.sampler must be PoissonSampler or AllClients"
            )
        if self.delta >= 1 / clients:
            raise ValueError(
                f"PrivateMean.delta is {self.delta}; it must be in (0, 1 / {clients}) for {clients} clients"
            )
        self.rate, self.expected, self.seed = rate, rate * clients, seed
        before, self.plan = self.plan, [self.epsilon, self.delta, rate, rounds, self.accountant]
        left = rounds - sum(times for _, _, times in self.spent)  # a round, an event
        if self.noise_multiplier is not None:
            self.z = self.noise_multiplier
        elif self.plan != before and left > 0:  # else that of the rounds before, to the bit
            assert self.epsilon is not None
            self.z = noise_for(self.epsilon, self.delta, rate, left, self.accountant, self.spent)
        z = self.z_update = self.z
        if self.adapt is not None:
            # Algorithm 1: z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), so that both releases together cost what z does.
            self.sigma_count = self.adapt_noise or max(self.expected / 20, 0.55 * z)
            if not 2 * self.sigma_count > z:
                raise ValueError(
                    f"PrivateMean.adapt_noise is {self.sigma_count}; it must be above {z / 2:.4g}, half of noise_multiplier"
                )
            self.z_update = (z**-2 - (2 * self.sigma_count) ** -2) ** -0.5

    def check(self, replies: int, refused: int = 0) -> None:
        """Any number will do: the denominator is fixed."""

    def gathering(self, uplink: Mapping[str, Group], numbers: Sequence[str] = ()) -> dict[str, Group]:
        others = {name for name, group in uplink.items() if group.kind != "update"}
        if others:
            raise ValueError(f"PrivateMean covers updates; this method's clients also send {', '.join(sorted(others))}")
        if numbers:
            raise ValueError(
                f"PrivateMean covers updates; this method's clients also send numbers in clear: {', '.join(numbers)}"
            )
        if unknown := [name for name, group in uplink.items() if group.like is None]:
            raise ValueError(f"PrivateMean needs to know the shapes of what clients send; not stated for {unknown}")
        return super().gathering(uplink, numbers)

    def combine(self, vectors: Tensor, refused: int = 0) -> Tensor:
        raise NotImplementedError("a private mean is made with the round's noise; see aggregate")

    def aggregate(
        self, gathered: Mapping[str, Any], uplink: Mapping[str, Group], refused: int = 0, round: int = 0
    ) -> dict[str, Any]:
        schema = {(g, n): v for g, group in uplink.items() for n, v in (group.like or {}).items()}
        vector = Vector(schema)
        senders = list(gathered[next(iter(uplink))]) if gathered else []
        total, short = torch.zeros(len(vector), dtype=vector.dtype), 0
        for sender in senders:
            row = vector.of({(group, name): gathered[group][sender][name] for group, name in schema})
            norm = float(row.double().norm())
            if not math.isfinite(norm):
                raise ValueError(f"PrivateMean needs finite updates; that of client {sender} is not")
            total += row * min(1.0, self.clip / norm) if norm else row
            short += norm <= self.clip
        draw = torch_generator(self.seed, round, "privacy noise")
        total += self.z_update * self.clip * torch.randn(len(total), generator=draw, dtype=vector.dtype)
        self.spent = spend(self.spent, self.rate, self.z)
        self.numbers = {
            "epsilon": epsilon_of(tuple(self.spent), self.delta, self.accountant),
            "clip": self.clip,
            "noise": self.z_update * self.clip / self.expected,
        }
        if self.adapt is not None:
            # b~ = 1/2 + (sum (b_k - 1/2) + N(0, sigma_b^2)) / (q N); C <- C exp(-eta_C (b~ - gamma)).
            noise = self.sigma_count * float(torch.randn(1, generator=draw, dtype=torch.float64))
            count = short - len(senders) / 2 + noise
            self.clip *= math.exp(-self.adapt_rate * (0.5 + count / self.expected - self.adapt))
        out: dict[str, dict[str, Tensor]] = {group: {} for group in uplink}
        parts = vector.parts(total)
        for (group, name), like in schema.items():
            if (group, name) in parts:
                often = 1 / self.expected if uplink[group].reduce.copies(0) else 1.0  # a mean, or a sum
                out[group][name] = (parts[group, name] * often).to(like.dtype)
            else:
                out[group][name] = torch.zeros_like(like)
        return out

    def participants(self, replies: int) -> float:
        return self.expected

    def record(self) -> dict[str, float]:
        return {f"privacy/{name}": value for name, value in self.numbers.items()}

    def state_dict(self) -> dict[str, Any]:
        adapted = {} if self.adapt is None else {"clip": self.clip}  # else the configuration's word holds
        return {"spent": [list(event) for event in self.spent], "plan": self.plan, "z": self.z, **adapted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "spent" not in state:
            raise ValueError(
                "the checkpoint's rounds were in clear, and PrivateMean's epsilon would say nothing of them"
            )
        self.spent = [(float(q), float(z), int(n)) for q, z, n in state["spent"]]
        last = self.spent[-1][1] if self.spent else 0.0  # of a checkpoint without the rest
        self.plan, self.z = list(state.get("plan", [])), float(state.get("z", last))
        if self.adapt is not None and "clip" in state:
            self.clip = float(state["clip"])
