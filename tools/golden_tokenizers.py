"""The small tokenizers that `golden.py` puts beside tiny models, shaped like those of real ones."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from golden_cases import TEMPLATES, TRAINING_TEXT


def byte_level(folder, vocab):
    """Byte-level BPE shaped like Llama 3's: split pattern, then bytes; `<|begin_of_text|>` put in front."""
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(
        TRAINING_TEXT,
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tok.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{special[0]} $A", pair=f"{special[0]} $A {special[0]} $B:1", special_tokens=[(special[0], 0)]
            ),
        ]
    )
    return save_tokenizer(tok, folder, vocab, bos=special[0], eos=special[3], template=TEMPLATES["chatml_with_bos"])


def sentencepiece_like(folder, vocab):
    """BPE shaped like Phi-3's conversion of a SentencePiece model: `▁` normaliser, byte fallback."""
    control = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    phi = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    room = vocab - len(control) - len(fallback) - len(phi)
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    trained.train_from_iterator(TRAINING_TEXT, trainers.BpeTrainer(vocab_size=room, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    ids = {t: i for i, t in enumerate(control + fallback + pieces)}
    merges = [tuple(m) for m in learned["merges"]]
    tok = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True, rstrip=t != phi[0]) for t in phi])
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 1)]
    )
    return save_tokenizer(tok, folder, vocab, bos="<s>", eos="<|endoftext|>", template=TEMPLATES["phi3"])


def save_tokenizer(tok, folder, vocab, bos, eos, template):
    assert tok.get_vocab_size() == vocab, f"{tok.get_vocab_size()} tokens for a vocabulary of {vocab}"
    tok.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return PreTrainedTokenizerFast.from_pretrained(folder)


TOKENIZERS = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like}
