#!/usr/bin/env python3
"""Counts what is not said in plain words, for each folder, and compares with tools/folders.txt.

Rules (docs/glossary.md): 1. the first sentence of a comment begins with a verb or a noun of the glossary; 2. no pronoun
or adverb is an identifier; 3. some words are in no comment, message or page; 4. Markdown lines have 120 columns.
A folder's counts, one column for each rule, may fall, never grow; `--write` records them, `--show FOLDER` lists the
lines.
"""

import io
import pathlib
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator

from code_lines import folder_of, holds, tracked_files

FRAGMENT = re.compile(r'^(?:///?|#|[rf]?""")\s*(?:What|Of|Who|That|Those|Whose)\b')
PRONOUN = re.compile(r"\b(?:one|found|there|now|here|mine|theirs|everybody|nobody|given|said|told)\b")
UNPLAIN = re.compile(
    r"\b(?:told|said|stands|somebody|nobody|everybody|whoever|all the same|in words|way out|of its own)\b",
    re.IGNORECASE,
)
CPP_TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
SUFFIXES = (".py", ".cc", ".h", ".cu", ".cuh", ".md")
RULES = ("rule1", "rule2", "rule3", "rule4")
SELF = "tools/lint_words.py"

Finding = tuple[int, int, str]  # rule, line, text


def python_findings(text: str) -> Iterator[Finding]:
    """Yields the findings of a Python file."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.NAME and PRONOUN.fullmatch(token.string):
            yield 2, line, token.line
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            alone = token.line.strip().startswith(token.string[:3])
            if alone and before != tokenize.COMMENT and FRAGMENT.match(token.string):
                yield 1, line, token.string
            yield from ((3, line, match[0]) for match in UNPLAIN.finditer(token.string))
        if token.type != tokenize.NL:
            before = token.type


def cpp_findings(text: str) -> Iterator[Finding]:
    """Yields the findings of a C++ or CUDA file."""
    last_comment = -2
    for match in CPP_TOKEN.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match[0].startswith("//"):
            if line != last_comment + 1 and FRAGMENT.match(match[0]):
                yield 1, line, match[0]
            last_comment = line
        yield from ((3, line, word[0]) for word in UNPLAIN.finditer(match[0]))
    code = CPP_TOKEN.sub(lambda match: "\n" * match[0].count("\n"), text)
    for line, content in enumerate(code.split("\n"), 1):
        yield from ((2, line, content) for _ in PRONOUN.finditer(content))


def page_findings(text: str) -> Iterator[Finding]:
    """Yields the findings of a Markdown page; code blocks and tables may be wide."""
    fenced = False
    for line, content in enumerate(text.split("\n"), 1):
        fenced ^= content.startswith("```")
        if not fenced:
            yield from ((3, line, match[0]) for match in UNPLAIN.finditer(content))
            if len(content) > 120 and not content.startswith(("|", "![")):
                yield 4, line, content


def findings(path: str) -> Iterator[Finding]:
    """Yields the findings of one file."""
    text = pathlib.Path(path).read_text()
    kind = page_findings if path.endswith(".md") else python_findings if path.endswith(".py") else cpp_findings
    return kind(text)


def main() -> int:
    """Prints the sums; fails where a folder has more findings of a rule than recorded."""
    paths = [path for path in tracked_files() if path.endswith(SUFFIXES) and path != SELF]
    shown = sys.argv[2] if sys.argv[1:2] == ["--show"] else None
    counts: Counter[tuple[str, str]] = Counter()
    for path in paths:
        folder = folder_of(path)
        for rule, line, text in findings(path):
            counts[folder, RULES[rule - 1]] += 1
            if folder == shown:
                print(f"{path}:{line}: rule {rule}: {text.strip()[:100]}")
    held = holds(RULES, counts)
    if not held:
        print("List them with: python3 tools/lint_words.py --show FOLDER")
    sums = Counter(rule for _, rule in counts.elements())
    print("Plain words: " + ", ".join(f"{rule} {sums[rule]:,}" for rule in RULES))
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
