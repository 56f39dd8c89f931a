"""Client work in long-lived processes of Ray, on this machine or a cluster, with the serial engine's bits.

Every worker holds the program's tasks, the data and, where it has some, its GPUs for the whole run. A worker is a process,
or one for each of the devices that fit a client together (`_Group`). The work items are blocks of clients, those that the
serial engine adds up too, and a worker sends back a block's sum and not its replies. Where there are too few blocks to keep
everybody busy, or somebody wants to see each reply, the items are single clients, and their replies are added up here in the
order of the cohort. Either way the additions are those of the serial engine, in its order.

Every worker has a guard of its own, which asks and checks as the serial engine's would. Its failures come back with the
work, and the run's guard takes them over.

Tensors travel as NumPy arrays: the broadcast is put into the object store once a round, and processes map it.
"""

from __future__ import annotations

import builtins
import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation import BLOCK_SIZE, block_size
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.federation.engines.base import Addressed, BlockReducer, Intake, Total, Weight, addressed_part
from fl_lightning.federation.engines.serial import SerialEngine
from fl_lightning.federation.incoming import BadReply, Failure, Guard, OnClientError
from fl_lightning.federation.participant import Participant
from fl_lightning.federation.state import MemoryStore
from fl_lightning.message import Group, Groups, Message
from fl_lightning.methods.base import ClientProgram, Reply
from fl_lightning.rng import global_rng_saved
from fl_lightning.tasks.base import FederatedTask

DEATHS = 3  # workers that may die over the same clients before the round is given up
BUSY = 2  # blocks a worker, at least: else clients are handed out one by one


@dataclass(frozen=True)
class Settings:
    """What a worker is made of; attributes as the arguments of `Participant`."""

    program: ClientProgram
    model: FederatedTask
    data: FederatedDataModule
    trainer: Mapping[str, Any]
    batch_size: int
    seed: int
    eval_batch_size: int
    client_loop: Any
    num_threads: int
    on_client_error: OnClientError
    max_reply_bytes: int


@dataclass(frozen=True)
class Work:
    """What all items of a round share; ``whole`` sends replies back instead of their sum."""

    program: ClientProgram
    message: Message
    uplink: Mapping[str, Group]
    whole: bool = True
    numbers: Sequence[str] = ()


@dataclass(frozen=True)
class Item:
    """Clients for one worker, with what is theirs alone."""

    memories: Mapping[str, Groups]
    addressed: Mapping[str, tuple[str, ...] | None]
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Done:
    """What a worker made of an item: replies, without their tensors where ``block`` is their sum, and who failed."""

    replies: list[Reply]
    block: Mapping[str, Any] | None
    num_gradients: int
    failures: Sequence[Failure]
    lost: Mapping[str, Failure]


@dataclass(frozen=True)
class Ended:
    """What ended a worker's item: the exception by kind and arguments."""

    client: str
    kind: str
    arguments: tuple[Any, ...]
    trace: str
    failures: Sequence[Failure]

    @classmethod
    def by(cls, error: Exception, client: str, failures: Sequence[Failure]) -> Ended:
        """At whom an exception was raised, and what; in the exception's handler."""
        plain = tuple(value if isinstance(value, (str, int, float)) else str(value) for value in error.args)
        return cls(client, type(error).__name__, plain, traceback.format_exc(), failures)

    def exception(self, round: int) -> Exception:
        """The exception as it was there, with client, round and place as a note; a RuntimeError for a kind that is not known
        here."""
        kind = BadReply if self.kind == BadReply.__name__ else getattr(builtins, self.kind, None)
        try:
            error = kind(*self.arguments) if isinstance(kind, type) and issubclass(kind, Exception) else None
        except TypeError:  # of arguments that are no plain values
            error = None
        error = error or RuntimeError(f"{self.kind}: {' '.join(map(str, self.arguments))}")
        error.add_note(f"client {self.client}, round {round}, in a worker:\n{self.trace}")
        return error


@dataclass(frozen=True)
class Place:
    """Which of a worker's processes one is, and where they meet.

    Attributes:
        rank: From 0.
        address: Of the machine that they are all on.
        port: That is free there.
        gpus: Of all of them, by number; empty for CPUs.
    """

    rank: int
    address: str
    port: int
    gpus: tuple[str, ...]

    def take(self) -> None:
        """Be there: what Lightning looks at when a Trainer is built. CUDA must not have been used before."""
        os.environ |= {
            "LOCAL_RANK": str(self.rank),
            "NODE_RANK": "0",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }
        if self.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)


