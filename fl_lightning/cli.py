"""The command line: ``fit``, ``validate``, ``test``, ``predict``, ``partition``, ``compare``, ``flatness`` and more."""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger

# Short class names in a YAML are looked up among what is imported here.
import fl_lightning.aggregation
import fl_lightning.callbacks
import fl_lightning.data.glyphs
import fl_lightning.data.scenes
import fl_lightning.data.sources
import fl_lightning.federation.attacks
import fl_lightning.federation.distillation
import fl_lightning.federation.generation
import fl_lightning.federation.privacy
import fl_lightning.methods
import fl_lightning.models
import fl_lightning.tasks  # noqa: F401
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.federation.flatness import FlatnessMeter
from fl_lightning.federation.incoming import BadReply
from fl_lightning.federation.journal import FOLDER
from fl_lightning.federation.loop import FederationLoop, info_from_json
from fl_lightning.federation.progress import ProgressDisplay
from fl_lightning.federation.recorder import Recorder, write_json
from fl_lightning.federation.state import MANIFEST, CheckpointFolder, digest, read_checkpoint, read_info
from fl_lightning.federation.uploads import uploads_digest, uploads_folder
from fl_lightning.methods.base import Method
from fl_lightning.tasks.base import FederatedTask
from fl_lightning.usage import fail, usage_errors

RUNS = "lightning_logs"
_DRAWN_SEED = "FL_LIGHTNING_SEED"

# Where a run lies and how it is shown do not change what it computes.
_NOT_MEANING = {
    "config": None,
    "ckpt_path": None,
    "images": None,
    "output": None,
    "meter": None,
    "client": None,
    "class_name": None,
    "approximate": None,
    "verify": None,
    "accept_changes": None,
    "federation": (
        *("name", "client_loop", "progress", "checkpoint_every", "keep_last", "journal_seconds", "monitor"),
        "save_uploads",
        *("num_workers", "gpus_per_worker", "address", "memory_budget"),
        *("on_client_error", "min_clients", "max_reply_bytes"),  # a run that a client ended may go on without it
    ),
    "trainer": ("default_root_dir", "logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"),
}


# Files of a run's folder about its trained model: another one makes them again, or leaves them out.
_OF_THE_MODEL = (
    *("summary.json", "samples*.png", "confusion.png", "flatness*.png", "flatness*.json", "*.writing"),
    FOLDER,  # of the round that was being run: it may hold whole factories
)
# What else may show or hold what was trained.
_DELETED_BY_UNLEARN = ("events.out.tfevents.*", "hparams.yaml", "pictures", "uploads")


