"""Translates docstrings for the site: they are written with reStructuredText's roles, and the site needs Markdown."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(class|func|meth|mod|data|attr):`~?([^`]+)`")
MATH = re.compile(r":math:`([^`]+)`")
BLOCK = re.compile(r"^( *)\.\. math::[ ]?(.*(?:\n(?:\1 +\S.*|\s*$))*)", re.MULTILINE)
RULE = re.compile(r"^ *=+(?: +=+)+ *$")


def to_markdown(text: str) -> str:
    """Turn roles into code, formulas into the site's notation, simple tables into Markdown, and ``::`` into a code block."""
    text = BLOCK.sub(_display, text)
    text = _tables(text)
    text = MATH.sub(r"\\(\1\\)", text)
    text = ROLE.sub(lambda match: f"`{match[2]}`", text)
    text = re.sub(r"(?<![`\w])(\[\w+\]\[\w+\])", r"`\1`", text)  # [i][j] are indices, not a link
    return re.sub(r"::\n\n((?: {4,}.*\n?|\n)+)", _literal, text)


def _display(match: re.Match[str]) -> str:
    formula = textwrap.dedent("\n".join(match[2].splitlines())).strip()
    formula = re.sub(r"\n\s+", "\n", formula)
    if "&" in formula:
        formula = "\\begin{aligned}" + formula + "\\end{aligned}"
    one_line = " ".join(formula.split())
    return f"\n{match[1]}\\[{one_line}\\]\n\n"


def _literal(match: re.Match[str]) -> str:
    return ":\n\n```python\n" + textwrap.dedent(match[1]).strip("\n") + "\n```\n\n"


def _tables(text: str) -> str:
    lines, out, i = text.split("\n"), [], 0
    while i < len(lines):
        if not RULE.match(lines[i]):
            out.append(lines[i])
            i += 1
            continue
        spans = [match.span() for match in re.finditer("=+", lines[i])]
        cuts = [
            (a, spans[k + 1][0] if k + 1 < len(spans) else None) for k, (a, _) in enumerate(spans)
        ]
        rows: list[list[str]] = []
        rules = 1
        i += 1
        header = False
        while i < len(lines):
            if RULE.match(lines[i]):
                rules += 1
                after = [line for line in lines[i + 1 :] if RULE.match(line)]
                if rules == 2 and after and len(rows) == 1:
                    header = True
                    i += 1
                    continue
                i += 1
                break
            cells = [lines[i][a:b].strip() for a, b in cuts]
            if rows and not cells[0]:
                rows[-1] = [" ".join(filter(None, both)) for both in zip(rows[-1], cells)]
            elif any(cells):
                rows.append(cells)
            i += 1
        head = rows.pop(0) if header else [""] * len(cuts)
        table = [head, ["---"] * len(cuts), *rows]
        out += ["", *("| " + " | ".join(row) + " |" for row in table), ""]
    return "\n".join(out)


class Docstrings(griffe.Extension):
    """Translate every docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
