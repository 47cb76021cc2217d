//! Models of random weights at the shape of real ones, for times and for comparisons of devices where no model's file is.
//!
//! All matrices of a model lie in one run of random numbers, each from a place of its own on, so that the file is hardly larger than the largest
//! of them. A token is a byte, or one of as many fillers as the vocabulary takes.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Bytes to which tensors are aligned.
const ALIGNMENT: usize = 32;
/// Bytes behind the largest matrix, among which others begin.
const SPREAD: usize = 32 << 20;
/// ggml's numbers of element types.
const F32: u32 = 0;
const BF16: u32 = 30;
/// Types of a GGUF file's values.
const U32_VALUE: u32 = 4;
const F32_VALUE: u32 = 6;
const STRING_VALUE: u32 = 8;
const ARRAY_VALUE: u32 = 9;
const I32_VALUE: u32 = 5;
/// Types of tokens.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
/// Turns as ChatML has them.
const TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The model whose shape it gets
    shape: Shape,
    /// File that is written, ending in .gguf
    file: PathBuf,
    /// Seed of the numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Shapes by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Shape {
    /// Llama 3 8B, for prompts of up to 131072 tokens
    #[value(name = "llama-3-8b")]
    Llama8B,
    /// SmolLM2 135M
    #[value(name = "smollm2-135m")]
    SmolLm2,
    /// Two layers, for emulated threads
    Tiny,
}

/// Sizes of a Llama.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    vocab: usize,
    context: usize,
    rope_theta: f32,
    /// Whether the language head is the embedding.
    tied: bool,
}

impl Shape {
    fn sizes(self) -> Sizes {
        match self {
            Shape::Llama8B => Sizes {
                layers: 32,
                hidden: 4096,
                heads: 32,
                kv_heads: 8,
                head_dim: 128,
                intermediate: 14_336,
                vocab: 128_256,
                context: 131_072,
                rope_theta: 500_000.0,
                tied: false,
            },
            Shape::SmolLm2 => Sizes {
                layers: 30,
                hidden: 576,
                heads: 9,
                kv_heads: 3,
                head_dim: 64,
                intermediate: 1536,
                vocab: 49_152,
                context: 8192,
                rope_theta: 100_000.0,
                tied: true,
            },
            Shape::Tiny => Sizes {
                layers: 2,
                hidden: 128,
                heads: 4,
                kv_heads: 2,
                head_dim: 64,
                intermediate: 192,
                vocab: 320,
                context: 2048,
                rope_theta: 10_000.0,
                tied: false,
            },
        }
    }
}

/// A tensor: its name, and its shape, rows first.
type Tensor = (String, Vec<usize>);

