"""What `golden.py` makes golden files of: families, prompts, texts, chats."""

VOCAB = 256


def config(model_type, **more):
    """The shape most families share; `more` overrides it."""
    shape = dict(
        model_type=model_type,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    return shape | more


def longrope(pairs, **more):
    """Factors for `pairs` rotary frequencies: short ones near 1, long ones growing with the wavelength."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [round(1.0 + 0.05 * i, 4) for i in range(pairs)],
        "long_factor": [round(1.1 + 0.7 * i, 4) for i in range(pairs)],
        "original_max_position_embeddings": 96,
    }
    return rope | more


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE_CASES = (
    "case 0 and its 64 tokens stay within the original 96 positions (short factors); "
    "case 1 is longer (long factors, for all its positions)"
)

# The parts that see, as small as they can be: none of the text's logits hang on them.
VISION_TOWER = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14)
VISION = {
    "gemma3": dict(vision_config=VISION_TOWER, mm_tokens_per_image=1, image_token_index=250, boi_token_index=251, eoi_token_index=252),
    "mistral3": dict(vision_config=VISION_TOWER | {"model_type": "pixtral", "head_dim": 8}, image_token_index=250, spatial_merge_size=1),
}

# config     keyword arguments of the transformers config
# dtype      of the stored weights
# old        rewrite config.json to the keys of transformers 4
# old_extra  further keys old configs of the family have
# prompts    lengths, one a case; positions: where logits are kept, one list a case
# nested     the kind of model for pictures whose text part it is
# ignore     config changes that leave the family's feature out (or "biases": zero them, "head norms": skip them)
FAMILIES = {
    "llama": dict(
        exercises="grouped-query attention, separate lm_head, two shards with an index, byte-level BPE tokenizer",
        config=config("llama", vocab_size=320, intermediate_size=64, eos_token_id=3, bos_token_id=0),
        dtype="float16",
        shard="120KB",
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        tokenizer="byte_level",
    ),
    "llama_tied": dict(
        exercises="tied embeddings, head_dim 16 although hidden_size / heads is 8, float32 weights, rope_theta 500000",
        config=config(
            "llama",
            hidden_size=32,
            head_dim=16,
            intermediate_size=64,
            tie_word_embeddings=True,
            rope_parameters=PLAIN_ROPE | {"rope_theta": 500000.0},
        ),
        dtype="float32",
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        ignore={"rope_parameters": PLAIN_ROPE},
    ),
    "llama31": dict(
        exercises="rope type llama3 with original length 32, so that all three frequency bands occur",
        config=config("llama", tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
        dtype="bfloat16",
        old=True,
        prompts=[80],
        positions=[[0, 1, 31, 32, 78, 79]],
        ignore={"rope_parameters": PLAIN_ROPE},
    ),
    "llama_bias": dict(
        exercises="attention_bias: biases on q, k, v and o",
        config=config("llama", hidden_size=32, head_dim=16, intermediate_size=64, attention_bias=True),
        dtype="float32",
        old=True,
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        ignore="biases",
    ),
    "mistral_window": dict(
        exercises="sliding_window 16: position q sees keys q-15..=q; 4 layers; three query heads to one key head",
        config=config(
            "mistral",
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=1,
            sliding_window=16,
        ),
        dtype="bfloat16",
        prompts=[60],
        positions=[[0, 14, 15, 16, 17, 31, 32, 59]],
        ignore={"sliding_window": None},
    ),
    "qwen2": dict(
        exercises="biases on q, k, v, not o; tied embeddings; sliding_window 16 disabled by use_sliding_window=false",
        config=config(
            "qwen2",
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            rope_parameters=PLAIN_ROPE | {"rope_theta": 1e6},
        ),
        dtype="bfloat16",
        old=True,
        old_extra={"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 0},
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        ignore="biases",
    ),
    "qwen3": dict(
        exercises="norms of query and key heads; heads of 16 although hidden_size / heads is 12; layers with a sliding "
        "window of 16 between layers without one",
        config=config(
            "qwen3",
            hidden_size=48,
            head_dim=16,
            intermediate_size=64,
            num_hidden_layers=4,
            rms_norm_eps=1e-6,
            use_sliding_window=True,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            rope_parameters=PLAIN_ROPE | {"rope_theta": 1e6},
        ),
        dtype="bfloat16",
        prompts=[60],
        positions=[[0, 1, 14, 15, 16, 17, 31, 32, 59]],
        ignore="head norms",
    ),
    "phi3": dict(
        exercises="fused qkv_proj and gate_up_proj, no grouping, sliding_window null, SentencePiece-like tokenizer",
        config=config(
            "phi3",
            vocab_size=448,
            hidden_size=48,
            intermediate_size=64,
            num_attention_heads=3,
            num_key_value_heads=3,
            sliding_window=None,
            eos_token_id=443,
            pad_token_id=443,
        ),
        dtype="bfloat16",
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        tokenizer="sentencepiece_like",
    ),
    "phi3_longrope": dict(
        exercises=f"longrope, 512 / 96 positions: {LONGROPE_CASES}",
        config=config(
            "phi3",
            num_key_value_heads=4,
            intermediate_size=64,
            original_max_position_embeddings=96,
            rope_parameters=longrope(8),
        ),
        dtype="bfloat16",
        old=True,
        prompts=[30, 120],
        positions=[[0, 1, 15, 29], [0, 1, 95, 96, 97, 119]],
        ignore={"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "phi4": dict(
        exercises="Phi-4-mini's shape without rope scaling: partial_rotary_factor 0.75, grouped, tied embeddings",
        config=config(
            "phi3", tie_word_embeddings=True, rope_parameters=PLAIN_ROPE | {"partial_rotary_factor": 0.75}
        ),
        dtype="float16",
        old=True,
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        ignore={"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 1.0}},
    ),
    "phi4_longrope": dict(
        exercises=f"Phi-4-mini's shape: partial_rotary_factor 0.75 and longrope together; {LONGROPE_CASES}",
        config=config(
            "phi3",
            tie_word_embeddings=True,
            original_max_position_embeddings=96,
            rope_parameters=longrope(6, partial_rotary_factor=0.75),
        ),
        dtype="bfloat16",
        prompts=[30, 120],
        positions=[[0, 1, 15, 29], [0, 1, 95, 96, 97, 119]],
        ignore={"rope_parameters": PLAIN_ROPE | {"partial_rotary_factor": 0.75}},
    ),
    "gemma3": dict(
        exercises="norms before and after each branch, weights stored less one; head norms; embeddings times the root of their width; "
        "two layers of a window of 16 for each without one, each kind with a rope of its own, the wide one scaled by 8; GELU; attention "
        "scaled by query_pre_attn_scalar 24, not by the head's 16; logits capped",
        config=config(
            "gemma3_text",
            hidden_size=48,
            head_dim=16,
            intermediate_size=64,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            query_pre_attn_scalar=24,
            final_logit_softcapping=3.0,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": PLAIN_ROPE,
            },
        ),
        dtype="bfloat16",
        prompts=[60],
        positions=[[0, 1, 14, 15, 16, 17, 31, 32, 59]],
        ignore={"final_logit_softcapping": None},
    ),
    "gemma3_vision": dict(
        exercises="the text part of a folder that holds a model for pictures too: text_config, prefixed tensors, class defaults; "
        "transformers 4 keys: rope_local_base_freq, sliding_window_pattern",
        config=config(
            "gemma3_text",
            hidden_size=32,
            head_dim=16,
            intermediate_size=48,
            num_hidden_layers=4,
            rms_norm_eps=1e-6,
            tie_word_embeddings=True,
            query_pre_attn_scalar=256,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "full_attention": PLAIN_ROPE | {"rope_theta": 1e6},
                "sliding_attention": PLAIN_ROPE,
            },
        ),
        dtype="bfloat16",
        nested="gemma3",
        prompts=[40],
        positions=[[0, 1, 15, 16, 17, 39]],
        ignore={"sliding_window": 512},
    ),
    "smollm3": dict(
        exercises="a layer without rope after each one with it (no_rope_layers), tied embeddings",
        config=config(
            "smollm3",
            num_hidden_layers=4,
            tie_word_embeddings=True,
            no_rope_layers=[1, 0, 1, 0],
            pad_token_id=2,
            rope_parameters=PLAIN_ROPE | {"rope_theta": 2e6},
        ),
        dtype="bfloat16",
        prompts=[60],
        positions=[[0, 1, 20, 58, 59]],
        ignore={"no_rope_layers": [1, 1, 1, 1]},
    ),
    "olmo2": dict(
        exercises="norms after each branch and none before it; norms over all query heads and all key heads of a token together",
        config=config("olmo2", rope_parameters=PLAIN_ROPE | {"rope_theta": 500000.0}),
        dtype="bfloat16",
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        ignore="head norms",
    ),
    "mistral3": dict(
        exercises="Mistral Small 3's shape: the text part of a folder for pictures too, heads of 24 although hidden_size / heads is 16, no window",
        config=config("mistral", head_dim=24, intermediate_size=64, sliding_window=None, rope_parameters=PLAIN_ROPE | {"rope_theta": 1e6}),
        dtype="bfloat16",
        nested="mistral3",
        prompts=[40],
        positions=[[0, 1, 20, 38, 39]],
        ignore={"rope_parameters": PLAIN_ROPE},
    ),
    "qwen3_moe": dict(
        exercises="a router that gives each token to 3 of 8 experts, their weights normalised; one layer whose MLP is dense (mlp_only_layers)",
        config=config(
            "qwen3_moe",
            hidden_size=48,
            head_dim=16,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            decoder_sparse_step=1,
            rms_norm_eps=1e-6,
            rope_parameters=PLAIN_ROPE | {"rope_theta": 1e6},
        ),
        dtype="bfloat16",
        prompts=[60],
        positions=[[0, 1, 20, 58, 59]],
        ignore={"num_experts_per_tok": 2},
    ),
}

PROMPT = """\
<|im_start|>system
You are a helpful assistant.<|im_end|>
<|im_start|>user
The Library of Alexandria was one of the largest libraries of the ancient world. How many scrolls it held at any
given time isn't known; estimates range from 40,000 to 400,000. It didn't burn down in a single night: it
declined over several centuries, beginning with the purge of intellectuals in 145 BC.

Eratosthenes, its third head, measured the Earth's circumference to within a few percent. He compared shadows
at noon in Syene (modern Aswân) and Alexandria, 5,000 stadia apart, and found an angle of about 7.2°.

```python
def circumference(distance: float, angle_deg: float) -> float:
\treturn distance * 360.0 / angle_deg  # 250_000 stadia
```

亚历山大图书馆 · Βιβλιοθήκη · naïve café 📚🔥

List five interesting facts about ancient Egypt, one per line.<|im_end|>
<|im_start|>assistant
"""

TEXTS = [
    "",
    "Hello, world!",
    " leading space",
    "   three leading and trailing   ",
    "two  inner   runs    of spaces",
    "\n",
    "line one\nline two\n\n\nline five\r\nwindows line",
    "\tindented\t\ttabs\n\t mixed \t ",
    "I'm sure they'll say we've won; it's what she'd do, don't you think? YOU'RE RIGHT, I'LL GO",
    "1234567890 3.14159 1,000,000 2024-05-06 0x1F v1.2.3",
    "fn main() {\n    let x: Vec<u8> = vec![0; 16]; // comment\n    println!(\"{x:?}\");\n}\n",
    "if (a != b && c <= d) { return a->b[c]++; } else goto end;",
    "图书馆里有很多书。我爱读书！",
    "日本語のテキスト、カタカナとひらがな",
    "Привет, мир! Ελληνικά. שלום. مرحبا",
    "naïve café résumé Zürich",
    "cafe\u0301 A\u030a decomposed accents",
    "😀 👩\u200d👩\u200d👧 🇫🇷 ❤\ufe0f emoji",
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|im_end|>text <|endoftext|> <|im_start|>",
    "<|user|>\nHi<|end|>\n<|assistant|>\n<s></s><unk>",
    "<|begin_of_text|>abc<|end_of_text|>",
    "<|im_start |> not special <im_start>",
    "https://example.com/a/b?c=d&e=%20f#g user@example.org",
    "snake_case camelCase SCREAMING_CASE kebab-case path/to/file.rs",
    "aaaaaaaaaaaaaaaa!!!!!!!!........----____====",
    "\u00a0non-breaking\u2003em space\u3000wide\u200bzero width",
    "½ ² ① Ⅷ ٣ ৪ fullwidth １２３ ﬁ ligature",
    "\x00\x01\x7f control \ufeff bom \ufffd",
]

CHATS = [
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is a refrain?"},
    ],
    [{"role": "user", "content": "  Name three rivers.\nOne per line: 1) … 2) … 3) …  "}],
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "Hello. How can I help?"},
        {"role": "user", "content": "Say \"goodbye\" in 中文."},
    ],
]

TEMPLATES = {
    "chatml_with_bos": (
        "{{- bos_token }}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content'] | trim %}\n"
        "    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n"
        "    {%- set system_message = 'You are a tiny model.' %}\n"
        "{%- endif %}\n"
        "{{- '<|im_start|>system\\n' + system_message + '<|im_end|>\\n' }}\n"
        "{%- for message in messages %}\n"
        "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
        "        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\n"
        "    {%- endif %}\n"
        "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "{%- endif %}\n"
    ),
    "phi3": (
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}"
        "{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}"
        "{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
}

TRAINING_TEXT = [
    "The refrain is the part of the song that returns; to refrain is to hold back from doing.",
    "Every document is read once, and its keys and values are kept for the prompts that come later.",
    "A question looks at only a few of the tokens in the document, so only these are computed again.",
    "It is the case that there are more things in this world than one can read in a thousand years.",
    "What she said and what he heard were not the same thing, and neither of them knew the other's mind.",
    "In the beginning there was a list of numbers, and the numbers were added, one after another.",
]
