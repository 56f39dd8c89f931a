"""One clear line for a wrong argument: the key, the value, what is allowed, what was perhaps meant."""

from __future__ import annotations

import difflib
import inspect
import pydoc
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from fl_lightning.aggregation import Aggregator
from fl_lightning.data.partition import Partitioner
from fl_lightning.data.source import Source
from fl_lightning.federation.attacks import Attack
from fl_lightning.federation.sampling import CohortSampler
from fl_lightning.methods.base import Method
from fl_lightning.tasks.base import FederatedTask

BASES: dict[str, type] = {  # by the last part of a key
    "method": Method,
    "model": FederatedTask,
    "source": Source,
    "partitioner": Partitioner,
    "sampler": CohortSampler,
    "aggregator": Aggregator,
    "attack": Attack,
    "optimizer": Optimizer,
    "server_optimizer": Optimizer,
}


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn what a user can mend into one line on standard error and exit code 2."""
    try:
        yield
    except (ArgumentError, ValueError, OSError, KeyError, ModuleNotFoundError, MisconfigurationException) as error:
        raise SystemExit(fail(str(error.args[0]) if isinstance(error, KeyError) else str(error))) from error


def fail(message: str, options: Sequence[str] = ()) -> int:
    """Print an error line; returns the exit code."""
    print(f"error: {explain(message, options)}", file=sys.stderr)
    return 2


def explain(message: str, options: Sequence[str] = ()) -> str:
    """Bring a parser's message of many lines down to one.

    Args:
        message: What jsonargparse, or a constructor, said.
        options: All keys of the command line, to name those near a wrong one.
    """
    text = re.sub(r"\s+", " ", message).strip()
    key = ".init_args.".join(re.findall(r'Parser key "([^"]+)"', text))
    named = re.findall(r"given class_path '([^']+)'", text)

    if found := re.search(r"(?:does not accept option '|unrecognized arguments: -*)([\w.+]+)", text):
        return _unknown(found[1], options)
    if found := re.search(r"Option '([^']+)' is not accepted(?:\. Got value: Namespace\(class_path='([^']+)')?", text):
        path = found[2] or (named[-1] if named else "")
        wrong, arguments = found[1].split(".")[0], _arguments(path)
        hint = f"{_near(wrong, arguments)}; allowed: {', '.join(arguments)}" if arguments else ""
        return f"{key}.init_args.{wrong} is no argument of {_short(path)}{hint}"
    if found := re.search(
        r"Expected a dot import path string: (\S+)|class_path '(\S+)': (?:module|No module|Import)", text
    ):
        return _no_class(key, found[1] or found[2])
    if "Not a valid subclass of" in text or "does not correspond to a subclass" in text:
        return _no_class(key, named[-1] if named else "")
    if found := re.search(r"the following arguments are required: ([\w., ]+?)(?: - Expected|$)", text):
        names = [
            name.removeprefix(f"{name.split('.')[0]}.") if not key else f"{key}.init_args.{name}"
            for name in found[1].split(", ")
        ]
        by = f" by {_short(named[-1])}" if named else "; give a --config or the options"
        return f"{', '.join(names)}: required{by}"
    if found := re.search(r"Expected an? (.+?)\. Got value: (.+?)(?: - Expected a | Given value type|$)", text):
        return f"{key} is {found[2]}; allowed: {_kind(found[1])}"
    if "Does not validate against any of the Union subtypes" in text:
        errors = re.search(r"Errors: - (.+?) Given value type:.*?Given value: (.+)$", text)
        if errors:
            reasons = errors[1].split(" - ")
            own = [reason for reason in reasons if not reason.startswith("Expected a ")]
            if own:  # a constructor's own words
                by_class = re.search(r"class_path='([^']+)'", errors[2])
                return f"{_short(by_class[1])}: {own[0]}" if by_class else own[0]
            return f"{key} is {errors[2]}; allowed: {', '.join(_kind(r.removeprefix('Expected a ')) for r in reasons)}"
    return text


def _unknown(key: str, options: Sequence[str]) -> str:
    near = _near(key, options)
    if not near and "." in key:  # the right section, at least
        section = [option for option in options if option.startswith(key.rsplit(".", 1)[0] + ".")]
        near = f"; {key.rsplit('.', 1)[0]} has: {', '.join(o.rsplit('.', 1)[1] for o in section)}" if section else ""
    return f"{key} is no option{near}"


def _no_class(key: str, value: str) -> str:
    base = BASES.get(key.rsplit(".", 1)[-1])
    said = f"{key} is {value!r}, which is no class" if value else f"{key} needs a class_path"
    if base is None:
        return f"{said}; give its full import path"
    names = sorted({child.__name__ for child in _subclasses(base) if not inspect.isabstract(child)})
    return f"{said} of its kind{_near(value, names)}; allowed: {', '.join(names)}"


def _near(wrong: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(wrong, names, 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _arguments(class_path: str) -> list[str]:
    """The keyword arguments of a class, those of its bases included where it passes them on."""
    parser, found = ArgumentParser(), pydoc.locate(class_path)
    if not isinstance(found, type):
        return []
    parser.add_class_arguments(found, "of", fail_untyped=False)
    return [name for name in vars(parser.get_defaults().get("of")) if name != "params"]


def _subclasses(base: type) -> Iterator[type]:
    child: type
    for child in base.__subclasses__():
        public = not child.__name__.startswith("_") and not child.__module__.startswith("test")
        if public and not getattr(child, "__abstractmethods__", None):
            yield child
        yield from _subclasses(child)


def _short(class_path: str) -> str:
    return class_path.rsplit(".", 1)[-1]


def _kind(text: str) -> str:
    """A type, in a user's words."""
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text).replace("NoneType", "null")
    return re.sub(r"(?:typing\.)?Literal\[(.*?)\]", r"\1", text)
