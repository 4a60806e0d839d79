"""The Space's page: paste the rounds of some requests, read the numbers. Needs gradio, which the Space provides."""

import json
from pathlib import Path

import evaluate
import gradio


folder = Path(__file__).parent
metric = evaluate.load(str(folder))


def compute(rounds: str, block_size: float) -> dict:
    return metric.compute(predictions=json.loads(rounds), block_size=int(block_size) or None)


page = gradio.Interface(
    fn=compute,
    inputs=[
        gradio.Textbox("[[4, 1, 3], [2, 2]]", label="Tokens committed in every round: one list per request (JSON)"),
        gradio.Number(4, precision=0, label="Block size (0: the largest round)"),
    ],
    outputs=gradio.JSON(label="Accepted length"),
    title="Accepted length of speculative decoding",
    article=(folder / "README.md").read_text(encoding="utf-8").split("---", 2)[-1],
)

if __name__ == "__main__":
    page.launch()