class Verbs(Trainer):
    """Names the subcommands and their options; never built. `FederatedCLI` does the work."""

    def fit(self, ckpt_path: str | None = None, accept_changes: bool = False) -> None:  # type: ignore[override]
        """Run the federation.

        Args:
            ckpt_path: "last" goes on with the newest run below trainer.default_root_dir whose configuration is the same; or
                the path of a round checkpoint or of a run's folder.
            accept_changes: Go on from the path under a configuration that differs from the checkpoint's. What differs is
                kept in the checkpoints from then on.
        """

    def validate(self, ckpt_path: str | None = None) -> None:  # type: ignore[override]
        """Score the global model of a round checkpoint on the validation examples.

        Args:
            ckpt_path: A round checkpoint, a run's folder, or "last".
        """

    def test(self, ckpt_path: str | None = None) -> None:  # type: ignore[override]
        """Score the global model of a round checkpoint on the test sets.

        Args:
            ckpt_path: A round checkpoint, a run's folder, or "last".
        """

    def predict(  # type: ignore[override]
        self, images: str, ckpt_path: str | None = None, output: str = "predictions.csv"
    ) -> None:
        """Label a folder of images with the global model of a round checkpoint and write a CSV.

        Args:
            images: A folder of images, searched with its subfolders.
            ckpt_path: A round checkpoint, a run's folder, or "last".
            output: The CSV: path, label, confidence.
        """

    def partition(self, output: str = "partition.png") -> None:
        """Show which client holds what: a table of clients and classes, measures of heterogeneity, a picture.

        Args:
            output: The PNG.
        """

    def compare(self) -> None:
        """Run variants of a configuration over seeds and tabulate them (see compare --help)."""

    def flatness(
        self, ckpt_path: str | None = None, meter: FlatnessMeter | None = None, output: str | None = None
    ) -> None:
        """Measure how flat the loss is around the global model of a round checkpoint: a table, flatness.json, pictures.

        Args:
            ckpt_path: A round checkpoint, a run's folder, or "last".
            meter: What to measure; by default what the run's own FlatnessMeter does, or any does by default.
            output: Folder of the files, made if need be; by default the run's.
        """

    def unlearn(
        self,
        ckpt_path: str | None = None,
        client: str | None = None,
        class_name: str | None = None,
        approximate: bool = False,
        verify: bool = False,
    ) -> None:
        """Make a run forget a client or a class: delete what it left, train again what depended on it.

        Args:
            ckpt_path: A round checkpoint, a run's folder, or "last".
            client: The key of the client.
            class_name: The name of the class, in place of a client.
            approximate: Only never name the class again; its influence on the weights stays.
            verify: Train a federation that the key never joined, and compare hashes of the states.
        """

    def enrol(
        self,
        ckpt_path: str | None = None,
        client: str | None = None,
        class_name: str | None = None,
        verify: bool = False,
    ) -> None:
        """Let a client or a class join a run that left it out: train what it lacks, and again what depends on it.

        Args:
            ckpt_path: A round checkpoint, a run's folder, or "last".
            client: The key of the client.
            class_name: The name of the class, in place of a client.
            verify: Train a federation in which the key took part from the start, and compare hashes of the states.
        """


