//! Checks of a configuration: everything that the documentation of [`Config`] promises.

use std::path::Path;

use super::{Config, ExpertSpec, LayerSpec, RopeScaling, RopeSpec};
use crate::error::{ModelError, Result};

/// Most layers of a model, far above every model there is.
const MAX_LAYERS: usize = 1 << 12;

/// Most elements of an attention head, far above every model there is.
pub(super) const MAX_HEAD_DIM: usize = 1 << 14;

/// Most tokens of a vocabulary, far above every model there is.
pub(crate) const MAX_VOCABULARY: usize = 1 << 24;

/// `count` if it is a number of layers that can be; asked before anything is allocated for each layer. `path` is the file
/// to name.
pub(super) fn checked_layers(path: &Path, count: usize) -> Result<usize> {
    Check(path).size("the number of layers", count, MAX_LAYERS)?;
    Ok(count)
}

impl Config {
    /// The configuration with the context that YaRN stretches, its end tokens sorted and windows of the whole context left
    /// out, if it is sound; `path` is the file to name.
    pub(super) fn validated(mut self, path: &Path) -> Result<Self> {
        // Files of published models keep the original context beside YaRN's parameters.
        if let Some(&RopeScaling::Yarn { context, .. }) = self.ropes.first().map(|rope| &rope.scaling) {
            self.context = self.context.max(context);
        }
        for layer in &mut self.layers {
            layer.window = layer.window.filter(|w| *w < self.context);
        }
        self.eos.retain(|&id| (id as usize) < self.vocab);
        self.eos.sort_unstable();
        self.eos.dedup();
        let check = Check(path);
        check.sizes(&self)?;
        check.heads(&self)?;
        check.ropes(&self)?;
        check.layers(&self)?;
        if !(self.rms_eps.is_finite() && self.rms_eps > 0.0 && self.rms_eps < 0.1) {
            return Err(
                check.wrong(format!("the RMS norm's epsilon is {}, not between 0 and 0.1", self.rms_eps))
            );
        }
        if let Some(bos) = self.bos.filter(|&id| id as usize >= self.vocab) {
            return Err(
                check.wrong(format!("the BOS token {bos} lies outside the vocabulary of {}", self.vocab))
            );
        }
        Ok(self)
    }
}

/// The checks of [`Config::validated`], with the file that their errors name.
struct Check<'a>(&'a Path);

