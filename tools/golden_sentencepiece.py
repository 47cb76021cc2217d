#!/usr/bin/env python3
"""Makes tests/golden/sentencepiece.json: a small SentencePiece vocabulary as GGUF files hold it, and what SentencePiece
itself makes of texts with it.

    .venv/bin/pip install sentencepiece==0.2.3
    .venv/bin/python tools/golden_sentencepiece.py

pieces, scores, types       the vocabulary; types are ggml's: 1 normal, 2 unknown, 3 control, 4 user-defined, 6 byte
cases[]                     text; ids, as Llama's settings give them: a space is put before the text, bytes for
                            characters that no piece has, nothing normalised; decoded
"""

import io
import json
from pathlib import Path

import sentencepiece

from golden_cases import PROMPT, TEXTS

ROOT = Path(__file__).resolve().parent.parent


def main():
    corpus = [PROMPT, *TEXTS, *(line for line in (ROOT / "docs/design.md").read_text().splitlines() if line.strip())]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.98,
        user_defined_symbols=["[INST]"],
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def kind(i):
        if sp.is_unknown(i):
            return 2
        if sp.is_control(i):
            return 3
        return 6 if sp.is_byte(i) else 4 if sp.id_to_piece(i) == "[INST]" else 1

    ids = range(sp.vocab_size())
    golden = {
        "made_by": f"tools/golden_sentencepiece.py; sentencepiece {sentencepiece.__version__}",
        "pieces": [sp.id_to_piece(i) for i in ids],
        "scores": [sp.get_score(i) for i in ids],
        "types": [kind(i) for i in ids],
        "cases": [{"text": t, "ids": sp.encode(t), "decoded": sp.decode(sp.encode(t))} for t in TEXTS],
    }
    out = ROOT / "tests/golden/sentencepiece.json"
    out.write_text(json.dumps(golden, ensure_ascii=False) + "\n")
    print(out, out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
