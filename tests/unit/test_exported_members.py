"""The public surface: what `import plait` gives, no more and no less."""

import inspect
import pkgutil
import types

import plait
from plait import errors


def test_everything_public_is_exported() -> None:
    public = {
        name
        for name, value in vars(plait).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public | {"__version__"} == set(plait.__all__)


def test_the_contract() -> None:
    assert set(plait.__all__) == {
        "Job", "Limits", "PlaitError", "Plan", "Result", "Saving", "Step", "Trial", "Until", "Verification",
        "__version__", "parallelize", "resolve", "train", "verify",
    }  # fmt: skip


def test_no_function_hides_a_folder() -> None:
    folders = {module.name for module in pkgutil.iter_modules(plait.__path__)}
    assert not folders & set(plait.__all__)


def test_names_of_a_job_are_a_contract() -> None:
    assert set(inspect.signature(plait.Job).parameters) >= {
        "model", "data", "loss", "objective", "optimizer", "batch", "epochs", "steps", "seed", "schedule", "clip_norm",
        "accumulate", "precision", "metrics", "evaluate", "evaluate_every", "until", "collate", "shuffle", "batch_norm",
    }  # fmt: skip


def test_train_takes_a_plan_and_ranks_by_position() -> None:
    parameters = list(inspect.signature(plait.train).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["job", "plan", "ranks"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters[3:])


def test_every_error_is_a_plait_error_and_drawn_in_the_tree() -> None:
    kinds = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert all(issubclass(kind, plait.PlaitError) for kind in kinds)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in kinds)