class FederatedCLI(LightningCLI):
    """One run of the command line, from a configuration to its end.

    Attributes:
        loop: The `FederationLoop`, with its record in ``loop.history``.
        run_folder: What the run left, or None (a dry run leaves nothing).
    """

    loop: FederationLoop
    run_folder: Path | None = None

    def __init__(self, arguments: list[str]) -> None:
        self._first = arguments[:1]
        options = {"exit_on_error": False}
        super().__init__(
            FederatedTask,
            FederatedDataModule,
            trainer_class=Verbs,
            subclass_mode_model=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=None,
            seed_everything_default=0,
            trainer_defaults={"max_epochs": 1, "devices": 1},
            parser_kwargs={**options, **{name: dict(options) for name in self.subcommands()}},
            args=arguments,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """All of them, or the one that is called: building a parser takes a good part of a command's start."""
        names = ("fit", "validate", "test", "predict", "partition", "compare", "flatness", "unlearn", "enrol")
        called = [name for name in names if name in self._first]
        return {name: set() for name in called or names}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_subclass_arguments(Method, "method", required=True)
        parser.add_class_arguments(FederationLoop, "federation")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            keys = [action.dest for verb in self._subcommand_parsers.values() for action in verb._actions]
            raise SystemExit(fail(str(error), sorted(set(keys)))) from error

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing yet: what goes wrong in a run is no wrong argument. See `run`."""

    def _parse_ckpt_path(self) -> None:
        """Lightning would open the checkpoint as a pickle here; ours is a folder that `fit` and the others read."""

    def _set_seed(self) -> None:
        """No global seeding: every draw has an owner. Only a seed that was left to chance is drawn here."""
        config = self.config[self.config.subcommand]
        if isinstance(config.seed_everything, bool):
            if not config.seed_everything:
                raise ValueError("seed_everything is false; allowed: an integer, or true for a random one")
            # Processes that the launcher starts read the same command line, and must not draw another seed.
            drawn = os.environ.get(_DRAWN_SEED) if int(os.environ.get("LOCAL_RANK", 0)) else None
            config.seed_everything = int(drawn or secrets.randbelow(2**31))
            os.environ[_DRAWN_SEED] = str(config.seed_everything)

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate(self.config)
        self.datamodule: FederatedDataModule = self._get(self.config_init, "data")
        self.model: FederatedTask = self._get(self.config_init, "model")
        self.method: Method = self._get(self.config_init, "method")
        self.loop = self._get(self.config_init, "federation")
        self.template = dict(self._get(self.config_init, "trainer").items())
        self.seed: int = self._get(self.config, "seed_everything")
        self.trainer = Verbs  # type: ignore[assignment]  # participants build Trainers from the template

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        names = self._subcommand_method_arguments[subcommand]
        return {name: value for name, value in self.config_init[subcommand].items() if name in names}

    # ---- subcommands

    def fit(self, ckpt_path: str | None = None, accept_changes: bool = False) -> None:
        if accept_changes and ckpt_path in (None, "last"):
            raise SystemExit(fail(f"accept_changes needs the path of a checkpoint; ckpt_path is {ckpt_path!r}"))
        checkpoint = self.find_checkpoint(ckpt_path, same_config=not accept_changes) if ckpt_path else None
        if ckpt_path and checkpoint is None:
            print(f"no run with this configuration below {self.root / RUNS}: starting a new one")
        with usage_errors():
            self.assemble()
        self.loop.launch()
        text = self.config_text()
        if self.loop.progress:
            self.loop.callbacks.append(ProgressDisplay())
        if not self.loop.dry_run:
            loggers: list[Logger] = []
            if self.loop.is_main:
                self.run_folder = checkpoint.parent.parent if checkpoint else self.new_folder()
                (self.run_folder / "config.yaml").write_text(text)
                loggers = self.loggers(self.run_folder)
            # On every process, since what it evaluates at the end is computed by all of them together.
            self.loop.callbacks.insert(0, Recorder(self.run_folder or Path(), loggers))
        facts: dict[str, Any] = {"config": text, "config_hash": config_hash(yaml.safe_load(text))}
        if checkpoint is not None and (changes := self._changes(checkpoint)):
            facts["changes"] = changes
        try:
            self.loop.fit(self.run_folder, checkpoint, facts)
        except ValueError as error:
            trained = self.loop.participant.trained or isinstance(error, BadReply)
            if trained or (self.run_folder is not None and (self.run_folder / FOLDER).exists()):
                raise  # no wrong argument, then: it wants its traceback
            if self.run_folder is not None and checkpoint is None:
                shutil.rmtree(self.run_folder)  # nothing was trained: no run
            raise SystemExit(fail(str(error))) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            kept = CheckpointFolder(self.run_folder / "checkpoints").list() if self.run_folder else []
            rest = (
                f"make room, then go on from {kept[-1]} with --ckpt_path last" if kept else "no checkpoint was written"
            )
            raise SystemExit(fail(f"the disk is full ({error}); {rest}")) from error
        except (KeyboardInterrupt, SystemExit):
            if self.run_folder is not None:
                print(
                    f"to go on: python -m fl_lightning fit --config {self.run_folder / 'config.yaml'} --ckpt_path last",
                    file=sys.stderr,
                )
            raise SystemExit(130) from None
        if self.run_folder is not None:
            print(f"run: {self.run_folder}   (tensorboard --logdir {self.root / RUNS})")

    def _changes(self, checkpoint: Path) -> list[dict[str, Any]]:
        """How the configuration has changed in the middle of the run: after which round, and what."""
        facts = read_info(checkpoint)
        changed = differences(yaml.safe_load(facts["config"]), yaml.safe_load(self.config_text()))
        return [*facts.get("changes", []), *([{"after_round": facts["round"], "changed": changed}] if changed else [])]

    def validate(self, ckpt_path: str | None = None) -> None:
        self._score(ckpt_path, validate=True, test=False)

    def test(self, ckpt_path: str | None = None) -> None:
        self._score(ckpt_path, validate=False, test=True)

    def _score(self, ckpt_path: str | None, *, validate: bool, test: bool) -> None:
        with usage_errors():
            state, _ = read_checkpoint(self.checkpoint(ckpt_path))
            self.assemble()
            self.loop.restore(state)
        self.scores = self.loop.evaluate(validate=validate, test=test)
        width = max(map(len, self.scores), default=0)
        for name, value in self.scores.items():
            print(f"{name:<{width}}  {value:.4f}")

    def predict(self, images: str, ckpt_path: str | None = None, output: str = "predictions.csv") -> None:
        from fl_lightning.data.folder import folder_images

        with usage_errors():
            state, facts = read_checkpoint(self.checkpoint(ckpt_path))
            info = info_from_json(facts["info"])
            channels, size, _ = info.input_shape
            paths, examples = folder_images(images, image_size=size, channels=channels)
            self.loop.assemble_model(self.method, self.model, info, self.template, self.seed)
            self.method.load_state_dict(state["method"])
            requests = self.method.evaluations()
            if not requests:
                raise ValueError(f"{type(self.method).__name__} has no global model to predict with")
        logits = self.loop.predict(next(iter(requests.values())), examples)
        confidence, label = torch.softmax(logits, 1).max(1)
        with open(output, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["path", "label", "confidence"])
            for path, number, value in zip(paths, label.tolist(), confidence.tolist(), strict=True):
                writer.writerow([path, info.class_names[number], f"{value:.6f}"])
        print(f"{len(paths)} images labelled: {output}")

    def partition(self, output: str = "partition.png") -> None:
        from fl_lightning.data.partition import heterogeneity, plot_counts

        with usage_errors():
            self.datamodule.use_seed(self.seed)
            self.datamodule.setup()
            if not self.datamodule.info.clients:
                raise ValueError("data.num_clients is 0; there is nothing to divide")
        data = self.datamodule
        counts, names = data.counts(), data.info.class_names
        print("client  " + "  ".join(f"{name[:10]:>10}" for name in names) + "       total")
        for key, row in zip(data.partition.clients, counts, strict=True):
            print(f"{key:>6}  " + "  ".join(f"{n:>10}" for n in row) + f"  {row.sum():>10}")
        for name, value in heterogeneity(counts).items():
            print(f"{name}: {value:.4f}")
        plot_counts(counts, names, data.partition.clients).savefig(output, dpi=120, bbox_inches="tight")
        print(f"picture: {output}   partition hash: {data.partition.hash}")

    def flatness(
        self, ckpt_path: str | None = None, meter: FlatnessMeter | None = None, output: str | None = None
    ) -> None:
        with usage_errors():
            path = self.checkpoint(ckpt_path)
            state, _ = read_checkpoint(path)
            self.assemble()
            self.loop.restore(state)
            own = [callback for callback in self.loop.callbacks if isinstance(callback, FlatnessMeter)]
            meter = meter or next(iter(own), None) or FlatnessMeter()
            meter.on_start(self.loop)
            folder = Path(output) if output else path.parent.parent
            folder.mkdir(parents=True, exist_ok=True)
        measured = meter.values(self.loop)
        self.scores = {name: value for name, value in measured.items() if not name.startswith("time/")}
        width = max(map(len, self.scores))
        for name, value in self.scores.items():
            print(f"{name:<{width}}  {value:.6g}")
        report = {"checkpoint": str(path), "round": self.loop.round, "settings": meter.settings, "metrics": self.scores}
        write_json(folder / "flatness.json", report)
        pictures = meter.draw(self.loop, folder)
        print(f"files: {', '.join(map(str, [folder / 'flatness.json', *pictures]))}")

    def unlearn(
        self,
        ckpt_path: str | None = None,
        client: str | None = None,
        class_name: str | None = None,
        approximate: bool = False,
        verify: bool = False,
    ) -> None:
        with usage_errors():
            if approximate and verify:
                raise ValueError("an approximate unlearning leaves traces, so there is nothing to verify")
            key, path, _ = self._open(ckpt_path, client, class_name)
            if approximate or key not in self.method.without:  # else: finish what was interrupted, or verify it
                self.loop.rewind(self.method.unlearn(key, approximate))
        if approximate:
            self.loop.history[-1] |= self.loop.evaluate()
        report = {"forgotten": key, "approximate": approximate}
        stale = (*_OF_THE_MODEL, *_DELETED_BY_UNLEARN, f"enrolled_{_file_name(key)}.json")
        report |= self._go_on(path, {}, stale, "never_joined_sha256" if verify else None)
        write_json(self._run / f"unlearned_{_file_name(key)}.json", report)
        print(f"forgotten: {key}   run: {self._run}")
        print(
            "not touched: what peers, uploads and exports outside of the run's folder and backups keep; "
            "the record of earlier rounds"
        )
        if verify and not report["exact"]:
            raise SystemExit(fail(f"the state differs from that of a federation without {key}"))

    def enrol(
        self,
        ckpt_path: str | None = None,
        client: str | None = None,
        class_name: str | None = None,
        verify: bool = False,
    ) -> None:
        with usage_errors():
            key, path, facts = self._open(ckpt_path, client, class_name)
            if facts.get("enrolled") != key:  # else: finish what was interrupted, or verify it
                self.loop.rewind(self.method.enrol(key))
        stale = (*_OF_THE_MODEL, f"unlearned_{_file_name(key)}.json")
        report = {"enrolled": key}
        report |= self._go_on(path, {"enrolled": key}, stale, "from_the_start_sha256" if verify else None)
        write_json(self._run / f"enrolled_{_file_name(key)}.json", report)
        print(f"enrolled: {key}   run: {self._run}")
        if verify and not report["exact"]:
            raise SystemExit(fail(f"the state differs from that of a federation with {key} from the start"))

    def _open(
        self, ckpt_path: str | None, client: str | None, class_name: str | None
    ) -> tuple[str, Path, dict[str, Any]]:
        """The key that is to go or to come, the checkpoint of the run that this is about, restored, and its facts.

        Raises:
            ValueError: The run must not be changed in its place.
        """
        verb = str(self.subcommand)
        if (client is None) == (class_name is None):
            raise ValueError(f"{verb} takes one of --client and --class_name")
        path = self.checkpoint(ckpt_path)
        self._run = self.run_folder = path.parent.parent
        state, facts = read_checkpoint(path)
        if path.parent.name != "checkpoints" or not (self._run / "config.yaml").is_file():
            raise ValueError(f"{path} lies in no run's folder, and {verb} changes and deletes files there")
        if facts["config_hash"] != self.config_hash():
            changed = differences(yaml.safe_load(facts["config"]), yaml.safe_load(self.config_text()))
            raise ValueError(f"{path} belongs to another configuration; differences: {'; '.join(changed)}")
        self.assemble()
        if (devices := self.loop.participant.trainer.world_size) > 1:
            raise ValueError(
                f"{verb} works on one device, and trainer.devices and trainer.num_nodes of this run make {devices}"
            )
        self.loop.restore(state)
        return client if client is not None else f"class:{class_name}", path, facts

    def _go_on(self, path: Path, facts: dict[str, Any], stale: tuple[str, ...], verify: str | None) -> dict[str, Any]:
        """Put the loop's state in the place of everything that the run had, and run the rounds that are left.

        Args:
            path: The checkpoint that it came from.
            facts: What later commands shall find in the checkpoints.
            stale: Patterns of files in the run's folder that go.
            verify: What to call the hashes of the same federation, trained from the start; None trains none.

        Returns:
            Facts for the report.
        """
        folder = self._run
        config = yaml.safe_load(self.config_text())
        config["method"].setdefault("init_args", {})["without"] = list(self.method.without) or None
        text = yaml.safe_dump(config, sort_keys=False)
        facts = {**facts, "config": text, "config_hash": config_hash(config)}
        before = set(path.parent.iterdir())
        kept = CheckpointFolder(path.parent).save(self.loop.round, self.loop.state_dict(), facts)
        # Now nothing else of the run that could hold the key. Torn checkpoints too: they have no manifest, but tensors.
        gone = [*(before.union(path.parent.iterdir()) - {kept})]
        gone += [p for pattern in stale for p in folder.glob(pattern)]
        for old in gone:
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)
        (folder / "config.yaml").write_text(text)
        print(f"deleted: {', '.join(sorted(str(p.relative_to(folder)) for p in gone)) or 'nothing'}")
        if self.loop.progress:
            self.loop.callbacks.append(ProgressDisplay())
        self.loop.callbacks.insert(0, Recorder(folder, self.loggers(folder)))
        self.loop.fit(folder, kept, facts)
        report: dict[str, Any] = {"round": self.loop.round, "sha256": self._digests()}
        if verify:
            report[verify] = expected = self._from_the_start(folder)._digests()
            report["exact"] = expected == report["sha256"]
            for name, found in report["sha256"].items():
                print(f"{name:<12} {'equal' if found == expected[name] else 'DIFFERS'}  {found[:16]}")
        return report

    def _digests(self) -> dict[str, str]:
        """SHA-256 of each part of the server's state, and of the clients' memories."""
        parts = {**self.method.state_dict(), "memory": self.loop.memory.state_dict()}
        return {name: digest(value) for name, value in parts.items() if name != "masked"}  # a mask trains nothing

    def _from_the_start(self, folder: Path) -> FederatedCLI:
        """The federation of the run's configuration, which says by now who is left out, trained from the start."""
        with tempfile.TemporaryDirectory() as root:
            arguments = ["--trainer.default_root_dir", root]
            print(f"verifying: training a federation without {', '.join(self.method.without) or 'exceptions'}")
            other = run(["fit", "--config", str(folder / "config.yaml"), *arguments, "--trainer.logger", "false"])
        assert isinstance(other, FederatedCLI)
        return other

    # ---- helpers

    def assemble(self) -> None:
        """Put the loop together."""
        self.loop.assemble(self.method, self.model, self.datamodule, self.template, self.seed)

    @property
    def root(self) -> Path:
        return Path(self.template.get("default_root_dir") or ".")

    def new_folder(self) -> Path:
        """``lightning_logs/<name>/version_N``, N the next that is free."""
        base = self.root / RUNS / self.loop.name
        base.mkdir(parents=True, exist_ok=True)
        taken = [int(m[1]) for p in base.iterdir() if (m := re.fullmatch(r"version_(\d+)", p.name))]
        number = max(taken, default=-1) + 1
        while True:  # two runs may start at the same moment
            try:
                (base / f"version_{number}").mkdir()
                return base / f"version_{number}"
            except FileExistsError:
                number += 1

    def loggers(self, folder: Path) -> list[Logger]:
        """TensorBoard, unless the trainer section says otherwise: false for none, or loggers of its own."""
        given = self.template.get("logger")
        if given is None or given is True:
            return [TensorBoardLogger(folder, name="", version="", default_hp_metric=False)]
        return list(given) if isinstance(given, (list, tuple)) else [given] if given else []

    def config_text(self) -> str:
        """The whole configuration as YAML, such that ``--config`` takes it."""
        config = self.config[self.config.subcommand].clone()
        for key in (
            key for key, ignored in _NOT_MEANING.items() if ignored is None
        ):  # options of this subcommand alone
            config.pop(key, None)
        return self._parser(self.subcommand).dump(config, skip_unset=False, skip_validation=True)

    def config_hash(self) -> str:
        """A name for what the run computes."""
        return config_hash(yaml.safe_load(self.config_text()))

    def checkpoint(self, ckpt_path: str | None) -> Path:
        """A checkpoint to read; by default the newest of this configuration."""
        found = self.find_checkpoint(ckpt_path or "last", same_config=ckpt_path in (None, "last"))
        if found is None:
            raise FileNotFoundError(
                f"no checkpoint of this configuration below {self.root / RUNS}; run fit first, or give --ckpt_path"
            )
        return found

    def find_checkpoint(self, ckpt_path: str, *, same_config: bool) -> Path | None:
        """The round checkpoint that ``ckpt_path`` names.

        Raises:
            SystemExit: The path is no checkpoint, or one of another configuration.
        """
        with usage_errors():
            if ckpt_path != "last":
                path = newest(Path(ckpt_path).resolve())  # its run's folder is two above
                _, facts = read_checkpoint(path)
                if same_config and facts["config_hash"] != self.config_hash():
                    changed = differences(yaml.safe_load(facts["config"]), yaml.safe_load(self.config_text()))
                    raise ValueError(
                        f"{path} belongs to another configuration; differences: {'; '.join(changed)}. If that is meant, say "
                        "--accept_changes"
                    )
                return path
            wanted = self.config_hash()
            folders = (self.root / RUNS).glob("**/checkpoints")
            there = [path for folder in folders for path in CheckpointFolder(folder).list()]
            for path in sorted(there, key=lambda p: ((p / MANIFEST).stat().st_mtime, str(p)), reverse=True):
                try:
                    # As it was then: uploads may have moved, or changed, since.
                    if read_info(path).get("config_hash") == wanted:
                        read_checkpoint(path)
                        return path
                except (ValueError, OSError) as error:
                    print(f"{error}; looking for an older one", file=sys.stderr)
            return None


def newest(path: Path) -> Path:
    """The path of a round checkpoint, or the last one of a run's folder."""
    return next(reversed(CheckpointFolder(path / "checkpoints").list()), path)


def _file_name(key: str) -> str:
    """A client's or a class's key, as a part of a file's name."""
    return re.sub("[^A-Za-z0-9]+", "_", key)


def meaning(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides what a run computes. Uploads count by their contents, wherever they lie."""
    kept = {}
    for key, value in config.items():
        if key in _NOT_MEANING:
            ignored = _NOT_MEANING[key]
            if ignored is None:
                continue
            value = {k: v for k, v in (value or {}).items() if k not in ignored}
        if key == "federation" and value.get("uploads"):
            folder = uploads_folder(value["uploads"], config.get("seed_everything", 0))
            value = {**value, "uploads": uploads_digest(folder) or value["uploads"]}
        kept[key] = value
    return kept


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of the part of a configuration that decides what a run computes."""
    return hashlib.sha256(json.dumps(meaning(config), sort_keys=True).encode()).hexdigest()


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two configurations differ, as ``key: old -> new``."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if not path:
            old, new = meaning(old), meaning(new)
        keys = [*old, *(key for key in new if key not in old)]
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{path}.{k}".lstrip("."))]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


def quiet() -> None:
    """Silence what Lightning says at every one of thousands of fits."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message="Full backward hook is firing.*")  # Opacus' at a network's first layer


def run(arguments: list[str]) -> object:
    """Dispatch a command line; see `fl_lightning.__main__.main`."""
    quiet()
    if arguments[:1] == ["compare"]:
        from fl_lightning.report.compare import main as compare

        with usage_errors():
            return compare(arguments[1:])
    arguments = _with_config_of_checkpoint(_with_values_of_flags(arguments))
    with usage_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
        cli = FederatedCLI(arguments)
    LightningCLI._run_subcommand(cli, str(cli.subcommand))
    return cli


def _with_values_of_flags(arguments: list[str]) -> list[str]:
    """``--verify`` alone means true; the parser wants a value."""
    out = []
    for argument, after in pairwise([*arguments, "--"]):
        out += (
            [argument, "true"]
            if argument in ("--verify", "--approximate", "--accept_changes") and after.startswith("--")
            else [argument]
        )
    return out


def _with_config_of_checkpoint(arguments: list[str]) -> list[str]:
    """What is done with a checkpoint (``test``, ``flatness``, ...) needs no ``--config``: the checkpoint holds its own."""
    given = [
        a.split("=", 1)[1] if "=" in a else b for a, b in pairwise([*arguments, ""]) if re.match("--ckpt_path(=|$)", a)
    ]
    if not given or any(re.match("(--config|-c)(=|$)", a) for a in arguments):
        return arguments
    path = Path(given[-1]).resolve()
    config = next(
        (folder / "config.yaml" for folder in (path, path.parent.parent) if (folder / "config.yaml").is_file()), None
    )
    return [arguments[0], "--config", str(config), *arguments[1:]] if config else arguments
