//! The trait of eviction policies.

use std::fmt::Debug;

use refrain_kv::Span;

use crate::{AttentionNeeds, Error, Result, TokenScorer};

/// Most attention rows of a prompt times its tokens that a policy looks back at. Each is a bit or a weight for every head, and all of a layer are
/// computed and looked at in one step, between two tokens of other answers.
const PROMPT_ROWS: usize = 1 << 27;

/// The parts of a prompt that policies tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSpans {
    /// The system part, from 0.
    pub system: Span,
    /// The question part, up to the end.
    pub question: Span,
}

impl PromptSpans {
    /// Tokens of the prompt, `n`.
    pub fn len(&self) -> usize {
        self.question.end as usize
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks whether `policy` can look back at so many attention rows, which are as many as its `option` says, or all of the prompt's.
    pub(crate) fn check_rows(&self, rows: usize, policy: &'static str, option: &str) -> Result<()> {
        let (n, most) = (self.len(), PROMPT_ROWS / self.len().max(1));
        if rows.min(n) <= most {
            return Ok(());
        }
        Err(Error::conflict(
            policy,
            format!(
                "a {option} of {rows} rows over a prompt of {n} tokens is more than is looked back at: choose a {option} of at most {most}, or send less"
            ),
        ))
    }
}

/// How many tokens stay, and when tokens go. Pruning comes before a token is appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Tokens that pruning leaves.
    pub keep: usize,
    /// Pruning happens when there are more tokens than this; at least `keep`.
    pub most: usize,
    /// Whether pruning goes on while decoding. If not, only the prompt is pruned, and the cache grows from there.
    pub decoding: bool,
}

impl Budget {
    /// Pruning to `capacity` whenever there is one token more.
    pub fn constant(capacity: usize) -> Budget {
        Budget { keep: capacity, most: capacity, decoding: true }
    }

    /// Pruning the prompt to `capacity`, once.
    pub fn once(capacity: usize) -> Budget {
        Budget { keep: capacity, most: capacity, decoding: false }
    }
}

/// Sizes of one layer's scorer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Heads of the cache.
    pub heads: usize,
    /// Query heads of each head.
    pub group: usize,
    /// Elements of a head, `d`.
    pub head_dim: usize,
    /// Slots of a head.
    pub capacity: usize,
    /// Most rows that there can be: the tokens of prompt and answer.
    pub rows: usize,
}

/// A rule that bounds the KV cache of a request.
pub trait EvictionPolicy: Debug + Send + Sync {
    /// How many tokens stay; none if nothing is ever evicted after this prompt.
    ///
    /// # Errors
    /// If options contradict one another or the prompt.
    fn budget(&self, prompt: &PromptSpans) -> Result<Option<Budget>>;

    /// Reports of attention that the scorers of this prompt's request need, whose answer has at most `answer` tokens. The result is the
    /// same whenever it is asked for, so that a cache asks once and keeps it.
    fn needs(&self, prompt: &PromptSpans, answer: usize) -> AttentionNeeds;

    /// The scorer of one layer.
    fn scorer(&self, prompt: &PromptSpans, sizes: Sizes) -> Box<dyn TokenScorer>;

    /// Most bytes that a [scorer](EvictionPolicy::scorer) of these sizes holds, or one that was
    /// [gathered](TokenScorer::gather) to `sizes.capacity` slots. Known before a request starts.
    fn side_bytes(&self, prompt: &PromptSpans, sizes: Sizes) -> usize;

    /// Whether the policy never evicts anything from any prompt.
    fn is_full(&self) -> bool {
        false
    }

    /// Where keys are rotated by their places in the cache and not by their positions: how many tokens at the start
    /// stay for good.
    fn sinks(&self) -> Option<usize> {
        None
    }
}
