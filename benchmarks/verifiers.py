"""How many completions a second each verifier scores: in process, and through worker processes.

    python benchmarks/verifiers.py [NAME ...] [--rows 4000] [--workers 1] [--data ../shared/data]

Prints a JSON line for each verifier that is there: a first pass over the `unseen` completions, each
of which comes once and is not cached yet, and the median of passes over `--rows` of them after it.
Every other completion is the right answer, the rest are mostly wrong. Without `--data` the rows are
made here; a folder that holds `math_problems` and `sql_spider_en` gives those of maths and SQL.
"""

import argparse
import contextlib
import gzip
import itertools
import json
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timing
import workload  # noqa: F401 - puts the repository on the path

from rlx.rewards import VERIFIERS
from rlx.rewards.batch import BatchScorer, InProcess
from rlx.rewards.pool import WorkerPool, spare_cores
from rlx.tasks import TASKS

Case = tuple[dict, str, str]
"""A row, a right completion and a wrong one."""

ANSWERS = (
    *(r"\frac{3}{4}", r"2\sqrt{3}", r"\left(3, \frac{\pi}{2}\right)", "x^2 + 3x - 4", "1{,}024"),
    *(r"\frac{\pi}{6}", "-17", "0.125", r"[-2, 7)", r"\{1, 2, 3\}", "90^\\circ", "3 - 2i"),
)
QUERIES = (
    "SELECT count(*) FROM staff WHERE pay > {n}",
    "SELECT name FROM staff WHERE pay < {n} ORDER BY name",
    "SELECT town, avg(pay) FROM staff GROUP BY town HAVING count(*) > {n} / 1000",
    "SELECT s.name, t.head FROM staff AS s JOIN town AS t ON s.town = t.name WHERE s.pay = {n}",
)


def block(answer: str) -> str:
    return f" The steps are worked out one after the other.\n</think>\n<answer>{answer}</answer>"


def countdown(data: Path | None) -> Iterator[Case]:
    rng = random.Random(0)
    # a worked completion that never gives up is right
    task = TASKS["countdown"](seed=0, train_size=2000, heldout_size=1, give_up=0.0)
    for row in task.train:
        text = task.demonstrate(row, rng)
        nums = "+".join(map(str, row["nums"]))
        yield row, text, text[: text.rindex("<answer>")] + f"<answer>{nums}*1</answer>"


def choice(data: Path | None) -> Iterator[Case]:
    words = ("the first rib", "a branch of the vagus nerve", "dopamine", "vitamin K", "none")
    for i in range(500):
        letters = "ABCDE"
        row = {"options": dict(zip(letters, words, strict=True)), "answer": letters[i % 5]}
        wrong = letters[(i + 1) % 5]
        if i % 2:
            yield row, block(row["answer"]), block(f"{wrong}. {row['options'][wrong]}")
        else:
            say = " It follows from the nerve's course.</think>\nSo the answer is "
            yield row, f"{say}{row['answer']}.", f"{say}({wrong})."


def pubmedqa(data: Path | None) -> Iterator[Case]:
    for right, wrong in itertools.permutations(("yes", "no", "maybe"), 2):
        yield {"answer": right}, block(right), block(wrong)


def maths(data: Path | None) -> Iterator[Case]:
    answers = list(ANSWERS)
    if data is not None:
        text = (data / "math_problems" / "math.json").read_text(encoding="utf-8")
        answers = [str(problem["answer"]) for problem in json.loads(text)]
    # No answer comes in two rows: the verifier remembers those that it has read.
    answers = list(dict.fromkeys(answers))
    for right, wrong in zip(answers[::2], answers[1::2], strict=False):
        yield {"answer": right}, *(block(rf"\boxed{{{answer}}}") for answer in (right, wrong))


def sql(data: Path | None, folder: Path) -> Iterator[Case]:
    if data is not None:
        yield from spider(data / "sql_spider_en")
        return
    file = folder / "staff.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE staff (name TEXT, town TEXT, pay INTEGER)")
        connection.execute("CREATE TABLE town (name TEXT, head TEXT)")
        people = [(f"name {i}", f"town {i % 20}", 1000 + i * 7 % 4000) for i in range(500)]
        connection.executemany("INSERT INTO staff VALUES (?, ?, ?)", people)
        towns = [(f"town {i}", f"name {i}") for i in range(20)]
        connection.executemany("INSERT INTO town VALUES (?, ?)", towns)
        connection.commit()
    for n, query in itertools.product(range(1000, 5000, 100), QUERIES):
        right = query.format(n=n)
        row = {"query": right, "database": str(file)}
        yield row, block(right), block(query.format(n=n + 7))