impl Sizes {
    fn tensors(&self) -> Vec<Tensor> {
        let Sizes { hidden, intermediate, vocab, .. } = *self;
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut all = vec![
            ("token_embd.weight".to_owned(), vec![vocab, hidden]),
            ("output_norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.tied {
            all.push(("output.weight".to_owned(), vec![vocab, hidden]));
        }
        for layer in 0..self.layers {
            let parts = [
                ("attn_norm", vec![hidden]),
                ("attn_q", vec![q, hidden]),
                ("attn_k", vec![kv, hidden]),
                ("attn_v", vec![kv, hidden]),
                ("attn_output", vec![hidden, q]),
                ("ffn_norm", vec![hidden]),
                ("ffn_gate", vec![intermediate, hidden]),
                ("ffn_up", vec![intermediate, hidden]),
                ("ffn_down", vec![hidden, intermediate]),
            ];
            all.extend(parts.map(|(part, shape)| (format!("blk.{layer}.{part}.weight"), shape)));
        }
        all
    }
}

/// Writes a model.
pub(crate) fn run(options: &Options) -> Result<()> {
    write(options.shape, options.seed, &options.file)
        .with_context(|| format!("cannot write {}", options.file.display()))
}

pub(crate) fn write(shape: Shape, seed: u64, path: &Path) -> Result<()> {
    let sizes = shape.sizes();
    let tensors = sizes.tensors();
    // Weights of norms, which are ones, come first.
    let ones = (4 * sizes.hidden).next_multiple_of(ALIGNMENT);
    let largest = tensors.iter().map(|(_, shape)| 2 * shape.iter().product::<usize>()).max().unwrap_or(0);
    let spread = SPREAD.min(largest.next_multiple_of(ALIGNMENT));
    let mut header = Header::default();
    header.metadata(&sizes);
    for (index, (name, shape)) in tensors.iter().enumerate() {
        let place = index * 1_000_003 * ALIGNMENT % spread;
        let (kind, offset) = if shape.len() == 1 { (F32, 0) } else { (BF16, ones + place) };
        header.tensor(name, shape, kind, offset);
    }
    let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
    out.write_all(&header.build())?;
    let mut data = 1.0f32.to_le_bytes().repeat(sizes.hidden);
    data.resize(ones, 0);
    out.write_all(&data)?;
    write_random(&mut out, (largest + spread) / 8, seed, sizes.hidden)?;
    out.flush()?;
    Ok(())
}

/// Writes `count` times four `bf16`, uniform within ±√(3 / hidden): products of normed rows are then about as large as these.
fn write_random(out: &mut impl Write, count: usize, seed: u64, hidden: usize) -> std::io::Result<()> {
    let scale = (3.0 / hidden as f32).sqrt() / f32::from(i16::MAX);
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for _ in 0..count {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let drawn = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let four = (0..4).fold(0u64, |four, i| {
            let number = f32::from((drawn >> (16 * i)) as i16) * scale;
            four | u64::from(number.to_bits() >> 16) << (16 * i)
        });
        out.write_all(&four.to_le_bytes())?;
    }
    Ok(())
}

/// The part of a GGUF file before its data.
#[derive(Default)]
struct Header {
    keys: Vec<u8>,
    key_count: u64,
    directory: Vec<u8>,
    tensors: u64,
}

impl Header {
    fn metadata(&mut self, sizes: &Sizes) {
        self.string("general.architecture", "llama");
        self.string("general.name", "random weights");
        for (key, value) in [
            ("block_count", sizes.layers),
            ("context_length", sizes.context),
            ("embedding_length", sizes.hidden),
            ("feed_forward_length", sizes.intermediate),
            ("attention.head_count", sizes.heads),
            ("attention.head_count_kv", sizes.kv_heads),
            ("attention.key_length", sizes.head_dim),
            ("attention.value_length", sizes.head_dim),
            ("rope.dimension_count", sizes.head_dim),
        ] {
            self.number(&format!("llama.{key}"), value);
        }
        self.float("llama.attention.layer_norm_rms_epsilon", 1e-5);
        self.float("llama.rope.freq_base", sizes.rope_theta);
        let (tokens, kinds) = vocabulary(sizes.vocab);
        self.string("tokenizer.ggml.model", "gpt2");
        self.string("tokenizer.ggml.pre", "default");
        self.string("tokenizer.chat_template", TEMPLATE);
        let strings = |values: &[String]| values.iter().flat_map(|value| text(value)).collect::<Vec<u8>>();
        self.array("tokenizer.ggml.tokens", STRING_VALUE, tokens.len(), &strings(&tokens));
        self.array("tokenizer.ggml.merges", STRING_VALUE, 0, &[]);
        let kinds: Vec<u8> = kinds.iter().flat_map(|kind| kind.to_le_bytes()).collect();
        self.array("tokenizer.ggml.token_type", I32_VALUE, tokens.len(), &kinds);
        self.number("tokenizer.ggml.bos_token_id", 0);
        self.number("tokenizer.ggml.eos_token_id", 2);
    }

    fn value(&mut self, key: &str, kind: u32, bytes: &[u8]) {
        self.keys.extend(text(key));
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(bytes);
        self.key_count += 1;
    }

    fn string(&mut self, key: &str, value: &str) {
        self.value(key, STRING_VALUE, &text(value));
    }

