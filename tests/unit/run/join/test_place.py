"""A place is found in what engines really set, and what contradicts itself is told in one line."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ranks.hosts.hosts import environment

from plait.errors import UsageError
from plait.run.join import addresses
from plait.run.join.addresses import addresses_of_first, is_here, own_address
from plait.run.join.find import find_place
from plait.run.join.place import Place
from plait.run.join.slurm import expand, tasks_by_host
from plait.run.join.token import ports_of, run_token
from plait.run.setup.interfaces import choose_interfaces, register_buffers

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "2731.0;tcp://10.0.0.9,172.17.0.1:40000", "OMPI_MCA_ess_base_jobid": "2731",
}  # fmt: skip
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}


def place(**more: object) -> Place:
    fields = {"engine": "srun", "task": 0, "tasks": 2, "local_tasks": 1, "first": "127.0.0.2", "run": "1"}
    return Place(**(fields | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 3, 4, 2, "10.0.0.1")),
        (SRUN, ("srun", 2, 3, 1, "n0")),
        (MPIRUN, ("Open MPI", 1, 2, 1, "10.0.0.9,172.17.0.1")),
        (MPICH, ("MPICH", 0, 2, 2, None)),
        (SRUN | TORCHRUN, ("torchrun", 3, 4, 2, "10.0.0.1")),
        (MPIRUN | {"PLAIT_FIRST_ADDRESS": "node7"}, ("Open MPI", 1, 2, 1, "node7")),
    ],
)
def test_engines(environment: dict[str, str], expected: tuple[object, ...]) -> None:
    found = find_place(environment)
    assert found is not None
    assert (found.engine, found.task, found.tasks, found.local_tasks, found.first) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, False),
        (TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "1"}, True),
        (TORCHRUN | {"TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"PLAIT_TASK": "0", "PLAIT_TASKS": "2", "PLAIT_RESTARTS": "2"}, True),
        (SRUN, False),
    ],
)
def test_engines_that_start_all_tasks_again(environment: dict[str, str], expected: bool) -> None:
    found = find_place(environment)
    assert found is not None and found.restarts is expected


@pytest.mark.parametrize(
    "environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}]
)
def test_processes_that_are_alone(environment: dict[str, str]) -> None:
    assert find_place(environment) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": "x"}, "RANK is 'x', no number"),
        ({"RANK": "4"}, "task 4 of 4; the last one is 3"),
    ],
)
def test_variables_that_contradict_each_other(changed: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | changed).items() if value is not None}
    with pytest.raises(UsageError, match=message):
        find_place(environment)


def test_ranks_of_a_task() -> None:
    assert place().ranks_each(2) == 1
    assert place().ranks_each(6) == 3
    with pytest.raises(UsageError, match="3 ranks, which 2 tasks of srun cannot share"):
        place().ranks_each(3)
    with pytest.raises(UsageError, match="2 of them on this host"):
        place(local_tasks=2).ranks_each(4)
    with pytest.raises(UsageError, match="each of which is one rank"):
        place(is_rank=True).ranks_each(4)


def test_lists_of_hosts() -> None:
    assert expand("n[0-2,07],login,a[1-2]b[3,5]") == [
        "n0", "n1", "n2", "n07", "login", "a1b3", "a1b5", "a2b3", "a2b5",
    ]  # fmt: skip
    assert expand("gpu[008-011]") == ["gpu008", "gpu009", "gpu010", "gpu011"]
    assert tasks_by_host("2(x3),1") == [2, 2, 2, 1]


@given(st.text("n0123456789-,[]()x", max_size=30))
def test_any_list_of_hosts_is_read_quickly(text: str) -> None:
    assert len(expand(text)) <= 400_000
    tasks_by_host(text)


def test_where_the_first_task_is() -> None:
    assert addresses_of_first(place()) == ("127.0.0.2",)
    assert addresses_of_first(place(local_tasks=2, first="some.where")) == ("127.0.0.1",)
    with pytest.raises(UsageError, match="does not say where task 0 is"):
        addresses_of_first(place(first=None))
    with pytest.raises(UsageError, match="has no address here"):
        addresses_of_first(place(engine="torchrun", first="no.such.host.invalid"))


def test_a_host_whose_name_leads_to_itself_is_reached_by_any_of_its_interfaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That on the way to other networks may be one by which no other host of the run comes: all of them are tried."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(addresses, "_outward", lambda: "10.0.2.15")
    monkeypatch.setattr(addresses, "_TABLE", tmp_path / "table")
    two = [place(task=task, first="localhost", tasks=3, local_tasks=2) for task in (0, 1)]
    assert [addresses_of_first(found) for found in two] == [("10.0.2.15",)] * 2
    listed = "Main:\n" + "".join(
        f"     |-- {address}\n        {kind}\n"
        for address, kind in (
            ("10.1.2.0", "/24 link UNICAST"), ("10.1.2.3", "/32 host LOCAL"), ("10.0.2.15", "/32 host LOCAL"),
            ("127.0.0.1", "/32 host LOCAL"), ("10.1.2.255", "/32 link BROADCAST"),
        )
    )  # fmt: skip
    (tmp_path / "table").write_text(listed * 2)
    assert [addresses_of_first(found) for found in two] == [("10.0.2.15", "10.1.2.3")] * 2
    assert [is_here(address) for address in ("10.1.2.3", "127.0.0.7", "10.1.2.4", "::1")] == [
        True, True, False, True,
    ]  # fmt: skip
    monkeypatch.setattr(addresses, "_outward", lambda: None)
    assert addresses_of_first(two[0]) == ("10.1.2.3", "10.0.2.15")


def test_mpirun_may_name_several_addresses() -> None:
    assert addresses_of_first(place(engine="Open MPI", first="127.0.0.2,127.0.0.3")) == (
        "127.0.0.2",
        "127.0.0.3",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
def test_mpich_says_where_mpiexec_is_though_a_script_is_in_between() -> None:
    task = "import os; from plait.run.join.find import find_place as f; print(f(os.environ).first)"
    words = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, task]
    code = f"import subprocess\nsubprocess.run({words!r}, env={environment(**MPICH)!r})"
    proxy = [sys.executable, "-c", code, "--control-port", "node7:4000"]
    assert subprocess.run(proxy, capture_output=True, text=True, check=True).stdout == "node7\n"


def test_the_token_is_the_users_own(tmp_path: Path) -> None:
    token = run_token(place(), {}, tmp_path)
    key = tmp_path / ".plait" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert run_token(place(), {}, tmp_path) == token != run_token(place(run="2"), {}, tmp_path)
    assert run_token(place(), {"PLAIT_TOKEN": "x" * 32}, tmp_path) != token
    assert len(set(ports_of(token))) > 10 and ports_of(token) == ports_of(token)
    os.chmod(key, 0o640)
    with pytest.raises(UsageError, match="others than you may read"):
        run_token(place(), {}, tmp_path)
    for said, message in (
        ({"PLAIT_TOKEN": "short"}, "can be guessed"),
        ({"PLAIT_TOKEN_FILE": "no"}, "cannot be read"),
    ):
        with pytest.raises(UsageError, match=message):
            run_token(place(), said, tmp_path)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_no_address_of_the_environment_opens_all_interfaces(address: str) -> None:
    with pytest.raises(UsageError, match="would open the run on all interfaces"):
        own_address({"PLAIT_ADDRESS": address})
    place = find_place({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address})
    assert place is not None
    with pytest.raises(UsageError, match="would open the run on all interfaces"):
        addresses_of_first(place)


def test_what_opens_nccl_to_other_interfaces_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_COMM_ID", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    choose_interfaces()
    assert os.environ["NCCL_SOCKET_IFNAME"] == ("lo0" if sys.platform == "darwin" else "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    with pytest.warns(UserWarning, match="opens this run to other interfaces: NCCL_SOCKET_IFNAME=eth0"):
        choose_interfaces()
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("allocator", "chosen", "expected"),
    [(None, None, "1"), (None, "0", "0"), ("backend:native,expandable_segments:True", None, None)],
)
def test_nccl_registers_memory_once_where_torch_can(
    allocator: str | None, chosen: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    for name, value in ((hook, chosen), ("PYTORCH_CUDA_ALLOC_CONF", allocator)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    register_buffers()
    assert os.environ.get(hook) == expected
    os.environ.pop(hook, None)
