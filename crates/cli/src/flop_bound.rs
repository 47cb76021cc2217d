//! The speed-up over vanilla that a method's first token would have if only floating-point operations took time. Keys and
//! values are resident, and the language head is ignored.
//!
//! A layer's weights are `P = 2·D·H·d + 2·D·Hkv·d + 3·D·F`. A row costs `2P + 4·H·d·k` operations over `k` visible keys:
//! half of the prompt for a document row on average, all of it for a row of the question.

use refrain::model::Config;

use crate::methods::Method;

/// Dimensions of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelSize {
    layers: f64,
    hidden: f64,
    heads: f64,
    kv_heads: f64,
    head_dim: f64,
    intermediate: f64,
}

/// Lengths in tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PromptSize {
    pub(crate) prompt: usize,
    pub(crate) question: usize,
    pub(crate) chunk: usize,
}

impl ModelSize {
    pub(crate) fn of(config: &Config) -> ModelSize {
        let dimensions = [
            config.num_layers(),
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.intermediate,
        ];
        ModelSize::from(dimensions.map(|size| size as f64))
    }

    /// The bound of a method's speed-up; none for methods without a closed form.
    pub(crate) fn speedup(&self, size: PromptSize, method: &Method) -> Option<f64> {
        let number = |name: &str| method.options.get(name)?.as_f64();
        let set = |name: &str| method.options.get(name).is_some_and(|value| value == true);
        let vanilla = self.layers * self.full_layer(size);
        let question = size.question as f64;
        let cost = match method.name {
            "vanilla" => vanilla,
            "pie" | "full_reuse" => self.layers * self.rows(size, question),
            "lego_link" => {
                let ends = if set("head_only") { 1.0 } else { 2.0 } * number("window")?;
                self.layers * self.rows(size, chunk_ends(size, ends) + question)
            }
            "cache_blend" if set("gradual") => return None,
            "cache_blend" => self.checked(size, number("ratio")?, 1.0),
            "a3" => self.checked(size, number("ratio")?, number("check_layer")?),
            _ => return None,
        };
        Some(vanilla / cost)
    }

    fn weights(&self) -> f64 {
        let ModelSize { hidden, heads, kv_heads, head_dim, intermediate, .. } = *self;
        2.0 * hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim + 3.0 * hidden * intermediate
    }

    /// Operations of a layer that computes every row.
    fn full_layer(&self, size: PromptSize) -> f64 {
        let n = size.prompt as f64;
        n * (2.0 * self.weights() + 2.0 * self.heads * self.head_dim * n)
    }

    /// Operations of a layer that computes `rows` rows, the question among them.
    fn rows(&self, size: PromptSize, rows: f64) -> f64 {
        let (n, question) = (size.prompt as f64, size.question as f64);
        let keys = (rows - question) * n / 2.0 + question * n;
        2.0 * self.weights() * rows + 4.0 * self.heads * self.head_dim * keys
    }

    /// Operations of `full` whole layers, the projections of all rows at the check layer, and `ratio` of the rows from there.
    fn checked(&self, size: PromptSize, ratio: f64, full: f64) -> f64 {
        let ModelSize { layers, hidden, heads, kv_heads, head_dim, .. } = *self;
        let n = size.prompt as f64;
        let reusable = size.prompt.saturating_sub(size.question) as f64;
        let rows = (ratio * reusable).floor() + size.question as f64;
        let projections = 2.0 * n * (hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim);
        full * self.full_layer(size) + projections + (layers - full) * self.rows(size, rows)
    }
}

impl From<[f64; 6]> for ModelSize {
    fn from([layers, hidden, heads, kv_heads, head_dim, intermediate]: [f64; 6]) -> ModelSize {
        ModelSize { layers, hidden, heads, kv_heads, head_dim, intermediate }
    }
}

/// Rows at the ends of all chunks: `ends` of a chunk, or all rows of a shorter one.
fn chunk_ends(size: PromptSize, ends: f64) -> f64 {
    let documents = size.prompt.saturating_sub(size.question);
    let (whole, rest) = (documents / size.chunk, documents % size.chunk);
    whole as f64 * ends.min(size.chunk as f64) + ends.min(rest as f64)
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
        for (model, prompt, a3, lego_link, pie) in [
            (LLAMA_8B, 2048, 4.9, 9.2, 33.0),
            (LLAMA_8B, 6000, 5.3, 11.0, 91.0),
            (LLAMA_8B, 32768, 5.5, 12.4, 395.0),
            (QWEN_HALF_B, 6000, 5.0, 10.8, 79.0),
            (QWEN_7B, 6000, 5.2, 11.0, 92.0),
            (LLAMA_70B, 6000, 5.9, 11.0, 95.0),
        ] {
            let size = PromptSize { prompt, question: 60, chunk: 512 };
            let bound = |spec| {
                let asked = crate::methods::method(spec).unwrap();
                ModelSize::from(model).speedup(size, &asked).unwrap()
            };
            let close = |found: f64, expected: f64, step: f64| {
                assert!(
                    (found - expected).abs() <= 0.5 * step + 1e-9,
                    "{model:?} {prompt}: {found} {expected}"
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
        let (model, size) =
            (ModelSize::from(LLAMA_8B), PromptSize { prompt: 6000, question: 60, chunk: 512 });
        assert!((model.layers * model.full_layer(size) / 1e12 - 93.2).abs() < 0.05);
        assert!((model.checked(size, 0.15, 1.0) / 1e12 - 17.6).abs() < 0.05);
    }
}