class Worker:
    """The other side: a serial engine that is handed clients."""

    def use(self, settings: Settings, place: Place | None = None) -> None:
        """Be what the settings say."""
        if place is not None:
            place.take()
        torch.set_num_threads(settings.num_threads)
        participant = Participant(
            settings.program.tasks(settings.model),
            settings.trainer,
            settings.batch_size,
            settings.seed,
            settings.eval_batch_size,
            settings.client_loop,
        )
        guard = Guard(settings.on_client_error, max_bytes=settings.max_reply_bytes)
        self.engine = SerialEngine(participant, settings.data, MemoryStore(), guard)

    def work(self, name: str, *arguments: Any) -> tuple[Ended | None, Any]:
        """Call a method below; what ends it comes back as a value, with the client at whom it did."""
        self.at = "?"
        try:
            return None, getattr(self, name)(*arguments)
        except Exception as error:
            return Ended.by(error, self.at, self.engine.guard.failures), None

    def update(self, work: Work, item: Item) -> Done:
        """Clients' turns."""
        engine = self._for(work, item)
        before, replies = engine.participant.num_gradients, list[Reply]()
        reducer = BlockReducer(work.uplink, lambda message: item.weights[message.sender], len(item.memories))
        with global_rng_saved():
            for reply, _ in engine.replies(
                work.program, work.message, list(item.memories), item.addressed.__getitem__, self._starts
            ):
                if not work.whole:
                    reducer.add(reply.message if reply else None)
                if reply:
                    sent = reply if work.whole else replace(reply, message=reply.message.without_tensors())
                    replies.append(sent)
        reducer.close_block()
        return Done(
            replies,
            None if work.whole else reducer.totals,
            engine.participant.num_gradients - before,
            engine.guard.failures,
            engine.guard.lost,
        )

    def evaluate(self, work: Work, item: Item) -> dict[str, dict[str, Tensor]]:
        """Outputs of clients' own models."""
        engine, outputs = self._for(work, item), dict[str, dict[str, Tensor]]()
        for key in item.memories:
            self._starts(key)
            outputs |= engine.evaluate(work.program, work.message, [key]) or {}
        return outputs

    def _for(self, work: Work, item: Item) -> SerialEngine:
        """The engine, with the memories of these clients and no others."""
        self.engine.memory.load_state_dict(item.memories)
        self.engine.guard.begin(work.message.round, work.uplink)
        self.engine.guard.numbers = work.numbers
        return self.engine

    def _starts(self, client: str) -> None:
        self.at = client


