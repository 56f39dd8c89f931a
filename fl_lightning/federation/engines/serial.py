"""One client after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.federation.engines.base import Addressed, Engine, Intake, Total, Weight, addressed_part
from fl_lightning.federation.incoming import Guard
from fl_lightning.federation.participant import Participant
from fl_lightning.federation.state import MemoryStore
from fl_lightning.message import Group, Message
from fl_lightning.methods.base import Client, ClientProgram, Reply
from fl_lightning.rng import global_rng_saved


class SerialEngine(Engine):
    """Runs clients one by one on one participant.

    Args:
        participant: Carries out fits, with the program's tasks.
        data: Holds every client's examples.
        memory: Client memories.
        guard: Asks the clients, and checks what they send; by default one that ends the run at a failure.
    """

    def __init__(
        self, participant: Participant, data: FederatedDataModule, memory: MemoryStore, guard: Guard | None = None
    ) -> None:
        self.participant, self.data, self.memory, self.guard = participant, data, memory, guard or Guard()
        self.shared_test = data.test_sets()["global"]

    def client(self, key: str, round: int) -> Client:
        """A client's view of the world."""
        data = self.data
        return Client(
            key,
            round,
            self.participant.seed,
            data.train(key),
            data.val(key),
            data.test(key),
            self.shared_test,
            self.memory.get(key),
        )

    def run(
        self,
        program: ClientProgram,
        message: Message,
        cohort: Sequence[str],
        uplink: Mapping[str, Group],
        weight: Weight,
        addressed: Addressed,
        progress: Callable[[str], None],
        accepted: Callable[[Reply], None] | None,
    ) -> Total:
        self.guard.begin(message.round, uplink)
        intake, before = Intake(cohort, uplink, weight, accepted), self.participant.num_gradients
        with global_rng_saved():
            replies = self.replies(program, message, cohort, addressed, progress)
            if self.participant.journal is not None:
                replies = self.participant.journal.keeping(replies, self.participant, self.guard)
            for reply, received in replies:
                intake.take(reply, received)
        return intake.finish(self.guard, self.memory, self.participant.num_gradients - before)

    def replies(
        self,
        program: ClientProgram,
        message: Message,
        cohort: Sequence[str],
        addressed: Addressed,
        progress: Callable[[str], None],
    ) -> Iterator[tuple[Reply | None, Message | None]]:
        """Replies in the order of the cohort, None for a client that failed, each with what its client had received."""
        for key in cohort:
            progress(key)
            received = addressed_part(message, addressed(key))
            yield self.guard.ask(key, partial(self.reply, program, received, key)), received

    def reply(self, program: ClientProgram, received: Message, key: str) -> Reply:
        """One client's reply: out of the journal, or as its program makes it."""
        if (recalled := self.recalled([key])) is not None:
            return recalled[0]
        return self.participant.run(program.update(self.client(key, received.round), received), received.round, key)

    def recalled(self, keys: Sequence[str]) -> list[Reply] | None:
        """The replies of clients that have replied before the run was killed, if all of these have."""
        journal = self.participant.journal
        return None if journal is None else journal.recall(keys, self.participant, self.guard)

    def evaluate(
        self, program: ClientProgram, message: Message, clients: Sequence[str]
    ) -> dict[str, dict[str, Tensor]] | None:
        outputs = {}
        for key in clients:
            steps = program.evaluate(self.client(key, message.round), message)
            if steps is not None:
                outputs[key] = self.participant.run(steps, message.round, key, "evaluate")
        return outputs or None
