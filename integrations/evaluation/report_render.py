"""Blocks of a report written out: Markdown with figures beside it, and one HTML file with the figures inside."""

import html
import re
from dataclasses import dataclass, field
from pathlib import Path

from .report_figures import GRID, INK, PAPER, Drawing


@dataclass
class Block:
    """One piece of the page. `kind`: "h1", "h2", "p", "lead", "table", "figure" or "details"."""

    kind: str
    text: str = ""
    rows: list[list[str]] = field(default_factory=list)
    name: str = ""
    drawing: Drawing | None = None


STYLE = """
:root { color-scheme: light dark; --ink: #1b1c1e; --soft: #55585c; --line: #d9dadd; --paper: #fff; --box: #f1f6fb; --blue: #0067a3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e5e7; --soft: #a3a7ad; --line: #3a3d42; --paper: #141517; --box: #1c242c; --blue: #6db7e8; } }
body { font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: var(--ink); background: var(--paper);
  max-width: 66rem; margin: 2.5rem auto 4rem; padding: 0 1.5rem; overflow-wrap: break-word; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .4rem; border-top: 1px solid var(--line); }
.lead { background: var(--box); border-left: 4px solid var(--blue); padding: .7rem 1.1rem; margin: 0; }
.lead + .lead { padding-top: 0; }
h1 + .lead { font-size: 1.12rem; }
figure { margin: 1rem 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .3rem; }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid var(--soft); vertical-align: bottom; }
td { white-space: nowrap; } td.long { white-space: normal; min-width: 14rem; }
th:first-child, td:first-child, .words, .long { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
details { margin: .8rem 0; } summary { cursor: pointer; color: var(--blue); }
pre { font-size: .78rem; background: var(--box); padding: .8rem; overflow-x: auto; }
@media (max-width: 44rem) {
  body { padding: 0 1rem; margin-top: 1.2rem; }
  figure svg { width: 44rem; max-width: none; } }
"""
# a figure's own colours for text, grid and background, in the page
IN_PAGE = {INK: "var(--ink)", GRID: "var(--line)", PAPER: "none"}


def _inline(text: str) -> str:
    """Escaped text with **bold** and *emphasis*."""
    text = html.escape(text, quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"(?<!\*)\*([^*]+)\*(?!\*)", r"<em>\1</em>", text)


def _kinds(rows: list[list[str]]) -> list[str]:
    """What the columns hold: "long" texts, "words", or numbers ("")."""
    kinds = []
    for column in list(zip(*rows[1:])) or [()] * len(rows[0]):
        is_words = any(re.search(r"[A-Za-z]{3}", re.sub(r"\bof\b|faults?|none", "", cell)) for cell in column)
        kinds.append("long" if max(map(len, column), default=0) > 40 else "words" if is_words else "")
    return kinds


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
                svg = re.sub(r'(id="|url\(#|xlink:href="#|href="#)', rf"\g<1>f{number}-", block.drawing.svg)
                for own, here in IN_PAGE.items():
                    svg = svg.replace(own, here)
                label = html.escape(block.text, quote=True)
                svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
                parts.append(
                    f'<figure><div class="scroll">{svg}</div><figcaption>{_inline(block.text)}</figcaption></figure>'
                )
            case "table":
                kinds = [f" class={kind}" if kind else "" for kind in _kinds(block.rows)]
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
                marks = ["---" if kind or not i else "---:" for i, kind in enumerate(_kinds(block.rows))]
                lines.insert(1, f"| {' | '.join(marks)} |")
                parts.append("\n".join(lines))
            case "details":
                parts.append(f"<details>\n<summary>{block.name}</summary>\n\n```json\n{block.text}\n```\n\n</details>")
    return "\n\n".join(parts) + "\n"


def write(blocks: list[Block], folder: str | Path) -> list[Path]:
    """Writes `report.html`, `report.md`, `figures/*.svg` and the same as small `figures/*.png`; returns the paths."""
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.html", folder / "report.md"]
    paths[0].write_text(to_html(blocks), encoding="utf-8")
    paths[1].write_text(to_markdown(blocks), encoding="utf-8")
    for block in blocks:
        if block.kind == "figure":
            paths += [folder / "figures" / f"{block.name}.{kind}" for kind in ("svg", "png")]
            paths[-2].write_text(block.drawing.svg + "\n", encoding="utf-8")
            paths[-1].write_bytes(block.drawing.png)
    return paths


__all__ = ["Block", "to_html", "to_markdown", "write"]
