"""`python -m docs.screenshots` draws inspect.png: responses of SmolLM2-135M in the inspector (Chromium; extra `[benchmarks]`).

The responses are in responses.jsonl. Where that file is missing the model writes it first: eight responses, at temperature 1,
to the first word problem of seed 0 that has both of `picked`.
"""

import io
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import sync_playwright
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.language import smollm2
from oar_plugin.cli.main import main as oar
from oar_plugin.cli.score import configs_of, scored
from oar_plugin.credit.answer import Segment
from oar_plugin.page.record import Response
from recipes.cpu_demo import word_problems

HERE = Path(__file__).parent
RESPONSES = HERE / "responses.jsonl"


def picked(responses: Sequence[Response]) -> list[Response]:
    """The first right and the first wrong response with 25 to 60 reasoning tokens; fewer where there is none."""
    fit = [one for one in responses if 25 <= one.segments.count(Segment.REASONING) <= 60]
    return [row for row in (next((one for one in fit if one.reward == right), None) for right in (1.0, 0.0)) if row]


def write_responses(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for row in word_problems.rows(20, seed=0):
        asked = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        torch.manual_seed(0)
        written = model.generate(**asked, do_sample=True, top_k=0, max_new_tokens=48, num_return_sequences=8)
        texts = tokenizer.batch_decode(written[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        line = {"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]}
        RESPONSES.write_text("".join(json.dumps(line | {"response": text}) + "\n" for text in texts), encoding="utf-8")
        if len(picked(list(scored([RESPONSES], str(folder), configs_of(None, []))))) == 2:
            return


def main() -> None:
    folder = smollm2.folder()
    if not RESPONSES.exists():
        write_responses(folder)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        page_file = Path(made, "page.html")
        oar(["inspect", str(RESPONSES), "--model", str(folder), "--out", str(page_file)])
        program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        page = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]).new_page(
            viewport={"width": 1240, "height": 860}
        )
        page.goto(page_file.as_uri())
        page.wait_for_selector("article .t")
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(64).save(HERE / "inspect.png", optimize=True)  # 64 colours take a third of the bytes


if __name__ == "__main__":
    main()
