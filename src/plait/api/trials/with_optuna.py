"""Arguments that optuna proposes from the trials before.

In: what may be tried, and the scores so far. Out: the next arguments. Nothing is kept between two proposals but the
scores, so a try that goes on after a kill needs nothing else.
"""

from collections.abc import Mapping
from typing import Any

from plait.api.trials.space import Propose, Range, Space
from plait.errors import UsageError


def with_optuna(space: Space, trials: int, seed: int, mode: str) -> Propose:
    """Proposals of optuna's TPE sampler."""
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "--search optuna needs the package optuna, which is not installed.",
            fix="pip install 'plait[optuna]', or use --search random or asha.",
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds: dict[str, Any] = {name: _distribution(optuna, values) for name, values in space.items()}

    def propose(
        number: int, scores: Mapping[int, float], args: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        if number >= trials:
            return None
        sampler = optuna.samplers.TPESampler(seed=seed + number)
        study = optuna.create_study(direction=f"{mode}imize", sampler=sampler)
        for trial, score in sorted(scores.items()):
            told = optuna.trial.create_trial(params=dict(args[trial]), distributions=kinds, value=score)
            study.add_trial(told)
        found = study.ask(kinds).params
        return {name: _short(value, space[name]) for name, value in found.items()}

    return propose


def _short(value: Any, values: tuple[Any, ...] | Range) -> Any:
    """With as many digits as a person would type."""
    if not isinstance(values, Range) or not isinstance(value, float):
        return value
    return min(max(float(f"{value:.6g}"), values.low), values.high)


def _distribution(optuna: Any, values: tuple[Any, ...] | Range) -> Any:
    if not isinstance(values, Range):
        return optuna.distributions.CategoricalDistribution(values)
    if values.is_whole:
        return optuna.distributions.IntDistribution(int(values.low), int(values.high), log=values.is_log)
    return optuna.distributions.FloatDistribution(values.low, values.high, log=values.is_log)
