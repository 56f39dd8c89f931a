"""The federation: rounds of broadcast, client work, server update and evaluation. It knows no method."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from fl_lightning.aggregation import Aggregator
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.data.examples import DataInfo, Examples
from fl_lightning.federation.attacks import Attack
from fl_lightning.federation.callbacks import FederationCallback
from fl_lightning.federation.engines.base import Engine, addressed_part
from fl_lightning.federation.engines.ray import RayEngine
from fl_lightning.federation.engines.serial import SerialEngine
from fl_lightning.federation.engines.uploads import UploadsEngine
from fl_lightning.federation.engines.vectorized import VectorizedEngine
from fl_lightning.federation.evaluation import Evaluator
from fl_lightning.federation.flops import FlopCount
from fl_lightning.federation.generation import MemorisationMeter
from fl_lightning.federation.incoming import MAX_REPLY_BYTES, Failure, Guard, OnClientError, TooFewReplies
from fl_lightning.federation.journal import FOLDER, Follower, Journal
from fl_lightning.federation.participant import ClientLoop, Participant, ServerSide
from fl_lightning.federation.record_privacy import RecordPrivacy
from fl_lightning.federation.sampling import AllClients, CohortSampler
from fl_lightning.federation.state import CheckpointFolder, MemoryStore, read_checkpoint
from fl_lightning.federation.system import System, Turn
from fl_lightning.federation.uploads import SaveUploads, upload_clients, uploads_folder
from fl_lightning.message import Group, Message
from fl_lightning.methods.base import Method, Predict, Reply
from fl_lightning.tasks.base import FederatedTask

DRY_RUN = 2  # rounds and clients of a dry run (trainer.fast_dev_run)


class FederationLoop:
    """Runs a method's rounds, evaluates, records and checkpoints.

    Args:
        name: Name of the run; its folder is ``lightning_logs/<name>/version_N``.
        sampler: Draws the cohort of each round; everybody by default.
        engine: Where client work runs. "serial": one client after the other, in this process. "vectorized": small clients
            together, as one batched computation, equal to float tolerance. "ray" (extra ``ray``): in processes of their own,
            on this machine or a cluster, with the serial engine's bits.
        vectorized_clients: Most clients in one batched computation, at least 1.
        client_loop: "trainer": a client's fit is a fit of Lightning's Trainer; "lean": the same step without the Trainer's
            costs, bit for bit; "auto": lean where callbacks, precision and strategy allow it.
        compile: Run networks through ``torch.compile``: once, not once a client. Numbers change in their last bits.
        num_workers: Workers of the Ray engine, at least 1. ``time/cpu`` is this process's alone.
        gpus_per_worker: GPUs of each of them, in [0, 1], where a fraction shares one; with several devices, their number.
        devices_per_worker: Devices that fit a client together in each of them, at least 1; on CPUs these are processes.
        address: Of the Ray cluster to use; None starts Ray on this machine.
        memory_budget: MiB of clients' memories (SCAFFOLD's control variates, personal models) to keep in memory, at least 0;
            those used least recently lie in a temporary folder (TMPDIR). Null keeps all in memory.
        evaluate_every: Evaluate every so many rounds (and before the first and after the last), at least 1.
        validate: Score the global model on the validation examples too (``val_global/acc``), for tuning and early stopping.
        checkpoint_every: Write a round checkpoint every so many rounds (and after the last), at least 1.
        keep_last: Round checkpoints to keep, at least 1.
        journal_seconds: Most seconds of work that a killed run does again, at least 0, besides the drawing that it was in
            the middle of: replies, the server's results and snapshots of the training in progress are written to
            ``journal/`` in the run's folder, where a round takes longer than that, and deleted with the round's checkpoint.
            A line names trainings that cannot be resumed within. Null for no journal. With the engine "ray" no training of
            a client, and no replies that workers add up.
        monitor: A score (higher is better) whose best round goes into ``summary.json`` beside the last round.
        num_threads: CPU threads of a process; None leaves torch's choice. One is the default since on few cores the
            threads of small models mostly wait for each other (``docs/results/speed.md``).
        eval_batch_size: Examples per forward pass when evaluating, at least 1.
        count_flops: Record the floating-point operations of every round, at clients and server, evaluation aside
            (``round/flops``); for the serial engine.
        callbacks: Watchers of the federation, for example `EarlyStop`.
        progress: Show progress: a live display on a terminal, plain lines elsewhere.
        uploads: A folder with what clients have sent (`fl_lightning.federation.uploads`), "{seed}" in its name standing for
            the run's seed. The replies of round 1 come from there, and no client trains in it; the clients are those
            who have sent something. With ``data.num_clients: 0`` there is no data but the test set.
        save_uploads: Write what the clients send in round 1 to ``uploads/`` in the run's folder.
        aggregator: A rule in place of the mean of updates, for example `Krum`; null for the method's own.
        attack: Hostile clients, for experiments. Not with ``uploads``, which are as they are.
        record_privacy: Train with differential privacy for single examples at the clients; null for none. Not with the
            vectorized engine, and not with ``uploads``.
        on_client_error: What a client that fails means: by an exception, or by a reply that does not fit what the method
            expects or is not finite. "raise": the end of the run; "skip": the round goes on without the client; "retry":
            so, after it was asked once more. Failures stand in ``failures.jsonl``, and their number in ``round/failures``.
        min_clients: Fewest clients that must reply in a round, at least 1; with fewer the run ends. At 1 an aggregator that
            makes something of nobody (`PrivateMean`) needs no reply.
        max_reply_bytes: Largest reply of a client, at least 1.
        system: A virtual clock: who is there, and who comes too late (``round/virtual_seconds``); null for none. Whom it
            leaves out counts as missing for ``min_clients``.
        client_timeout: Seconds, on the wall, of a client's turn, above 0; one that takes longer has failed. Looked at before
            every batch and every request, so it cannot stop what hangs within one. For the serial engine.
    """

    def __init__(
        self,
        name: str = "federation",
        sampler: CohortSampler | None = None,
        engine: Literal["serial", "vectorized", "ray"] = "serial",
        vectorized_clients: int = 64,
        client_loop: ClientLoop = "auto",
        compile: bool = False,
        num_workers: int = 2,
        gpus_per_worker: float = 0.0,
        devices_per_worker: int = 1,
        address: str | None = None,
        memory_budget: float | None = None,
        evaluate_every: int = 1,
        validate: bool = True,
        checkpoint_every: int = 1,
        keep_last: int = 2,
        journal_seconds: float | None = 30.0,
        monitor: str | None = None,
        num_threads: int | None = 1,
        eval_batch_size: int = 512,
        count_flops: bool = False,
        callbacks: list[FederationCallback] | None = None,
        progress: bool = True,
        uploads: str | None = None,
        save_uploads: bool = False,
        aggregator: Aggregator | None = None,
        attack: Attack | None = None,
        record_privacy: RecordPrivacy | None = None,
        on_client_error: OnClientError = "raise",
        min_clients: int = 1,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        system: System | None = None,
        client_timeout: float | None = None,
    ) -> None:
        for label, value in {
            "evaluate_every": evaluate_every,
            "checkpoint_every": checkpoint_every,
            "keep_last": keep_last,
            "eval_batch_size": eval_batch_size,
            "vectorized_clients": vectorized_clients,
            "num_threads": num_threads if num_threads is not None else 1,
            "min_clients": min_clients,
            "max_reply_bytes": max_reply_bytes,
        }.items():
            if value < 1:
                raise ValueError(f"federation.{label} is {value}; it must be at least 1")
        if engine not in ("serial", "vectorized", "ray"):
            raise ValueError(f"federation.engine is {engine!r}; allowed: 'serial', 'vectorized', 'ray'")
        if count_flops and engine != "serial":
            raise ValueError(f"federation.count_flops is true, and the engine is {engine!r}; it must be 'serial'")
        if compile and engine != "serial":
            raise ValueError(f"federation.compile is true, and the engine is {engine!r}; it must be 'serial'")
        self.compile = compile
        if journal_seconds is not None and not journal_seconds >= 0:
            raise ValueError(f"federation.journal_seconds is {journal_seconds}; it must be at least 0, or null")
        self.journal_seconds = journal_seconds
        self.flops = FlopCount() if count_flops else None
        self.vectorized_clients = vectorized_clients
        self.num_workers, self.gpus_per_worker, self.address = num_workers, gpus_per_worker, address
        self.devices_per_worker = devices_per_worker
        self.memory_budget = memory_budget
        if client_loop not in ("auto", "trainer", "lean"):
            raise ValueError(f"federation.client_loop is {client_loop!r}; allowed: 'auto', 'trainer', 'lean'")
        self.client_loop: ClientLoop = client_loop
        self.name, self.sampler, self.engine_name = name, sampler or AllClients(), engine
        self.evaluate_every, self.validate = evaluate_every, validate
        self.checkpoint_every, self.keep_last, self.monitor = checkpoint_every, keep_last, monitor
        self.num_threads, self.eval_batch_size, self.progress = num_threads, eval_batch_size, progress
        self.uploads, self.save_uploads = uploads, save_uploads
        self.aggregator, self.attack, self.record_privacy = aggregator, attack, record_privacy
        if record_privacy is not None and (engine == "vectorized" or uploads is not None):
            what = "engine is 'vectorized'" if engine == "vectorized" else f"uploads is {uploads!r}"
            raise ValueError(f"federation.{what}, and federation.record_privacy is given; they do not go together")
        if on_client_error not in ("raise", "skip", "retry"):
            raise ValueError(f"federation.on_client_error is {on_client_error!r}; allowed: 'raise', 'skip', 'retry'")
        # A rule that serves a round in which nobody is drawn serves one in which nobody replies, too.
        quorum = 0 if min_clients == 1 and aggregator is not None and aggregator.serves_empty else min_clients
        self.guard = Guard(on_client_error, quorum, max_reply_bytes, self._failed)
        if client_timeout is not None and not (client_timeout > 0 and engine == "serial"):
            raise ValueError(
                f"federation.client_timeout is {client_timeout} and the engine {engine!r}; it must be above 0 and 'serial'"
            )
        for label, given in {"system": system, "attack": attack}.items():
            if given is not None and uploads is not None:
                raise ValueError(
                    f"federation.uploads is {uploads!r}, and federation.{label} is given; they do not go together"
                )
        self.system, self.client_timeout = system, client_timeout
        self.callbacks: list[FederationCallback] = [*(callbacks or []), MemorisationMeter()]
        self.callbacks += [record_privacy] if record_privacy is not None else []
        self.history: list[dict[str, float]] = []
        self.seconds: dict[str, float] = {}
        self.round = 0
        self.is_main = True

    # ---- setting up

    def assemble(
        self,
        method: Method,
        model: FederatedTask,
        data: FederatedDataModule,
        trainer: Mapping[str, Any],
        seed: int,
    ) -> None:
        """Put the pieces together: partition the data, build the model, set the method up."""
        data.use_seed(seed)
        data.setup()
        self.data = data
        info, folder = data.info, None
        if self.uploads is not None:
            folder = uploads_folder(self.uploads, seed)
            info = replace(info, clients=upload_clients(folder, info.clients))
        elif not info.clients:
            raise ValueError("data.num_clients is 0; it must be at least 1 unless federation.uploads names a folder")
        self.assemble_model(method, model, info, trainer, seed, data.batch_size)
        self.memory = MemoryStore(self.memory_budget)
        if self.client_timeout is not None:
            self.guard.turn = partial(self.participant.within, self.client_timeout)
        engine = SerialEngine(self.participant, data, self.memory, self.guard)
        if self.engine_name == "vectorized":
            engine = VectorizedEngine(self.participant, data, self.memory, self.vectorized_clients, self.guard)
        if self.engine_name == "ray":
            engine = RayEngine(
                self.participant,
                data,
                self.memory,
                self.program,
                model,
                trainer,
                self.num_workers,
                self.gpus_per_worker,
                self.devices_per_worker,
                self.address,
                self.guard,
            )
        self.engine: Engine = UploadsEngine(engine, folder) if folder is not None else engine
        self.evaluator = Evaluator(data, self.info, self.participant, self.eval_batch_size if self.dry_run else None)

    def assemble_model(
        self,
        method: Method,
        model: FederatedTask,
        info: DataInfo,
        trainer: Mapping[str, Any],
        seed: int,
        batch_size: int = 1,
    ) -> None:
        """Build the model and set the method up, without data: enough to predict."""
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        self.method, self.model, self.info, self.seed = method, model, info, seed
        self.dry_run = bool(trainer.get("fast_dev_run"))
        if self.dry_run:
            method.limit_rounds(DRY_RUN)
            self.guard.min_clients = 1  # it has as many as it takes
        model.build(info, seed)
        method.setup(model, info, seed)
        self.program = method.client()
        if self.record_privacy is not None:
            self.program = self.record_privacy.wrap(self.program, batch_size)
        if self.attack is not None:
            self.program = self.attack.wrap(self.program, info, seed)
        tasks = {**method.tasks(model), **self.program.tasks(model)}
        self.participant = Participant(
            tasks, trainer, batch_size, seed, self.eval_batch_size, self.client_loop, self.compile
        )
        self.is_main = self.participant.trainer.global_rank == 0

    def launch(self) -> None:
        """Start the processes of a multi-device strategy, once, before anything is written. Each runs the same program."""
        launcher = self.participant.trainer.strategy.launcher
        if launcher is not None:
            launcher.launch(lambda: None, trainer=self.participant.trainer)
            if self.num_threads is not None:
                torch.set_num_threads(self.num_threads)  # the launcher has set another number

    def predict(self, request: Predict, examples: Examples) -> torch.Tensor:
        """Outputs (N, ...) of a model on examples."""
        outputs = self.participant.execute(replace(request, data=examples), self.round, "predict").outputs
        assert outputs is not None
        return outputs.float()

    # ---- running

    def fit(
        self, run_folder: Path | None = None, checkpoint: Path | None = None, facts: Mapping[str, Any] | None = None
    ) -> list[dict[str, float]]:
        """Run the rounds that are left.

        Args:
            run_folder: Where round checkpoints go (``checkpoints/`` below it); None writes none.
            checkpoint: A round checkpoint to go on from.
            facts: JSON facts to keep in every checkpoint (the configuration and its hash).

        Returns:
            The record, one row a round, row 0 before the first.
        """
        self.facts = {**(facts or {}), "info": info_to_json(self.info), "preprocessing": self.model.preprocessing()}
        self.folder = CheckpointFolder(run_folder / "checkpoints", self.keep_last) if run_folder else None
        self._committed: tuple[int, dict[str, Any]] | None = None
        self._on_disk = -1
        self.journal = self._new_journal(run_folder)
        if self.save_uploads and run_folder is not None:
            self.callbacks.append(SaveUploads(run_folder / "uploads"))
        if checkpoint is not None:
            self.restore(read_checkpoint(checkpoint)[0])
            self._on_disk = self.round if self.folder and checkpoint.name == self._path(self.round).name else -1
        if self.aggregator is not None:
            self.aggregator.setup(len(self.info.clients), self.method.rounds, self.sampler.rate, self.seed)
        self._check_cohorts()
        try:
            self._call("on_start")
            self._commit()
            if checkpoint is None:
                self._record({})
            if self.monitor is not None and self.monitor not in self.history[0]:
                scores = ", ".join(sorted(self.history[0]))
                raise ValueError(f"federation.monitor is {self.monitor!r}; this run's scores are: {scores}")
            while self.round < self.method.rounds and not any([c.should_stop(self) for c in self.callbacks]):
                self._run_round(self.round + 1)
            self._save()
            self._call("on_end")
        except (KeyboardInterrupt, SystemExit):
            # Lightning turns an interrupt inside a fit into SystemExit.
            saved = self._save()
            if self.participant.journal is not None:
                self.participant.journal.write()
            self._call("on_interrupt", str(saved) if saved else None)
            raise
        finally:
            self.engine.close()
        return self.history

    def _cohort(self, round: int) -> tuple[str, ...]:
        drawn = self.sampler.cohort(round, self.info.clients, self.seed)
        if self.dry_run and not drawn:  # what serves an empty round is no part of it
            drawn = self.info.clients
        cohort = self.method.cohort(round, drawn)
        return tuple(sorted(cohort[:DRY_RUN] if self.dry_run else cohort, key=self.info.clients.index))

    def _rule(self, cohort: tuple[str, ...]) -> Aggregator | None:
        """What stands in for the method's own reducers of a round; None where they do their work."""
        if self.dry_run:  # it has too few clients for most
            return None
        return self.aggregator if self.aggregator and (cohort or self.aggregator.serves_empty) else None

    def _check_cohorts(self) -> None:
        """Refuse, before any training, what a later round would end at: nobody drawn where the mean needs somebody, a quorum
        that its cohort cannot reach, a rule that the cohort is too small for or that the method has no use for.

        Raises:
            ValueError: One would.
        """
        perhaps_nobody = not self.sampler.draws_somebody
        if self.dry_run or (self.aggregator is None and self.guard.min_clients == 1 and not perhaps_nobody):
            return  # draws cost, and large federations have many
        for round in range(self.round + 1, self.method.rounds + 1):
            cohort = self._cohort(round)
            if (
                perhaps_nobody
                and not self.sampler.cohort(round, self.info.clients, self.seed)
                and self._rule(cohort) is None
            ):
                raise ValueError(
                    f"{type(self.sampler).__name__} draws nobody for round {round}, which only an aggregator like "
                    "PrivateMean can make something of"
                )
            if cohort and len(cohort) < self.guard.min_clients:
                raise ValueError(
                    f"federation.min_clients is {self.guard.min_clients}; round {round} has {len(cohort)} clients"
                )
            if (rule := self._rule(cohort)) is not None:
                rule.gathering(self.method.uplink(round), self.method.numbers(round))
                try:
                    rule.check(len(cohort))
                except ValueError as error:
                    raise ValueError(f"federation.aggregator: {error} (round {round})") from None

    def _turns(self, cohort: tuple[str, ...], message: Message, uplink: Mapping[str, Group]) -> dict[str, Turn]:
        """The virtual clock's word on every client of a cohort; uploads count as far as their shapes are known before."""
        turns: dict[str, Turn] = {}
        if self.system is None:
            return turns
        like = {name: group.like for name, group in uplink.items() if group.like is not None}
        for client in cohort:
            count, received = len(self.data.train(client)), self.method.addressed(message.round, client)
            work = count * (self.system.passes or self.participant.passes(count))
            down, up = addressed_part(message, received).nbytes, Message(message.round, client, like).nbytes
            turns[client] = self.system.turn(client, message.round, self.seed, work, down, up)
        return turns

    def _clock(self, turns: Mapping[str, Turn], replied: tuple[str, ...]) -> dict[str, float]:
        """What the virtual clock puts into a round's row."""
        if self.system is None:
            return {}
        there = [turn for turn in turns.values() if turn.available]
        return {
            "round/virtual_seconds": self.system.seconds(list(turns.values()), [turns[client] for client in replied]),
            "round/unavailable": float(len(turns) - len(there)),
            "round/late": float(sum(not self.system.in_time(turn) for turn in there)),
        }

    def _run_round(self, round: int) -> None:
        method, started = self.method, _clocks()
        flops = self.participant.flops = self.flops
        self.participant.journal = self.journal
        if self.journal is not None:
            self.journal.begin(round, self._path(self.round) if self.folder else None)
        before = flops.total if flops else 0.0
        timings: dict[str, float] = {}
        with _timed(timings, "clients"):
            sampled = cohort = self._cohort(round)
            message = method.broadcast(round)
            done = iter(range(len(cohort) + 1))
            uplink, scalars = method.uplink(round), list[Mapping[str, float]]()
            turns = self._turns(sampled, message, uplink)
            if self.system is not None:
                cohort = tuple(client for client in sampled if self.dry_run or self.system.in_time(turns[client]))
                if sampled and len(cohort) < self.guard.min_clients:
                    raise TooFewReplies(
                        f"round {round}: {len(cohort)} of {len(sampled)} clients are there and in time "
                        f"(federation.system), and federation.min_clients is {self.guard.min_clients}"
                    )
            rule = self._rule(cohort)
            self.guard.numbers = method.numbers(round)

            def accepted(reply: Reply) -> None:
                scalars.append(reply.message.scalars)
                self._call("on_reply", reply)

            total = self.engine.run(
                self.program,
                message,
                cohort,
                rule.gathering(uplink) if rule else uplink,
                method.weight,
                lambda client: method.addressed(round, client),
                lambda client: self._call("on_stage", f"client {client}", next(done), len(cohort)),
                accepted if rule or self._watched else None,
            )
            if rule:
                total.groups = rule.aggregate(total.groups, uplink, self.guard.refused, round)
                total.scalars, total.counted_as = rule.scalars(scalars), rule.participants(len(total.clients))
        with _timed(timings, "server"):
            self._call("on_stage", "server", len(cohort), len(cohort))
            numbers = dict(method.server_update(round, total, ServerSide(self.participant, round)))
        self.participant.flops = self.participant.journal = None
        self.round = round
        if total.pictures:
            self._call("on_pictures", total.pictures)
        row = {f"client/{name}": value for name, value in total.metrics.items()} | numbers
        row |= rule.record() if rule else {}
        row |= {
            "round/clients": float(len(total.clients)),
            **({} if self.guard.policy == "raise" else {"round/failures": float(len(self.guard.failures))}),
            "round/gradients": float(total.num_gradients),
            **({"round/flops": flops.total - before} if flops else {}),
            **self._clock(turns, total.clients),
            "comm/bytes_up": float(total.bytes_up),
            "comm/bytes_down": float(total.bytes_down),
        }
        self._record(row, timings, started)

    def _record(
        self,
        row: Mapping[str, float],
        timings: dict[str, float] | None = None,
        started: tuple[float, float] | None = None,
    ) -> None:
        """Evaluate, put the round's row into the history, commit."""
        timings = {} if timings is None else timings
        started = _clocks() if started is None else started
        row = {"round": float(self.round), **row}
        last = self.round >= self.method.rounds
        if self.round % self.evaluate_every == 0 or last:
            with _timed(timings, "evaluate"):
                self._call("on_stage", "evaluate", 1, 1)
                row |= self.evaluate()
        for callback in self.callbacks:
            row |= callback.measure(self)
        timings["round"], timings["cpu"] = (now - then for now, then in zip(_clocks(), started, strict=True))
        row |= {f"time/{name}": value for name, value in timings.items()}
        for name, value in timings.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
        row = {sys.intern(name): value for name, value in row.items()}  # names are made anew each round, and kept once
        self.history.append(row)
        self._commit()
        if self.round % self.checkpoint_every == 0 and self.round > 0:
            self._save()
        self._call("on_round_end", row)

    def evaluate(self, *, validate: bool | None = None, test: bool = True) -> dict[str, float]:
        """Scores of the method's models as they are now."""
        row: dict[str, float] = {}
        validate = self.validate if validate is None else validate
        for prefix, request in self.method.evaluations().items():
            values = self.evaluator.model(request, self.round, validate=validate, test=test)
            row |= {f"{prefix}/{name}" if prefix else name: value for name, value in values.items()}
        if test:
            row |= self.evaluator.personal(self.engine, self.program, self.method.judged(self.round))
        return row

    @property
    def _watched(self) -> bool:
        """Whether a callback wants to see replies."""
        return any(type(callback).on_reply is not FederationCallback.on_reply for callback in self.callbacks)

    def _failed(self, failure: Failure) -> None:
        """A client has failed. What it did before counts where the run ends with an exception of its and goes on later."""
        if self.participant.journal is not None and (failure.refused or self.guard.policy != "raise"):
            self.participant.journal.forget(failure.client)
        self._call("on_failure", failure)

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs: the method's state, client memories, the record, the clock."""
        return {
            "round": self.round,
            "method": self.method.state_dict(),
            "memory": self.memory.state_dict(),
            "aggregator": self.aggregator.state_dict() if self.aggregator is not None else {},
            "history": self.history,
            "seconds": self.seconds,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to what `state_dict` gave."""
        self.round = int(state["round"])
        self.method.load_state_dict(state["method"])
        self.memory.load_state_dict(state["memory"])
        if self.aggregator is not None:
            self.aggregator.load_state_dict(state.get("aggregator") or {})
        self.history, self.seconds = list(state["history"]), dict(state["seconds"])

    def rewind(self, round: int) -> None:
        """Go back to after a round, with the method's state as it is: later rows of the record and client memories go."""
        if round < self.round:
            self.round = round
            self.history = [row for row in self.history if row["round"] <= round]
            self.memory.load_state_dict({})

    def _commit(self) -> None:
        """Remember the state after a finished round, so that an interrupt in the next one loses nothing before it."""
        if self.folder is not None and self.is_main:
            state = self.state_dict()  # the aggregator's is small, and new each time
            self._committed = self.round, {**state, "method": _copy(state["method"]), "history": list(self.history)}

    def _save(self) -> Path | None:
        """Write the last committed round, unless it is on disk."""
        if self.folder is None or self._committed is None or not self.history:
            return None
        round, state = self._committed
        if round != self._on_disk:
            self.folder.save(round, state, self.facts)
            self._on_disk = round
            if (journal := self.folder.folder.with_name(FOLDER)).exists():
                shutil.rmtree(journal)  # of this round, or an earlier one
        return self._path(round)

    def _path(self, round: int) -> Path:
        """Where the checkpoint after a round lies, once it is written."""
        assert self.folder is not None
        return self.folder.folder / f"round_{round:05d}"

    def _new_journal(self, run_folder: Path | None) -> Journal | None:
        """The journal of a run that has a folder, and that the processes of other devices follow."""
        trainer, share = self.participant.trainer, None
        if self.journal_seconds is None:
            return None
        if trainer.world_size > 1:
            trainer.strategy.setup_environment()  # else the first fit does that
            share = trainer.strategy.broadcast
            if not share(run_folder is not None):
                return None
            if not self.is_main:
                return Follower(share)
        if run_folder is None:
            return None

        def base() -> Path:
            saved = self._save()
            assert saved is not None
            return saved

        return Journal(run_folder / FOLDER, self.journal_seconds, base, str(self.facts.get("config_hash")), share)

    def summary(self) -> dict[str, Any]:
        """The run in one JSON object: final metrics, bytes, seconds, versions."""
        final: dict[str, float] = {}
        for row in self.history:
            final |= {k: v for k, v in row.items() if not k.startswith(("time/", "comm/")) and k != "round"}
        summary = {
            "metrics": final,
            "bytes": {
                "up": int(sum(row.get("comm/bytes_up", 0) for row in self.history)),
                "down": int(sum(row.get("comm/bytes_down", 0) for row in self.history)),
            },
            "seconds": dict(self.seconds),
            "rounds": self.round,
            "seed": self.seed,
            "versions": versions(),
            "git_commit": git_commit(),
        }
        if self.monitor is not None:
            best = max((row for row in self.history if self.monitor in row), key=lambda row: row[self.monitor or ""])
            summary["best"] = {"round": int(best["round"]), "metrics": {k: v for k, v in best.items() if k in final}}
        return summary


def _clocks() -> tuple[float, float]:
    """Seconds on the wall, and of this process on a CPU."""
    return time.perf_counter(), time.process_time()


@contextmanager
def _timed(timings: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timings[phase] = timings.get(phase, 0.0) + time.perf_counter() - started


def _copy(value: Any) -> Any:
    """Nested containers with their tensors cloned: methods may step in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value


def info_to_json(info: DataInfo) -> dict[str, Any]:
    """`DataInfo` as JSON values."""
    return {name: list(value) for name, value in vars(info).items()}


def info_from_json(values: Mapping[str, Any]) -> DataInfo:
    """The inverse of `info_to_json`."""
    return DataInfo(**{name: tuple(value) for name, value in values.items()})


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("fl_lightning", "torch", "lightning", "torchvision", "timm", "open_clip_torch", "peft", "torchmetrics")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except Exception:  # not installed as a distribution (run from a source tree)
            continue
    return found


def git_commit() -> str | None:
    """Commit of the source tree, with "+" where it has changes; None outside of one."""
    try:
        here = Path(__file__).parent
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5)
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, timeout=5
        )
    except OSError:
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "") if head.returncode == 0 else None
