//! The bound by arithmetic alone: how much faster than vanilla a method's first token could come if nothing but its
//! floating point operations took time. Keys and values are resident, the language head is ignored.
//!
//! Weights of a layer `P = 2·D·H·d + 2·D·Hkv·d + 3·D·F`; a row costs `2P + 4·H·d·k` over `k` visible keys: half of
//! the prompt for a document row on average, all of it for a row of the question.

use refrain_model::Config;

use crate::methods::Method;

/// Sizes of a model that cost depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    layers: f64,
    hidden: f64,
    heads: f64,
    kv_heads: f64,
    head_dim: f64,
    intermediate: f64,
}

/// Sizes of a prompt that cost depends on, in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) prompt: usize,
    pub(crate) question: usize,
    pub(crate) chunk: usize,
}

impl Shape {
    pub(crate) fn of(config: &Config) -> Shape {
        let sizes = [
            config.num_layers(),
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.intermediate,
        ];
        Shape::from(sizes.map(|size| size as f64))
    }

    /// The bound of a method's speed-up over vanilla; none if it is not known.
    pub(crate) fn speedup(&self, sizes: Sizes, asked: &Method) -> Option<f64> {
        let number = |name: &str| asked.options.get(name)?.as_f64();
        let set = |name: &str| asked.options.get(name).is_some_and(|value| value == true);
        let vanilla = self.layers * self.full_layer(sizes);
        let question = sizes.question as f64;
        let cost = match asked.name {
            "vanilla" => vanilla,
            "pie" | "full_reuse" => self.layers * self.rows(sizes, question),
            "lego_link" => {
                let ends = if set("head_only") { 1.0 } else { 2.0 } * number("window")?;
                self.layers * self.rows(sizes, chunk_ends(sizes, ends) + question)
            }
            "cache_blend" if set("gradual") => return None,
            "cache_blend" => self.checked(sizes, number("ratio")?, 1.0),
            "a3" => self.checked(sizes, number("ratio")?, number("check_layer")?),
            _ => return None,
        };
        Some(vanilla / cost)
    }

    fn weights(&self) -> f64 {
        let Shape { hidden, heads, kv_heads, head_dim, intermediate, .. } = *self;
        2.0 * hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim + 3.0 * hidden * intermediate
    }

    /// A layer in which every row is computed.
    fn full_layer(&self, sizes: Sizes) -> f64 {
        let n = sizes.prompt as f64;
        n * (2.0 * self.weights() + 2.0 * self.heads * self.head_dim * n)
    }

    /// A layer in which `rows` are computed, the question among them.
    fn rows(&self, sizes: Sizes, rows: f64) -> f64 {
        let (n, question) = (sizes.prompt as f64, sizes.question as f64);
        let keys = (rows - question) * n / 2.0 + question * n;
        2.0 * self.weights() * rows + 4.0 * self.heads * self.head_dim * keys
    }

    /// `full` whole layers, the projections of all rows at the check layer, and `ratio` of the rows from there on.
    fn checked(&self, sizes: Sizes, ratio: f64, full: f64) -> f64 {
        let Shape { layers, hidden, heads, kv_heads, head_dim, .. } = *self;
        let n = sizes.prompt as f64;
        let reusable = sizes.prompt.saturating_sub(sizes.question) as f64;
        let rows = (ratio * reusable).floor() + sizes.question as f64;
        let projections = 2.0 * n * (hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim);
        full * self.full_layer(sizes) + projections + (layers - full) * self.rows(sizes, rows)
    }
}

impl From<[f64; 6]> for Shape {
    fn from([layers, hidden, heads, kv_heads, head_dim, intermediate]: [f64; 6]) -> Shape {
        Shape { layers, hidden, heads, kv_heads, head_dim, intermediate }
    }
}

/// Rows at the ends of chunks, `ends` a chunk, fewer where a chunk is shorter.
fn chunk_ends(sizes: Sizes, ends: f64) -> f64 {
    let documents = sizes.prompt.saturating_sub(sizes.question);
    let (whole, rest) = (documents / sizes.chunk, documents % sizes.chunk);
    whole as f64 * ends.min(sizes.chunk as f64) + ends.min(rest as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA_8B: [f64; 6] = [32.0, 4096.0, 32.0, 8.0, 128.0, 14336.0];
    const QWEN_HALF_B: [f64; 6] = [24.0, 896.0, 14.0, 2.0, 64.0, 4864.0];
    const QWEN_7B: [f64; 6] = [28.0, 3584.0, 28.0, 4.0, 128.0, 18944.0];
    const LLAMA_70B: [f64; 6] = [80.0, 8192.0, 64.0, 8.0, 128.0, 28672.0];

    /// Ratio 0.15, questions of 60 tokens, chunks of 512, windows of 20 tokens.
    #[test]
    fn the_bounds_are_those_worked_out_by_hand() {
        for (shape, prompt, a3, lego_link, pie) in [
            (LLAMA_8B, 2048, 4.9, 9.2, 33.0),
            (LLAMA_8B, 6000, 5.3, 11.0, 91.0),
            (LLAMA_8B, 32768, 5.5, 12.4, 395.0),
            (QWEN_HALF_B, 6000, 5.0, 10.8, 79.0),
            (QWEN_7B, 6000, 5.2, 11.0, 92.0),
            (LLAMA_70B, 6000, 5.9, 11.0, 95.0),
        ] {
            let sizes = Sizes { prompt, question: 60, chunk: 512 };
            let bound = |spec| {
                let asked = crate::methods::method(spec).unwrap();
                Shape::from(shape).speedup(sizes, &asked).unwrap()
            };
            let close = |found: f64, expected: f64, step: f64| {
                assert!(
                    (found - expected).abs() <= 0.5 * step + 1e-9,
                    "{shape:?} {prompt}: {found} {expected}"
                );
            };
            close(bound("vanilla"), 1.0, 0.0);
            close(bound("a3"), a3, 0.1);
            close(bound("cache_blend"), a3, 0.1);
            close(bound("lego_link"), lego_link, 0.1);
            close(bound("pie"), pie, 1.0);
            close(bound("full_reuse"), pie, 1.0);
            assert!(bound("lego_link:head_only") > bound("lego_link"));
        }
    }

    #[test]
    fn operations_are_those_of_the_table() {
        let (shape, sizes) = (Shape::from(LLAMA_8B), Sizes { prompt: 6000, question: 60, chunk: 512 });
        assert!((shape.layers * shape.full_layer(sizes) / 1e12 - 93.2).abs() < 0.05);
        assert!((shape.checked(sizes, 0.15, 1.0) / 1e12 - 17.6).abs() < 0.05);
    }
}
