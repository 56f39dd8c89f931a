"""What the design promises about the source: imports run one way, randomness has owners, nothing is pickled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fl_lightning"
FILES = sorted(PACKAGE.rglob("*.py"))
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))

# A room imports rooms of lower levels, and its own level.
LEVELS = (
    {"rng", "aggregation", "message", "accounting"},
    {"rules", "optim", "synthesis", "models", "losses", "metrics", "data"},
    {"callbacks", "tasks"},
    {"methods"},
    {"report", "federation", "usage"},
    {"cli"},
    {"__main__"},
)
# `compare` runs the command line, over and over, and the command line offers it: each imports the other when it is used.
UPWARD = {"fl_lightning/report/compare.py": {"cli", "__main__"}}
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# Rooms whose code any loop could run; the data module is a Lightning one, and the optimizers' types are torch's.
WITHOUT_LIGHTNING = {
    "rng",
    "aggregation",
    "message",
    "accounting",
    "models",
    "losses",
    "rules",
    "metrics",
    "synthesis",
    "optim",
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def named(node: ast.AST) -> str:
    """``torch.rand`` of the expression torch.rand."""
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_room_has_a_level() -> None:
    assert {room(path) for path in FILES} - {"__init__"} <= LEVEL.keys()


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_run_one_way(path: Path) -> None:
    if room(path) == "__init__":
        return
    for imported in imports(path):
        if imported.startswith("fl_lightning."):
            other = imported.split(".")[1]
            if other != "__version__" and other not in UPWARD.get(name(path), ()):
                assert LEVEL[other] <= LEVEL[room(path)], f"{name(path)} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_pure_rooms_know_no_lightning_and_the_federation_knows_no_method(path: Path) -> None:
    found = list(imports(path))
    pure = room(path) in WITHOUT_LIGHTNING or (room(path) == "data" and path.name != "datamodule.py")
    if pure:
        assert not [i for i in found if i.split(".")[0] in ("lightning", "pytorch_lightning")]
    if room(path) == "federation":
        concrete = [
            i for i in found if i.startswith("fl_lightning.methods") and not i.startswith("fl_lightning.methods.base")
        ]
        assert not concrete
        names = {yaml.safe_load(c.read_text())["method"]["class_path"].rsplit(".", 1)[-1] for c in whole_configs()}
        assert len(names) > 3
        code = ast.unparse(without_docstrings(ast.parse(path.read_text())))
        assert not [n for n in names if re.search(rf"\b{n}\b", code)]


def without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
            ] or [ast.Pass()]
    return tree


# Draws from torch's global generator unless given one of their own.
DRAWS = {"rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "rand_like", "randn_like"}
IN_PLACE = {
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
    "trunc_normal_",
    "kaiming_uniform_",
    "xavier_uniform_",
}
# File: why its global draws are owned all the same.
OWNED: dict[str, str] = {
    "fl_lightning/rng.py": "lends the global generators",
    "fl_lightning/tasks/inversion.py": "a step's jitter; the participant lends the global generators to the fit",
    "fl_lightning/tasks/clip.py": "one draw at the start of a fit, to which the participant lends the global generators",
}


def global_draws(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        call, owned = named(node.func), any(k.arg == "generator" for k in node.keywords)
        last = call.rsplit(".", 1)[-1]
        if (
            re.match(r"random\.|torch\.(manual_seed|seed|cuda\.manual_seed\w*)$", call)
            or (re.match(r"(np|numpy)\.random\.", call) and last not in ("default_rng", "Generator", "SeedSequence"))
            or (not owned and call.startswith("torch.") and last in DRAWS)
        ):
            found.append(call)
        elif not owned and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
            found.append(node.func.attr)
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_draw_has_an_owner(path: Path) -> None:
    text = path.read_text()
    found = global_draws(ast.parse(text))
    if name(path) in OWNED:
        assert found, f"{name(path)} needs no exception any more"
    elif "owned_global_rng" in text:
        return  # draws inside of a loan; what is lent is given back, see test_rng
    else:
        assert not found


def test_the_search_for_global_draws_finds_them() -> None:
    wrong = "torch.rand(3); np.random.rand(); random.choice(x); torch.manual_seed(0); w.normal_(); torch.randn_like(x)"
    right = "torch.rand(3, generator=g); np.random.default_rng(0); w.normal_(generator=g); rng.normal(); self.random(x)"
    assert len(global_draws(ast.parse(wrong))) == 6
    assert global_draws(ast.parse(right)) == []


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_is_pickled(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not {i.split(".")[0] for i in imports(path)} & {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
    calls = {named(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"torch.load", "torch.save", "np.load", "numpy.load"} - allowed_loads(path)


def allowed_loads(path: Path) -> set[str]:
    """numpy refuses pickles unless told otherwise; archives of data are read so."""
    text = path.read_text()
    return {"np.load"} if room(path) == "data" and "allow_pickle=False" in text else set()


def whole_configs() -> list[Path]:
    """Those that name a method; others are parts, or lists of variants."""
    return [path for path in CONFIGS if "method" in (yaml.safe_load(path.read_text()) or {})]


@pytest.mark.parametrize("path", whole_configs(), ids=name)
def test_every_configuration_names_a_method_that_exists(path: Path) -> None:
    import fl_lightning.methods

    method = yaml.safe_load(path.read_text())["method"]["class_path"].rsplit(".", 1)[-1]
    assert method in fl_lightning.methods.__all__
    assert issubclass(getattr(fl_lightning.methods, method), fl_lightning.methods.Method)


def test_every_method_has_a_configuration() -> None:
    import fl_lightning.methods as methods

    used = {yaml.safe_load(path.read_text())["method"]["class_path"].rsplit(".", 1)[-1] for path in whole_configs()}
    concrete = {
        found.__name__
        for found in map(methods.__dict__.get, methods.__all__)
        if isinstance(found, type) and issubclass(found, methods.Method) and found is not methods.Method
    }
    assert concrete <= used
