"""Plots are labelled: axes with units, legends, edges that avoid boxes."""

import itertools

import pytest

from fairway._native import StepGraph
from fairway.placement import jobs
from fairway.report.carried import CarriedStep
from fairway.report.plots import drawing
from fairway.studies.reproduce import pathways, sipml, syndicate, tsp


@pytest.fixture
def axes():
    pyplot = drawing()
    canvas, made = pyplot.subplots()
    yield made
    pyplot.close(canvas)


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_training_times_have_a_unit(axes):
    sipml._draw("minutes to train", axes, [{"Gbit/s": 128, "SiP-Ring": 2.0, "SiP-Ring: copies": 4}])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Gbit/s", "minutes to train")


def test_lines_on_each_other_differ_and_ticks_are_plain_numbers(axes):
    rows = [{"Gbit/s": 128, "A": 1.35, "B": 1.35}, {"Gbit/s": 256, "A": 1.2, "B": 1.2}]
    sipml._draw("minutes to train", axes, rows)
    first, second = axes.lines
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_marker() != second.get_marker()
    axes.figure.canvas.draw()
    assert axes.yaxis.get_minor_formatter()(1.35, 0) == "1.35"


def test_jobs_say_what_colours_are(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "fairway.placement.jobs.save", lambda canvas, *_, **__: shown.append(canvas)
    )
    sharing = jobs.Sharing("any devices", [(0, 1)], [0], [(0, 0, 2, 0, 1)], 0, 0.0, 1.0)
    jobs.draw(tmp_path / "jobs.png", "1 job on elect-flat:2, simulated", 2, [sharing])
    title = shown[0].get_suptitle()
    assert "elect-flat:2" in title
    assert "each colour is a job" in title
    drawing().close(shown[0])


@pytest.mark.parametrize(
    ("figure", "row", "label"),
    [
        ("11", {"model": "A1", "BS+": 1.0, "joint": 1.5}, "throughput over BS+"),
        ("14", {"system": "BS+", "idle": 0.3, "paper": 0.4}, "idle fraction of a step"),
        ("16", {"KB": 4, "ring": 1.0}, "ms"),
        ("18", {"all-to-all MB": 96, "both on RDMA": 3.0}, "ms until both are done"),
    ],
)
def test_values_of_syndicate_have_a_unit(axes, figure, row, label):
    syndicate._DRAWERS[figure](axes, [row])
    assert axes.get_ylabel() == label


def test_clients_have_a_colour_each(axes):
    rows = [{"weights": name} for name in pathways.WEIGHTS]
    rows[0]["spans"] = [(1, 0, 10), (2, 10, 20)]
    pathways._draw_9(axes, rows)
    assert legend(axes) == [f"client {number}" for number in (1, 2, 3, 4)]
    handles, _ = axes.get_legend_handles_labels()
    assert len({tuple(handle.get_facecolor()[0]) for handle in handles}) == 4


def test_units_do_not_share_an_axis(axes):
    lines = {"time": ([8.0, 16.0], [300.0, 200.0]), "utilisation": ([8.0, 16.0], [80.0, 70.0])}
    right = {"utilisation": "utilisation, %"}
    tsp.draw_figure(axes, tsp.TspFigure("14", "", lines, ("chips", "us"), "", right=right))
    assert [one.get_ylabel() for one in axes.figure.axes] == ["us", "utilisation, %"]
    assert [len(one.lines) for one in axes.figure.axes] == [1, 1]
    assert legend(axes) == ["time", "utilisation (right)"]


def test_categories_are_not_joined_by_lines(axes):
    lines = {"computing": ([0.0, 1.0], [33.0, 23.0]), "all": ([0.0, 1.0], [195.0, 27.0])}
    names = ("spread", "pipeline")
    tsp.draw_figure(axes, tsp.TspFigure("20", "", lines, ("", "us"), "", categories=names))
    assert not axes.lines
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list(names)
    assert len(axes.patches) == 4


def test_edges_pass_boxes(axes):
    """An edge over several columns has a height of its own in each."""
    after = {"a": [], "b": ["a"], "c": ["b"], "d": ["c", "a"], "e": ["d", "b"]}
    rows = [{"task": task, "after": names, "collective": ""} for task, names in after.items()]
    rows[0]["after"] = ["e@1"]
    syndicate._draw_dag(axes, rows)
    boxes = [text.xy for text in axes.texts if text.get_text()]
    assert len(boxes) == len(after)
    for line in axes.lines:
        for (x, y), (to_x, to_y) in itertools.pairwise(line.get_xydata()):
            for box_x, box_y in boxes:
                if min(x, to_x) < box_x < max(x, to_x):
                    height = y + (to_y - y) * (box_x - x) / (to_x - x)
                    assert abs(height - box_y) > 0.1, (box_x, box_y)


def test_devices_that_do_the_same_share_a_row(tmp_path, monkeypatch):
    graph = StepGraph(10)
    for device, time_ns in [*((device, 5) for device in range(8)), (9, 7)]:
        graph.compute(device, time_ns)
    step = CarriedStep({}, graph, [(0.0, 5e-9)] * 8 + [(0.0, 7e-9)])
    shown = []
    monkeypatch.setattr("fairway.report.carried.save", lambda canvas, _: shown.append(canvas))
    step.draw(tmp_path / "step.png", "a step")
    above = shown[0].axes[0]
    assert [tick.get_text() for tick in above.get_yticklabels()] == ["0-7", "9"]
    drawing().close(shown[0])


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(Exception, match=r"pip install 'fairway\[plots\]'"):
        drawing()
