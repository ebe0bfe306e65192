"""What the repository promises about itself."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUIET = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip


def count_code_lines(source: str) -> int:
    """Lines that hold code: not blank, not only a comment, not part of a docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in QUIET:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_counting_lines():
    source = '"""Doc\nstring."""\n\nx = 1  # why\n# a comment\ny = """two\nlines"""\n'
    assert count_code_lines(source) == 3


def test_the_core_stays_near_two_thousand_lines():
    core = sum(count_code_lines(path.read_text()) for path in (ROOT / "minikv").glob("*.py"))
    assert 1000 < core <= 2100
    [claim] = re.findall(r"([\d,]+) lines of code", (ROOT / "README.md").read_text())
    assert abs(int(claim.replace(",", "")) - core) <= 50, f"README says {claim}, there are {core}"


def test_the_readme_names_only_files_that_exist():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_bundled_model_is_at_most_eight_megabytes():
    files = list((ROOT / "minikv" / "models" / "tinypy").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        file.name for file in files
    }
    assert sum(file.stat().st_size for file in files) <= 8_000_000