class _Group:
    """A worker: actors that do the same work, each on a device of its own, under a strategy of Lightning's. One is the rule.

    Args:
        ray: The library.
        actors: By rank.
        pack: The placement group that keeps several on one machine.
    """

    def __init__(self, ray: Any, actors: Sequence[Any], pack: Any = None) -> None:
        self.ray, self.actors, self.pack = ray, actors, pack

    def use(self, settings: Any) -> Any:
        """Get ready. Returns a reference to what it came to; calls are carried out in their order."""
        if len(self.actors) == 1:
            return self.actors[0].use.remote(settings)
        found = self.ray.get([actor.where.remote() for actor in self.actors])
        (address, port, _), gpus = found[0], tuple(gpu for _, _, own in found for gpu in own)
        places = [Place(rank, address, port, gpus) for rank in range(len(found))]
        return self._all(a.use.remote(settings, place) for a, place in zip(self.actors, places, strict=True))

    def work(self, name: str, shared: Any, item: Item) -> tuple[Any, Any]:
        """Call a method of all. Returns references to what ended it, and to the first one's result."""
        calls = [actor.work.options(num_returns=2).remote(name, shared, item) for actor in self.actors]
        first, result = calls[0]
        return first if len(calls) == 1 else self._all(status for status, _ in calls), result

    def _all(self, statuses: Iterator[Any]) -> Any:
        """One reference to what ended several calls; fails where the process of one died."""
        return self.ray.remote(num_cpus=0)(_first).remote(*statuses)

    def kill(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
        if self.pack is not None:
            self.ray.util.remove_placement_group(self.pack)


def _first(*endings: Ended | None) -> Ended | None:
    return next((ended for ended in endings if ended is not None), None)


class RayEngine(SerialEngine):
    """Runs a cohort on workers.

    Args:
        participant: Of the server; says how clients are fitted.
        data: Holds every client's examples. Workers get its arguments and set it up themselves: on a cluster, each machine
            needs the files.
        memory: Client memories. They stay here, and travel with a client's work.
        program: Of the clients.
        model: The built model.
        trainer: Keyword arguments of a Trainer.
        num_workers: At least 1.
        gpus_per_worker: GPUs of each, in [0, 1], where a fraction shares one; with several devices, their number, or 0.
        devices_per_worker: Devices that fit a client together, at least 1: processes on one machine, by ``trainer.strategy``
            (default ddp).
        address: Of a running cluster; None starts Ray on this machine.
        guard: Of the run. Workers have guards like it; by default one that ends the run at a failure.

    Raises:
        ValueError: Ray is not installed, or the run needs what workers cannot give.
    """

    def __init__(
        self,
        participant: Participant,
        data: FederatedDataModule,
        memory: MemoryStore,
        program: ClientProgram,
        model: FederatedTask,
        trainer: Mapping[str, Any],
        num_workers: int = 2,
        gpus_per_worker: float = 0.0,
        devices_per_worker: int = 1,
        address: str | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(participant, data, memory, guard)
        if num_workers < 1:
            raise ValueError(f"federation.num_workers is {num_workers}; it must be at least 1")
        if devices_per_worker < 1:
            raise ValueError(f"federation.devices_per_worker is {devices_per_worker}; it must be at least 1")
        if devices_per_worker == 1 and not 0 <= gpus_per_worker <= 1:
            raise ValueError(
                f"federation.gpus_per_worker is {gpus_per_worker}; it must be in [0, 1], or federation.devices_per_worker"
            )
        if devices_per_worker > 1 and gpus_per_worker not in (0, devices_per_worker):
            raise ValueError(
                f"federation.gpus_per_worker is {gpus_per_worker}; for {devices_per_worker} devices a worker it must be "
                f"{devices_per_worker}, or 0 for CPUs"
            )
        if (devices := participant.trainer.world_size) > 1:
            raise ValueError(
                f"trainer's devices make {devices} processes of the server; with federation.engine 'ray' it has one, and "
                "federation.devices_per_worker says how many fit a client"
            )
        device = participant.trainer.strategy.root_device.type
        if (device == "cuda") != (gpus_per_worker > 0):
            raise ValueError(
                f"federation.gpus_per_worker is {gpus_per_worker}, and trainer.accelerator trains on {device}; "
                "workers must train on the same: above 0 for cuda, else 0"
            )
        try:
            import ray
        except ImportError as error:
            raise ValueError("federation.engine 'ray' needs Ray: pip install 'fl_lightning[ray]'") from error
        self.ray: Any = ray
        self.num_workers, self.gpus_per_worker, self.address = num_workers, gpus_per_worker, address
        self.devices_per_worker = devices_per_worker
        strategy = trainer.get("strategy", "auto")
        self.settings = Settings(
            program,
            model,
            data,
            {
                **trainer,
                "devices": devices_per_worker,
                "strategy": "ddp" if devices_per_worker > 1 and strategy == "auto" else strategy,
                "logger": False,
            },
            participant.batch_size,
            participant.seed,
            participant.eval_batch_size,
            participant.client_loop,
            torch.get_num_threads(),
            self.guard.policy,
            self.guard.max_bytes,
        )
        self.workers: list[_Group] = []
        self.deaths = 0  # of workers so far
        self._started = False

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
        participant, journal = self.participant, self.participant.journal
        intake, before = Intake(cohort, uplink, weight, accepted), participant.num_gradients
        weights = {key: weight(Message(message.round, key, num_examples=len(self.data.train(key)))) for key in cohort}
        received = {key: addressed_part(message, addressed(key)) for key in cohort}
        blocks = _pieces(cohort, block_size(len(cohort)))
        whole = accepted is not None or len(blocks) < BUSY * self.num_workers
        work = Work(
            program, message, {name: _schema(group) for name, group in uplink.items()}, whole, self.guard.numbers
        )

        def items(clients: Sequence[tuple[str, ...]]) -> list[Item]:
            return [
                Item({k: self.memory.get(k) for k in c}, {k: addressed(k) for k in c}, {k: weights[k] for k in c})
                for c in clients
            ]

        done: Done
        if whole:
            known = {key: found[0] for key in cohort if (found := self.recalled([key])) is not None}
            left = [key for key in cohort if key not in known]
            results = self._results("update", work, items(_pieces(left, 1)), progress, self._journalled)
            for key in cohort:
                if key not in known:
                    done = next(results)
                    self._count(done)
                intake.take(known[key] if key in known else next(iter(done.replies), None), received[key])
        else:
            if journal is not None:
                journal.without_replies()
            for done in self._results("update", work, items(blocks), progress):
                self._count(done)
                for reply in done.replies:
                    key = reply.message.sender
                    if (actual := weight(reply.message)) != weights[key]:
                        raise ValueError(
                            f"client {key} was to weigh {weights[key]} by its examples, and its reply weighs {actual}; "
                            "use federation.engine serial"
                        )
                    intake.count(reply, received[key])
                if done.replies:
                    assert done.block is not None
                    intake.reducer.merge(done.block)
        return intake.finish(self.guard, self.memory, participant.num_gradients - before)

    def _journalled(self, done: Done) -> None:
        """Keep a client's reply as soon as it is here, whoever is waited for."""
        if self.participant.journal is not None:
            for reply in done.replies:
                self.participant.journal.keep_reply(reply, done.num_gradients, 0.0, done.failures)

    def _count(self, done: Done) -> None:
        """Take over what a worker's item has cost, and who failed in it."""
        self.guard.take_over(done.failures, done.lost)
        self.participant.num_gradients += done.num_gradients

    def evaluate(
        self, program: ClientProgram, message: Message, clients: Sequence[str]
    ) -> dict[str, dict[str, Tensor]] | None:
        personal = [k for k in clients if program.evaluate(self.client(k, message.round), message) is not None]
        items = [Item({k: self.memory.get(k) for k in keys}, {}, {}) for keys in _pieces(personal, BLOCK_SIZE)]
        outputs: dict[str, dict[str, Tensor]] = {}
        for found in self._results("evaluate", Work(program, message, {}), items, lambda _: None):
            outputs |= found
        return outputs or None

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []
        if self._started:
            self.ray.shutdown()
            self._started = False

    # ---- workers

    def _start(self) -> None:
        """Start Ray, unless it runs, and the workers."""
        if not self.ray.is_initialized():
            options = {"num_cpus": self.num_workers * self.devices_per_worker} if self.address is None else {}
            paths = os.pathsep.join(path for path in sys.path if path)
            # Workers find the modules that this process does, and yield to others no more than it does (Ray's default is a
            # niceness of 15); Ray sends no statistics of its use.
            with _environment(PYTHONPATH=paths, RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0"):
                self.ray.init(
                    address=self.address or "local", include_dashboard=False, logging_level="error", **options
                )
            self._started = True
        room = sum(self._room(node["Resources"]) for node in self.ray.nodes() if node["Alive"])
        if room < self.num_workers:  # Ray would wait for more machines
            raise ValueError(
                f"federation.num_workers is {self.num_workers}, and Ray's machines have room for {room}: a worker takes "
                f"{self.devices_per_worker} CPUs and {self.gpus_per_worker:g} GPUs of one machine"
            )
        _send_arrays()
        self._settings = self.ray.put(self.settings)
        self.workers = [self._worker() for _ in range(self.num_workers)]
        self.ray.get([worker.use(self._settings) for worker in self.workers])  # raises what a worker could not do

    def _room(self, machine: Mapping[str, float]) -> int:
        """Workers that a machine of these resources has room for; a fraction of a GPU is one of the same GPU."""
        cpus, gpus, each = machine.get("CPU", 0.0), machine.get("GPU", 0.0), self.gpus_per_worker
        by_cpu = int(cpus // self.devices_per_worker)
        if not each:
            return by_cpu
        return min(by_cpu, int(gpus) * int(1 / each + 1e-6) if each < 1 else int(gpus // each))

    def _worker(self) -> _Group:
        count, gpus = self.devices_per_worker, self.gpus_per_worker / self.devices_per_worker
        if count == 1:
            return _Group(self.ray, [self.ray.remote(num_cpus=1, num_gpus=gpus)(_Actor).remote()])
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        pack = self.ray.util.placement_group(
            [{"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}] * count, "STRICT_PACK"
        )
        place = PlacementGroupSchedulingStrategy(pack)
        kind = self.ray.remote(num_cpus=1, num_gpus=gpus, scheduling_strategy=place)(_Actor)
        return _Group(self.ray, [kind.remote() for _ in range(count)], pack)

    def _results(
        self,
        name: str,
        work: Work,
        items: Sequence[Item],
        progress: Callable[[str], None],
        arrived: Callable[[Any], None] | None = None,
    ) -> Iterator[Any]:
        """Results of all items in their order, whoever does them when; the longest go first.

        Args:
            name: Of the workers' method.
            work: What the items share.
            items: The items.
            progress: Called with a client when somebody begins with it.
            arrived: Called with a result when it is there, before its turn comes.

        Raises:
            Exception: What ended the first item that did not end well, with the place as a note.
            RuntimeError: Workers died over the same clients again and again.
        """
        if not items:
            return
        if not self.workers:
            self._start()
        shared = self.ray.put(work)
        waiting = sorted(range(len(items)), key=lambda at: -self._cost(items[at]))
        idle, running = list(self.workers), dict[Any, tuple[int, _Group, Any]]()
        ready, deaths, told = dict[int, tuple[Ended | None, Any]](), dict.fromkeys(waiting, 0), set[str]()

        def again(at: int, error: Exception) -> None:
            deaths[at] += 1
            if deaths[at] == DEATHS:
                clients = ", ".join(items[at].memories)
                raise RuntimeError(
                    f"{DEATHS} workers died over client {clients}, round {work.message.round}"
                ) from error
            waiting.insert(0, at)

        number = 0
        try:
            while number < len(items):
                if number in ready:
                    ended, result = ready.pop(number)
                    if ended is not None:
                        self.guard.take_over(ended.failures, {})
                        raise ended.exception(work.message.round)
                    try:
                        found = self.ray.get(result)
                    except self.ray.exceptions.ObjectLostError as error:  # with its machine
                        again(number, error)
                        continue
                    yield found
                    number += 1
                    continue
                while waiting and idle:
                    at, worker = waiting.pop(0), idle.pop()
                    for client in items[at].memories.keys() - told:
                        progress(client)
                    told |= items[at].memories.keys()
                    status, result = worker.work(name, shared, items[at])
                    running[status] = at, worker, result
                (status,), _ = self.ray.wait(list(running), num_returns=1)
                at, worker, result = running.pop(status)
                try:
                    ready[at] = self.ray.get(status), result
                except self.ray.exceptions.RayActorError as error:
                    worker = self._replace(worker)
                    again(at, error)
                else:
                    if ready[at][0] is not None:
                        waiting = [other for other in waiting if other < at]  # the run ends here, if not before
                    elif arrived is not None:
                        with suppress(self.ray.exceptions.ObjectLostError):  # it is made again when its turn comes
                            arrived(self.ray.get(result))
                idle.append(worker)
        finally:
            if running:  # given up in the middle: nobody waits for what these do
                self.close()

    def _replace(self, worker: _Group) -> _Group:
        self.deaths += 1
        if worker.pack is not None:
            worker.kill()  # the others wait for the one that died
        new = self._worker()
        new.use(self._settings)
        self.workers[self.workers.index(worker)] = new
        return new

    def _cost(self, item: Item) -> int:
        """Examples that the clients of an item will go through, by the configured budget."""
        epochs, steps, size = self.participant.budget({})
        counts = [len(self.data.train(key)) for key in item.memories]
        limits = [[epochs * n] * (epochs >= 0) + [steps * size] * (steps >= 0) for n in counts]
        return sum(min(limit) for limit in limits if limit)


class _Actor(Worker):
    """A worker in a process of its own."""

    def __init__(self) -> None:
        _send_arrays()
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # each would tell what devices there are

    def where(self) -> tuple[str, int, list[str]]:
        """The machine's address, a port that is free there, and the numbers of the GPUs that are this process's."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1], [str(gpu) for gpu in ray.get_gpu_ids()]


def _schema(group: Group) -> Group:
    """A group whose replies can be checked, with no number in it."""
    like = group.like and {name: torch.empty_like(value, device="meta") for name, value in group.like.items()}
    return replace(group, like=like)


def _pieces(keys: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(keys[first : first + size]) for first in range(0, len(keys), size)]


def _send_arrays() -> None:
    """From this process, tensors travel as arrays, which Ray shares between processes instead of pickling them."""
    from ray.util import register_serializer

    register_serializer(Tensor, serializer=_to_array, deserializer=_from_array)


def _to_array(value: Tensor) -> tuple[Any, torch.dtype, tuple[int, ...]]:
    array = None if value.is_meta else value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return array, value.dtype, tuple(value.shape)


def _from_array(parts: tuple[Any, torch.dtype, tuple[int, ...]]) -> Tensor:
    """A copy, since what processes share can be read only."""
    array, dtype, shape = parts
    if array is None or not len(array):
        return torch.empty(shape, dtype=dtype, device="meta" if array is None else "cpu")
    return torch.frombuffer(bytearray(array), dtype=dtype).view(shape)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Processes started meanwhile see these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
