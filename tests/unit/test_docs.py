"""The documentation: links lead somewhere, Python blocks run, prose fits 100 columns."""

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import hybrid_ep
from tests.ranks import documents
from tools import wrap_markdown

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# ---- links and lines


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them, and those that it names itself."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), re.MULTILINE)
    texts = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    named = re.findall(r'<a id="([^"]+)">', page.read_text())
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts} | {*named}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@names
def test_links_lead_somewhere(page):
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


@names
def test_prose_fits_100_columns(page):
    text = page.read_text()
    assert wrap_markdown.too_long(text) == [], "make format wraps them"
    assert wrap_markdown.wrap(text) == text


def test_the_index_of_the_lab_names_each_experiment():
    index = (ROOT / "docs/lab/README.md").read_text()
    for page in (ROOT / "docs/lab").glob("*.md"):
        assert f"]({page.name})" in index or page.name == "README.md", page.name
        number = re.match(r"(\d\d)-", page.name)
        if number:  # comments of the sources name it
            assert page.read_text().startswith(f"# {int(number[1])}. "), page.name


def test_wrapping_changes_no_word_and_no_mark():
    long = "word " * 30 + "`a b`"
    text = f"# {long}\n\n- {long}\n  more\n- short\n\n| {long} |\n\n```\n{long}\n```\n\n1. {long}\n"
    wrapped = wrap_markdown.wrap(text)
    assert wrapped.split() == text.split()
    lines = wrapped.splitlines()
    assert [line for line in lines if line.startswith(("#", "|", "word"))] == [
        f"# {long}", f"| {long} |", long
    ]  # fmt: skip
    assert len(wrap_markdown.too_long(wrapped)) == 0
    assert lines[3].startswith("  word") and "- short" in lines
    assert wrap_markdown.wrap(wrapped) == wrapped
    assert wrap_markdown.wrap("a " * 46 + "\nb - c") == "a " * 46 + "\nb - c", "it fits: it stays"
    marks = wrap_markdown.wrap("wordword " * 11 + "- 1. # + * > x " * 4)
    assert not re.search(r"^\s*([-+*>#]|\d+\.) ", marks, re.MULTILINE), "none begins a line"


# ---- Python blocks


@dataclass(frozen=True)
class Block:
    """A Python block of a page."""

    page: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1]))
    return found


# What runs a block, by words of it that no other block has.
SIGNATURES = {
    "Buffer(group=None": hybrid_ep.Buffer,
    "dispatch(buffer, x, topk_idx=None": hybrid_ep.dispatch,
    "combine(buffer, rows, handle, *": hybrid_ep.combine,
    "combine_values(buffer, rows": hybrid_ep.combine_values,
    "Config(*, num_sms": hybrid_ep.Config,
}
CONTEXTS = {
    "with hybrid_ep.Buffer(group": "buffer_and_tokens",
    "in replicated_parameters(model)": "layer_before_backward",
    "masters = [weight": "layer_with_main_grad",
    "check.run(group).ok": "",
    "dcp.save(": "trained_layer",
    "DDP._set_params": "trained_layer",
    "handle.required_rows.clone()": "buffer_and_tokens",
    "handle.overflow.to(": "buffer_and_tokens",
    "y = hybrid_ep.checkpoint(": "layer_and_tokens",
    "MUST_SAVE": "layer_and_tokens",
    "torch.compile(": "layer_and_tokens",
    "num_sms=16": "buffer_and_tokens",
    "Config(num_sms_dispatch=48": "buffer_and_tokens",
    "q = x.to(": "buffer_and_tokens",
    "buffer.release()": "buffer_and_tokens",
    "dist.new_group()": "",
    "logging.basicConfig()": "",
    "lane = Lane(": "buffer_and_tokens",
}
PROGRAMS = {  # whole files, which a shell block of the same page starts (test_docs_shell.py)
    "torch.randn(512, 1024": "example.py",
    "each token is its own sum": "first.py",
    "for step in range(20)": "train.py",
}
ELSEWHERE = {  # what a test on hardware, or with other tools, does
    "checkpoint(function, *args": "a signature with the names that stand for it",
    "map_to_topk(routing_map": "tests/suite/test_maps.py",
    "torch.cuda.CUDAGraph()": "tests/gpu/test_graphs.py",
    "buffer.write_trace(": "tests/gpu/test_trace.py",
    'dist.init_process_group("cpu:gloo,cuda:nccl")': "tests/gpu/test_over_nccl.py",
}


def of(block: Block, table) -> list[str]:
    return [words for words in table if words in block.code]


def chosen(table) -> list[Block]:
    return [block for block in blocks() if of(block, table)]


def test_every_block_is_run_in_one_way():
    ways = (SIGNATURES, CONTEXTS, PROGRAMS, ELSEWHERE)
    for block in blocks():
        if (ROOT / "docs/integrations.md") == ROOT / block.page:
            continue  # tests/unit/test_frameworks.py
        found = [words for table in ways for words in of(block, table)]
        assert len(found) == 1, f"{block}: {found}\n{block.code}"
    for table in ways:
        for words in table:
            assert any(words in block.code for block in blocks()), f"no block has {words}"
    for path in ELSEWHERE.values():
        assert " " in path or (ROOT / path).exists()


@pytest.mark.parametrize("block", chosen(CONTEXTS), ids=str)
def test_a_block_runs(world, block):
    (words,) = of(block, CONTEXTS)
    for told in world(2).run(documents.run, block.code, CONTEXTS[words]):
        assigned = re.findall(r"^\s*(\w+) = ", block.code, re.MULTILINE)
        assert set(told) >= {name for name in assigned if name not in documents.GIVEN}


@pytest.mark.parametrize("block", chosen(SIGNATURES), ids=str)
def test_a_signature_is_that_of_the_code(block):
    (words,) = of(block, SIGNATURES)
    written = re.match(r"\w+\((.*?)\)( ->|$)", " ".join(block.code.split()))[1]
    documented = {}
    exec(f"def documented({written}): pass", {"torch": __import__("torch")}, documented)
    ours, theirs = (
        [
            (each.name, each.kind, each.default)
            for each in inspect.signature(one).parameters.values()
        ]
        for one in (documented["documented"], SIGNATURES[words])
    )
    assert ours == theirs
