"""The gallery of the lectures: every exhibit's own numbers, in a form that is quick to compute."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examples.lectures import (
    lecture000_bert_on_k80 as bert,
)
from examples.lectures import (
    lecture000_data_parallel as data_parallel,
)
from examples.lectures import (
    lecture000_linear_regression as regression,
)
from examples.lectures import (
    lecture000_small_network as small_network,
)
from examples.lectures import (
    lecture001_accumulation as accumulation,
)
from examples.lectures import (
    lecture001_collectives as collectives,
)
from examples.lectures import (
    lecture002_alexnet as alexnet,
)
from examples.lectures import (
    lecture002_algorithm_1 as algorithm_1,
)
from examples.lectures import (
    lecture002_backpropagation as backpropagation,
)
from examples.lectures import (
    lecture002_five_samples as five_samples,
)
from examples.lectures import (
    lecture002_optimizers as optimizers,
)
from examples.lectures import (
    lecture002_printed_network as printed,
)
from examples.lectures import (
    lecture003_rewriting as rewriting,
)
from examples.lectures import (
    lecture003_server_for_anything as server,
)
from examples.lectures import (
    lecture003_static_or_dynamic as static_or_dynamic,
)
from examples.lectures import (
    lecture003_symbolic_and_imperative as symbolic,
)
from examples.lectures import (
    lecture003_tree_lstm as tree_lstm,
)
from examples.lectures import (
    lecture004_easgd as easgd,
)
from examples.lectures import (
    lecture004_megatron as megatron,
)
from examples.lectures import (
    lecture004_pipelines as pipelines,
)
from examples.lectures.__main__ import index, names
from examples.lectures.exhibit import LECTURES, Exhibit, Number, Table, page, show
from examples.lectures.graphs import draw, walk
from examples.lectures.pictures import bars, curves, timeline
from examples.linear_regression import least_squares

import plait
from plait.plan.named import resolve
from plait.run.proof.serial_run import run_serially

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", names())
def test_an_exhibit_says_how_it_is_run_and_has_a_page_with_numbers_date_and_machine(name: str) -> None:
    module = importlib.import_module(f"examples.lectures.{name}")
    assert f"python -m examples.lectures.{name}" in (module.__doc__ or "")
    text = (ROOT / "docs" / "gallery" / f"{name}.md").read_text()
    assert f"python -m examples.lectures.{name}" in text
    assert "*Made by the command above in" in text and "torch" in text.splitlines()[-1]
    assert f"]({name}.md)" in (ROOT / "docs" / "gallery" / "index.md").read_text()
    for line in text.splitlines():
        if line.startswith("!["):
            assert (ROOT / "docs" / "gallery" / line.rpartition("(")[2][:-1]).exists()


def test_the_index_lists_all_lectures() -> None:
    text = index()
    assert all(title in text for title in LECTURES.values())


def test_a_page_holds_what_the_exhibit_holds(capsys: pytest.CaptureFixture[str]) -> None:
    exhibit = Exhibit(
        lecture="002",
        title="T",
        idea="I.",
        numbers=[Number(what="n", lecture=0.5, ours=0.25, note="why")],
        tables=[Table(title="more", columns=["a|b"], rows=[[1]])],
        pictures={"p": "<svg/>"},
        texts={"t": "x"},
        seen="S.",
    )
    text, pictures = page(exhibit, "examples.lectures.some", 3.0)
    assert pictures == {"some_0.svg": "<svg/>"} and "![p](some_0.svg)" in text
    assert "| n | 0.5 | 0.25 | why |" in text and "| a\\|b |" in text and exhibit.number("n") == 0.25
    show(exhibit)
    assert "0.25" in capsys.readouterr().out


def test_pictures_are_svg_with_escaped_words() -> None:
    assert "&lt;b&gt;" in curves("<b>", {"l": [(1.0, 2.0), (2.0, 3.0)]}, x="x", y="y", log_x=True)
    assert bars("b", {"r": {"p": 1.0, "q": 2.0}}, unit="ms").count("<rect") >= 3
    found = pipelines.exhibit()
    assert found.number("bubble of GPipe, (p - 1)/(m + p - 1)") == pytest.approx(3 / 11)
    assert all(svg.startswith("<svg") for svg in found.pictures.values()) and timeline is not None


def test_backpropagation_by_the_graph_is_the_slides() -> None:
    graph, walked = walk(backpropagation.job(), (backpropagation.HIDDEN, backpropagation.TARGET))
    gradient = next(one.value for one in walked if one.name == graph.gradients["weight"])
    assert gradient is not None and gradient[0, 0].item() == pytest.approx(-0.0315, abs=1e-7)
    assert draw("g", graph).count("<rect") > len(walked)


def test_five_samples_weigh_alike() -> None:
    dropped = five_samples.by_hand(five_samples.USED_X, five_samples.USED_Y, drops_a_factor=True)
    right = five_samples.by_hand(five_samples.USED_X, five_samples.USED_Y, drops_a_factor=False)
    assert dropped.mean().item() == pytest.approx(0.03281, abs=5e-6)
    assert dropped[2].item() == pytest.approx(-0.00270, abs=5e-6)  # printed as -0.00279
    assert (dropped[:3].mean() + dropped[3:].mean()).item() / 2 == pytest.approx(0.04173, abs=5e-6)
    assert right.mean().item() == pytest.approx(0.00146, abs=5e-6)
    assert (right[:3].mean() + right[3:].mean()).item() / 2 == pytest.approx(0.00189, abs=5e-6)
    found = run_serially(five_samples.job(), resolve("ddp", 2), 1, torch.float64)
    assert float(1 - found.weights["hidden.weight"][0, 0]) == pytest.approx(right.mean().item(), rel=1e-9)


@pytest.mark.parametrize("name", optimizers.RULES)
def test_formulas_are_torchs_when_put_right(name: str) -> None:
    step, make = optimizers.RULES[name]
    assert optimizers.gap(optimizers.Rule(step=step), make) < 1e-12
    if name in ("Adagrad", "RMSprop", "Adam"):
        assert optimizers.gap(optimizers.Rule(step=step, sign=1.0), make) > 0.1


def test_printed_programs_do_not_run_and_the_correction_does() -> None:
    picture = torch.zeros(1, 3, 32, 32)
    assert "1x1176 and 400x120" in printed.said(lambda: printed.Net()(picture))
    assert printed.said(lambda: printed.Net(1176)(picture)) == "it runs"


def test_regression_agrees_three_ways() -> None:
    analytic = least_squares()
    assert (regression.by_hand() - analytic).abs().max() < 1e-9
    found = run_serially(replace(regression.job(), steps=600), resolve("ddp", 2), 600, torch.float64)
    assert (found.weights["weight"].flatten() - analytic[:10]).abs().max() < 1e-4


def test_algorithm_1_stops_where_one_process_does() -> None:
    found = algorithm_1.algorithm(1)
    assert found[0] < algorithm_1.AT_MOST
    assert max(abs(a - b) for a, b in zip(found[1:], least_squares().tolist(), strict=True)) < 1e-6


def test_the_small_network_is_a_graph_that_can_be_walked() -> None:
    columns = tuple(column[:32] for column in small_network.points().tensors)
    _, walked = walk(small_network.job(), columns)
    assert {one.phase for one in walked} == {"forward", "backward"}


def test_alexnets_neurons_are_the_papers_but_for_one_layer() -> None:
    found = alexnet.neurons()
    assert {name for name in found if found[name] != alexnet.PAPER[name]} == {"conv1"}
    assert found["conv1"] == 55 * 55 * 96 and alexnet.PAPER["conv1"] == 55 * 48 * 96


def test_a_ring_needs_six_rounds_and_all_collectives_are_right() -> None:
    found = collectives.exhibit()
    assert found.number("rounds of a ring all-reduce on 4") == 6.0
    assert found.number("collectives with the right result everywhere") == "9 of 9"


def test_accumulation_is_the_whole_batch() -> None:
    whole = run_serially(accumulation.job(256, 1, 2), resolve("ddp", 2), 2, torch.float64)
    slices = run_serially(accumulation.job(256, 4, 2), resolve("ddp", 2), 2, torch.float64)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(slices.weights[name], tensor, rtol=1e-12, atol=1e-12)


def test_elastic_averaging_follows_its_equations() -> None:
    assert (easgd.by_plait("sync", 2) - easgd.together(2)).abs().max() < 1e-12
    assert (easgd.by_plait("round-robin", 3) - easgd.in_turn(2)).abs().max() < 1e-12


def test_a_server_serves_what_is_no_network() -> None:
    assert plait.verify(server.job(), "server-sync", 3, serial=True, steps=2).ok


def test_megatrons_block_has_two_sums_each_way() -> None:
    sums = [
        one for one in plait.placements(megatron.job(), "megatron", 2).listing.transfers if one.num_bytes > 64
    ]
    assert [one.phase for one in sums if one.collective == "all_reduce"] == ["forward"] * 2 + ["backward"] * 2


def test_some_settings_explain_the_k80s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bert, "SEQUENCES", (256,))
    monkeypatch.setattr(bert, "LINKS", {"10 GB/s, PCIe 3": 10e9})
    found = bert.guesses()
    assert found[0].error < bert.CLOSE and not found[0].overlap
    assert all(guess.efficiency[-1] > 0.95 for guess in found if guess.overlap and guess.batch >= 4)


def test_a_traced_program_gives_what_its_lines_give() -> None:
    a, b = torch.ones(10), torch.full((10,), 2.0)
    assert torch.equal(symbolic.symbolic()(a, b), symbolic.program(a, b))


def test_the_quiz_is_answered() -> None:
    found = {name: answer for name, (answer, _) in static_or_dynamic.quiz().items()}
    assert found["CNN, training"] == "static" and found["GPT (decoder), training"] == "static for each shape"
    assert found["GPT inference, batch 1, word after word"] == found["tree-LSTM"] == "dynamic"


def test_trees_batched_are_trees_one_by_one() -> None:
    assert tree_lstm.both([((1, 2), 3), (4, (5, (6, 7)))])[2] < 1e-9


def test_both_rewritings_pay_by_their_price() -> None:
    for model, width in rewriting.CASES.values():
        found = plait.rewritten(rewriting.job(model, width))
        assert found.after.predicted_s < found.before.predicted_s and found.after.ops < found.before.ops


def test_every_row_of_the_seeds_names_things_that_exist() -> None:
    text = (ROOT / "docs" / "seeds.md").read_text()
    rows = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    own = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for idea, exhibit, command, test in (row for row in rows if row[0] != "idea"):
        assert idea and "](" in exhibit and "`" in command
        for word in re.findall(r"`(lecture\d+_\w+)`", command):
            assert word in names(), word
        named = test.strip("` |")
        assert f"def {named}(" in own if named.startswith("test_") else (ROOT / named).exists(), named
    linked = set(re.findall(r"gallery/(lecture\w+)\.md", text))
    assert linked == set(names())


def test_threads_that_copy_the_model_train_what_one_process_does() -> None:
    ran = data_parallel.run("threads")
    found = run_serially(data_parallel.job(), resolve("single", 1), data_parallel.STEPS, torch.float32)
    assert ran.losses == pytest.approx(list(found.losses), rel=1e-4)
    for rank in range(data_parallel.REPLICAS):
        assert set(ran.parts(rank)) > {"scatter", "replicate", "forward", "gather", "backward", "reduce"}
    assert "update" in ran.parts(0) and "update" not in ran.parts(1)
