"""The public surface: what `import plait` gives, no more and no less."""

import inspect
import pkgutil
import subprocess
import sys
import types
from dataclasses import fields, is_dataclass
from itertools import product

import pytest

import plait
from plait import errors
from plait.cli.main import app
from plait.options import SYSTEMS
from plait.search.export import EXPORTERS

FUNCTIONS = {
    "capture", "choose", "compare", "doctor", "export", "export_plan", "find_lr", "launch", "links", "load_job",
    "measure", "parallelize", "placements", "predict", "prepare", "read_run", "resolve", "resume", "rewritten", "scale",
    "train", "verdict", "tune", "validate", "verify", "wrap", "write_page",
}  # fmt: skip
VALUES = {
    "Average", "Batched", "Callback", "Changes", "Choice", "Comparison", "Diagnosis", "Elsewhere", "Ended", "EpochDone",
    "Evaluated", "Failed", "Freeze", "Job", "Limits", "LinkReport",
    "Measured", "Objective", "Placed", "PlaitError", "Plan", "Predicted", "Rates", "Result", "RewrittenGraph",
    "Verdict", "RunRecord", "Saved", "Saving", "Search", "Started", "States", "Step", "StepDone", "Stop", "Structure",
    "Trial", "Tried", "Tries", "Tuned", "Until", "Validation", "Verification", "Vertices", "Watching",
}  # fmt: skip
COMMANDS = {
    "run": ("train", "resume"), "graph": ("capture", "verdict", "placements", "rewritten"),
    "plan": ("choose", "scale", "export_plan"),
    "predict": ("predict",), "measure": ("measure",), "validate": ("validate",), "verify": ("verify",),
    "report": ("read_run", "write_page"), "compare": ("compare",), "export": ("export",),
    "doctor": ("doctor",), "links": ("links",), "try": ("tune",), "lr": ("find_lr",),
}  # fmt: skip
"""Which functions do what a command does."""


def test_the_contract() -> None:
    assert set(plait.__all__) == FUNCTIONS | VALUES | {"__version__"}
    assert set(dir(plait)) >= set(plait.__all__)


def test_everything_public_is_exported() -> None:
    assert all(inspect.isfunction(getattr(plait, name)) for name in FUNCTIONS)
    assert all(inspect.isclass(getattr(plait, name)) for name in VALUES)
    public = {
        name
        for name, value in vars(plait).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "TYPE_CHECKING"
    }
    assert public - {"Any"} <= set(plait.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = plait.nothing


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_help_tells_a_newcomer_what_to_call(name: str) -> None:
    assert plait.__doc__ is not None and f" {name} " in plait.__doc__
    function = getattr(plait, name)
    assert inspect.getdoc(function)
    hints = inspect.signature(function)
    assert all(entry.annotation is not inspect.Parameter.empty for entry in hints.parameters.values())


@pytest.mark.parametrize("name", sorted(VALUES - {"PlaitError"}))
def test_values_are_documented(name: str) -> None:
    assert inspect.getdoc(getattr(plait, name))


def test_what_the_command_line_can_python_can() -> None:
    assert {command.name for command in app.registered_commands} == set(COMMANDS)
    for command in app.registered_commands:
        assert command.callback is not None and command.name is not None
        python: set[str] = set()
        for function in COMMANDS[command.name]:
            for parameter in inspect.signature(getattr(plait, function)).parameters.values():
                group = parameter.annotation
                python.add(parameter.name)
                if is_dataclass(group) and group is not plait.Plan:
                    python |= {field.name for field in fields(group)}
        shown = {"json_", "html", "explain", "svg"}  # how it is shown, and where; a value can be asked
        spelled = {
            "scale": "counts",
            "export": "to",
            "folders": "runs",
            "folder": "run_dir",
        }
        for option in inspect.signature(command.callback).parameters:
            name = spelled.get(option, option)
            known = name in python or option in python or (command.name, option) in EQUIVALENT
            assert option in shown or known, f"plait {command.name}: --{option}"


EQUIVALENT = {
    ("graph", "placements"),  # the function of that name
    ("graph", "rewrite"),  # `plait.rewritten`
    ("predict", "trace"),  # `Predicted.trace`
    ("run", "resume"),  # the function of that name
    ("run", "workers"),  # settings={"workers": 2}, or Job(workers=2)
    ("run", "skip_bad"),
    ("run", "weights"),
    ("lr", "out"),  # `Rates.picture`
    # started elsewhere is this very command line, not a call
    *product(("run", "verify", "plan", "measure"), ("engine", "hosts", "engine_set", "dry_run")),
}


def test_import_is_quick() -> None:
    """Neither `import plait`, nor help, nor a refusal of the command line waits for torch."""
    told = (
        "import sys, plait\n"
        "from plait.cli.main import call\n"
        "assert call(['run', '--help']) == 0 and call(['run']) == 2 and call(['graph', 'x.py', '--mesh', 'a']) == 2\n"
        "for typo in ('--mesh=dta=2', '--set=sync.buckt=1', '--log=csw', '--device=gpu', '--ranks=0'):\n"
        "    assert call(['run', __import__('plait.errors').errors.__file__, typo]) == 2, typo\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules, 'imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_looking_up_a_name_draws_no_random_number() -> None:
    told = (
        "import random, plait\nbefore = random.getstate()\nplait.compare\nassert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", told], timeout=60, check=True)


def test_systems_are_those_that_can_be_written_for() -> None:
    assert tuple(EXPORTERS) == SYSTEMS


def test_no_function_hides_a_folder() -> None:
    folders = {module.name for module in pkgutil.iter_modules(plait.__path__)}
    assert not folders & set(plait.__all__)


def test_names_of_a_job_are_a_contract() -> None:
    assert set(inspect.signature(plait.Job).parameters) >= {
        "model", "data", "loss", "objective", "optimizer", "batch", "epochs", "steps", "seed", "schedule", "clip_norm",
        "accumulate", "precision", "metrics", "evaluate", "evaluate_every", "until", "collate", "shuffle", "batch_norm",
        "clip_value", "freeze", "average", "follow", "objectives", "trains",
    }  # fmt: skip


def test_train_takes_a_plan_and_ranks_by_position() -> None:
    parameters = list(inspect.signature(plait.train).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["job", "plan", "ranks"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters[3:])


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_options_that_belong_together_are_one_parameter(name: str) -> None:
    assert len(inspect.signature(getattr(plait, name)).parameters) <= 12


def test_every_error_is_a_plait_error_and_drawn_in_the_tree() -> None:
    kinds = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert all(issubclass(kind, plait.PlaitError) for kind in kinds)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in kinds)
