"""The catalogue and the generated documentation agree with the code."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from docs.generate import __main__ as generate
from docs.generate import encodings, equations, families
from docs.generate.__main__ import main
from fairseq_posenc import registry
from fairseq_posenc.analysis import catalogue
from tests.helpers import oracles, support
from tests.helpers.commands import call, refused
from tests.helpers.tiny_models import COMPANIONS, NAMES

ROOT = Path(__file__).parents[2]


def test_the_documentation_is_up_to_date():
    assert main(["--check"]) == 0


def test_the_support_table_is_what_runs():
    assert support.PAGE.read_text(encoding="utf-8") == support.page(), "run make docs"


def test_the_package_does_not_need_what_writes_its_documentation():
    for path in (ROOT / "fairseq_posenc").rglob("*.py"):
        assert "docs.generate" not in path.read_text(encoding="utf-8"), path


def test_an_outdated_file_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "format_files", lambda root: {tmp_path / "README.md": "new\n"})
    for change in (lambda path: None, lambda path: path.write_text("old\n")):
        change(tmp_path / "README.md")
        assert main(["--check", "--root", str(tmp_path)]) == 2
        assert "README.md is out of date: run make docs" in capsys.readouterr().err


def test_an_outdated_file_is_mended_and_one_without_markers_refused(tmp_path, capsys):
    overview = tmp_path / "docs" / "encodings" / "README.md"
    overview.parent.mkdir(parents=True)
    overview.write_text(f"before\n{encodings.START}\nold\n{encodings.END}\nafter\n")
    (tmp_path / "docs" / "hf.md").write_text(f"{families.START}\n{families.END}\n")
    assert main(["--root", str(tmp_path)]) == 0
    text = overview.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "[`m4m`](m4m.md)" in text
    assert {path.stem for path in overview.parent.glob("*.md")} == {"README", *registry.names()}
    overview.write_text("nothing")
    capsys.readouterr()
    assert main(["--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("name", registry.names())
def test_equations_become_latex_without_a_rest(name):
    latex = equations.to_latex(equations.split_equation(catalogue.parse_page(name)["equation"])[0])
    assert not re.search(r"(sqrt|abs|_)\(", latex)
    assert latex.count("{") == latex.count("}")


def test_an_equation_as_latex():
    text = "e_ij = (q_i.k_j * a_r) / sqrt(c d), where r = j - i."
    formula, prose = equations.split_equation(text)
    assert equations.to_latex(formula) == r"e_{ij} = (q_i \cdot k_j \, a_r) / \sqrt{c d}"
    assert prose == "r = j - i."
    assert equations.to_latex("sqrt(abs(r))") == r"\sqrt{\left\vert r \right\vert}"


@pytest.mark.parametrize("name", registry.names())
def test_base_size_counts_are_those_of_the_formulas(name):
    expected = oracles.parameter_count(name, m=12, n=512, d=64, D=768, h=12)
    assert catalogue.count_at_base_size(name) == expected


@pytest.mark.parametrize(
    ("spec", "total"),
    [
        ("learned", 393_216),
        ("shaw", 785_664),
        ("raffel", 12_276),
        ("m2", 12_276),
        ("m4", 785_664),
        ("m4m", 785_664),
        ("deberta", 883_968),
        ("deberta(tie_projections=true)", 834_816),
        ("tupe", 503_796),
        ("tupe(tie_projections=true)", 454_644),
        ("learned+m4m", 1_178_880),
        ("m4+reset", 785_664 + 12 * 2 * 64),
        ("m4(per_head=true)", 12 * 785_664),
        ("t5", 384),
        ("transformer_xl", 7_096_320),
        ("sentence_learned", 393_216),
        ("m1", 6_144),
        ("m3", 785_664),
        ("tupe+reset", 503_796 + 12 * 2),
        ("learned+m4m+reset", 1_178_880 + 12 * 2 * 64),
        ("shaw(max_distance=128)", 12 * 257 * 64),
        ("kerple", 12 * 2 * 12),
        ("fire", 12 * 462),
        *((name, 0) for name in ("none", "sinusoidal", "rope", "alibi", "sandwich")),
    ],
)
def test_count_prints_the_numbers_of_the_papers_tables(spec, total, capsys):
    *rows, last = call(capsys, "count", "--encoding", spec)[0].splitlines()
    *sizes, printed = (int(line.split()[0].replace(",", "")) for line in (*rows, last))
    assert printed == total == sum(sizes)


@pytest.mark.parametrize("name", [*NAMES, *COMPANIONS])
def test_describe_says_everything(name, capsys):
    """Without marks of a markup language, in lines that fit a terminal."""
    lines, _ = call(capsys, "describe", name)
    assert max(map(len, lines.splitlines())) <= 80
    assert "`" not in lines
    printed = " ".join(lines.split())
    assert catalogue.parse_page(name)["equation"].replace("``", "") in printed
    assert "At base size" in printed
    assert "fairseq_posenc." not in printed
    assert {*re.findall(r"[a-zA-Z]: the option (\w+)", printed)} <= {*registry.options(name)}


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("sink", ["value (number)"]),  # an option without default
        ("randomized", ["evaluation=drawn or even"]),
        ("m4m", ["d, D: width of a head", "G: tables, 1 or one for each head", "K: the option"]),
        ("decbert_diff", ["--position-encoding learned --attention-directions lr,rl"]),
    ],
)
def test_describe_names_types_letters_and_directions(name, texts, capsys):
    printed = " ".join(call(capsys, "describe", name)[0].split())
    assert all(text in printed for text in texts)
    assert name != "m4m" or "C: width of the model" not in printed


@pytest.mark.parametrize(
    ("name", "letter"), [("chunk", "C"), ("sandwich", "n"), ("ssmax", "n"), ("transformer_xl", "v")]
)
def test_describe_leaves_out_letters_that_the_equation_defines(name, letter, capsys):
    assert not re.search(rf"\b{letter}: ", call(capsys, "describe", name)[0])


def test_describe_takes_specs(capsys):
    rope, window = (call(capsys, "describe", name)[0] for name in ("rope", "window"))
    both, _ = call(capsys, "describe", "3*rope+window(size=64),rope")
    assert both == rope + window.replace("window:", "\nwindow:", 1)
    assert "rope has no option 'bas=500'" in refused(capsys, "describe", "rope(bas=500)")


def test_user_dir_is_the_package(capsys):
    assert Path(call(capsys, "user-dir")[0].strip(), "registry.py").is_file()


@pytest.mark.parametrize("option", ["--heads", "--embed-dim", "--max-positions", "--layers"])
@pytest.mark.parametrize("size", ["0", "-1", "-8"])
def test_counting_with_sizes_below_one_is_one_line(option, size, capsys):
    message = refused(capsys, "count", "--encoding", "learned", option, size)
    assert f"argument {option}: must be a whole number of at least 1, not '{size}'" in message


def test_counting_takes_no_memory_and_no_time(capsys):
    printed, _ = call(capsys, "count", "--encoding", "learned", "--max-positions", 10**12)
    assert f"{768 * 10**12:,}  learned" in printed
    printed, _ = call(capsys, "count", "--encoding", "m1,none", "--layers", 10**12 - 1)
    assert f"{512 * 10**12 // 2:,}  m1,none" in printed  # in one layer more than without


def test_every_option_is_explained():
    layers = (ROOT / "docs" / "layers.md").read_text("utf-8")
    overview = (ROOT / "docs" / "encodings" / "README.md").read_text("utf-8")
    explained = overview.partition("## Options")[2].partition("\n## ")[0]
    for name in (*NAMES, *COMPANIONS):
        text = explained + layers * (name in COMPANIONS)
        assert all(re.search(rf"`[^`]*\b{x}\b", text) for x in registry.options(name)), name
    (modes,) = re.findall(r"\| `mode` \| (.*)", explained)
    assert {*re.findall(r"`(\w+)`", modes)} == {"alibi", "symmetric", "asymmetric"}


def test_pages_list_the_encodings_of_the_registry():
    pages = ("README.md", "docs/encodings/README.md", "docs/library.md")
    readme, overview, library = ((ROOT / page).read_text(encoding="utf-8") for page in pages)
    assert f" {len(registry.names())} position encodings to train with" in readme
    causal = overview.partition("measured costs in ")[2].partition(" are for causal")[0]
    real = library.partition("such as times, work with ")[2].partition(", and with")[0]
    for text, attribute in ((causal, "causal_reason"), (real, "takes_real_ids")):
        having = [name for name in registry.names() if getattr(registry.get(name), attribute)]
        assert sorted(re.findall(r"`(\w+)`", text)) == having, attribute


def test_every_pinned_package_has_hashes():
    """As `HASHES=1 make install` needs them; a comment in the file tells how it is made."""
    pinned, hashed = (
        (ROOT / name).read_text(encoding="utf-8").splitlines()
        for name in ("constraints.txt", "hashes.txt")
    )
    packages = [line.split()[0] for line in hashed if line[0].isalnum()]
    wanted = [line.lower().replace("_", "-") for line in pinned if not line.startswith("#")]
    assert sorted(packages) == sorted(wanted)
    after = [next_line for line, next_line in zip(hashed, hashed[1:]) if line[0].isalnum()]
    assert all(line.startswith("    --hash=sha256:") for line in after)


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=str)
def test_workflows_call_what_is_there(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["name"] == path.stem
    assert workflow[True]  # YAML 1.1 reads `on` so
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for job in workflow["jobs"].values():
        assert job["runs-on"]
        assert job.get("needs", next(iter(workflow["jobs"]))) in workflow["jobs"]
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", step["uses"])
                continue
            program, *words = step["run"].split()
            assert words[0] in targets if program == "make" else os.access(ROOT / program, os.X_OK)


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=str)
def test_issue_forms_have_what_a_form_needs(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    for field in form["body"]:
        assert field["type"] in {"markdown", "input", "textarea", "dropdown", "checkboxes"}
        assert field["attributes"].get("value" if field["type"] == "markdown" else "label")
