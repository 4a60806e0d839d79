"""Blocks of a report written out: Markdown with figures beside it, and one HTML file with the figures inside."""

import html
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Block:
    """One piece of the page. `kind`: "h1", "h2", "p", "lead", "table", "figure" or "details"."""

    kind: str
    text: str = ""
    rows: list[list[str]] = field(default_factory=list)
    name: str = ""
    svg: str = ""


STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff;
  max-width: 62rem; margin: 2.5rem auto 4rem; padding: 0 1.5rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .4rem; border-top: 1px solid #ddd; }
.lead { font-size: 1.08rem; background: #f3f7fb; border-left: 4px solid #0072B2; padding: .8rem 1.1rem; margin: 0 0 1rem; }
.lead + .lead { margin-top: -1rem; padding-top: 0; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: #555; font-size: .9rem; margin-top: .3rem; }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .5rem; border-bottom: 1px solid #e3e3e3; text-align: right; vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid #bbb; vertical-align: bottom; }
td { white-space: nowrap; } td.long { white-space: normal; min-width: 14rem; }
th:first-child, td:first-child, .words, .long { text-align: left; }
details { margin: .8rem 0; } summary { cursor: pointer; color: #0072B2; }
pre { font-size: .78rem; background: #f6f6f6; padding: .8rem; overflow-x: auto; }
"""


def _inline(text: str) -> str:
    """Escaped text with **bold** and *emphasis*."""
    text = html.escape(text, quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"(?<!\*)\*([^*]+)\*(?!\*)", r"<em>\1</em>", text)


def _is_words(column: list[str]) -> bool:
    return any(re.search(r"[A-Za-z]{3}", re.sub(r"\bto\b|\bof\b|faults?", "", cell)) for cell in column)


def to_html(blocks: list[Block]) -> str:
    """One page, figures inside, nothing loaded from anywhere."""
    title = next((block.text for block in blocks if block.kind == "h1"), "Report")
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, '
        f'initial-scale=1">\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>'
    ]
    for number, block in enumerate(blocks):
        match block.kind:
            case "h1" | "h2":
                parts.append(f"<{block.kind}>{_inline(block.text)}</{block.kind}>")
            case "p":
                parts.append(f"<p>{_inline(block.text)}</p>")
            case "lead":
                parts.append(f'<p class="lead">{_inline(block.text)}</p>')
            case "figure":
                # ids of several drawings in one page must not meet
                svg = re.sub(r'(id="|url\(#|xlink:href="#|href="#)', rf"\g<1>f{number}-", block.svg)
                label = html.escape(block.text, quote=True)
                svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
                parts.append(f"<figure>{svg}<figcaption>{_inline(block.text)}</figcaption></figure>")
            case "table":
                columns = [[row[i] for row in block.rows[1:]] for i in range(len(block.rows[0]))]
                kinds = [
                    " class=long"
                    if max(map(len, column), default=0) > 40
                    else " class=words"
                    if _is_words(column)
                    else ""
                    for column in columns
                ]
                lines = []
                for tag, rows in (("th", block.rows[:1]), ("td", block.rows[1:])):
                    for row in rows:
                        cells = (f"<{tag}{kind}>{_inline(cell)}</{tag}>" for cell, kind in zip(row, kinds))
                        lines.append(f"<tr>{''.join(cells)}</tr>")
                parts.append(f'<div class="scroll"><table>{"".join(lines)}</table></div>')
            case "details":
                parts.append(
                    f"<details><summary>{_inline(block.name)}</summary><pre>{html.escape(block.text)}</pre></details>"
                )
    return "\n".join([*parts, "</body>\n</html>\n"])


def to_markdown(blocks: list[Block], figures: str = "figures") -> str:
    """The same page as Markdown; figures are linked as `figures/<name>.svg`."""
    parts = []
    for block in blocks:
        match block.kind:
            case "h1":
                parts.append(f"# {block.text}")
            case "h2":
                parts.append(f"## {block.text}")
            case "p" | "lead":
                parts.append(block.text)
            case "figure":
                parts.append(f"![{block.name.replace('_', ' ')}]({figures}/{block.name}.svg)\n\n*{block.text}*")
            case "table":
                lines = ["| " + " | ".join(row) + " |" for row in block.rows]
                lines.insert(1, "| --- |" + " ---: |" * (len(block.rows[0]) - 1))
                parts.append("\n".join(lines))
            case "details":
                parts.append(f"<details>\n<summary>{block.name}</summary>\n\n```json\n{block.text}\n```\n\n</details>")
    return "\n\n".join(parts) + "\n"


def write(blocks: list[Block], folder: str | Path) -> list[Path]:
    """Writes `report.html`, `report.md` and `figures/*.svg`; returns the paths."""
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.html", folder / "report.md"]
    paths[0].write_text(to_html(blocks), encoding="utf-8")
    paths[1].write_text(to_markdown(blocks), encoding="utf-8")
    for block in blocks:
        if block.kind == "figure":
            paths.append(folder / "figures" / f"{block.name}.svg")
            paths[-1].write_text(block.svg + "\n", encoding="utf-8")
    return paths


__all__ = ["Block", "to_html", "to_markdown", "write"]
