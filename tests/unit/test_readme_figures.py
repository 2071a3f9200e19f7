"""The figures of README.md are those of benchmarks/results, and its picture is what is drawn."""

import json
import re

import pytest

from tools import draw_overview, readme_figures


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A tree whose results can be changed: a function of the file's name and of what changes it."""

    def change(name, edit):
        folder = tmp_path / readme_figures.RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        for each in readme_figures.MAKERS:
            report = json.loads((readme_figures.ROOT / readme_figures.RESULTS / each).read_text())
            if each == name:
                edit(report)
            (folder / each).write_text(json.dumps(report))
        monkeypatch.setattr(readme_figures, "ROOT", tmp_path)

    return change


def test_the_readme_has_the_figures_of_the_results():
    text = readme_figures.README.read_text()
    assert readme_figures.update(text) == text, "tools/readme_figures.py writes them"
    assert not re.search(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b", text), "commits are in the results"


def test_another_result_is_another_figure(changed):
    text = readme_figures.README.read_text()

    def edit(report):
        wanted = {"op": "combine", "backend": "nvlink", "sms": 48, "experts": 16, "mode": "fresh"}
        record = readme_figures.only(
            [r for r in report["records"] if r["direction"] == "forward"],
            sizing="exact",
            **wanted,
        )
        assert f"| {record['us_median']:.0f} |" in text
        record["us_median"] = 123456.0

    changed("h200x2.json", edit)
    (line,) = set(readme_figures.update(text).splitlines()) - set(text.splitlines())
    assert line.startswith("| combine | ") and "| 123,456 |" in line


def test_two_records_for_one_cell_are_refused(changed):
    changed("beside_deep_ep.json", lambda report: report["records"].append(report["records"][0]))
    with pytest.raises(ValueError, match="2 records have"):
        readme_figures.update(readme_figures.README.read_text())


def test_the_picture_is_what_is_drawn():
    assert draw_overview.TARGET.read_text() == "\n".join(draw_overview.draw()) + "\n"
    for expert, ranks in ((0, [0, 0, 1]), (2, [0, 0, 1]), (3, [0, 1, 1, 1])):
        assert [rank for rank, _ in draw_overview.rows_of(expert)] == ranks
