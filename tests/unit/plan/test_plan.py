"""Plans: named, from a file, with settings; and every mistake with its fix."""

from pathlib import Path
from typing import Any

import pytest

from plait.errors import PlanError, UsageError
from plait.plan.ddp import ddp
from plait.plan.decisions import SCHEDULE_NAMES, Sync
from plait.plan.mesh import Mesh
from plait.plan.named import NAMED, resolve
from plait.plan.plan import DATA, Plan, parse_plan, read_plan, with_settings
from plait.plan.single import single
from plait.program.stage.schedules import SCHEDULES
from plait.run.setup.device import check_suits_device


def test_a_named_plan_has_as_many_ranks_as_asked_for() -> None:
    assert resolve("single", None).mesh.size == 1
    assert resolve("ddp", 5).mesh == Mesh(axes=((DATA, 5),))
    assert resolve(ddp(3), None) == ddp(3)


@pytest.mark.parametrize("name", NAMED)
def test_a_plan_survives_its_yaml_file(name: str, tmp_path: Path) -> None:
    plan = with_settings(NAMED[name](1), {"sync": {"bucket_mib": 0.25, "overlap": False}})
    file = tmp_path / "plan.yaml"
    file.write_text(plan.to_yaml())
    assert read_plan(file) == plan
    assert resolve(file, plan.ranks) == plan
    assert resolve(str(file), None) == plan


def test_a_plan_file_is_readable() -> None:
    lines = ddp(4).to_yaml().splitlines()
    assert lines[:3] == ["plan: ddp", "mesh:", "  data: 4"]


def test_a_plan_file_may_leave_settings_out() -> None:
    assert parse_plan("{plan: ddp, mesh: {data: 2}}") == ddp(2)
    assert parse_plan("{plan: ddp, mesh: {data: 2}, sync: null}").sync == Sync()


def test_settings_replace_what_they_name() -> None:
    plan = resolve("ddp", 2, {"sync": {"bucket_mib": 1}})
    assert plan.sync == Sync(bucket_mib=1, overlap=True)
    assert ddp(2).sync == Sync()


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda: resolve("ddq", 2), "no plan 'ddq'", "did you mean 'ddp'"),
        (lambda: resolve("zzz", 2), "no plan 'zzz'", "choose one of single, "),
        (lambda: resolve("ddp", 0), "ranks=0", "1 or more"),
        (lambda: resolve("single", 2), "1 rank, not 2", "--plan ddp"),
        (lambda: resolve(ddp(3), 2), "data=3 has 3 ranks; 2 were asked for", "--ranks 3"),
        (lambda: resolve("nowhere.yaml", 2), "nowhere.yaml cannot be read: No such file", "check the path"),
        (lambda: with_settings(ddp(2), {"moon": {}}), "no setting moon", "sync.bucket_mib"),
        (
            lambda: with_settings(ddp(2), {"sync": {"bucket": 1}}),
            "no setting sync.bucket",
            "sync.bucket_mib, sync.compress",
        ),
        (lambda: with_settings(ddp(2), {"sync": {"bucket_mib": -1}}), "sync.bucket_mib=-1", "0 or more"),
        (
            lambda: with_settings(ddp(2), {"sync": {"bucket_mib": "big"}}),
            "sync.bucket_mib='big': expected a number",
            "sync: {bucket_mib: 8}",
        ),
        (lambda: Mesh(axes=((DATA, 0),)), "axis data=0", "data=1 or more"),
        (lambda: Mesh(axes=((DATA, "two"),)), "axis data=two", "data=1 or more"),  # type: ignore[arg-type]
        (lambda: Mesh(axes=((DATA, 2), (DATA, 2))), "names an axis twice: data, data", "each axis once"),
        (lambda: parse_plan("mesh: {}"), "the plan, line 1: `plan` is missing", "plan: NAME"),
        (
            lambda: parse_plan("{plan: ddp, mash: 1}"),
            "unknown key 'mash'",
            "use plan, mesh, sync",
        ),
        (
            lambda: parse_plan("{plan: ddp, mesh: 4}"),
            "the plan, line 1: mesh=4: expected a table",
            "mesh: {axis: size}",
        ),
    ],
)
def test_a_mistake_is_named_with_its_fix(make: Any, what: str, fix: str) -> None:
    with pytest.raises(PlanError) as raised:
        make()
    assert what in raised.value.what
    assert fix in (raised.value.fix or "")