def spider(folder: Path) -> Iterator[Case]:
    """The questions whose databases are there."""
    files = {file.stem: file for file in sorted(folder.rglob("*.sqlite"))}
    with gzip.open(folder / "dev.json.gz", "rt", encoding="utf-8") as file:
        asked = [row for row in json.load(file) if row["db_id"] in files]
    for row, other in zip(asked, asked[1:] + asked[:1], strict=True):
        gold = {"query": row["query"], "database": str(files[row["db_id"]])}
        yield gold, block(row["query"]), block(other["query"])


CASES: dict[str, Callable[..., Iterator[Case]]] = {
    "countdown": countdown,
    "choice": choice,
    "pubmedqa": pubmedqa,
    "maths": maths,
    "sql": sql,
}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = [name for name in CASES if name in VERIFIERS]
    flags.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(known)}")
    flags.add_argument("--rows", type=int, default=4000, help="completions a repetition")
    flags.add_argument("--workers", type=int, default=spare_cores())
    flags.add_argument("--reps", type=int, default=5)
    flags.add_argument("--data", type=Path, help="folder with math_problems and sql_spider_en")
    options = flags.parse_args()
    if unknown := set(options.names) - set(known):
        flags.error(f"no verifier is called {', '.join(unknown)}; there are {', '.join(known)}")
    for name in options.names or known:
        with tempfile.TemporaryDirectory() as folder:
            own = (Path(folder),) if name == "sql" else ()
            cases = list(CASES[name](options.data, *own))
            print(json.dumps(measure(name, cases, options)), flush=True)


def measure(name: str, cases: list[Case], options: argparse.Namespace) -> dict:
    rows = [row for row, *_ in cases]
    # right ones and wrong ones in turn, whatever the number of rows
    items = [
        (cases[i // 2 % len(cases)][1 + i % 2], i // 2 % len(cases)) for i in range(options.rows)
    ]
    unseen = list({(text, json.dumps(rows[row])): (text, row) for text, row in items}.values())
    score = VERIFIERS[name]
    in_process = InProcess(score, rows)
    start = time.perf_counter()
    in_process.score_all(items[:1])
    first = time.perf_counter() - start
    seconds, results = timed(in_process, unseen, items, options.reps)
    start = time.perf_counter()
    with WorkerPool(score, rows, workers=options.workers) as pool:
        starting = time.perf_counter() - start
        pooled, same = timed(pool, unseen, items, options.reps)
    right = [getattr(result, "correct", None) for result in results]
    return {
        "bench": "verifiers",
        "impl": "rlx",
        "verifier": name,
        "rows": len(items),
        "unseen": len(unseen),
        "workers": options.workers,
        "in_process_rows_per_s": round(len(items) / seconds["median_s"], 1),
        "in_process_first_rows_per_s": round(len(unseen) / seconds["first_s"], 1),
        "pool_rows_per_s": round(len(items) / pooled["median_s"], 1),
        "pool_first_rows_per_s": round(len(unseen) / pooled["first_s"], 1),
        "pool_share": round(seconds["median_s"] / pooled["median_s"], 3),
        "pool_start_s": round(starting, 3),
        "first_row_s": round(first, 3),
        "same": results == same,
        "right_share": round(right.count(True) / len(right), 4),
        "unscored": right.count(None),
        "in_process": seconds,
        "pool": pooled,
    }


def timed(scorer: BatchScorer, unseen: list, items: list, reps: int) -> tuple[dict, list]:
    """Seconds a pass, each when the machine has little else to do, and the last pass's results.
    The first is over `unseen` alone, each of which comes once."""
    quiet, taken = timing.Quiet(), []
    for part in (unseen, *[items] * reps):
        quiet.wait()
        start = time.perf_counter()
        results = scorer.score_all(part)
        taken.append(time.perf_counter() - start)
    first, *taken = taken
    return {
        "first_s": round(first, 5),
        "median_s": round(statistics.median(taken), 5),
        "min_s": round(min(taken), 5),
        "max_s": round(max(taken), 5),
    }, results


if __name__ == "__main__":
    main()
