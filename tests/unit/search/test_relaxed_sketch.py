"""Plans whose workers do not sum gradients, priced by sketch on the simulator that runs compiled programs."""

import pytest
import torch
from tests.unit.run.training import case_job

from plait.cluster.parse import parse_cluster
from plait.plan.plan import DATA
from plait.search.choose.choose import Request, oracle_for
from plait.search.choose.subject import subject_of_job
from plait.search.predict.prediction import Prediction


@pytest.fixture(scope="module")
def priced() -> dict[int, dict[str, Prediction]]:
    subject = subject_of_job(
        case_job("mlp", torch.float32, optimizer="adamw", batch=96, num_samples=960), "mlp"
    )
    clusters = {count: parse_cluster(f"{count}x1xA100") for count in (4, 48)}
    return {
        count: {found.plan.name: found for found in oracle_for(subject, cluster, Request()).relaxed()}
        for count, cluster in clusters.items()
    }


def test_every_rule_is_priced_but_what_needs_one_memory(priced: dict[int, dict[str, Prediction]]) -> None:
    wanted = {"server-sync", "server-async", "server-stale", "easgd", "local-sgd", "diloco"}
    assert set(priced[4]) == wanted
    assert all(found.step_s > 0 and found.plan.ranks == 4 for found in priced[4].values())


def test_less_often_is_less_sent_and_servers_are_sent_all(priced: dict[int, dict[str, Prediction]]) -> None:
    few = priced[4]
    assert few["diloco"].sent_bytes[DATA] < few["local-sgd"].sent_bytes[DATA]
    assert few["easgd"].sent_bytes["servers"] < few["server-sync"].sent_bytes["servers"]
    assert few["server-sync"].memory.optimizer == 0 < few["easgd"].memory.optimizer


def test_one_server_is_a_bottleneck_for_many_workers(priced: dict[int, dict[str, Prediction]]) -> None:
    """All pass one link to it: a step of 47 workers takes far longer than one of 3; averages hardly do."""
    served = priced[48]["server-sync"].step_s / priced[4]["server-sync"].step_s
    averaged = priced[48]["local-sgd"].step_s / priced[4]["local-sgd"].step_s
    assert served > 1.02 * averaged
    assert priced[48]["server-sync"].exposed_s > 5 * priced[4]["server-sync"].exposed_s