def test_a_file_says_what_is_other_than_in_the_plan_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("plan: zero3\nmesh: {data: 2}")
    assert resolve(file, None) == resolve("zero3", 2)
    file.write_text(resolve("zero3", 2, {"memory": {"zero": 0}}).to_yaml())
    assert resolve(file, None).memory.zero == 0


def test_every_schedule_has_a_name_in_plans() -> None:
    assert {*SCHEDULES, "pipedream"} == set(SCHEDULE_NAMES)
    with pytest.raises(PlanError, match="'foo' is unknown"):
        resolve("1f1b", 2, {"pipe": {"schedule": "foo"}})


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [("gpipe", {"data": 2}), ("megatron", {"data": 2}), ("domain", {"tensor": 2}), ("zero3", {"tensor": 2})],
)
def test_a_plan_without_ranks_on_its_own_axis_is_refused(plan: str, mesh: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=f"plan {plan} works along the axis") as raised:
        resolve(plan, None, mesh=mesh)
    assert raised.value.fix is not None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("plan: [", "is not YAML"),
        ("- ddp", "line 1: expected a plan, a table; it holds a list"),
        ("", "expected a plan, a table; it holds nothing"),
        ("plan: ddp\nsync:\n  servers: two", "line 3: sync.servers='two': expected a whole number"),
        ("plan: ddp\nsync: {rule: foo}", "line 2: sync.rule='foo' is unknown"),
        ("plan: ddp\nsync:\n  bucket_mib: -1", "line 3: sync.bucket_mib=-1.0 is not a size"),
        ("plan: ddp\nmesh:\n  data: true", "line 3: mesh.data=true: expected a whole number"),
        ("plan: ddp\nmesh:\n  data: 0", "line 3: axis data=0"),
        ("plan: ddp\nmesh: {data: 9999999}", "mesh data=9999999 has 9,999,999 ranks"),
        ("plan: 2024-01-01\nmesh: {data: ²}", "mesh.data='²': expected a whole number"),
        (
            "plan: tensor\nplacements:\n  tensor: {ops: {a: R}, oops: {}}",
            "line 3: unknown key 'oops' in placements.tensor",
        ),
        (
            "plan: tensor\nplacements:\n  tensor:\n    parameters: {a: S(²)}",
            "placements.tensor.parameters: a: S(²)",
        ),
        ("plan: gpippe\nmesh: {data: 2}", "'gpippe', which does not exist"),
    ],
)
def test_a_bad_file_is_named_with_its_fix(text: str, what: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(PlanError, match="mine.yaml") as raised:
        resolve(file, None)
    assert what in raised.value.what
    assert raised.value.fix


@pytest.mark.parametrize(("plan", "mesh"), [("ddp", {DATA: 2}), ("1f1b", {"pipe": 2})])
def test_sequences_are_not_cut_along_an_axis_that_is_not_there(plan: str, mesh: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="tensor.sequence cuts sequences along the axis tensor") as raised:
        resolve(plan, None, {"tensor": {"sequence": True}}, mesh)
    assert raised.value.fix == "add tensor=2 to the mesh, or drop tensor.sequence."
    assert resolve(plan, None, {"tensor": {"sequence": True}}, mesh | {"tensor": 2}).tensor.sequence


def test_a_mesh_knows_places_and_groups() -> None:
    mesh = Mesh(axes=(("pipe", 2), (DATA, 3)))
    assert mesh.size == 6
    assert [mesh.coordinates(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.group(4, DATA) == (3, 4, 5)
    assert mesh.group(4, "pipe") == (1, 4)


def test_a_plan_is_a_value() -> None:
    assert single(1) == single(1)
    assert hash(ddp(2)) == hash(ddp(2))
    with pytest.raises(AttributeError):
        ddp(2).name = "other"  # type: ignore[misc]
    assert isinstance(ddp(2), Plan)


def test_links_that_a_run_cannot_have_are_refused() -> None:
    with pytest.raises(PlanError, match="links.transport"):
        resolve("ddp", 2, {"links": {"transport": "pigeon"}})
    with pytest.raises(UsageError, match="this run is on processors"):
        check_suits_device(resolve("ddp", 2, {"links": {"transport": "nccl"}}), "cpu")
    with pytest.raises(UsageError, match="ranks without one"):
        check_suits_device(resolve("server-sync", 3, {"links": {"transport": "nccl"}}), "cuda")
    with pytest.raises(UsageError, match="memory of processors"):
        check_suits_device(resolve("ddp", 2, {"links": {"transport": "shared"}}), "cuda")
    check_suits_device(resolve("ddp", 2), "cuda")
