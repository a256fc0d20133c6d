"""Packages that plait uses, and which of them are here.

In: the name of a package. Out: its version, or that there is none. Nothing is imported: one that is broken is found
when it is used.
"""

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

REQUIRED = {
    "torch": "2.11", "numpy": "1.26", "scipy": "1.11", "safetensors": "0.4.5", "pyyaml": "6.0", "msgspec": "0.19",
    "typer": "0.12", "rich": "13.0", "cloudpickle": "3.0",
}  # fmt: skip
"""Packages that plait cannot do without, and the oldest version of each."""
OPTIONAL = {
    "transformers": ("4.48", "models of Hugging Face"),
    "accelerate": ("1.0", "Hugging Face's Trainer"),
    "datasets": ("3.0", "datasets of Hugging Face as data"),
    "pytorch-lightning": ("2.4", "plait.lightning"),
    "pyarrow": ("17.0", "Parquet files as data"),
    "optuna": ("4.0", "plait try --search optuna"),
    "onnx": ("1.18", "plait export --to onnx"),
    "onnxscript": ("0.5", "plait export --to onnx"),
    "tensorboard": ("2.17", "--log tensorboard"),
    "wandb": ("0.19", "--log wandb"),
    "mlflow-skinny": ("3.0", "--log mlflow"),
    "egglog": ("13.2", "rewriting of graphs"),
    "scikit-learn": ("1.5", "the examples with handwritten digits"),
}
"""Packages that are used where they are there: the oldest version, and what for."""
ENGINES = {
    "ray": ("2.40", "--engine ray"),
    "pyspark": ("3.5", "--engine spark"),
    "mpi4py": ("4.1", "links.transport=mpi"),
}
"""Packages of what starts processes on several hosts."""
_MODULES = {
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
    "pytorch-lightning": "pytorch_lightning",
    "mlflow-skinny": "mlflow",
}
"""Packages that are imported by another name."""


def installed(package: str) -> str | None:
    """The version of a package that can be imported."""
    if find_spec(_MODULES.get(package, package)) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"


def is_new_enough(found: str | None, least: str) -> bool:
    """Whether a version is there and not older; only its leading numbers count."""
    if found is None:
        return False
    numbers = [int(number) for number in re.findall(r"\d+", re.split(r"[+a-z ]", found, maxsplit=1)[0])]
    return not numbers or [*numbers, 0, 0] >= [int(number) for number in least.split(".")]
