"""The report shows what the run wrote, lets no text of a model act as markup, and stands gaps."""

import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.report.chart import POINTS, Line, Point, line_chart, pool, tick_texts, ticks
from rlx.report.html import write_report
from rlx.report.metrics import MetricsWriter

VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps what the tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.rows, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if "data-verdict" in attributes:
            self.rows.append(attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def write_run(folder, *, steps=4, completion="<think>2</think>", loss=0.5, summary=None):
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        for step in range(1, steps + 1):
            writer.write(step, {"reward/mean": step / 10, "loss": loss, "seconds": 30.0})
        rewards = [(True, 1.0), (False, 0.0), (None, math.nan)]
        writer.write_samples(
            steps,
            [
                {
                    "prompt": "<|im_start|>user",
                    "completion": completion,
                    "reward": reward,
                    "components": {"answer<x>": reward},
                    "correct": correct,
                    "advantage": -0.75,
                    "truncated": correct is False,
                    "length": 9,
                }
                for correct, reward in rewards
            ],
        )
        if summary is not None:
            writer.write_summary(summary)
    (folder / "config.yaml").write_text(
        "run: {name: '<i>trial</i>'}\ntask: {name: countdown}\nloop: {steps: 8}\n"
    )


def report(folder):
    text = write_report(folder).read_text()
    return text, Page(text)


def test_the_page_shows_the_held_out_scores_with_their_errors(tmp_path):
    summary = {
        "task": "countdown",
        "model": "nano",
        "algorithm": "dapo",
        "seconds": 3725.0,
        "before": {"pass@1": 0.10, "stderr": 0.03, "n": 100, "greedy": {"pass@1": 0.2}},
        "after": {"pass@1": 0.50, "stderr": 0.04, "n": 100, "greedy": {"pass@1": None}},
    }
    write_run(tmp_path, summary=summary)
    text, page = report(tmp_path)
    words = " ".join(page.words)
    for shown in ("10.0%", "± 3.0, n = 100", "50.0%", "+40.0", "± 5.0", "20.0%", "1:02:05", "dapo"):
        assert shown in words
    assert "left no summary" not in text
    assert "4 of 8" in words


def test_text_of_a_model_never_becomes_markup(tmp_path):
    evil = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>&lt;\x00\x1b[31m"
    write_run(tmp_path, completion=evil)
    text, page = report(tmp_path)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [tag for tag, _ in page.tags if tag in ("img", "i") and "src" in _]
    assert "".join(page.words).count(evil.split("\x00")[0]) == 3
    assert "<i>trial</i>" in "".join(page.words)
    assert "answer<x>" in "".join(page.words)
    assert "\x00" not in text and "\x1b" not in text


def test_the_page_asks_for_nothing_from_outside(tmp_path):
    write_run(tmp_path)
    text, page = report(tmp_path)
    assert not [tag for tag, found in page.tags if {"src", "href"} & found.keys()]
    assert not re.search(r"https?://|@import|url\(", text)


def test_samples_can_be_filtered_by_step_and_verdict(tmp_path):
    """A row that could not be scored is neither correct nor wrong."""
    write_run(tmp_path)
    _, page = report(tmp_path)
    assert [row["data-verdict"] for row in page.rows] == ["correct", "wrong", "unscored"]
    assert {row["data-step"] for row in page.rows} == {"4"}
    assert {found.get("name") for tag, found in page.tags if tag == "select"} == {"step", "verdict"}


def test_a_run_that_stopped_early_has_a_report(tmp_path):
    """All losses NaN, no evaluation, no samples, no summary, a line torn by the crash."""
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(1, {"reward/mean": 0.25, "loss": math.nan})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ki')
    text, page = report(tmp_path)
    assert "stopped early. Its last step is 1." in text
    assert "Reward in training" in text
    assert "<h4>Loss</h4>" not in text
    assert page.rows == []
    assert tmp_path.name in page.words[page.words.index(tmp_path.name)]


def test_without_a_summary_the_evaluations_give_the_scores(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        first = {"pass@1": 0.25, "stderr": 0.05, "greedy/pass@1": 0.3, "greedy/stderr": 0.05}
        writer.write(0, first, kind="eval")
        writer.write(1, {"loss": 0.0})
        writer.write(20, {"pass@1": 0.75, "stderr": 0.05}, kind="eval")
    _, page = report(tmp_path)
    words = " ".join(page.words)
    assert "25.0%" in words and "75.0%" in words and "+50.0" in words and "30.0%" in words
    assert "Step 20" in words


KINDS = {
    "ppo": (
        {"reward/mean": 0.5, "kl/reward": 0.1, "kl/completion": 2.0, "kl/beta": 0.05}
        | {"value/mean": 0.5, "return/mean": 0.6, "explained_variance": 0.2, "value/loss": 0.1}
        | {"loss/ppo": 0.1, "loss/value": 0.2},
        {"reward": -0.5, "stderr": 0.25, "n": 8, "greedy/reward": 0.5, "greedy/stderr": 0.25},
        ["Held-out reward", "KL in the reward", "Values and returns", "Loss of each term"],
    ),
    "dpo": (
        {"accuracy": 0.5, "margin": 0.0, "rewards/chosen": 0.1, "rewards/rejected": 0.1},
        {"accuracy": 0.5, "stderr": 0.25, "n": 8, "loss": 0.69, "margin": 0.0},
        ["Held-out accuracy", "Held-out margin", "Implicit rewards in training"],
    ),
    "reward_model": (
        {"accuracy": 0.5, "margin": 0.0, "score/chosen": 0.1, "score/rejected": 0.1},
        {"accuracy": 0.5, "stderr": 0.25, "n": 8, "score/chosen": 0.1, "score/rejected": 0.2},
        ["Held-out accuracy", "Held-out scores", "Scores in training"],
    ),
    "sft": (
        {"nll": 2.0, "loss": 2.0},
        {"nll": 2.0, "stderr": 0.25, "n": 8, "perplexity": 7.4},
        ["Held-out NLL", "Held-out perplexity", "NLL in training"],
    ),
    "terms": (
        {"loss/grpo": 0.1, "loss/dpo": 0.2, "dpo/accuracy": 0.5, "kl_k3/kl": 0.1, "sft/nll": 1.0}
        | {"correction/ratio": 1.0, "replay/age": 2.0, "probe/informative": 0.5, "gate": 0.9},
        {"pass@1": 0.5, "stderr": 0.25, "n": 8},
        ["Held-out pass@1", "Accuracy in training", "KL to the reference", "NLL in training"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_run_has_its_score_and_its_pictures(tmp_path, kind):
    """All but n, of which no picture says anything, are drawn before the further metrics."""
    train, heldout, pictures = KINDS[kind]
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(0, heldout, kind="eval")
        writer.write(1, train)
        writer.write(1, heldout, kind="eval")
    text, _ = report(tmp_path)
    assert "Held-out score" in text
    curves, _, rest = text.partition("<h2>Further metrics</h2>")
    titles = " ".join(re.findall("<h4>(.*?)</h4>", curves))
    assert [picture for picture in pictures if picture not in titles] == []
    assert re.findall("<h4>(.*?)</h4>", rest) == ["n (held-out)"]


def test_the_lower_nll_is_the_better_one(tmp_path):
    """Shown as pass@1 is, a loss that fell would stand there in red."""
    summary = {
        "before": {"nll": 2.5, "stderr": 0.3, "n": 64, "perplexity": 12.2},
        "after": {"nll": 1.25, "stderr": 0.4, "n": 64, "perplexity": 3.5},
    }
    write_run(tmp_path, summary=summary)
    text, page = report(tmp_path)
    words = " ".join(page.words)
    for shown in ("2.5 ", "± 0.3, n = 64", "1.25", "± 0.5", "Lower is better."):
        assert shown in words
    assert '<span class="up">-1.25</span>' in text
    assert "0.5 to 3" in words


def test_a_score_without_an_error_and_one_that_is_not_finite(tmp_path):
    """One held-out problem has no standard error, and a change from it none either."""
    summary = {
        "before": {"reward": -3.0, "stderr": None, "n": 1},
        "after": {"reward": 4.0, "stderr": 0.5, "n": 8, "greedy": {"reward": None}},
    }
    write_run(tmp_path, summary=summary)
    text, _ = report(tmp_path)
    assert '<span class="up">+7</span></td>' in text
    # The scale is made for what is shown: 0 to 1 would put both outside.
    places = [float(place) for place in re.findall(r'<b class="\w+" style="left:(.*?)%"', text)]
    assert len(places) == 2 and all(0 <= place <= 100 for place in places)


def test_a_reward_without_a_verdict_is_scored(tmp_path):
    """A reward model's samples are not `unscored`, and no filter offers `correct`."""
    row = {"prompt": "", "completion": "", "components": {}, "correct": None, "advantage": None}
    rows = [row | {"reward": r, "truncated": False, "length": 1} for r in (0.5, None)]
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(1, {"loss": 0.5})
        writer.write_samples(1, rows)
    text, page = report(tmp_path)
    assert [row["data-verdict"] for row in page.rows] == ["scored", "unscored"]
    assert 'option value="scored"' in text and 'option value="correct"' not in text


def test_a_run_of_several_terms_is_named_by_them(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "algorithm: {terms: [{name: grpo}, {name: entropy, weight: 0.01}]}\n"
    )
    _, page = report(tmp_path)
    assert "grpo + entropy" in page.words


def test_every_metric_has_a_curve(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        writer.write(1, {"entropy": 1.0, "reward/format": 0.5, "made<up>": 2.0})
    text, _ = report(tmp_path)
    titles = re.findall("<h4>(.*?)</h4>", text)
    assert titles == ["Entropy", "reward/format", "made&lt;up&gt;"]


def test_the_empty_run_and_the_wrong_folder(tmp_path):
    with pytest.raises(ValueError, match=r"found none of them in .*nowhere"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"run folder that holds config\.yaml"):
        write_report(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [")
    text, page = report(tmp_path)
    assert "It has not taken a step yet." in text
    assert "a: [" in page.words


def test_a_summary_that_is_no_json_is_named(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=r"summary\.json: expected JSON"):
        write_report(tmp_path)


def paths(svg, name):
    return re.findall(rf'<path class="{name} c0" d="(.*?)"', svg)


def test_a_null_breaks_the_line_and_is_marked():
    """A line drawn across it would claim values that never were."""
    values = [1.0, 2.0, None, 3.0, 4.0, 5.0]
    svg = line_chart("loss", [Line("loss", [Point(i, v) for i, v in enumerate(values)])])
    assert [path.count("L") for path in paths(svg, "line")] == [1, 2]
    assert svg.count('class="gap"') == 1
    assert line_chart("loss", [Line("loss", [Point(1, None)])]) == ""


def test_the_band_is_one_standard_error_to_each_side(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=None) as writer:
        for step in (0, 10):
            writer.write(step, {"pass@1": 0.5, "stderr": 0.125}, kind="eval")
    text, _ = report(tmp_path)
    assert "[0, 0.5, 0.375, 0.625], [10, 0.5, 0.375, 0.625]" in text
    assert len(paths(text, "band")) == 1


def test_the_error_of_a_single_evaluation_is_a_stroke():
    """A filled band of no width would not be seen."""
    svg = line_chart("pass@1", [Line("sampled", [Point(0, 0.5, 0.25, 0.75)])])
    assert "band" not in svg
    high, low = re.search(r'class="line c0" d="M\S+ (\S+?)L\S+ (\S+?)"', svg).groups()
    assert float(high) < float(low)


def test_numbers_of_a_chart_are_whole_where_they_are():
    """Five digits of 123,456 updates would be 123,460."""
    svg = line_chart("updates", [Line("updates", [Point(1, 123456.0), Point(2, 0.123456)])])
    assert "[1, 123456.0, null, null], [2, 0.12346, null, null]" in svg


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.0, 3.0, ["0", "1", "2", "3"]),
        (1500.2, 1501.4, ["1,500.0", "1,500.5", "1,501.0", "1,501.5"]),
        (1.2340, 1.2349, ["1.23400", "1.23425", "1.23450", "1.23475", "1.23500"]),
        (1001.0, 1010.0, ["1,000.0", "1,002.5", "1,005.0", "1,007.5", "1,010.0"]),
        (12345601.0, 12345614.0, ["12,345,600", "12,345,605", "12,345,610", "12,345,615"]),
        (1e-9, 3e-9, ["1e-09", "1.5e-09", "2e-09", "2.5e-09", "3e-09"]),
    ],
)
def test_ticks_are_told_apart(low, high, told):
    assert tick_texts(ticks(low, high, count=4)) == told


@given(st.floats(-1e30, 1e30, allow_subnormal=False), st.floats(1e-8, 10.0))
def test_a_tick_says_where_it_stands(low, share):
    """`1,002` at 1002.5 would be read as a fifth of a step off."""
    marks = ticks(low, low + max(abs(low), 1e-30) * share, count=4)
    told = [float(text.replace(",", "")) for text in tick_texts(marks)]
    assert told == pytest.approx(marks, rel=0, abs=0.01 * (marks[1] - marks[0]))


def test_pooling_keeps_means_spikes_and_gaps():
    points = [Point(step, 1.0) for step in range(10 * POINTS)]
    points[777] = Point(777, 100.0)
    points[2000] = Point(2000, None)
    pooled = pool(points)
    assert len(pooled) <= POINTS + 1
    assert max(point.high for point in pooled if point.value is not None) == 100.0
    assert [point.step for point in pooled if point.value is None] == [2000]
    spike = next(point for point in pooled if point.high == 100.0)
    assert spike.value == pytest.approx((9 * 1.0 + 100.0) / 10)


@given(
    st.floats(-1e30, 1e30, allow_subnormal=False),
    st.floats(-1e30, 1e30, allow_subnormal=False),
)
def test_any_two_values_are_drawn_inside_the_plot(first, last):
    svg = line_chart("value", [Line("a", [Point(1, first), Point(2, last)])])
    heights = [
        float(pair.split()[1]) for path in paths(svg, "line") for pair in path[1:].split("L")
    ]
    assert len(heights) == 2
    assert all(12 - 0.1 <= height <= 174 + 0.1 for height in heights)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.25, 0.5, 0.75, 1]),
        (3.0, 97.0, [0, 25, 50, 75, 100]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low, high, expected):
    assert ticks(low, high, count=4) == pytest.approx(expected)