    fn number(&mut self, key: &str, value: usize) {
        self.value(key, U32_VALUE, &(value as u32).to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f32) {
        self.value(key, F32_VALUE, &value.to_le_bytes());
    }

    fn array(&mut self, key: &str, kind: u32, count: usize, elements: &[u8]) {
        let head = [&kind.to_le_bytes()[..], &(count as u64).to_le_bytes(), elements].concat();
        self.value(key, ARRAY_VALUE, &head);
    }

    fn tensor(&mut self, name: &str, shape: &[usize], kind: u32, offset: usize) {
        self.directory.extend(text(name));
        self.directory.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|size| self.directory.extend((*size as u64).to_le_bytes()));
        self.directory.extend(kind.to_le_bytes());
        self.directory.extend((offset as u64).to_le_bytes());
        self.tensors += 1;
    }

    fn build(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.tensors.to_le_bytes());
        out.extend(self.key_count.to_le_bytes());
        out.extend(&self.keys);
        out.extend(&self.directory);
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }
}

/// A string as GGUF writes it.
fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes()[..], value.as_bytes()].concat()
}

/// Tokens and their types: the control tokens, each byte as GPT-2 writes it, and fillers.
fn vocabulary(size: usize) -> (Vec<String>, Vec<i32>) {
    let control = ["<|begin|>", "<|im_start|>", "<|im_end|>"];
    let mut others = 256..;
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let bytes = (0..256).map(|byte| if printable(byte) { byte } else { others.next().unwrap_or(byte) });
    let bytes = bytes.filter_map(char::from_u32).map(String::from);
    let fillers = (0..).map(|index| format!("filler{index}"));
    let tokens: Vec<String> =
        control.into_iter().map(str::to_owned).chain(bytes).chain(fillers).take(size).collect();
    let kinds = (0..size).map(|id| if id < control.len() { CONTROL } else { NORMAL }).collect();
    (tokens, kinds)
}

#[cfg(test)]
mod tests {
    use refrain_engine::{Document, Engine, Settings};
    use refrain_kernels::Precision;
    use refrain_model::Specials;
    use refrain_store::Store;

    use super::*;

    fn engine(path: &Path) -> Engine {
        let settings = Settings {
            precision: Some(Precision::F32),
            keep_packed: false,
            threads: 1,
            ..Settings::default()
        };
        Engine::open(path, Store::in_memory(1 << 20), settings, |_, _| ()).unwrap()
    }

    #[test]
    fn a_random_model_opens_and_answers_by_its_seed() {
        let folder = tempfile::tempdir().unwrap();
        let logits = |seed: u64| {
            let path = folder.path().join(format!("{seed}.gguf"));
            write(Shape::Tiny, seed, &path).unwrap();
            let engine = engine(&path);
            let text = "Bytes:\n\u{e9}\u{0} and more";
            let ids = engine.tokenizer().encode(text, Specials::Plain).unwrap();
            assert_eq!(ids.len(), text.len());
            let document = Document { title: String::new(), text: text.to_owned() };
            let prompt = engine.prompt(&[document], "What?", &Default::default()).unwrap();
            assert!(engine.time_prefill(&ids).unwrap() > 0.0);
            (engine.agreement_with(&engine, &prompt, 3).unwrap(), engine.fingerprint().to_vec())
        };
        let (same, first) = logits(1);
        assert_eq!((same.kl, same.top1, same.positions), (0.0, 1.0, 3));
        assert_ne!(logits(2).1, first);
    }

    #[test]
    fn matrices_differ_and_are_as_large_as_they_should_be() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        write(Shape::Tiny, 1, &path).unwrap();
        let gguf = refrain_model::Gguf::open(&path).unwrap();
        let mut firsts = Vec::new();
        for (name, info) in gguf.tensors() {
            let (_, _, bytes) = gguf.tensor(name).unwrap();
            if info.shape.len() == 1 {
                assert!(bytes.chunks_exact(4).all(|x| x == 1f32.to_le_bytes()), "{name}");
                continue;
            }
            let values: Vec<f32> = bytes
                .chunks_exact(2)
                .map(|x| f32::from_bits(u32::from_le_bytes([0, 0, x[0], x[1]])))
                .collect();
            let square = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
            assert!((square * 128.0 - 1.0).abs() < 0.1, "{name}: {square}");
            firsts.push(bytes[..64].to_vec());
        }
        let matrices = firsts.len();
        firsts.sort_unstable();
        firsts.dedup();
        assert_eq!(firsts.len(), matrices);
    }
}