impl Check<'_> {
    fn wrong(&self, message: String) -> ModelError {
        ModelError::Config { path: self.0.to_owned(), message }
    }

    /// Bounds far above every model there is; products of two of these fit in 64 bits with ease.
    fn sizes(&self, c: &Config) -> Result<()> {
        for (name, value, max) in [
            ("the number of layers", c.num_layers(), MAX_LAYERS),
            ("the hidden size", c.hidden, 1 << 20),
            ("the number of attention heads", c.heads, 1 << 14),
            ("the number of key-value heads", c.kv_heads, 1 << 14),
            ("the head dimension", c.head_dim, MAX_HEAD_DIM),
            ("the intermediate size", c.intermediate, 1 << 22),
            ("the vocabulary size", c.vocab, MAX_VOCABULARY),
            ("the context length", c.context, 1 << 30),
        ] {
            self.size(name, value, max)?;
        }
        Ok(())
    }

    fn size(&self, name: &str, value: usize, max: usize) -> Result<()> {
        if value == 0 || value > max {
            return Err(self.wrong(format!("{name} is {value}, not between 1 and {max}")));
        }
        Ok(())
    }

    fn heads(&self, c: &Config) -> Result<()> {
        if !c.heads.is_multiple_of(c.kv_heads) {
            let Config { heads, kv_heads, .. } = c;
            return Err(
                self.wrong(format!("{heads} attention heads are no multiple of {kv_heads} key-value heads"))
            );
        }
        Ok(())
    }

    fn layers(&self, c: &Config) -> Result<()> {
        self.positive("the embedding scale", &[f64::from(c.embedding_scale)])?;
        self.positive("final_logit_softcapping", &[c.logit_softcap.map_or(1.0, f64::from)])?;
        for LayerSpec { window, rope, attention_scale: scale, experts, .. } in &c.layers {
            if let Some(ExpertSpec { count, top_k, intermediate, .. }) = *experts {
                self.size("the number of experts", count, 1 << 14)?;
                self.size("the number of experts of a token", top_k, count)?;
                self.size("the intermediate size of an expert", intermediate, 1 << 22)?;
            }
            if *window == Some(0) {
                return Err(self.wrong("sliding_window is 0".into()));
            }
            if *rope >= c.ropes.len() {
                return Err(self.wrong(format!("a layer has rope {rope} of {}", c.ropes.len())));
            }
            self.positive("the attention scale", &[f64::from(*scale)])?;
        }
        Ok(())
    }

    fn ropes(&self, c: &Config) -> Result<()> {
        let head = c.head_dim;
        for rope in &c.ropes {
            let dim = rope.rotary_dim;
            if dim == 0 || dim > head || !dim.is_multiple_of(2) {
                let message = format!("the rotary dimension is {dim}, not even and between 2 and {head}");
                return Err(self.wrong(message));
            }
            if dim != c.ropes[0].rotary_dim {
                let message = "rotary dimensions that differ by layer are not supported";
                return Err(self.wrong(message.into()));
            }
            self.rope(rope)?;
        }
        Ok(())
    }

    fn rope(&self, rope: &RopeSpec) -> Result<()> {
        self.positive("rope_theta", &[rope.theta])?;
        let half = rope.rotary_dim / 2;
        match &rope.scaling {
            RopeScaling::None | RopeScaling::NoRope => Ok(()),
            RopeScaling::Linear { factor } => self.positive("the rope factor", &[*factor]),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                self.positive("a rope factor", &[*factor, *low_freq_factor, *high_freq_factor])?;
                self.original(*original_context)?;
                if low_freq_factor >= high_freq_factor {
                    let message =
                        format!("low_freq_factor {low_freq_factor} is not below {high_freq_factor}");
                    return Err(self.wrong(message));
                }
                Ok(())
            }
            RopeScaling::LongRope { short, long, original_context, attention_factor } => {
                self.positive("the rope attention factor", &[*attention_factor])?;
                self.original(*original_context)?;
                self.count("short rope factors", short.len(), half)?;
                self.count("long rope factors", long.len(), half)?;
                self.positive("a short rope factor", short)?;
                self.positive("a long rope factor", long)
            }
            RopeScaling::Yarn { divisors, attention_factor, .. } => {
                self.positive("the rope attention factor", &[*attention_factor])?;
                self.count("rope divisors", divisors.len(), half)?;
                self.positive("a divisor of YaRN's rope", divisors)
            }
            RopeScaling::Factors(factors) => {
                self.count("rope factors", factors.len(), half)?;
                self.positive("a rope factor", &factors.iter().map(|&f| f.into()).collect::<Vec<_>>())
            }
        }
    }

    fn original(&self, context: usize) -> Result<()> {
        if context == 0 || context > 1 << 30 {
            return Err(self.wrong(format!("the rope scaling's original context is {context}")));
        }
        Ok(())
    }

    fn count(&self, what: &str, found: usize, expected: usize) -> Result<()> {
        if found != expected {
            return Err(self.wrong(format!("there are {found} {what}, expected {expected}")));
        }
        Ok(())
    }

    fn positive(&self, what: &str, values: &[f64]) -> Result<()> {
        match values.iter().find(|v| !(v.is_finite() && **v > 0.0)) {
            Some(v) => Err(self.wrong(format!("{what} is {v}, not a positive number"))),
            None => Ok(()),
        }
    }
}
